"""What recipes set otherwise than their methods' papers do is told where the recipes are described."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from rolltape.recipes import running_max_compaction, sort_digits, sort_digits_async, sort_digits_sao, tool_digits_dis
from rolltape.recipes.config import RunConfig
from rolltape.trainers.config import TrainerConfig

README: Final = Path(__file__).resolve().parents[3] / "recipes" / "README.md"
OF_A_METHOD: Final = (
    *("adv_norm", "aggregation", "optimizer_reset", "entropy_coef", "truncated", "zero_std_groups", "stats"),
    *("gamma", "lambda_alpha", "critic_lambda", "critic_updates", "critic_warmup_steps", "advantage_values", "whiten"),
    *("value_clip", "value_norm", "train_critic", "freeze_critic", "bootstrap_truncated", "compaction_ratio"),
    *("train_summary", "train_rejected_summaries", "boundary_value", "critic_target"),
)
RECIPES: Final = {
    "sort_digits": sort_digits.config(),
    "sort_digits_async": sort_digits_async.config(),
    "tool_digits_dis": tool_digits_dis.config(),
    "sort_digits_sao": sort_digits_sao.config(),
    "running_max_compaction": running_max_compaction.config(),
}


def departures(config: TrainerConfig) -> set[str]:
    own = TrainerConfig(algorithm=config.algorithm, epsilon_low=config.epsilon_low, epsilon_high=config.epsilon_high)
    return {name for name in OF_A_METHOD if getattr(config, name) != getattr(own, name)}


@pytest.mark.parametrize(("name", "recipe"), RECIPES.items())
def test_every_option_that_departs_from_the_method_is_named(name: str, recipe: RunConfig) -> None:
    section = README.read_text().partition("### Where they depart from the papers")[2].partition("\n#")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("|")]
    told = {
        option.strip().strip("`").split(" ")[0]
        for recipes, option in rows
        if f"`{name}`" in recipes or recipes.strip().startswith("all")
    }
    found = departures(recipe.trainer)
    assert found
    assert found <= told, f"{name}: {sorted(found - told)} depart from the method and are not told"

"""Options of a counterfactual: those that enter a step are taken, and each other one is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest
import torch
from tests.methods import CONFIGS, TEMPERATURE, batch, learner, scorers

from rolltape.schema.errors import ConfigError
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.counterfactual import learner_for, variants_of
from rolltape.trainers.step import train_step
from rolltape.trainers.variant_options import entering

# Another value for each field but those that every method reads.
OTHERS: Final[dict[str, Any]] = {
    "max_steps": 7,
    "lr": 0.5,
    "warmup_steps": 3,
    "decay_steps": 9,
    "final_lr_fraction": 0.5,
    "beta1": 0.1,
    "beta2": 0.2,
    "adam_eps": 0.1,
    "weight_decay": 0.7,
    "max_grad_norm": 1e-3,
    "epsilon_low": 0.01,
    "epsilon_high": 0.02,
    "dual_clip": 1.1,
    "icepop_beta": 1.01,
    "pop_value": "binary",
    "tis_low": 0.4,
    "tis_high": 1.1,
    "const_length": 3,
    "adv_norm": "mean",
    "staleness_tau": 3,
    "group_timeout_s": 1.0,
    "overdue_groups": "train",
    "pad_rule": "ge_half",
    "stats": "valid_only",
    "zero_std_groups": "drop",
    "truncation_penalty": 0.5,
    "optimizer_reset": "on",
    "opd_form": "full",
    "opd_gap": "old",
    "max_gap": 0.01,
    "task_coef": 0.1,
    "opd_coef": 0.2,
    "score_low": 0.99,
    "score_high": 1.01,
    "teacher_floor": -0.5,
    "top_k": 2,
    "gamma": 0.5,
    "lambda_alpha": 0.7,
    "critic_lambda": 0.5,
    "critic_lr": 0.5,
    "critic_updates": 5,
    "critic_warmup_steps": 4,
    "advantage_values": "post_update",
    "whiten": True,
    "value_clip": 1e-3,
    "value_norm": True,
    "value_norm_rate": 0.9,
    "train_critic": ("head",),
    "freeze_critic": ("mlp",),
    "bootstrap_truncated": True,
    "compaction_ratio": "dis",
    "boundary_value": "bootstrap",
    "critic_target": "local",
    "gradient_checkpointing": True,
    "checkpoint_every": 3,
    "probe_every": 3,
    "alarm_entropy_below": 0.5,
    "alarm_trusted_below": 0.5,
    "alarm_mismatch_above": 0.5,
    "alarm_domain_kl_above": 0.5,
    "alarm_ema": 0.5,
    "stop_metric": "reward_mean",
    "stop_above": 0.5,
    "stop_ema": 0.5,
    "engine_timeout_s": 1.0,
    "archive_timeout_s": 1.0,
}
NEVER: Final = {
    *("max_steps", "staleness_tau", "group_timeout_s", "overdue_groups", "pad_rule", "zero_std_groups"),
    *("optimizer_reset", "gradient_checkpointing", "checkpoint_every", "probe_every", "num_threads"),
    *("alarm_entropy_below", "alarm_trusted_below", "alarm_mismatch_above", "alarm_domain_kl_above", "alarm_ema"),
    *("stop_metric", "stop_above", "stop_ema", "engine_timeout_s", "archive_timeout_s"),
}
"""Of forming, of a run's course, or of what the learner is before the step."""


def shown(made_with: TrainerConfig, config: TrainerConfig) -> list[Any]:
    """What a counterfactual shows of a step with ``config`` from a learner of ``made_with``."""
    outcome = train_step(learner(made_with), batch(), config, step=2, temperature=TEMPERATURE, scorers=scorers())
    losses = None if outcome.critic is None else outcome.critic.losses[-1]
    pull = torch.where(outcome.trusted, outcome.gate_weights * outcome.advantages, 0.0)
    return [outcome.loss, outcome.grad_norm, losses, pull.tolist()]


@pytest.mark.parametrize("name", CONFIGS)
def test_options_that_do_not_enter_change_nothing(name: str) -> None:
    config = CONFIGS[name]
    idle = OTHERS.keys() - entering(config, has_critic=True)
    idle.discard("dual_clip")  # which other methods than GRPO refuse
    changed = dataclasses.replace(config, **{field: OTHERS[field] for field in idle})
    assert len(idle) > 20
    assert shown(config, changed) == shown(config, config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"updates_per_batch": 2, "lr": 0.5}),
        ("grpo", {"updates_per_batch": 2, "lr": 0.5, "epsilon_low": 0.01}),
        ("grpo", {"updates_per_batch": 2, "max_grad_norm": 1e-3}),
        ("opd", {"updates_per_batch": 2, "opd_gap": "old"}),
        ("sao", {"critic_lr": 0.5}),
        ("sao", {"critic_lambda": 0.5}),
        ("sao", {"value_clip": 1e-3}),
        ("sao", {"critic_updates": 1}),
        ("sao", {"advantage_values": "post_update", "critic_updates": 1, "critic_lr": 0.5}),
        ("compaction", {"critic_target": "local", "gamma": 0.9}),
    ],
)
def test_options_that_enter_change_what_is_shown(name: str, changes: dict[str, Any]) -> None:
    *_, last = changes
    config = dataclasses.replace(CONFIGS[name], **changes)
    without = dataclasses.replace(config, **{last: getattr(CONFIGS[name], last)})
    assert last in entering(config, has_critic=True)
    assert shown(CONFIGS[name], config) != shown(CONFIGS[name], without)


def test_every_field_enters_some_step_or_none() -> None:
    more: dict[str, Any] = {"aggregation": "const", "const_length": 4, "value_norm": True, "updates_per_batch": 2}
    found: set[str] = set()
    for config in CONFIGS.values():
        found |= entering(config, has_critic=False)
        found |= entering(dataclasses.replace(config, **more), has_critic=False)
    found |= entering(dataclasses.replace(CONFIGS["grpo"], correction="tis"), has_critic=False)
    assert found == {field.name for field in dataclasses.fields(TrainerConfig)} - NEVER - {"algorithm"}


@pytest.mark.parametrize(
    ("recorded", "algorithms", "changes", "field"),
    [
        ("grpo", (), {"": {"zero_std_groups": "drop"}}, "zero_std_groups"),
        ("grpo", (), {"": {"checkpoint_every": 5}}, "checkpoint_every"),
        ("grpo", (), {"": {"lr": 1e-4}}, "lr"),
        ("grpo", (), {"": {"updates_per_batch": 2, "beta1": 0.5}}, "beta1"),
        ("grpo", ("opd", "compaction"), {"": {"pad_rule": "ge_half"}}, "pad_rule"),
        ("grpo", ("grpo", "compaction"), {"grpo": {"gamma": 0.9}}, "gamma"),
        ("sao", (), {"": {"freeze_critic": ()}}, "freeze_critic"),
        ("sao", ("compaction",), {"compaction": {"train_critic": ()}}, "train_critic"),
    ],
)
def test_an_option_that_can_change_nothing_is_refused_by_name(
    recorded: str, algorithms: tuple[str, ...], changes: dict[str, dict[str, Any]], field: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^trainer\.{field}: expected an option that enters a step of .*entropy_coef"
    ):
        variants_of(CONFIGS[recorded], algorithms, changes)


def test_what_names_no_algorithm_that_is_tried_is_refused() -> None:
    for algorithms, changes, what in (
        ((), {"sao": {"gamma": 0.9}}, r"^sao\.gamma: expected an option of an algorithm that is tried \(grpo\), got"),
        (("opd",), {"grpo": {"adv_norm": "mean"}}, r"^grpo\.adv_norm: expected .* tried \(opd\), got one of 'grpo'"),
        (("grpo", "grpo"), {}, "^algorithms: expected each once, got 'grpo' twice"),
        ((), {"": {"algorithm": "opd"}}, r"^trainer\.algorithm: expected it among the algorithms to try, got 'opd'"),
    ):
        with pytest.raises(ConfigError, match=what):
            variants_of(CONFIGS["grpo"], algorithms, changes)


def test_a_critic_may_be_updated_in_another_ratio_than_the_runs() -> None:
    """What the run did so far is no part of the variant's count."""
    made = learner(CONFIGS["sao"])
    for step in (1, 2):
        train_step(made, batch(), CONFIGS["sao"], step=step, temperature=TEMPERATURE)
    config = dataclasses.replace(CONFIGS["sao"], critic_updates=3)
    own = learner_for(config, made)
    outcome = train_step(own, batch(), config, step=3, temperature=TEMPERATURE)
    assert outcome.critic is not None
    assert outcome.critic.num_updates == 3
    assert made.critic is not None
    assert made.critic.counts.batches == 2


def test_an_option_of_all_need_enter_but_one() -> None:
    made = variants_of(CONFIGS["grpo"], ("grpo", "compaction"), {"": {"gamma": 0.9, "train_critic": ()}})
    assert [one.name for one in made] == ["grpo, as recorded", "grpo", "compaction"]
    assert made[2].config.train_critic == ()

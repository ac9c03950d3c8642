"""Recipe files map one to one onto the configuration; what makes no sense is refused by name; secrets stay out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolltape.ingest.embedded import EmbeddedLog
from rolltape.ingest.recorder import Recorder
from rolltape.recipes.commands.demo import demo_log
from rolltape.recipes.config import RunConfig, redacted
from rolltape.recipes.runs import start_run
from rolltape.recipes.sort_digits import config as sort_digits
from rolltape.schema.errors import ConfigError
from rolltape.store.lake import Lake
from rolltape.store.location import Location

SECRET = "hunter2-planted"
TAUGHT: dict[str, Any] = {
    "trainer": {"algorithm": "opd"},
    "teachers": {"routes": [{"domain": "d", "lake": "lake", "run": "teacher"}]},
}


def test_json_and_toml_round_trip(tmp_path: Path) -> None:
    config = sort_digits()
    assert RunConfig.from_json(config.to_json()) == config
    file = tmp_path / "recipe.toml"
    file.write_text('run_id = "r"\nseed = 3\n[trainer]\nlr = 1\n[environment.options]\nnum_heldout = 5\n')
    read = RunConfig.from_toml(file)
    assert (read.run_id, read.seed, read.trainer.lr, read.environment.options) == ("r", 3, 1.0, {"num_heldout": 5})


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"trainer": {"epsilon_low": 1.0}}, "trainer.epsilon_low"),
        ({"trainer": {"staleness_tau": -1}}, "trainer.staleness_tau"),
        ({"trainer": {"icepop_beta": 0.5}}, "trainer.icepop_beta"),
        ({"trainer": {"correction": "magic"}}, "trainer.correction"),
        ({"trainer": {"aggregation": "const"}}, "trainer.const_length"),
        ({"trainer": {"lr": "fast"}}, "trainer.lr"),
        ({"trainer": {"correction": "dis"}}, "trainer.correction"),
        ({"trainer": {"algorithm": "dis"}}, "trainer.epsilon_low"),
        ({"trainer": {"algorithm": "dis", "epsilon_low": 1.0, "epsilon_high": 3.0}}, "trainer.epsilon_low"),
        ({"trainer": {"group_timeout_s": 0}}, "trainer.group_timeout_s"),
        ({"trainer": {"overdue_groups": "wait"}}, "trainer.overdue_groups"),
        ({"rollout": {"max_lead_steps": -1}}, "rollout.max_lead_steps"),
        ({"rollout": {"top_k": -1}}, "rollout.top_k"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature"),
        ({"rollout": {"group_size": 0}}, "rollout.group_size"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size: expected 2 or more with algorithm grpo"),
        ({"rollout": {"top_p": 0.9}, **TAUGHT}, "rollout.top_p, rollout.top_k: expected 1.0 and 0 with algorithm opd"),
        ({"rollout": {"top_k": 5}, **TAUGHT}, "rollout.top_p, rollout.top_k: expected 1.0 and 0 with algorithm opd"),
        ({"rolout": {}}, "rolout"),
        ({"trainer": {"learning_rate": 1e-3}}, "trainer.learning_rate"),
    ],
)
def test_refused_by_name(data: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        RunConfig.from_dict(data)


@pytest.mark.parametrize("sampling", [{"top_p": 0.8}, {"top_k": 5}])
def test_a_limited_support_is_allowed_where_it_is_replayed(sampling: dict[str, Any]) -> None:
    assert RunConfig.from_dict({"rollout": sampling}).trainer.uses_ratio
    divergence = {**TAUGHT, "trainer": {"algorithm": "opd", "opd_form": "full"}, "rollout": sampling}
    assert not RunConfig.from_dict(divergence).trainer.uses_ratio


def test_budgets_of_agents_come_out_of_the_file_as_they_went_in(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[agent]\nmax_turns = 5\n[agent.compaction]\nmax_compactions = 1\nthreshold = 9\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"agent\.compaction\.max_summary_tokens: expected 1 or more"):
        RunConfig.from_toml(recipe)
    recipe.write_text(recipe.read_text(encoding="utf-8") + "max_summary_tokens = 4\n", encoding="utf-8")
    config = RunConfig.from_toml(recipe)
    assert (config.agent.max_turns, config.agent.compaction.threshold, config.agent.compaction.keep_recent) == (5, 9, 2)
    assert RunConfig.from_json(config.to_json()) == config


def test_a_plain_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.judge\.api_key") as caught:
        RunConfig.from_dict({"environment": {"options": {"judge": {"api_key": SECRET}}}})
    assert SECRET not in str(caught.value)


def test_a_secret_by_reference_is_resolved_in_the_process_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    config = RunConfig.from_dict({"environment": {"options": {"api_key": {"from_env": "JUDGE_KEY"}}}})
    assert config.environment.resolved_options() == {"api_key": SECRET}
    assert SECRET not in config.to_json() + repr(config) + config.digest
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        config.environment.resolved_options()


def test_redaction_covers_nested_values() -> None:
    value = {"a": {"db_password": SECRET, "list": [{"secret": SECRET}]}, "access_key": [SECRET], "plain": 1}
    shown = redacted(value)
    assert SECRET not in str(shown)
    assert shown["plain"] == 1


def test_a_run_of_an_older_release_is_resumed_not_refused(tmp_path: Path) -> None:
    """What later releases added to the configuration counts as its default."""
    config = sort_digits()
    old = json.loads(config.to_json())
    del old["rollout"]["max_lead_steps"], old["trainer"]["group_timeout_s"], old["trainer"]["opd_form"]
    lake = Lake.create(Location.parse(str(tmp_path / "lake")))
    with EmbeddedLog(lake, committer="thread") as log:
        with Recorder(log, producer_id="starter", run_id=config.run_id) as recorder:
            recorder.record("run_started", purpose="train", config_json=json.dumps(old), config_digest="of then")
            recorder.flush("logged")
        assert not start_run(lake, config, log)
        with pytest.raises(ConfigError, match="another configuration"):
            start_run(lake, replace(config, seed=9), log)


def test_the_log_of_a_demonstration_has_topics_of_its_own() -> None:
    assert demo_log("", "sort") == ""
    assert demo_log("kafka://one:9092,two:9092/mine?linger_s=0", "sort") == "kafka://one:9092,two:9092/mine?linger_s=0"
    made = demo_log("kafka://one:9092,two:9092/?linger_s=0", "sort")
    assert re.fullmatch(r"kafka://one:9092,two:9092/sort-\d{8}-\d{6}\?linger_s=0", made)

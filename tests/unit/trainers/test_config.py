"""Values that make no sense are refused at the start, by field and range; defaults follow the algorithm (§1)."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from rolltape.recipes.config import RunConfig
from rolltape.schema.errors import ConfigError
from rolltape.trainers.config import TrainerConfig, of_older_release

DIS = {"algorithm": "dis", "epsilon_low": 0.3, "epsilon_high": 5.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"algorithm": "ppo"}, "trainer.algorithm: expected one of grpo, dis, opd, mopd, sao, compaction, got 'ppo'"),
        ({"epsilon_low": 1.0}, "trainer.epsilon_low: expected 0 <= epsilon_low < 1, got 1.0"),
        ({"epsilon_low": -0.1}, "trainer.epsilon_low: expected 0 <= epsilon_low < 1, got -0.1"),
        ({"epsilon_high": -0.1}, "trainer.epsilon_high: expected 0 or more, got -0.1"),
        ({"epsilon_high": math.nan}, "trainer.epsilon_high: expected 0 or more, got nan"),
        ({**DIS, "epsilon_low": 1.5}, "trainer.epsilon_low: expected 0 <= epsilon_low < 1, got 1.5"),
        ({"algorithm": "dis"}, "trainer.epsilon_low: expected a value of its own (0 <= epsilon_low < 1) with DIS"),
        ({"algorithm": "dis", "epsilon_low": 0.3}, "trainer.epsilon_high: expected a value of its own"),
        ({"algorithm": "sao"}, "trainer.epsilon_low: expected a value of its own"),
        ({"algorithm": "compaction", "compaction_ratio": "dis"}, "trainer.epsilon_low: expected a value of its own"),
        ({**DIS, "epsilon_low": 0.0, "epsilon_high": 0.0}, "trainer.epsilon_low, trainer.epsilon_high: expected not"),
        ({"correction": "dis"}, "trainer.correction: expected one of icepop, tis, none with algorithm grpo, got 'dis'"),
        ({**DIS, "correction": "icepop"}, "trainer.correction: expected one of dis with algorithm dis"),
        ({"algorithm": "compaction", "correction": "tis"}, "trainer.correction: expected one of none with"),
        ({"staleness_tau": -1}, "trainer.staleness_tau: expected 0 or more, got -1"),
        ({"gamma": 1.01}, "trainer.gamma: expected 0 <= gamma <= 1, got 1.01"),
        ({"gamma": -0.01}, "trainer.gamma: expected 0 <= gamma <= 1, got -0.01"),
        ({"critic_lambda": 2.0}, "trainer.critic_lambda: expected 0 <= critic_lambda <= 1, got 2.0"),
        (
            {"algorithm": "compaction", "critic_lambda": 0.9},
            "trainer.critic_lambda: expected 1 with algorithm compaction and trainer.critic_target global",
        ),
        ({"lambda_alpha": 0.0}, "trainer.lambda_alpha: expected more than 0, got 0.0"),
        ({"critic_lr": 0.0}, "trainer.critic_lr: expected more than 0"),
        ({"critic_updates": 0}, "trainer.critic_updates: expected 1 or more"),
        ({"critic_warmup_steps": -1}, "trainer.critic_warmup_steps: expected 0 or more"),
        ({"value_clip": 0.0}, "trainer.value_clip: expected more than 0"),
        ({"value_norm_rate": 0.0}, "trainer.value_norm_rate: expected more than 0, at most 1"),
        ({"freeze_critic": ("attn", "")}, "trainer.freeze_critic: expected parts of module names"),
        ({"sentinels": (-100.0, 0.0)}, "trainer.sentinels: expected finite values below 0"),
        ({"sentinels": ("-inf",)}, "trainer.sentinels: expected finite values below 0"),
        ({"sentinels": (-math.inf,)}, "trainer.sentinels: expected finite values below 0"),
        ({"lr": math.inf}, "trainer.lr: expected a finite number, got inf"),
        ({"icepop_beta": math.inf}, "trainer.icepop_beta: expected a finite number, got inf"),
        ({"stop_above": math.nan}, "trainer.stop_above: expected a finite number, got nan"),
        ({"dual_clip": 1.0}, "trainer.dual_clip: expected more than 1, got 1.0"),
        ({**DIS, "dual_clip": 3.0}, "trainer.dual_clip: expected none with algorithm dis"),
        ({**DIS, "algorithm": "sao", "dual_clip": 3.0}, "trainer.dual_clip: expected none with algorithm sao"),
        ({"algorithm": "opd", "opd_coef": 0.0}, "trainer.task_coef, trainer.opd_coef: expected one above 0, got 0, 0"),
        ({"algorithm": "opd", "opd_coef": -1.0}, "trainer.opd_coef: expected 0 or more"),
        ({"algorithm": "opd", "score_low": 0.5}, "trainer.score_low, trainer.score_high: expected both"),
        ({"algorithm": "opd", "score_low": 2.0, "score_high": 1.0}, "trainer.score_low, trainer.score_high: expected"),
        ({"algorithm": "mopd", "max_gap": 0.0}, "trainer.max_gap: expected more than 0"),
        (
            {"algorithm": "opd", "opd_form": "full", "task_coef": 0.5},
            "trainer.task_coef: expected 0 with opd_form full",
        ),
        ({"algorithm": "opd", "opd_form": "kl"}, "trainer.opd_form: expected one of eq1, score, full, top_k"),
        ({"teacher_floor": 0.0}, "trainer.teacher_floor: expected a log-prob below 0"),
        ({"top_k": 0}, "trainer.top_k: expected 1 or more"),
        ({"truncated": "drop"}, "trainer.truncated: expected one of keep, mask, zero_reward"),
        ({"truncation_penalty": -0.5}, "trainer.truncation_penalty: expected 0 or more"),
        ({"zero_std_groups": "skip"}, "trainer.zero_std_groups: expected one of keep, drop"),
        ({"optimizer_reset": "yes"}, "trainer.optimizer_reset: expected one of auto, on, off"),
        ({"alarm_trusted_below": 1.5}, "trainer.alarm_trusted_below: expected more than 0, at most 1"),
        ({"alarm_ema": 1.0}, "trainer.alarm_ema: expected 0 <= alarm_ema < 1"),
        ({"compute_dtype": "float16"}, "trainer.compute_dtype: expected one of float32, bfloat16"),
        ({"boundary_value": "one"}, "trainer.boundary_value: expected one of zero, bootstrap"),
        ({"critic_target": "segment"}, "trainer.critic_target: expected one of global, local"),
        (
            {"algorithm": "grpo", "aggregation": "const"},
            "trainer.const_length: expected 1 or more with aggregation const",
        ),
        ({"tis_low": 3.0}, "trainer.tis_low: expected at most tis_high"),
        ({"icepop_beta": 0.9}, "trainer.icepop_beta: expected 1 or more"),
    ],
)
def test_refused_by_field_and_range(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**fields)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("fields", "resolved"),
    [
        ({}, (0.2, 0.28, "icepop", "seq_mean", "mean_std", None)),
        (DIS, (0.3, 5.0, "dis", "token_mean", "mean", None)),
        ({"algorithm": "opd"}, (0.2, 0.28, "icepop", "seq_mean", "mean_std", None)),
        ({"algorithm": "mopd"}, (0.2, 0.28, "icepop", "seq_mean", "mean_std", 5.0)),
        ({**DIS, "algorithm": "sao"}, (0.3, 5.0, "dis", "token_mean", "mean_std", None)),
        ({"algorithm": "compaction"}, (0.2, 0.2, "none", "token_mean", "mean_std", None)),
        (
            {**DIS, "algorithm": "compaction", "compaction_ratio": "dis"},
            (0.3, 5.0, "dis", "token_mean", "mean_std", None),
        ),
    ],
)
def test_the_record_holds_what_was_in_force(fields: dict[str, Any], resolved: tuple[Any, ...]) -> None:
    config = TrainerConfig(**fields)
    names = ("epsilon_low", "epsilon_high", "correction", "aggregation", "adv_norm", "max_gap")
    assert tuple(getattr(config, name) for name in names) == resolved
    recorded = json.loads(json.dumps(dataclasses.asdict(config)))
    assert tuple(recorded[name] for name in names) == resolved
    assert TrainerConfig(**recorded) == config


def test_a_recipe_file_sets_optional_fields_and_lists() -> None:
    trainer = {**DIS, "freeze_critic": ["attn", "embed"], "alarm_trusted_below": 1, "max_gap": None}
    config = RunConfig.from_dict({"trainer": trainer})
    assert config.trainer.freeze_critic == ("attn", "embed")
    assert config.trainer.alarm_trusted_below == 1.0
    assert RunConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match=r"trainer\.alarm_trusted_below: expected float"):
        RunConfig.from_dict({"trainer": {"alarm_trusted_below": "half"}})


def test_an_algorithm_for_another_takes_its_own_defaults() -> None:
    """A recorded configuration holds resolved values; GRPO's clip must not pass for DIS's interval (D7)."""
    config = TrainerConfig(lr=3e-4, epsilon_low=0.1)
    with pytest.raises(ConfigError, match=r"trainer\.epsilon_low"):
        config.with_algorithm("dis")
    dis = config.with_algorithm("dis", epsilon_low=0.8, epsilon_high=3.0)
    assert (dis.lr, dis.aggregation, dis.adv_norm, dis.is_dis) == (3e-4, "token_mean", "mean", True)
    assert dis.with_algorithm("grpo") == dataclasses.replace(TrainerConfig(), lr=3e-4)


def test_mopd_alarms_of_a_foreign_teacher_unless_told_otherwise() -> None:
    """§4.9: teachers of one origin begin near 0.04 nat per token, others near 0.19."""
    mopd = TrainerConfig(algorithm="mopd")
    assert mopd.alarm_domain_kl_above == 0.1
    assert TrainerConfig(algorithm="mopd", alarm_domain_kl_above=0.5).alarm_domain_kl_above == 0.5
    assert mopd.with_algorithm("opd").alarm_domain_kl_above is None


@pytest.mark.parametrize(
    ("fields", "groups", "rewards", "teacher_scores", "critic", "one_version"),
    [
        ({}, True, True, False, False, True),
        ({"correction": "tis"}, True, True, False, False, False),
        (DIS, True, True, False, False, False),
        ({"algorithm": "opd"}, False, False, True, False, True),
        ({"algorithm": "opd", "task_coef": 0.5}, True, True, True, False, True),
        ({"algorithm": "mopd", "opd_form": "score"}, False, False, True, False, False),
        ({"algorithm": "mopd", "opd_form": "full"}, False, False, False, False, False),
        ({**DIS, "algorithm": "sao"}, False, True, False, True, False),
        ({"algorithm": "compaction"}, False, True, False, True, True),
        ({**DIS, "algorithm": "compaction", "compaction_ratio": "dis"}, False, True, False, True, False),
    ],
)
def test_what_each_method_asks_of_a_batch(
    fields: dict[str, Any], groups: bool, rewards: bool, teacher_scores: bool, critic: bool, one_version: bool
) -> None:
    config = TrainerConfig(**fields)
    assert (config.uses_groups, config.uses_rewards) == (groups, rewards)
    assert (config.uses_teacher_scores, config.uses_critic) == (teacher_scores, critic)
    assert config.needs_one_version is one_version


def test_a_configuration_of_an_older_release_is_read_under_todays_names() -> None:
    old = {"correction": "icepop", "eps_low": 0.1, "eps_high": 0.3, "dis_low": 0.0, "dis_high": 0.0}
    assert TrainerConfig(**of_older_release(old)) == TrainerConfig(epsilon_low=0.1, epsilon_high=0.3)
    old = {**old, "correction": "dis", "dis_low": 0.8, "dis_high": 3.0, "adv_norm": "mean_std"}
    read = TrainerConfig(**of_older_release(old))
    assert (read.algorithm, read.epsilon_low, read.epsilon_high, read.adv_norm) == ("dis", 0.8, 3.0, "mean_std")
    assert of_older_release({"lr": 0.1}) == {"lr": 0.1}

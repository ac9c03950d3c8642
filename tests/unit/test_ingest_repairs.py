"""Repair rules of case D4: explicit, and only where the odd item is provably the stop token."""

from __future__ import annotations

from typing import Any

import pytest

from rolltape.ingest.repairs import REPAIRS, repair_named
from rolltape.schema.errors import ValidationError

STOP = 2


def action(num_ids: int, num_log_probs: int, *, last: int = 9, **other: Any) -> dict[str, Any]:
    return {
        "token_ids": [*[7] * (num_ids - 1), last],
        "rollout_log_probs": [-0.1 * n for n in range(num_log_probs)],
        "finish_reason": "stop",
        "sampling": {"stop_token_ids": [STOP]},
        **other,
    }


def test_the_trimmed_stop_tokens_log_prob_is_dropped() -> None:
    event = action(207, 208)
    repaired = repair_named("drop_trailing_stop_log_prob")(event)
    assert repaired["rollout_log_probs"] == event["rollout_log_probs"][:207]
    assert repaired["token_ids"] == event["token_ids"]
    assert len(event["rollout_log_probs"]) == 208


def test_the_kept_stop_tokens_missing_log_prob_is_unknown_not_invented() -> None:
    event = action(208, 207, last=STOP)
    repaired = repair_named("null_missing_stop_log_prob")(event)
    assert repaired["rollout_log_probs"] == [*event["rollout_log_probs"], None]


@pytest.mark.parametrize(
    ("rule", "event"),
    [
        ("drop_trailing_stop_log_prob", action(207, 209)),
        ("drop_trailing_stop_log_prob", action(208, 207)),
        ("drop_trailing_stop_log_prob", action(207, 208, last=STOP)),
        ("drop_trailing_stop_log_prob", action(207, 208, finish_reason="length")),
        ("drop_trailing_stop_log_prob", action(207, 208, sampling=None)),
        ("drop_trailing_stop_log_prob", {"token_ids": [1]}),
        ("null_missing_stop_log_prob", action(208, 207)),
        ("null_missing_stop_log_prob", action(208, 206, last=STOP)),
        ("null_missing_stop_log_prob", action(207, 208, last=STOP)),
    ],
)
def test_a_rule_that_does_not_apply_says_so(rule: str, event: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="does not apply"):
        repair_named(rule)(event)


def test_rules_have_names() -> None:
    assert sorted(REPAIRS) == ["drop_trailing_stop_log_prob", "null_missing_stop_log_prob"]
    with pytest.raises(ValidationError, match="expected one of the repair rules drop_trailing"):
        repair_named("truncate")

"""Events as lines of valid JSON, and back."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import numpy as np
import pytest
from tests.arrow_bits import same_bits
from tests.schema_events import action

from rolltape.schema.build import build_batch
from rolltape.schema.errors import CodecError, ValidationError
from rolltape.schema.jsonline import from_json_line, to_json_line


def test_non_finite_log_probs_are_valid_json_and_come_back() -> None:
    """Case D9."""
    values = [float("-inf"), -9999.0, -100.0, -1e-7, float("nan"), float("inf"), None]
    line = to_json_line({"rollout_log_probs": np.array(values[:-1])})
    assert json.loads(line, parse_constant=pytest.fail)["rollout_log_probs"][0] == "-Infinity"
    row = from_json_line("action_sampled", to_json_line({"rollout_log_probs": values}))
    back = row["rollout_log_probs"]
    assert back[:4] == values[:4]
    assert math.isnan(back[4])
    assert back[5:] == values[5:]


def test_a_whole_row_comes_back() -> None:
    columns = action(
        1,
        recorded_at=[datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)],
        sampling=[{"temperature": 0.5, "stop": ["a"]}],
        routed_experts=[b"\x00\xff"],
        text=["ü\n"],
        lane_seq=[0],
        event_index=[1],
    )
    line = to_json_line({name: value[0] if isinstance(value, list) else value for name, value in columns.items()})
    assert b"\n" not in line
    row = from_json_line("action_sampled", line)
    again = build_batch("action_sampled", {name: [value] for name, value in row.items()})
    assert same_bits(again.batch, build_batch("action_sampled", columns).batch)


def test_broken_text_is_kept() -> None:
    line = to_json_line({"text": "\ud800", "detail": b"\xff"})
    assert json.loads(line) == {"text": "\ud800", "detail": {"$base64": "/w=="}}
    assert from_json_line("action_sampled", to_json_line({"text": b"\xff"})) == {"text": b"\xff"}


def test_nested_non_finite_values_come_back() -> None:
    line = to_json_line({"components": [{"name": "NaN", "value": float("nan")}]})
    (component,) = from_json_line("reward_assigned", line)["components"]
    assert component["name"] == "NaN"
    assert math.isnan(component["value"])


@pytest.mark.parametrize("line", [b"", b"[1]", b"{", b"\xff"])
def test_other_bytes_are_no_event(line: bytes) -> None:
    with pytest.raises(CodecError):
        from_json_line("action_sampled", line)


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(ValidationError, match="no column"):
        from_json_line("action_sampled", b'{"nothing": 1}')

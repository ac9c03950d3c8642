"""Dead letters in a lake: kept with their bytes, looked at, repaired by a named rule, sent again once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape.ingest import EmbeddedLog, Recorder, list_dead_letters, redrive
from rolltape.schema.errors import ValidationError
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake

STOP = 2


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def log(lake: Lake) -> Iterator[EmbeddedLog]:
    with EmbeddedLog(lake, "thread") as opened:
        yield opened


def record_trimmed_action(log: EmbeddedLog, **fields: Any) -> None:
    """Case D4: 207 ids, 208 log-probs, the stop token trimmed from the ids alone."""
    action = {
        "trajectory_id": "t",
        "attempt": 0,
        "token_ids": [7] * 207,
        "rollout_log_probs": [-0.5] * 207 + [-0.25],
        "finish_reason": "stop",
        "sampling": {"stop_token_ids": [STOP], "temperature": 1.0},
    }
    with Recorder(log, producer_id="worker", run_id="run", run_epoch=2, limits=Limits(vocab_size=10)) as recorder:
        recorder.record("rollout_started", trajectory_id="t", attempt=0, prompt_token_ids=[1])
        recorder.record("action_sampled", **{**action, **fields})
        recorder.record("rollout_ended", trajectory_id="t", attempt=0, status="completed")
        recorder.flush()


def test_a_length_mismatch_is_kept_with_both_counts_and_repaired_by_the_named_rule(
    log: EmbeddedLog, lake: Lake
) -> None:
    record_trimmed_action(log)
    (letter,) = list_dead_letters(lake)
    assert letter.reason == "length_mismatch"
    assert "207" in letter.detail
    assert "208" in letter.detail
    assert (letter.run_id, letter.run_epoch, letter.trajectory_id, letter.attempt) == ("run", 2, "t", 0)
    assert lake.read("action_sampled").num_rows == 0

    ids = redrive(log, lake, letter.event_id, "drop_trailing_stop_log_prob", repaired_by="me")
    assert redrive(log, lake, letter.event_id, "drop_trailing_stop_log_prob") == ids
    (action,) = lake.read("action_sampled").to_pylist()
    assert (action["event_id"],) == ids
    assert action["rollout_log_probs"] == [-0.5] * 207
    assert (action["event_index"], action["run_id"], action["run_epoch"]) == (1, "run", 2)
    assert action["action_sampled"]["sampling"]["stop_token_ids"] == [STOP]
    (redriven,) = lake.read("dead_letter_redriven").to_pylist()
    assert redriven["trajectory_id"] == "t"
    assert redriven["dead_letter_redriven"] == {
        "dead_letter_event_id": letter.event_id,
        "replacement_event_ids": list(ids),
        "repair": "drop_trailing_stop_log_prob",
        "repaired_by": "me",
    }
    assert list_dead_letters(lake) == []
    assert [again.redriven_as for again in list_dead_letters(lake, redriven=True)] == [ids]


def test_a_row_that_could_not_be_built_is_redriven_from_its_json(log: EmbeddedLog, lake: Lake) -> None:
    record_trimmed_action(log, token_ids=[1, 2**31], rollout_log_probs=[float("nan"), -1.0])
    (letter,) = list_dead_letters(lake)
    assert letter.reason == "id_overflow"

    def clip(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "token_ids": [1, 9]}

    redrive(log, lake, letter.event_id, clip)
    (action,) = lake.read("action_sampled").to_pylist()
    assert (action["token_ids"], action["event_index"]) == ([1, 9], 1)
    assert repr(action["rollout_log_probs"]) == "[nan, -1.0]"
    assert lake.read("dead_letter_redriven").to_pylist()[0]["dead_letter_redriven"]["repair"] == "clip"


def test_a_repair_that_does_not_repair_sends_nothing(log: EmbeddedLog, lake: Lake) -> None:
    record_trimmed_action(log)
    (letter,) = list_dead_letters(lake)
    for repair in (None, "null_missing_stop_log_prob", "no_such_rule"):
        with pytest.raises(ValidationError):
            redrive(log, lake, letter.event_id, repair)
    with pytest.raises(ValidationError, match="expected the event id of a dead letter"):
        redrive(log, lake, "nobody", "drop_trailing_stop_log_prob")
    assert lake.read("action_sampled").num_rows == 0
    assert len(list_dead_letters(lake)) == 1


def test_a_redrive_that_was_cut_in_half_is_completed(
    log: EmbeddedLog, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_trimmed_action(log)
    (letter,) = list_dead_letters(lake)
    original = Recorder.record

    def die(self: Recorder, kind: str, **fields: Any) -> str:
        if kind == "dead_letter_redriven":
            raise KeyboardInterrupt
        return original(self, kind, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "record", die)
        with pytest.raises(KeyboardInterrupt):
            redrive(log, lake, letter.event_id, "drop_trailing_stop_log_prob")
    redrive(log, lake, letter.event_id, "drop_trailing_stop_log_prob")
    assert lake.read("action_sampled").num_rows == 1
    assert lake.read("dead_letter").num_rows == 1
    assert list_dead_letters(lake) == []

"""Importing: each event once, however often and however interrupted, and bad rows set aside by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape.ingest.importers import FORMATS, ImportReport, import_file
from rolltape.ingest.importers.reading import first_difference, starts_with
from rolltape.ingest.importers.rows import EventRows
from rolltape.ingest.importers.source import Source
from rolltape.ingest.memory import MemoryLog
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import ConfigError

PROBLEM = {"question": "How many?", "answer": "Two and two.\n#### 4"}


def rollout(token_ids: list[Any], log_probs: list[Any], **more: Any) -> dict[str, Any]:
    """A minimal NeMo Gym rollout of one call."""
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"text": "so"}],
        "prompt_token_ids": [1, 2, 3],
        "generation_token_ids": token_ids,
        "generation_log_probs": log_probs,
    }
    return {"responses_create_params": {"input": "ask"}, "response": {"output": [item]}, "reward": 1.0, **more}


@pytest.fixture
def log() -> Iterator[MemoryLog]:
    with MemoryLog() as log:
        yield log


def written(path: Path, *documents: dict[str, Any] | bytes) -> str:
    lines = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in documents]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def events_in(log: MemoryLog) -> list[dict[str, Any]]:
    reader = log.reader(Cursor())
    rows: list[dict[str, Any]] = []
    while deliveries := reader.poll(0.0):
        rows.extend(row for delivery in deliveries for row in delivery.table.to_pylist())
    return rows


def kinds_in(log: MemoryLog) -> list[str]:
    return sorted(row["kind"] for row in events_in(log))


def test_importing_twice_adds_nothing(log: MemoryLog, tmp_path: Path) -> None:
    path = written(tmp_path / "rollouts.jsonl", rollout([7], [-0.5]), rollout([8, 9], [-0.5, 0.0]))
    first = import_file(log, path)
    again = import_file(log, path)
    assert (first.num_new, again.num_new) == (first.num_events, 0)
    assert first.num_events == again.num_events == 10
    ids = [row["event_id"] for row in events_in(log)]
    assert len(ids) == len(set(ids)) == 10


def test_the_same_bytes_under_another_name_are_the_same_run(log: MemoryLog, tmp_path: Path) -> None:
    first = import_file(log, written(tmp_path / "a.jsonl", PROBLEM))
    second = import_file(log, written(tmp_path / "b.jsonl", PROBLEM))
    assert first.run_id == second.run_id
    assert second.num_new == 0


def test_an_import_that_broke_off_completes(log: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "problems.jsonl", *({**PROBLEM, "question": str(n)} for n in range(40)))
    monkeypatch.setattr("rolltape.ingest.importers.run._CHUNK_EVENTS", 8)

    def broken(rows: EventRows) -> Iterator[Any]:
        if taken:
            raise KeyboardInterrupt
        taken.append(len(rows))
        yield from whole(rows)

    whole, taken = EventRows.batches, list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(EventRows, "batches", broken)
        with pytest.raises(KeyboardInterrupt):
            import_file(log, path)
    partly = len(events_in(log))
    assert 0 < partly < 41
    report = import_file(log, path)
    assert report.num_new == 41 - partly
    assert len({row["event_id"] for row in events_in(log)}) == len(events_in(log)) == 41


def test_lists_of_different_length_are_a_dead_letter_and_the_rest_goes_on(log: MemoryLog, tmp_path: Path) -> None:
    path = written(tmp_path / "rollouts.jsonl", rollout([5] * 207, [-0.1] * 208), rollout([6], [-0.1]))
    report = import_file(log, path)
    assert dict(report.refused) == {"length_mismatch": 1}
    kinds = kinds_in(log)
    assert (kinds.count("dead_letter"), kinds.count("action_sampled"), kinds.count("rollout_ended")) == (1, 1, 2)
    again = import_file(log, path)
    assert again.num_new == 0
    assert kinds_in(log) == kinds


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"question": "a\xff", "answer": "b"}', "broken_utf8"),
        (b'{"question": "a", "ans', "truncated_payload"),
        (b'{"question": "a", "answer": ', "truncated_payload"),
        (b'{"question": "a" "answer": "b"}', "bad_value"),
        (b"[1, 2]", "bad_value"),
        (b'{"question": "a"}', "missing_field"),
        (b'{"question": "a", "answer": 4}', "bad_value"),
    ],
)
def test_a_row_that_cannot_be_read_is_a_dead_letter_with_its_bytes(
    line: bytes, reason: str, log: MemoryLog, tmp_path: Path
) -> None:
    report = import_file(log, written(tmp_path / "problems.jsonl", PROBLEM, line, {**PROBLEM, "question": "next"}))
    assert dict(report.refused) == {reason: 1}
    (letter,) = [row["dead_letter"] for row in events_in(log) if row["kind"] == "dead_letter"]
    assert (letter["reason"], letter["payload"], letter["payload_format"]) == (reason, line, "json_line")
    assert kinds_in(log).count("problem_registered") == 2


def test_null_and_infinite_log_probs_are_stored_as_they_are(log: MemoryLog, tmp_path: Path) -> None:
    import_file(log, written(tmp_path / "r.jsonl", rollout([1, 2, 3, 4], [-0.1, None, float("-inf"), -9999.0])))
    (action,) = [row for row in events_in(log) if row["kind"] == "action_sampled"]
    assert action["rollout_log_probs"][1:] == [None, float("-inf"), -9999.0]


def test_a_missing_reward_is_missing_and_not_zero(log: MemoryLog, tmp_path: Path) -> None:
    import_file(log, written(tmp_path / "r.jsonl", rollout([1], [-0.1], reward=None)))
    (reward,) = [row["reward_assigned"] for row in events_in(log) if row["kind"] == "reward_assigned"]
    assert reward["scalar"] is None
    assert reward["state"] != "earned"


def test_only_mask_sample_masks(log: MemoryLog, tmp_path: Path) -> None:
    kept = rollout([1], [-0.1], agent_error_kind="other", mask_sample=False)
    masked = rollout([1, 2], [-0.1, -0.2], mask_sample=True)
    import_file(log, written(tmp_path / "r.jsonl", kept, masked))
    (mask,) = [row["mask_assigned"] for row in events_in(log) if row["kind"] == "mask_assigned"]
    assert [(one["start"], one["length"]) for one in mask["ranges"]] == [(0, 2)]


def test_a_file_of_no_known_format_is_refused_with_its_keys(log: MemoryLog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys colour"):
        import_file(log, written(tmp_path / "r.jsonl", {"colour": 1}))
    with pytest.raises(ConfigError, match="no row that can be read"):
        import_file(log, written(tmp_path / "s.jsonl", b"{"))
    with pytest.raises(ConfigError, match="gsm8k_problems"):
        import_file(log, written(tmp_path / "t.jsonl", PROBLEM), format="parquet")
    for absent in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="expected a file to import"):
            import_file(log, str(absent))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match="no row that can be read"):
        import_file(log, str(empty))


def test_each_format_knows_its_own_file_alone() -> None:
    data = Path(__file__).parents[1] / "data"
    known = {
        "nemogym/cc_rollouts_with_logprobs.jsonl": "nemogym_rollouts",
        "nemogym/round_trip_token_ids.json": "nemogym_response",
        "nemorl/merged_tokens_drift.json": "nemorl_drift",
        "nemorl/nemo_gym_sanity.json": "nemorl_message_logs",
        "gsm8k/gsm8k_model_solutions.jsonl": "gsm8k_solutions",
        "gsm8k/gsm8k_test.jsonl": "gsm8k_problems",
    }
    for name, expected in known.items():
        document = Source.open(str(data / name)).first_document()
        assert document is not None
        assert [entry.name for entry in FORMATS.values() if entry.matches(document)] == [expected]


def test_a_pretty_printed_document_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(PROBLEM, indent=2))
    source = Source.open(str(path))
    assert [row.document() for row in source.rows()] == [PROBLEM]


def test_the_first_difference_is_an_index_of_ids() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert starts_with([1, 2, 3], [1, 2])
    assert not starts_with([1], [1, 2])


def test_the_report_is_a_value() -> None:
    assert ImportReport.__dataclass_params__.frozen  # type: ignore[attr-defined]  # dataclasses keep it untyped

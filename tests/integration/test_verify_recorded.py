"""Verification of tapes that recorder, spool and committer made: sound ones are sound, the others break by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolltape.ingest.importers import import_file
from rolltape.ingest.log import open_log
from rolltape.ingest.recorder import Recorder
from rolltape.schema.digest import prefix_digest
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake
from rolltape.store.maintenance import compact
from rolltape.store.verify import verify

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def import_files(lake: Lake, *names: str) -> None:
    with open_log(lake.location.url) as log:
        for name in names:
            import_file(log, str(DATA / name))


def test_a_drift_is_named_by_its_index(lake: Lake) -> None:
    import_files(lake, "nemorl/merged_tokens_drift.json")
    report = verify(lake)
    (finding,) = report.findings
    assert (finding.contract, finding.check, finding.index) == ("token", "prefix_proof", 4647)
    assert "index 4647" in finding.message
    assert not report.ok


def test_imports_are_sound_once_and_twice_and_compacted(lake: Lake) -> None:
    name = "nemogym/cc_rollouts_with_logprobs.jsonl"
    import_files(lake, name)
    import_files(lake, "nemorl/nemo_gym_sanity.json")
    first = verify(lake)
    assert first.findings == ()
    assert first.check("log_probs").num_checked == 5_023
    assert first.check("log_probs").counts["exactly_zero"] == 914
    assert first.check("modes").counts["unknown_temperature"] == 5
    import_files(lake, name)
    second = verify(lake)
    assert second.findings == ()
    assert second.check("event_ids").num_checked == first.check("event_ids").num_checked
    compact(lake)
    third = verify(lake)
    assert third.findings == ()
    assert [check.num_checked for check in third.checks] == [check.num_checked for check in second.checks]
    assert third.lake_version > second.lake_version


def test_dead_letters_keep_the_books_straight(lake: Lake) -> None:
    """A refused row leaves no gap in lanes or offsets; its trajectory is dropped, not incomplete."""
    with (
        open_log(lake.location.url) as log,
        Recorder(log, producer_id="p", run_id="run", limits=Limits(vocab_size=10)) as recorder,
    ):
        recorder.record("run_started", purpose="train", vocab_size=10)
        attempts: dict[str, Any] = {"trajectory_id": ["a", "b"], "attempt": 0, "group_id": "g", "problem_id": "x"}
        recorder.record_batch("rollout_dispatched", {**attempts, "purpose": "train"})
        recorder.record_batch("rollout_started", {**attempts, "prompt_token_ids": [[1, 2], [1, 2]]})
        recorder.record_batch(
            "action_sampled",
            {
                **attempts,
                "token_ids": [[3, 4], [3, 99]],
                "rollout_log_probs": [[-0.5, -0.5], [-0.5, -0.5]],
                "prefix_length": 2,
                "prefix_digest": prefix_digest([1, 2]),
                "prefix_source": "engine",
            },
        )
        recorder.record_batch("rollout_ended", {**attempts, "status": "completed", "last_event_index": 2})
        recorder.flush("logged")
    report = verify(lake)
    assert report.findings == ()
    assert report.check("event_ids").counts["dead_letters"] == 1
    assert report.check("completeness").counts == {"ended": 1, "open": 0, "dropped": 1, "abandoned": 0}
    assert report.check("lanes").counts["recognised_repeats"] == 0
    letters = lake.sql("SELECT trajectory_id, reason FROM dead_letters").rows()
    assert letters == [{"trajectory_id": "b", "reason": "out_of_vocabulary"}]

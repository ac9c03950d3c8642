"""Case D18: a message that is too large is never silently gone.

Reported elsewhere: above ``max_request_size`` the future of ``send()`` fails and nobody looks; the size is estimated
before compression. Here: 200,000 sampled tokens (ids, log-probs, versions) against a limit of 1 MiB.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rolltape.ingest import Recorder
from rolltape.ingest.kafka.log import KafkaLog
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import RecordTooLargeError

NUM_TOKENS = 200_000
LIMIT = 1 << 20


def generation(seed: int) -> dict[str, Any]:
    """One action; the log-probs have random low bits, so that compression helps little."""
    rng = np.random.default_rng(seed)
    run = {"start": 0, "length": NUM_TOKENS, "policy_id": "policy", "run_epoch": 1, "version": 3}
    return {
        "trajectory_id": f"t{seed}",
        "attempt": 0,
        "group_id": "g",
        "token_ids": rng.integers(0, 150_000, NUM_TOKENS, dtype=np.int32),
        "rollout_log_probs": -rng.exponential(size=NUM_TOKENS).astype(np.float32),
        "version_runs": [run],
    }


def digest(token_ids: Iterable[int], log_probs: Iterable[float]) -> str:
    """SHA-256 over ids and log-probs."""
    ids: NDArray[np.int32] = np.fromiter(token_ids, np.int32)
    probs: NDArray[np.float32] = np.fromiter(log_probs, np.float32)
    return hashlib.sha256(ids.tobytes() + probs.tobytes()).hexdigest()


def read_actions(log: KafkaLog, num_rows: int) -> dict[str, str]:
    """Digest of each action in the log, by trajectory."""
    reader = log.reader(Cursor(), topics=["rollout"])
    found: dict[str, str] = {}
    deadline = time.monotonic() + 60
    while len(found) < num_rows:
        assert time.monotonic() < deadline, f"expected {num_rows} actions, got {len(found)}"
        for delivery in reader.poll(1.0):
            for row in delivery.table.to_pylist() if delivery.kind == "action_sampled" else ():
                found[row["trajectory_id"]] = digest(row["token_ids"], row["rollout_log_probs"])
    reader.close()
    return found


@pytest.mark.parametrize("limit", [LIMIT, 16 << 20])
def test_case_d18_a_long_generation_arrives_whole_whatever_the_topics_limit(make_place: Any, limit: int) -> None:
    place = make_place(max_message_bytes=limit, partitions={"rollout": 2})
    expected = {}
    with place.open() as log, Recorder(log, producer_id="p", run_id="r") as recorder:
        for seed in range(2):
            action = generation(seed)
            recorder.record("action_sampled", **action)
            expected[action["trajectory_id"]] = digest(action["token_ids"], action["rollout_log_probs"])
        recorder.flush("logged")
        assert read_actions(log, 2) == expected
    blobs = list((place.lake.location.local_path() / "blobs").rglob("*")) if limit == LIMIT else []
    assert sum(path.is_file() for path in blobs) == (2 if limit == LIMIT else 0)


def test_case_d18_without_a_place_for_the_payload_the_error_comes_at_once(make_place: Any) -> None:
    place = make_place(max_message_bytes=LIMIT, partitions={"rollout": 2})
    with place.open(with_lake=False) as log:
        recorder = Recorder(log, producer_id="p", run_id="r")

        def record_and_flush() -> None:
            recorder.record("action_sampled", **generation(0))
            recorder.flush("logged")

        with pytest.raises(RecordTooLargeError, match=str(LIMIT)):
            record_and_flush()

"""What a tape says of agents' rollouts, to the bit and without ids or clocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc

from rolltape.schema.fold import FOLDED_KINDS, Fold, fold

from .conftest import TapeReader

Place = tuple[str, int, int, int]
"""Purpose, step, group ordinal and member."""


def folded(tape: TapeReader) -> Fold:
    tables = {kind: tape.table(kind) for kind in FOLDED_KINDS}
    return fold({kind: table for kind, table in tables.items() if table is not None})


def contents(tape: TapeReader) -> dict[Place, list[Any]]:
    """Of each current attempt, by its place: segments to the bit, status, rewards and masks."""
    places = {
        (row["trajectory_id"], row["attempt"]): tuple(
            row[name] for name in ("purpose", "training_step", "group_ordinal", "member")
        )
        for row in tape.rows("rollout_dispatched")
    }
    found = folded(tape)
    of_place: dict[Place, list[Any]] = {}
    for row in found.trajectories.filter(pc.field("is_current")).to_pylist():
        place = places[row["trajectory_id"], row["attempt"]]
        assert place not in of_place, f"two current attempts at {place}"
        token_rewards = [(r["segment_index"], r["position"], r["scalar"]) for r in row["token_rewards"]]
        of_place[place] = [row["status"], row["cause"], row["reward"], token_rewards, row["untrainable_reasons"]]
    for row in found.segments.filter(pc.field("is_current")).to_pylist():
        bits = np.array(row["rollout_log_probs"], dtype=np.float32).tobytes()
        masks = (row["response_mask"], row["observation_mask"])
        ids = (row["prompt_token_ids"], row["response_token_ids"], row["policy_versions"])
        place = places[row["trajectory_id"], row["attempt"]]
        of_place[place].append((row["segment_kind"], row["is_accepted"], *ids, bits, *masks))
    return of_place


def wait_for_ends(tape: TapeReader, num_ends: int) -> None:
    """Wait for so many attempts that ended and were not abandoned."""

    def ended() -> bool:
        gone = {(row["trajectory_id"], row["attempt"]) for row in tape.rows("attempt_abandoned")}
        ends = {(row["trajectory_id"], row["attempt"]) for row in tape.rows("rollout_ended")}
        return len(ends - gone) >= num_ends

    tape.wait_for(f"{num_ends} ends", ended)

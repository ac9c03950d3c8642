"""A small recorded batch with everything in it: segments, observations, mixed rewards, a truncation, teacher scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.attempts import AttemptWriter
from tests.conftest import Tape
from tests.scored import problem, route, score, start_run

from rolltape.schema.cursor import Cursor
from rolltape.schema.fold import fold
from rolltape.store.lake import Lake
from rolltape.store.sources import TableSource
from rolltape.store.verify import CHECKS
from rolltape.store.verify_context import Context
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.members import pack_members
from rolltape.trainers.pinned import PinnedBatch, member_columns, read_pinned
from rolltape.trainers.records import batch_formed_columns
from rolltape.trainers.score_book import ScoreBook

LOG_PROB: Final = -2.75
"""About what an untrained small character model says of any token."""


class Recorded:
    """Two rollouts of two segments each, with observations, mixed rewards and scores, and their batch."""

    def __init__(self, tape: Tape, folder: Path, *, version: int = 0, **started: Any) -> None:
        """``version`` sampled all of it; ``started``: columns of ``run_started``."""
        self.tape, self.folder, self.version = tape, folder, version
        start_run(tape, **started)
        problem(tape, "p", "math")
        route(tape, "math", "teacher-math")
        self.names = ("a", "b")
        self.actions = [self._rollout(name, member) for member, name in enumerate(self.names)]
        self.scores = {(name, s): score(tape, name, "teacher-math", segment=s) for name in self.names for s in (0, 1)}

    def _rollout(self, name: str, member: int) -> list[str]:
        writer = AttemptWriter(self.tape, name, group_id="g", problem_id="p")
        writer.add(
            "rollout_dispatched", indexed=False, purpose="train", group_ordinal=0, member=member, group_size=2,
            worker_id="w",
        )  # fmt: skip
        writer.start([1, 2])
        actions = [writer.act([5, 6 + member], version=self.version, log_probs=[LOG_PROB, LOG_PROB + 0.1])]
        writer.observe([3])
        actions.append(writer.act([8], version=self.version, log_probs=[LOG_PROB - 0.1]))
        writer.rewrite([1, 9])
        actions.append(writer.act([9, 10], version=self.version, log_probs=[LOG_PROB, LOG_PROB]))
        writer.end("truncated" if member else "completed")
        writer.reward(0.5, target_event_id=actions[1])
        writer.reward(float(member))
        return actions

    def pin(self, rules: BatchRules) -> PackedBatch:
        """Form the batch as the live trainer does; what it trained."""
        tables = self.tape.tables()
        folded, book = fold(tables), ScoreBook.of(tables, tables["run_started"], rules)
        plan: BatchPlan = plan_batch(folded, VersionRules(current=self.version, newest=self.version), rules, book)
        structs, digest = member_columns(folded, plan.members, rules, book)
        columns = batch_formed_columns(
            batch_id="batch",
            trainer_id="trainer",
            algorithm="any",
            step=1,
            members=structs,
            dropped=plan.dropped,
            staleness_version=0,
            staleness_run_epoch=1,
            cursors=(Cursor(), Cursor()),
            batch_digest=digest,
        )
        self.tape.add("batch_formed", **columns)
        return pack_members(folded, plan.members, rules, book)

    def forget_teacher_digests(self) -> None:
        """Pin the batch as a release did that knew no digest of scores."""
        [row] = self.tape.tables()["batch_formed"].to_pylist()
        columns = row["batch_formed"]
        for member in columns["members"]:
            del member["teacher_digest"]
        lists = {name: [value] for name, value in columns.items() if isinstance(value, list)}
        del self.tape.batches["batch_formed"]
        self.tape.add("batch_formed", event_id=row["event_id"], **(columns | lists))

    def verified(self) -> bool:
        """Whether ``verify`` finds every member as it was pinned."""
        [check] = [one for one in CHECKS if one.name == "content_digests"]
        return check.result(Context(TableSource(self.tape.tables()))).ok

    def read(self, rules: BatchRules, without: Sequence[str] = ()) -> PinnedBatch:
        """Read it from a lake that holds the tape."""
        return read_pinned(self.lake(without), "run", "batch", rules)

    def lake(self, without: Sequence[str] = ()) -> Lake:
        """A new lake that holds the tape."""
        lake = Lake.create(self.folder / f"lake-{len(list(self.folder.iterdir()))}")
        tables: Mapping[str, Any] = {kind: t for kind, t in self.tape.tables().items() if kind not in without}
        lake.append(tables, {})
        return lake

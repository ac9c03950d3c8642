"""The scoring service of a run: teachers' log-probs of what the student sampled (algorithms.md §4.7 to §4.9).

A process that follows the rollouts on the tape, sends each to the one teacher that its domain names, and records what
that says of the very ids that were sampled. It keeps no state: after any crash it reads which scores the tape has, goes
on with the rollouts that lack some, and adds those, to the same bits.

It fails closed. A teacher of other ids is refused at the start; a rollout whose domain has no teacher, or whose teacher
is not there, is held, with an alarm, and no other teacher stands in for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.log import EventLog, LogReader
from rolltape.ingest.recorder import Recorder
from rolltape.numerics.device import set_deterministic
from rolltape.numerics.models import ModelSpec, build_tokenizer
from rolltape.numerics.vocabulary import Vocabulary
from rolltape.rollout import teacher_queue
from rolltape.rollout.process import DONE, TERMINATED, on_sigterm, open_run_log
from rolltape.rollout.tape import RunTape, read_to
from rolltape.rollout.teacher_bench import TeacherBench
from rolltape.rollout.teacher_models import TeacherRoute, check_routes
from rolltape.rollout.teacher_past import Past, read_past
from rolltape.rollout.teacher_queue import ScoringQueue, UnitKey
from rolltape.rollout.teacher_units import HELD, UNREAD, UnitScorer
from rolltape.schema.cursor import Cursor
from rolltape.schema.errors import ConfigError
from rolltape.schema.identity import derived_id
from rolltape.schema.render import arrow_schema
from rolltape.schema.validate import Limits
from rolltape.store.lake import Lake
from rolltape.store.location import Location

_FOLLOWED: Final = ("run_started", "run_resumed", "train_step_completed", "dead_letter_redriven")
_OF_RUN: Final = ("run_started", "dead_letter_redriven")  # what the fold needs of them
_OWN: Final = ("teacher_routed", "teacher_scored", "alarm_raised")
_ROLLOUTS: Final = (*teacher_queue.KINDS, "problem_registered")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """What the scoring service of a run is to do."""

    lake: str  # path or URL
    run_id: str
    routes: tuple[TeacherRoute, ...]
    log: str = ""  # URL of the log; empty: the lake itself
    model: str | ModelSpec = "char-64x2"  # the student's
    temperature: float = 1.0  # the rollouts'
    top_k: int = 0  # likeliest ids that are recorded at each token; 0: the sampled one alone
    token_budget: int = 16_384  # padded tokens of one forward pass
    shuffle_scores: bool = False  # a control: scores of a step change places among the tokens of a domain
    groups_per_step: int = 1  # of the run
    group_size: int = 1  # rollouts of a group
    rollouts_per_unit: int = 32  # at least so many are scored together, where a step has so many; whole groups
    seed: int = 0  # the run's
    num_threads: int = 1
    poll_s: float = 0.2  # longest wait for the tape before signals are looked at
    group_wait_s: float = 30.0  # after so long the ended rollouts of a group that does not end are scored alone
    retry_s: float = 5.0  # between looks for a teacher that is not there
    verify_every_s: float = 60.0  # between looks at the teachers' weights
    flush_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.routes:
            raise ConfigError("teachers.routes: expected at least one teacher, got none")
        check_routes(self.routes)
        if not self.temperature > 0:
            raise ConfigError(f"teachers.temperature: expected more than 0, got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"teachers.top_k: expected 0 (sampled ids alone) or more, got {self.top_k}")
        for name in ("token_budget", "groups_per_step", "group_size", "rollouts_per_unit", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"teachers.{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("poll_s", "group_wait_s", "retry_s", "verify_every_s", "flush_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"teachers.{name}: expected more than 0, got {getattr(self, name)}")

    @property
    def groups_per_unit(self) -> int:
        """Groups that are scored together. Scores change places within a unit: a control's is a whole step."""
        return self.groups_per_step if self.shuffle_scores else -(-self.rollouts_per_unit // self.group_size)

    @property
    def producer_id(self) -> str:
        """Name of the service among all producers of the lake: one live service a run."""
        return f"{self.run_id}.teachers"


class Alarms:
    """Alarms of this run, each raised once, whatever was started again in between."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._raised: set[str] = set()

    def known(self, event_ids: Collection[str]) -> None:
        """These are on the tape."""
        self._raised.update(event_ids)

    def raise_once(self, alarm: str, subject: str, detail: str) -> None:
        """Record an alarm about ``subject``, unless it was raised before."""
        event_id = derived_id(self._recorder.run_id, "alarm_raised", alarm, subject)
        if event_id in self._raised:
            return
        self._raised.add(event_id)
        self._recorder.record("alarm_raised", event_id=event_id, alarm=alarm, severity="error", detail=detail)
        self._recorder.flush("spooled")


class TeacherService:
    """The scoring service over parts that are made elsewhere; :func:`run_teachers` makes the usual ones.

    Args:
        config: what it is to do.
        log: where it reads.
        recorder: what it writes with.
        bench: the teachers.
        lake: where the log is archived, so that what is scored is not read again; None: the log is read from its
            beginning.
    """

    def __init__(
        self, config: TeacherConfig, log: EventLog, recorder: Recorder, bench: TeacherBench, lake: Lake | None = None
    ) -> None:
        self._config = config
        self._log = log
        self._lake = lake
        self._recorder = recorder
        self._bench = bench
        self._alarms = Alarms(recorder)
        self._tape = RunTape(config.run_id, "actor")
        self._of_run: dict[str, pa.Table] = {kind: arrow_schema(kind).empty_table() for kind in _OF_RUN}
        self._domains: dict[str, str | None] = {}
        self._begun: dict[UnitKey, float] = {}  # when a unit that is not complete was first seen to have begun
        self._held: set[UnitKey] = set()
        self._redriven = False
        self._verified = time.monotonic()
        self._stop = threading.Event()
        self._queue: ScoringQueue
        self._units: UnitScorer
        self._rollouts: LogReader

    def stop(self) -> None:
        """Leave at the next opportunity."""
        self._stop.set()

    def run(self) -> int:
        """Score until the run's last step is completed: :data:`DONE`, or :data:`TERMINATED`.

        Raises:
            ConfigError, DigestMismatchError: a teacher is refused, or is no longer the one that it was.
        """
        self._recorder.wait_for_older_epochs(self._config.flush_timeout_s)
        reader = self._log.reader(Cursor(), topics=("control", "training"), kinds=_FOLLOWED)
        try:
            read_to(reader, self._log.end(), ("control", "training"), self._follow)
            while not self._tape.epochs and not self._stop.is_set():
                self._poll(reader, self._config.poll_s)
            self._recorder.set_run_epoch(self._tape.line.epoch)
            self._begin()
            try:
                return self._serve(reader)
            finally:
                self._rollouts.close()
        finally:
            reader.close()

    # Start

    def _begin(self) -> None:
        """Read what the tape has: scores, routes, alarms, then the rollouts."""
        self._redriven = False
        self._held.clear()
        self._begun.clear()
        past = Past() if self._lake is None else read_past(self._lake, self._config, self._of_run)
        own: dict[str, list[pa.Table]] = {kind: [past.tables[kind]] if past.tables else [] for kind in _OWN}

        def keep(kind: str, table: pa.Table) -> None:
            own[kind].append(table.filter(pc.equal(table["run_id"], self._config.run_id)))

        reader = self._log.reader(past.cursor, topics=("teacher", "control"), kinds=_OWN)
        try:
            read_to(reader, self._log.end(), ("teacher", "control"), keep)
        finally:
            reader.close()
        for table in own["alarm_raised"]:
            self._alarms.known(table["event_id"].to_pylist())
        self._bench.adopt(own["teacher_routed"])
        self._units = UnitScorer(self._config, self._recorder, self._bench, own["teacher_scored"])
        self._bench.load_missing(self._alarms)
        self._read_rollouts(past)

    def _read_rollouts(self, past: Past) -> None:
        self._queue = ScoringQueue.of(self._config)
        for kind in _ROLLOUTS if past.tables else ():
            self._take(kind, past.tables[kind])
        self._rollouts = self._log.reader(past.cursor, topics=("rollout",), kinds=_ROLLOUTS)
        # Nothing is scored before all is read: an attempt that ended may have been superseded since.
        read_to(self._rollouts, self._log.end(), ("rollout",), self._take)
        self._queue.settle()

    # Events

    def _follow(self, kind: str, table: pa.Table) -> None:
        mine = table.filter(pc.equal(table["run_id"], self._config.run_id))
        if kind in self._of_run and mine.num_rows:
            self._of_run[kind] = pa.concat_tables([self._of_run[kind], mine])
        if kind == "dead_letter_redriven":
            self._redriven |= table.num_rows > 0
        else:
            self._tape.apply(kind, mine)

    def _take(self, kind: str, table: pa.Table) -> None:
        if kind != "problem_registered":
            self._queue.add(kind, table)
            return
        mine = table.filter(pc.equal(table["run_id"], self._config.run_id))
        domains = pc.struct_field(mine[kind], "domain").to_pylist()
        self._domains.update(zip(mine["problem_id"].to_pylist(), domains, strict=True))
        self._held.clear()

    def _poll(self, reader: LogReader, timeout_s: float) -> None:
        for delivery in reader.poll(timeout_s):
            self._follow(delivery.kind, delivery.table)

    # Work

    def _serve(self, reader: LogReader) -> int:
        while not self._stop.is_set():
            self._poll(reader, 0.0)
            self._recorder.set_run_epoch(self._tape.line.epoch)
            last = self._tape.last_step
            if last is not None and last.is_final:
                self._leave()
                return DONE
            if self._redriven:
                # What a dead letter had closed is open again, and its events may be long behind us.
                self._recorder.flush("logged", self._config.flush_timeout_s)
                self._rollouts.close()
                self._begin()
            if self._bench.load_missing(self._alarms):
                self._held.clear()
            self._score()
            self._verify()
            for delivery in self._rollouts.poll(self._config.poll_s):
                self._take(delivery.kind, delivery.table)
            self._queue.settle()
        self._leave()
        return TERMINATED

    def _score(self) -> None:
        """Score what has ended; what nobody may score now is held."""
        complete = self._complete()
        overdue = self._overdue()
        if not complete and not overdue:
            return
        folded = self._queue.fold({*complete, *overdue}, self._of_run)
        found = self._units.score(folded, self._queue.place, self._domains, self._alarms, alone=overdue)
        self._held |= {key for key, outcome in found.items() if outcome == HELD}
        waiting = self._held | {key for key, outcome in found.items() if outcome == UNREAD}
        self._queue.forget(key for key in complete if key not in waiting)

    def _complete(self) -> list[UnitKey]:
        """Complete units that are not held. A problem may lie in a partition that was not read as far."""
        complete = [key for key in self._queue.complete() if key not in self._held]
        if self._queue.problems(complete) - self._domains.keys():
            read_to(self._rollouts, self._log.end(), ("rollout",), self._take)
            self._queue.settle()
            complete = [key for key in self._queue.complete() if key not in self._held]
        return complete

    def _overdue(self) -> set[UnitKey]:
        """Units that some rollouts keep waiting; each comes up again after as long."""
        now, begun = time.monotonic(), set(self._queue.begun())
        self._begun = {key: since for key, since in self._begun.items() if key in begun}
        overdue = set()
        for key in begun:
            if now - self._begun.setdefault(key, now) > self._config.group_wait_s:
                overdue.add(key)
                self._begun[key] = now
        return overdue

    def _verify(self) -> None:
        if time.monotonic() - self._verified > self._config.verify_every_s:
            self._bench.verify()
            self._verified = time.monotonic()

    def _leave(self) -> None:
        self._bench.verify()
        self._recorder.flush("logged", self._config.flush_timeout_s)


def make_service(config: TeacherConfig, log: EventLog, recorder: Recorder) -> TeacherService:
    """A service whose teachers are models in this process.

    Args:
        config: what it is to do.
        log: where it reads.
        recorder: what it writes with; made for ``config.producer_id`` and ``config.run_id``.
    """
    student = Vocabulary.of(build_tokenizer(config.model))
    lake = Lake.open(Location.parse(config.lake), read_only=True)
    return TeacherService(config, log, recorder, TeacherBench(config, student, recorder), lake)


def run_teachers(config: TeacherConfig) -> int:
    """Run the scoring service of a run in this process; returns its exit status.

    Raises:
        ConfigError: a teacher's ids or template are not the student's.
        DigestMismatchError: a teacher's weights are not what the tape says, or not what they were.
        LakeNotFoundError, ProducerFencedError: it cannot start.
        FlushTimeout, BackpressureTimeout: nothing archives what it spools; is a committer running?
    """
    set_deterministic(config.num_threads, config.seed)
    limits = Limits(vocab_size=build_tokenizer(config.model).vocab_size)
    with (
        open_run_log(config.log, config.lake) as log,
        Recorder(log, producer_id=config.producer_id, run_id=config.run_id, limits=limits) as recorder,
    ):
        service = make_service(config, log, recorder)
        on_sigterm(service.stop)
        return service.run()

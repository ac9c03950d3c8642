"""Scoring whole units: which segments a teacher may score, why others are held, and what is recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.ingest.recorder import Recorder
from rolltape.rollout.engine import PROCESSED
from rolltape.rollout.recording import select_rows
from rolltape.rollout.teacher_bench import TeacherBench
from rolltape.rollout.teacher_models import Teacher, TeacherRoute
from rolltape.rollout.teacher_queue import UnitKey
from rolltape.rollout.teacher_scores import Scores, SegmentKey, Segments, score, scored_columns, shuffle_order
from rolltape.schema.fold import Fold

if TYPE_CHECKING:
    from rolltape.rollout.teachers import Alarms, TeacherConfig

UNKNOWN_DOMAIN: Final = "teacher_unknown_domain"
OTHER_SAMPLING: Final = "teacher_other_sampling"
TOO_LONG: Final = "teacher_context"
SCORED: Final = "scored"
HELD: Final = "held"
"""A unit some rollouts of which may be scored later: their problem is not known yet, or their teacher not there."""
UNREAD: Final = "unread"
"""A unit with a rollout whose end is read and whose other events are not: kinds do not arrive in their order."""

Places = Callable[[str, int], tuple[UnitKey, int, int] | None]
_NEVER_TRAINED: Final = ("env_failed", "aborted")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A segment that is to be scored."""

    row: int  # of the folded segments
    unit: UnitKey
    order: tuple[int, int, int]  # group ordinal, member, segment
    attempt: tuple[str, int]
    domain: str | None
    route: TeacherRoute
    teacher: Teacher


class UnitScorer:
    """Scores units and records what is not on the tape yet.

    Args:
        config: temperature, top-k, control.
        recorder: what it writes with.
        bench: the teachers.
        past: ``teacher_scored`` rows of the run that the tape has.
    """

    def __init__(
        self, config: TeacherConfig, recorder: Recorder, bench: TeacherBench, past: Sequence[pa.Table] = ()
    ) -> None:
        self._config = config
        self._recorder = recorder
        self._bench = bench
        self._known: set[SegmentKey] = set()
        for table in past:
            names = ("trajectory_id", "attempt", "segment_index")
            self._known.update(zip(*(table[name].to_pylist() for name in names), strict=True))

    def score(
        self,
        folded: Fold,
        place: Places,
        domains: Mapping[str, str | None],
        alarms: Alarms,
        *,
        alone: Collection[UnitKey] = (),
    ) -> dict[UnitKey, str]:
        """Score the ended rollouts of units; :data:`SCORED`, :data:`HELD` or :data:`UNREAD` for each.

        Args:
            folded: their rollouts.
            place: unit, group ordinal and member of an attempt.
            domains: of each known problem.
            alarms: told of rollouts that nobody may score.
            alone: units that are not complete: each rollout is scored by itself.
        """
        outcome = dict.fromkeys(unread_units(folded, place) - set(alone), UNREAD)
        segments = _candidates(folded)
        units: dict[UnitKey, list[_Row]] = {}
        for row in self._admitted(segments, place, domains, alarms, outcome):
            units.setdefault(row.unit, []).append(row)
        for key, of_unit in units.items():
            comes_back = key in alone or outcome.get(key) == HELD
            self._score_unit(segments, sorted(of_unit, key=lambda row: row.order), key, key in alone, comes_back)
            outcome.setdefault(key, SCORED)
        if units:
            self._recorder.flush("spooled")
        return outcome

    def _admitted(
        self,
        segments: pa.Table,
        place: Places,
        domains: Mapping[str, str | None],
        alarms: Alarms,
        outcome: dict[UnitKey, str],
    ) -> Iterator[_Row]:
        """The segments that a teacher may score; an alarm for the others."""
        names = ("trajectory_id", "attempt", "segment_index", "problem_id", "num_tokens")
        columns = [segments[name].to_pylist() for name in names]
        samplings = [
            pc.struct_field(segments["sampling_config"], n).to_pylist() for n in ("temperature", "logprobs_mode")
        ]
        for row, (trajectory, attempt, index, problem, length, temperature, mode) in enumerate(
            zip(*columns, *samplings, strict=True)
        ):
            found = place(trajectory, attempt)
            if found is None or outcome.get(found[0]) == UNREAD:
                continue
            key, ordinal, member = found
            if problem not in domains:
                outcome[key] = HELD
                alarms.raise_once(UNKNOWN_DOMAIN, f"problem {problem}", f"problem {problem!r} is not registered; held")
                continue
            route = self._bench.route_of(domains[problem])
            if route is None:
                alarms.raise_once(
                    UNKNOWN_DOMAIN,
                    f"domain {domains[problem]}",
                    f"domain {domains[problem]!r} of problem {problem!r} has no teacher: its rollouts are held; "
                    "add a route for it",
                )
                continue
            teacher = self._bench.teacher_of(route)
            if teacher is None:
                outcome[key] = HELD
                continue
            refusal = self._refusal(length, temperature, mode, teacher)
            if refusal is not None:
                alarm, detail = refusal
                alarms.raise_once(alarm, route.name, f"trajectory {trajectory} segment {index}: {detail}; held")
                continue
            yield _Row(
                row=row,
                unit=key,
                order=(ordinal, member, index),
                attempt=(trajectory, attempt),
                domain=domains[problem],
                route=route,
                teacher=teacher,
            )

    def _refusal(
        self, length: int, temperature: float | None, mode: str | None, teacher: Teacher
    ) -> tuple[str, str] | None:
        """Why a teacher may not score a segment: alarm and detail."""
        identity = teacher.scorer.identity
        if length > teacher.max_length:
            return TOO_LONG, f"expected at most {teacher.max_length} tokens, got {length}"
        if temperature is not None and (temperature, mode) != (identity.temperature, PROCESSED):
            return OTHER_SAMPLING, (
                f"expected tokens sampled at temperature {identity.temperature} with {PROCESSED}, got "
                f"{temperature} with {mode}"
            )
        return None

    def _score_unit(self, segments: pa.Table, rows: list[_Row], key: UnitKey, alone: bool, comes_back: bool) -> None:
        """Score a unit's segments, teacher by teacher; ``alone``: rollout by rollout."""
        table = segments.take(pa.array([row.row for row in rows]))
        keys = list(
            zip(*(table[name].to_pylist() for name in ("trajectory_id", "attempt", "segment_index")), strict=True)
        )
        if not self._known.issuperset(keys):
            for route in dict.fromkeys(row.route for row in rows):
                own = [number for number, row in enumerate(rows) if row.route == route]
                self._score_rows(table.take(pa.array(own)), [rows[number] for number in own], key, alone=alone)
        if comes_back:
            self._known.update(keys)
        else:
            self._known.difference_update(keys)

    def _score_rows(self, table: pa.Table, rows: list[_Row], key: UnitKey, *, alone: bool) -> None:
        route, teacher = rows[0].route, rows[0].teacher
        parts = [
            score(
                Segments.of(table.slice(begin, end - begin)),
                teacher.scorer,
                top_k=self._config.top_k or None,
                num_ids=teacher.vocabulary.num_ids,
            )
            for begin, end in _cuts([row.attempt if alone else key for row in rows])
        ]
        segments, scores = Segments.of(table), Scores.joined(parts)
        if self._config.shuffle_scores:
            domains = [row.domain for row in rows]
            scores = scores.permuted(shuffle_order(segments, domains, self._config.seed, str(key)))
        missing = np.array([number for number, known in enumerate(segments.keys) if known not in self._known], np.int64)
        if not len(missing):
            return
        columns = scored_columns(segments, scores, teacher, self._bench.teacher_id(route), run_id=self._recorder.run_id)
        if len(missing) < len(segments):
            columns = select_rows(columns, missing)
        self._recorder.record_batch("teacher_scored", columns, len(missing))


def unread_units(folded: Fold, place: Places) -> set[UnitKey]:
    """Units with an attempt that counts and lacks events."""
    table = folded.trajectories
    is_open = table.filter(pc.and_(table["is_current"], pc.equal(table["state"], "open")))
    found = map(place, is_open["trajectory_id"].to_pylist(), is_open["attempt"].to_pylist())
    return {where[0] for where in found if where is not None}


def ended_segments(folded: Fold) -> pa.Table:
    """Segments of ended rollouts that may be trained."""
    attempts = folded.trajectories
    usable = pc.and_(
        pc.and_(attempts["is_current"], pc.equal(attempts["state"], "ended")),
        pc.invert(pc.is_in(attempts["status"], pa.array(_NEVER_TRAINED))),
    )
    chosen = attempts.filter(usable).select(["trajectory_id", "attempt"])
    wanted = set(zip(*(column.to_pylist() for column in chosen.columns), strict=True))
    segments = folded.segments
    keys = zip(segments["trajectory_id"].to_pylist(), segments["attempt"].to_pylist(), strict=True)
    return segments.filter(pa.array([key in wanted for key in keys], pa.bool_()))


def _candidates(folded: Fold) -> pa.Table:
    """Segments of :func:`ended_segments` with a known context and tokens, and how long they are."""
    segments = ended_segments(folded)
    lengths = pc.list_value_length(segments["response_token_ids"])
    kept = segments.filter(pc.and_(pc.is_valid(segments["prompt_token_ids"]), pc.greater(lengths, 0)))
    total = pc.add(pc.list_value_length(kept["prompt_token_ids"]), pc.list_value_length(kept["response_token_ids"]))
    return kept.append_column("num_tokens", total)


def _cuts(names: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Ranges of equal neighbours."""
    begin = 0
    for end in range(1, len(names) + 1):
        if end == len(names) or names[end] != names[begin]:
            yield begin, end
            begin = end

"""What teachers said of recorded tokens, matched to the segments that are trained; fail closed (algorithms.md §4.9).

A score counts for a segment when the teacher that the rollout's domain is routed to gave it, under the segment's own
context, for the segment's own ids, at the rollout's temperature and in its declared distribution, with the run's
tokenizer and chat template. Everything else is refused by name: no other teacher stands in, no list is shifted to fit.
Positions are absolute, so a score that begins earlier or ends sooner says of each token exactly what it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema import reasons
from rolltape.schema.digest import prefix_digest
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold
from rolltape.schema.render import arrow_schema
from rolltape.schema.score_digests import score_digests
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.packing import FlatSegments, RowScore, flat_values
from rolltape.trainers.segments import Attempt, TrainedSegments

TEACHER_KINDS: Final = ("teacher_scored", "teacher_routed", "problem_registered")
"""Kinds that a book is made of."""

SegmentKey: TypeAlias = tuple[str, int, int]
"""(trajectory, attempt, segment index)."""

_FIELDS: Final = (
    "teacher_id",
    "weights_digest",
    "logprobs_mode",
    "temperature",
    "template_digest",
    "tokenizer_digest",
    "prefix_digest",
    "start_position",
    "top_k",
)
_LISTS: Final = ("scored_token_ids", "log_probs", "top_k_token_ids", "top_k_log_probs")


class Route(NamedTuple):
    """Which teacher a domain goes to."""

    teacher_id: str
    weights_digest: str | None
    tokenizer_digest: str | None
    student_tokenizer_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """What a book says of a fold's attempts.

    Attributes:
        rows: row of the book's scores for each segment row of the fold that is scored.
        refusals: why an attempt's scores may not be used.
        awaiting: attempts of which a segment is not scored yet, or whose domain has no route yet, and the reason to
            give where nobody waits.
    """

    rows: Mapping[int, int]
    refusals: Mapping[Attempt, str]
    awaiting: Mapping[Attempt, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBook:
    """Scores, routes and domains of a run, as far as they are known now.

    Attributes:
        rules: which of it is needed.
        routes: by domain.
        domains: by problem.
        tokenizer_digest: of the run; None: not recorded.
        template_digest: of the run; None: its prompts are raw text.
    """

    rules: BatchRules
    routes: Mapping[str, Route]
    domains: Mapping[str, str | None]
    tokenizer_digest: str | None
    template_digest: str | None
    _scored: pa.Table
    _event_ids: Sequence[str]
    _rows_of: Mapping[SegmentKey, Sequence[int]]
    _fields: Mapping[str, Sequence[Any]]
    _lists: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
    _nulls: npt.NDArray[np.bool_] | None = field(default=None)

    @classmethod
    def of(cls, events: Mapping[str, pa.Table], run_started: pa.Table, rules: BatchRules) -> ScoreBook:
        """From tables of :data:`TEACHER_KINDS` (one that is not there counts as empty) and the run's start.

        Raises:
            UntrainableError: a domain is routed to two teachers.
        """
        scored, routed, problems = (_table(events, kind) for kind in TEACHER_KINDS)
        scored = scored.sort_by("log_offset") if scored.num_rows else scored  # the first in the log counts
        struct = scored["teacher_scored"].combine_chunks()
        lists = {name: pc.struct_field(struct, name) for name in _LISTS}
        log_probs = lists["log_probs"].values
        keys = zip(*(scored[n].to_pylist() for n in ("trajectory_id", "attempt", "segment_index")), strict=True)
        rows_of: dict[SegmentKey, list[int]] = {}
        for row, key in enumerate(keys):
            rows_of.setdefault(key, []).append(row)
        tokenizer, template = _of_run(run_started)
        return cls(
            rules=rules,
            routes=_routes(routed),
            domains=_domains(problems),
            tokenizer_digest=tokenizer,
            template_digest=template,
            _scored=scored,
            _event_ids=scored["event_id"].to_pylist(),
            _rows_of=rows_of,
            _fields={name: pc.struct_field(struct, name).to_pylist() for name in _FIELDS},
            _lists={name: flat_values(column) for name, column in lists.items()},
            _nulls=log_probs.is_null().to_numpy(zero_copy_only=False) if log_probs.null_count else None,
        )

    def domain_of(self, problem_id: str | None) -> str | None:
        """The problem's domain; None: unknown."""
        return None if problem_id is None else self.domains.get(problem_id)

    def match(self, folded: Fold, segments: TrainedSegments, attempts: Sequence[Attempt]) -> Matched:
        """Which scores are of which segment of these attempts.

        A domain without a route is waited for, because its teacher may not be there yet (its service raises the
        alarm); a problem without a domain is refused.
        """
        facts = _attempt_facts(folded)
        rows: dict[int, int] = {}
        refusals: dict[Attempt, str] = {}
        awaiting: dict[Attempt, str] = {}
        for key in attempts:
            own = segments.of_attempt(key)
            if not own:
                continue
            problem, temperature, mode = facts[key]
            route = self._route_of(problem)
            if route is None:
                where = refusals if self.domains.get(problem or "", "") is None else awaiting
                where[key] = reasons.UNKNOWN_DOMAIN
                continue
            if self.rules.teacher != "scores":
                continue
            found = {row: self._rows_of.get((*key, int(segments.numbers[row])), ()) for row in own}
            if not all(found.values()):
                awaiting[key] = reasons.TEACHER_SCORE_MISSING
                continue
            for row, candidates in found.items():
                chosen = self._by_route(candidates, route)
                why = self._refusal(chosen, route, segments.flat, row, (temperature, mode))
                if why is not None:
                    refusals[key] = why
                    break
                rows[row] = chosen
        return Matched(rows=rows, refusals=refusals, awaiting=awaiting)

    def teacher_of(self, problem_id: str | None) -> str | None:
        """Id of the teacher that a problem is routed to; None: no route."""
        route = self._route_of(problem_id)
        return None if route is None else route.teacher_id

    def _route_of(self, problem_id: str | None) -> Route | None:
        domain = self.domain_of(problem_id)
        return None if domain is None else self.routes.get(domain)

    def event_id(self, row: int) -> str:
        """Event of a score."""
        return self._event_ids[row]

    def digests(self, event_ids: Sequence[Sequence[str] | None]) -> list[int | None]:
        """Digest of each member's scores, given by their events; None: it has none, or the book lacks one."""
        return score_digests(self._scored, event_ids)

    def row_score(self, row: int, flat: FlatSegments, segment_row: int) -> RowScore:
        """A score as values over the tokens of a segment (context, then response), from its start position on."""
        prompt, response = _lengths(flat, segment_row)
        start = self._fields["start_position"][row]
        values = self._slice("log_probs", row)
        if self._nulls is not None:
            low = int(self._lists["log_probs"][1][row])
            values = np.where(self._nulls[low : low + len(values)], np.float32(np.nan), values)
        assert start + len(values) <= prompt + response
        k = self.rules.top_k
        if not k:
            return RowScore(start=start, log_probs=values)
        width = self._fields["top_k"][row]
        ids, log_probs = (self._slice(name, row).reshape(len(values), width) for name in _LISTS[2:])
        return RowScore(start=start, log_probs=values, top_k_ids=ids[:, :k], top_k_log_probs=log_probs[:, :k])

    def _by_route(self, candidates: Sequence[int], route: Route) -> int:
        """The routed teacher's first score; another's where it has none, to be refused by name."""
        teachers = self._fields["teacher_id"]
        return next((row for row in candidates if teachers[row] == route.teacher_id), candidates[0])

    def _refusal(
        self, row: int, route: Route, flat: FlatSegments, segment_row: int, sampled: tuple[float | None, str | None]
    ) -> str | None:
        """Why a score may not be used for a segment; ``sampled`` is the rollout's temperature and distribution."""
        fields = {name: values[row] for name, values in self._fields.items()}
        tokenizer = self.tokenizer_digest or route.student_tokenizer_digest
        checks = (
            (reasons.TEACHER_MISROUTED, (fields["teacher_id"], fields["weights_digest"]) == route[:2]),
            (reasons.TEACHER_TOKENIZER_DIFFERS, tokenizer is not None and fields["tokenizer_digest"] == tokenizer),
            (reasons.TEACHER_TEMPLATE_DIFFERS, fields["template_digest"] == self.template_digest),
            (reasons.TEACHER_TEMPERATURE_DIFFERS, sampled[0] is not None and fields["temperature"] == sampled[0]),
            (reasons.TEACHER_MODE_DIFFERS, sampled[1] is not None and fields["logprobs_mode"] == sampled[1]),
        )
        for reason, holds in checks:
            if not holds:
                return reason
        prompt = flat.prompt[flat.prompt_at[segment_row] : flat.prompt_at[segment_row + 1]]
        if fields["prefix_digest"] != prefix_digest(prompt):
            return reasons.TEACHER_PREFIX_DIFFERS
        if not self._same_ids(row, fields["start_position"], flat, segment_row):
            return reasons.TEACHER_IDS_DIFFER
        return None if self._has_top_k(row) else reasons.TEACHER_TOP_K_MISSING

    def _same_ids(self, row: int, start: int | None, flat: FlatSegments, segment_row: int) -> bool:
        """Whether the scored ids are the segment's from ``start`` on, one log-prob each."""
        ids = self._slice("scored_token_ids", row)
        prompt, response = _lengths(flat, segment_row)
        if start is None or len(self._slice("log_probs", row)) != len(ids) or start + len(ids) > prompt + response:
            return False
        inside = max(0, prompt - start)  # of the context
        context = flat.prompt[int(flat.prompt_at[segment_row]) + start :][:inside]
        begin = int(flat.response_at[segment_row]) + max(0, start - prompt)
        answer = flat.response[begin : begin + max(0, len(ids) - inside)]
        return bool(np.array_equal(ids[:inside], context[: len(ids)]) and np.array_equal(ids[inside:], answer))

    def _has_top_k(self, row: int) -> bool:
        wanted, width = self.rules.top_k, self._fields["top_k"][row]
        if not wanted:
            return True
        count = len(self._slice("log_probs", row)) * (width or 0)
        return (width or 0) >= wanted and all(len(self._slice(name, row)) == count for name in _LISTS[2:])

    def _slice(self, name: str, row: int) -> npt.NDArray[Any]:
        values, at = self._lists[name]
        return values[at[row] : at[row + 1]]


def _lengths(flat: FlatSegments, row: int) -> tuple[int, int]:
    """Tokens of a segment's context and response."""
    prompt = int(flat.prompt_at[row + 1] - flat.prompt_at[row])
    return prompt, int(flat.response_at[row + 1] - flat.response_at[row])


def _table(events: Mapping[str, pa.Table], kind: str) -> pa.Table:
    table = events.get(kind)
    return arrow_schema(kind).empty_table() if table is None else table


def _attempt_facts(folded: Fold) -> dict[Attempt, tuple[str | None, float | None, str | None]]:
    """Problem, temperature and declared distribution of each attempt."""
    names = ("trajectory_id", "attempt", "problem_id", "temperature", "logprobs_mode")
    columns = (folded.trajectories[name].to_pylist() for name in names)
    return {(t, a): (problem, heat, mode) for t, a, problem, heat, mode in zip(*columns, strict=True)}


def _routes(routed: pa.Table) -> dict[str, Route]:
    struct = routed["teacher_routed"].combine_chunks()
    domains, *told = (pc.struct_field(struct, name).to_pylist() for name in ("domain", *Route._fields))
    routes: dict[str, Route] = {}
    for domain, *values in zip(domains, *told, strict=True):
        route = Route(*values)
        if routes.setdefault(domain, route) != route:
            raise UntrainableError(
                f"{reasons.TEACHER_MISROUTED}: expected one teacher for domain {domain!r} in a run, got "
                f"{routes[domain].teacher_id} ({routes[domain].weights_digest}) and {route.teacher_id} "
                f"({route.weights_digest}); start a new run for another teacher"
            )
    return routes


def _domains(problems: pa.Table) -> dict[str, str | None]:
    struct = problems["problem_registered"].combine_chunks()
    return dict(zip(problems["problem_id"].to_pylist(), pc.struct_field(struct, "domain").to_pylist(), strict=True))


def _of_run(run_started: pa.Table) -> tuple[str | None, str | None]:
    """Behaviour digest of the run's tokenizer, and its chat template's."""
    if not run_started.num_rows:
        return None, None
    struct = run_started["run_started"].combine_chunks()[0].as_py()
    return (struct["tokenizer"] or {}).get("behaviour_digest"), struct["chat_template_digest"]

"""Teacher compatibility: scores of the very ids that were sampled, by the teacher of their domain (§4.7, §4.9)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.digest import prefix_digest
from rolltape.store.verify_context import Check, Context, Outcome, at_trajectory, outcome

_SHUFFLED: Final = "-shuffled"  # ends the teacher's id in a control
_TOP_K_TOLERANCE: Final = 1e-4  # on probabilities: float32 log-probs, summed over the k


def teachers(context: Context) -> Outcome:
    """Teacher scores cover their ids one to one, under the student's tokenizer; one teacher scores one way."""
    rows = context.rows(
        f"""
        SELECT s.trajectory_id, s.attempt, s.event_id, s.teacher_id, len(s.scored_token_ids) AS num_ids,
            len(s.log_probs) AS num_log_probs, s.tokenizer_digest, r.behaviour
        FROM teacher_scored s
        LEFT JOIN (
            SELECT run_id, any_value(tokenizer.behaviour_digest) AS behaviour FROM run_started GROUP BY run_id
        ) r ON r.run_id = s.run_id
        WHERE {context.new("s")} AND (
            len(s.log_probs) <> len(s.scored_token_ids)
            OR s.tokenizer_digest <> r.behaviour
        )
        ORDER BY ALL
        """
    )
    broken = [
        at_trajectory(
            row,
            f"score {row['event_id']} of teacher {row['teacher_id']}: expected one log-prob for each of "
            f"{row['num_ids']} ids "
            f"and tokenizer {row['behaviour']}, got {row['num_log_probs']} and {row['tokenizer_digest']}",
            event_id=row["event_id"],
        )
        for row in rows
    ]
    mixed = context.rows(
        f"""
        SELECT run_id, teacher_id, count(DISTINCT (logprobs_mode, temperature, template_digest)) AS ways
        FROM teacher_scored
        WHERE {context.new()}
        GROUP BY run_id, teacher_id, weights_digest
        HAVING ways > 1
        ORDER BY ALL
        """
    )
    broken += [
        {
            "message": f"teacher {row['teacher_id']} of run {row['run_id']}: expected one mode, temperature "
            "and template, "
            f"got {row['ways']} combinations"
        }
        for row in mixed
    ]
    num = context.one(f"SELECT count(*) AS num FROM teacher_scored WHERE {context.new()}")["num"]
    return outcome(num, broken)


def scored_tokens(context: Context) -> Outcome:
    """The ids that a teacher scored are the segment's own at that position, and its context is the segment's."""
    joined = f"""
        FROM teacher_scored s
        LEFT JOIN segments g ON g.run_id = s.run_id AND g.trajectory_id = s.trajectory_id AND g.attempt = s.attempt
            AND g.segment_index = coalesce(s.segment_index, 0)
        WHERE {context.new("s")}
    """
    ids = "CASE WHEN g.trajectory_id IS NOT NULL THEN list_concat(g.prompt_token_ids, g.response_token_ids) END"
    rows = context.rows(
        f"""
        SELECT s.trajectory_id, s.attempt, s.event_id, s.teacher_id, coalesce(s.segment_index, 0) AS segment,
            s.start_position AS start, s.scored_token_ids AS scored, {ids} AS ids
        {joined} AND (
            g.trajectory_id IS NULL
            OR list_slice({ids}, s.start_position + 1, s.start_position + len(s.scored_token_ids)) <> s.scored_token_ids
        )
        ORDER BY ALL
        """
    )
    broken = [at_trajectory(row, _other_ids(row), event_id=row["event_id"]) for row in rows]
    contexts = context.query(
        f"""
        SELECT s.trajectory_id, s.attempt, s.event_id, s.teacher_id, s.prefix_digest,
            list_slice({ids}, 1, s.start_position) AS ids
        {joined} AND s.prefix_digest IS NOT NULL AND {ids} IS NOT NULL AND s.start_position IS NOT NULL
        ORDER BY s.log_offset, s.event_id
        """
    )
    broken += [wrong for batch in contexts.to_batches() for wrong in _other_contexts(batch)]
    num = context.one(
        f"SELECT count(*) AS num, count(start_position) AS placed FROM teacher_scored WHERE {context.new()}"
    )
    return outcome(num["num"], broken, {"without_position": num["num"] - num["placed"], "contexts": contexts.num_rows})


def _other_ids(row: dict[str, Any]) -> str:
    who = f"score {row['event_id']} of teacher {row['teacher_id']}"
    if row["ids"] is None:
        return (
            f"{who}: expected segment {row['segment']} of trajectory {row['trajectory_id']} attempt {row['attempt']}, "
            "the tape does not have it"
        )
    start = row["start"]
    own = row["ids"][start : start + len(row["scored"])]
    at = next((i for i, pair in enumerate(zip(own, row["scored"], strict=False)) if pair[0] != pair[1]), len(own))
    expected, found = own[at] if at < len(own) else "none", row["scored"][at] if at < len(row["scored"]) else "none"
    return f"{who}: expected the ids of segment {row['segment']}, got {found} for {expected} at position {start + at}"


def _other_contexts(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Scores under another context than the segment's; equal contexts are hashed once."""
    known: dict[bytes, str] = {}
    lengths = pc.list_value_length(batch["ids"]).to_numpy()
    values = batch["ids"].flatten().to_numpy(zero_copy_only=False).astype("<i4", copy=False)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    for row, claimed in enumerate(batch["prefix_digest"].to_pylist()):
        ids = values[bounds[row] : bounds[row + 1]]
        key = ids.tobytes()
        if key not in known:
            known[key] = prefix_digest(ids)
        if known[key] == claimed:
            continue
        at = {name: batch[name][row].as_py() for name in ("trajectory_id", "attempt", "event_id", "teacher_id")}
        yield at_trajectory(
            at,
            f"score {at['event_id']} of teacher {at['teacher_id']}: expected prefix digest {known[key]} of the "
            f"{len(ids)} ids before it, got {claimed}",
            event_id=at["event_id"],
            tensor="prefix_token_ids",
        )


def scored_as_sampled(context: Context) -> Outcome:
    """A teacher's temperature, mode and template are those under which the ids were sampled; a null is unknown."""
    rows = context.rows(
        f"""
        SELECT s.trajectory_id, s.attempt, s.event_id, s.teacher_id,
            t.temperature AS sampled_at, t.logprobs_mode AS sampled_mode, r.template,
            s.temperature, s.logprobs_mode, s.template_digest
        FROM teacher_scored s
        LEFT JOIN trajectories t ON t.run_id = s.run_id AND t.trajectory_id = s.trajectory_id AND t.attempt = s.attempt
        LEFT JOIN (
            SELECT run_id, any_value(chat_template_digest) AS template FROM run_started GROUP BY run_id
        ) r ON r.run_id = s.run_id
        WHERE {context.new("s")} AND (
            s.temperature <> t.temperature OR s.logprobs_mode <> t.logprobs_mode OR s.template_digest <> r.template
        )
        ORDER BY ALL
        """
    )
    broken = [
        at_trajectory(
            row,
            f"score {row['event_id']} of teacher {row['teacher_id']}: expected {row['sampled_mode']} at temperature "
            f"{row['sampled_at']} under template {row['template']}, as sampled, got {row['logprobs_mode']} at "
            f"{row['temperature']} under {row['template_digest']}",
            event_id=row["event_id"],
        )
        for row in rows
    ]
    counts = context.one(
        f"SELECT count(*) AS num, count(temperature) AS declared FROM teacher_scored WHERE {context.new()}"
    )
    return outcome(counts["num"], broken, {"without_temperature": counts["num"] - counts["declared"]})


def routes(context: Context) -> Outcome:
    """One teacher a domain, of the student's ids; each score is by the teacher of its problem's domain, once."""
    broken = [
        {
            "message": f"domain {row['domain']!r} of run {row['run_id']}: expected one teacher with the student's "
            f"tokenizer, got {row['teachers']} with tokenizer {row['tokenizers']} for {row['students']}"
        }
        for row in context.rows(
            """
            SELECT run_id, domain,
                list_sort(list(DISTINCT teacher_id || ' ' || coalesce(weights_digest, ''))) AS teachers,
                list_sort(list(DISTINCT tokenizer_digest)) AS tokenizers,
                list_sort(list(DISTINCT student_tokenizer_digest)) AS students
            FROM teacher_routed
            GROUP BY run_id, domain
            HAVING len(teachers) > 1 OR bool_or(tokenizer_digest <> student_tokenizer_digest)
            ORDER BY ALL
            """
        )
    ]
    rows = context.rows(
        f"""
        WITH routed AS (
            SELECT run_id, domain, any_value(teacher_id) AS teacher_id, any_value(weights_digest) AS weights_digest
            FROM teacher_routed GROUP BY run_id, domain
        )
        SELECT s.trajectory_id, s.attempt, s.event_id, s.teacher_id, s.weights_digest, p.domain,
            w.teacher_id AS expected, w.weights_digest AS expected_weights
        FROM teacher_scored s
        JOIN problems p ON p.run_id = s.run_id AND p.problem_id = s.problem_id
        LEFT JOIN routed w ON w.run_id = s.run_id AND w.domain = p.domain
        WHERE {context.new("s")} AND s.run_id IN (SELECT run_id FROM routed)
            AND (w.teacher_id IS NULL OR w.teacher_id <> s.teacher_id OR w.weights_digest <> s.weights_digest)
        ORDER BY ALL
        """
    )
    broken += [
        at_trajectory(
            row,
            f"score {row['event_id']}: expected teacher {row['expected']} ({row['expected_weights']}) of domain "
            f"{row['domain']!r}, got {row['teacher_id']} ({row['weights_digest']})",
            event_id=row["event_id"],
        )
        for row in rows
    ]
    twice = context.rows(
        f"""
        SELECT trajectory_id, attempt, coalesce(segment_index, 0) AS segment, teacher_id, count(*) AS num
        FROM teacher_scored
        WHERE {context.new()} AND start_position IS NOT NULL
        GROUP BY run_id, trajectory_id, attempt, segment, teacher_id, weights_digest, start_position
        HAVING num > 1
        ORDER BY ALL
        """
    )
    broken += [
        at_trajectory(
            row,
            f"segment {row['segment']} of trajectory {row['trajectory_id']} attempt {row['attempt']}: expected one "
            f"score by teacher {row['teacher_id']}, got {row['num']}",
        )
        for row in twice
    ]
    counts = context.one(
        f"""
        SELECT count(*) AS num, count(*) FILTER (WHERE run_id NOT IN (SELECT run_id FROM teacher_routed)) AS unrouted
        FROM teacher_scored WHERE {context.new()}
        """
    )
    return outcome(counts.pop("num"), broken, counts)


def top_k(context: Context) -> Outcome:
    """Top-k payloads: likeliest first, ties by lower id; the tail has what the k leave; the scored id agrees.

    In a control the scores changed places among tokens, so there a payload is not of the id that was sampled.
    """
    table = context.query(
        f"""
        SELECT trajectory_id, attempt, event_id, teacher_id, top_k, scored_token_ids, log_probs, top_k_token_ids,
            top_k_log_probs, tail_mass
        FROM teacher_scored
        WHERE top_k IS NOT NULL AND top_k_token_ids IS NOT NULL AND top_k_log_probs IS NOT NULL AND {context.new()}
        ORDER BY log_offset, event_id
        """
    )
    broken: list[dict[str, Any]] = []
    num_positions = 0
    for row in (row for batch in table.to_batches(max_chunksize=1_000) for row in batch.to_pylist()):
        ids = np.array(row["top_k_token_ids"], np.int64).reshape(-1, row["top_k"])
        values = _floats(row["top_k_log_probs"]).reshape(-1, row["top_k"])
        num_positions += len(ids)
        wrong = _first_wrong(row, ids, values)
        if wrong is not None:
            at, what = wrong
            broken.append(
                at_trajectory(
                    row,
                    f"score {row['event_id']} of teacher {row['teacher_id']}: expected {what}, it is not so for the "
                    f"scored id number {at}",
                    event_id=row["event_id"],
                    tensor="top_k_log_probs",
                    index=at,
                )
            )
    return outcome(num_positions, broken, {"scores": table.num_rows})


def _first_wrong(row: dict[str, Any], ids: np.ndarray, values: np.ndarray) -> tuple[int, str] | None:
    """The first position whose payload is not sound, and what was expected there."""
    falls = (values[:, :-1] > values[:, 1:]) | ((values[:, :-1] == values[:, 1:]) & (ids[:, :-1] < ids[:, 1:]))
    absent = (ids[:, 1:] < 0) | np.isnan(values[:, 1:])  # -1: a position with fewer than k
    expected = {"log-probs that fall, ties by rising id": ~(falls | absent).all(-1)}
    mass = np.where(ids < 0, 0.0, np.exp(values)).sum(-1)
    if row["tail_mass"] is not None:
        tail = _floats(row["tail_mass"])
        differs = np.abs(1.0 - mass - tail) > _TOP_K_TOLERANCE
        expected["a tail of 1 - the sum of the k"] = differs & ~np.isnan(tail)
    if row["log_probs"] is not None and not row["teacher_id"].endswith(_SHUFFLED):
        own, scored = np.exp(_floats(row["log_probs"])), np.array(row["scored_token_ids"], np.int64)
        among = ids == scored[:, None]
        there = among.any(-1)
        same = np.abs(np.exp(np.where(among, values, -np.inf)).max(-1) - own) <= _TOP_K_TOLERANCE
        below = own <= np.exp(values).min(-1) + _TOP_K_TOLERANCE
        expected["the scored id's own log-prob among or below the k"] = ~np.where(there, same, below) & ~np.isnan(own)
    found = [(int(np.flatnonzero(wrong)[0]), what) for what, wrong in expected.items() if wrong.any()]
    return min(found, default=None)


def _floats(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], np.float64)


TEACHER_CHECKS: Final = (
    Check(contract="probability", name="teachers", doc="teacher scores fit the tokens", unit="scores", run=teachers),
    Check(
        contract="probability",
        name="scored_tokens",
        doc="teachers scored the very ids under the very context",
        unit="scores",
        run=scored_tokens,
    ),
    Check(
        contract="probability",
        name="scored_as_sampled",
        doc="temperature, mode and template of a score are the sampling's",
        unit="scores",
        run=scored_as_sampled,
    ),
    Check(
        contract="probability",
        name="teacher_routes",
        doc="one teacher a domain, each score by it, once",
        unit="scores",
        run=routes,
    ),
    Check(contract="probability", name="teacher_top_k", doc="top-k payloads are sound", unit="positions", run=top_k),
)

"""Probability contract: a log-prob per sampled token, of a declared distribution, close to the trainer's."""

from __future__ import annotations

from typing import Any, Final

from rolltape.schema.trust import MAX_LOG_PROB, SENTINELS
from rolltape.store.verify_context import Check, Context, Outcome, outcome
from rolltape.store.verify_teachers import TEACHER_CHECKS

_SENTINELS: Final = ", ".join(f"{value!r}::FLOAT" for value in SENTINELS)


def log_probs(context: Context) -> Outcome:
    """How many sampled tokens have a log-prob to compute with, and why the others have not. Counted, never imputed."""
    counts = context.one(
        f"""
        SELECT
            count(*) AS num,
            count(*) FILTER (WHERE trusted) AS trusted_tokens,
            count(*) FILTER (WHERE log_prob IS NULL) AS absent,
            count(*) FILTER (WHERE isnan(log_prob)) AS nan,
            count(*) FILTER (WHERE isinf(log_prob)) AS infinite,
            count(*) FILTER (WHERE isfinite(log_prob) AND log_prob > {MAX_LOG_PROB!r}::FLOAT) AS positive,
            count(*) FILTER (WHERE log_prob IN ({_SENTINELS})) AS sentinels,
            count(*) FILTER (WHERE log_prob = 0) AS exactly_zero
        FROM tokens
        WHERE is_action
        """
    )
    num = int(counts.pop("num"))
    counts["untrusted_tokens"] = num - counts["trusted_tokens"]
    counts["trusted_share"] = round(counts["trusted_tokens"] / num, 6) if num else 0.0
    return outcome(num, (), counts)


def modes(context: Context) -> Outcome:
    """Every completed batch holds log-probs of one declared distribution, at one temperature."""
    broken = [
        {
            "event_id": row["event_id"],
            "message": f"batch {row['batch_id']} (step {row['step']}): expected members of one declared "
            "distribution, got "
            f"logprobs_mode {row['modes']} at temperature {row['temperatures']}, {row['unknown']} members undeclared",
        }
        for row in context.rows(
            """
            SELECT m.batch_id, m.step, m.event_id,
                list_sort(list(DISTINCT t.logprobs_mode)) AS modes,
                list_sort(list(DISTINCT t.temperature)) AS temperatures,
                count(*) FILTER (WHERE t.logprobs_mode IS NULL OR t.temperature IS NULL) AS unknown
            FROM batch_members m
            JOIN trajectories t ON t.trajectory_id = m.trajectory_id AND t.attempt = m.attempt
            WHERE m.is_completed AND t.num_action_tokens > 0
            GROUP BY m.batch_id, m.step, m.event_id
            HAVING unknown > 0 OR len(modes) > 1 OR len(temperatures) > 1
            ORDER BY m.step, m.batch_id
            """
        )
    ]
    counts = context.one(
        """
        SELECT
            count(*) AS num,
            count(*) FILTER (WHERE logprobs_mode IS NULL) AS unknown_mode,
            count(*) FILTER (WHERE temperature IS NULL) AS unknown_temperature,
            count(*) FILTER (WHERE logprobs_mode = 'processed_logprobs') AS processed,
            count(*) FILTER (WHERE logprobs_mode = 'raw_logprobs') AS raw
        FROM trajectories
        WHERE num_action_tokens > 0
        """
    )
    return outcome(counts.pop("num"), broken, counts)


def mismatch(context: Context) -> Outcome:
    """Same-checkpoint comparisons: a probe with no number, or one not below its shifted control, proves nothing."""
    rows = context.rows(
        f"""
        SELECT event_id, step, version, num_tokens, mean_abs_delta, max_abs_delta, outside_share,
            control_max_abs_delta
        FROM mismatch_probed
        WHERE {context.new()}
        ORDER BY log_offset
        """
    )
    broken = [
        {
            "event_id": row["event_id"],
            "message": f"probe of version {row['version']} at step {row['step']}: expected a largest |delta| "
            "below that of "
            f"its shifted control ({row['control_max_abs_delta']}), got {row['max_abs_delta']}",
        }
        for row in rows
        if not _discriminates(row)
    ]
    num = sum(row["num_tokens"] or 0 for row in rows)
    counts: dict[str, int | float] = {"probes": len(rows)}
    if rows:
        counts["max_abs_delta"] = max((row["max_abs_delta"] or 0.0 for row in rows), default=0.0)
        counts["mean_abs_delta"] = sum((row["mean_abs_delta"] or 0.0) * (row["num_tokens"] or 0) for row in rows) / max(
            num, 1
        )
        counts["outside_share"] = max((row["outside_share"] or 0.0 for row in rows), default=0.0)
    return outcome(num, broken, counts | _gate_counts(context))


def _discriminates(row: dict[str, Any]) -> bool:
    if row["max_abs_delta"] is None:
        return False
    return row["control_max_abs_delta"] is None or row["max_abs_delta"] < row["control_max_abs_delta"]


def _gate_counts(context: Context) -> dict[str, int | float]:
    """Trusted tokens / action tokens as the trainer's gate decided, where it recorded that."""
    row = context.one(
        f"""
        SELECT sum(len(list_filter(trusted, lambda t: t))) AS gate_trusted_tokens,
            sum(len(list_filter(trusted, lambda t: t IS NOT NULL))) AS gate_tokens
        FROM tokens_trained
        WHERE {context.new()}
        """
    )
    return {name: int(value) for name, value in row.items()} if row["gate_tokens"] else {}


def trained_lengths(context: Context) -> Outcome:
    """What each token was trained with: as many values of each kind as the members have tokens."""
    names = ("old_log_probs", "current_log_probs", "advantages", "gate_weights", "trusted")
    differs = " OR ".join(f"len({name}) <> total" for name in names)
    lengths = ", ".join(f"len({name}) AS {name}" for name in names)
    rows = context.rows(
        f"""
        SELECT event_id, batch_id, step, group_id, total, {lengths}
        FROM (
            SELECT *, coalesce(list_sum(num_tokens), 0)::BIGINT AS total FROM tokens_trained WHERE {context.new()}
        )
        WHERE {differs}
        ORDER BY step, group_id
        """
    )
    broken = [
        {
            "event_id": row["event_id"],
            "message": f"group {row['group_id']} of batch {row['batch_id']}: expected {row['total']} values of "
            "each kind, got " + ", ".join(f"{row[name]} {name}" for name in names if row[name] is not None),
        }
        for row in rows
    ]
    num = context.one(f"SELECT count(*) AS num FROM tokens_trained WHERE {context.new()}")["num"]
    return outcome(num, broken)


PROBABILITY_CHECKS: Final = (
    Check(
        contract="probability",
        name="log_probs",
        doc="log-probs that can be computed with",
        unit="action tokens",
        run=log_probs,
    ),
    Check(contract="probability", name="modes", doc="one declared distribution a batch", unit="attempts", run=modes),
    Check(
        contract="probability", name="mismatch", doc="sampled against recomputed log-probs", unit="tokens", run=mismatch
    ),
    Check(
        contract="probability",
        name="trained_lengths",
        doc="trained values cover the tokens",
        unit="groups",
        run=trained_lengths,
    ),
    *TEACHER_CHECKS,
)

"""Token contract: sampled ids are trained as they are, contexts are proved, batches hold what they pinned."""

from __future__ import annotations

from typing import Any, Final

from rolltape.store.verify_content import content_digests
from rolltape.store.verify_context import Check, Context, Outcome, at_trajectory, outcome


def prefix_proof(context: Context) -> Outcome:
    """Each context that an engine used is the context that the tape holds; the first differing index where not."""
    broken = [
        at_trajectory(
            row,
            f"trajectory {row['trajectory_id']} attempt {row['attempt']}: expected the context that the tape "
            "holds, the "
            f"engine's differs from it at index {row['tito_first_difference']}",
            tensor="prefix_token_ids",
            index=row["tito_first_difference"],
        )
        for row in context.rows(
            "SELECT trajectory_id, attempt, tito_first_difference FROM trajectories WHERE NOT tito_ok ORDER BY ALL"
        )
    ]
    counts = context.one(
        """
        SELECT
            count(*) AS num, count(*) FILTER (WHERE tito_ok) AS proved,
            count(*) FILTER (WHERE tito_ok IS NULL) AS unknown_prefix,
            count(*) FILTER (WHERE tito_ok AND prefix_source = 'engine') AS reported_by_engine,
            count(*) FILTER (WHERE tito_ok AND prefix_source = 'submitted') AS as_submitted
        FROM trajectories
        WHERE num_action_tokens > 0 OR tito_ok IS NOT NULL
        """
    )
    return outcome(counts.pop("num"), broken, counts)


def lengths(context: Context) -> Outcome:
    """Every action has as many log-probs as ids, or none at all."""
    broken = [
        at_trajectory(
            row,
            f"action {row['event_id']} of trajectory {row['trajectory_id']}: expected {row['num_ids']} "
            "log-probs, one an "
            f"id, got {row['num_log_probs']}",
            event_id=row["event_id"],
            tensor="rollout_log_probs",
            index=min(row["num_ids"], row["num_log_probs"]),
        )
        for row in context.rows(
            f"""
            SELECT trajectory_id, attempt, event_id, coalesce(len(token_ids), 0) AS num_ids,
                len(rollout_log_probs) AS num_log_probs
            FROM action_sampled
            WHERE rollout_log_probs IS NOT NULL AND len(rollout_log_probs) <> coalesce(len(token_ids), 0)
                AND {context.new()}
            ORDER BY ALL
            """
        )
    ]
    counts = context.one(
        f"SELECT count(*) AS num, count(*) FILTER (WHERE rollout_log_probs IS NULL) AS without_log_probs "
        f"FROM action_sampled WHERE {context.new()}"
    )
    return outcome(counts.pop("num"), broken, counts)


def vocabulary(context: Context) -> Outcome:
    """Every id is at least 0 and below the vocabulary size that its run declares."""
    found = context.query(
        f"""
        WITH sizes AS (
            SELECT run_id, max(vocab_size) AS vocab_size FROM run_started GROUP BY run_id
        ),
        ids AS (
            SELECT run_id, trajectory_id, attempt, event_id, token_ids, 'token_ids' AS tensor
                FROM action_sampled WHERE {context.new()}
            UNION ALL
            SELECT run_id, trajectory_id, attempt, event_id, token_ids, 'token_ids'
                FROM observation_received WHERE {context.new()}
            UNION ALL
            SELECT run_id, trajectory_id, attempt, event_id, prompt_token_ids, 'prompt_token_ids'
                FROM rollout_started WHERE {context.new()}
        ),
        bounds AS (
            SELECT run_id, trajectory_id, attempt, event_id, tensor, list_min(token_ids) AS least,
                list_max(token_ids) AS most, len(token_ids) AS num
            FROM ids
            WHERE token_ids IS NOT NULL
        )
        SELECT b.*, s.vocab_size, (b.least < 0 OR b.most >= s.vocab_size) AS is_outside
        FROM bounds b
        LEFT JOIN sizes s ON s.run_id = b.run_id
        """
    )
    rows = found.filter(found["is_outside"]).to_pylist()
    broken = [
        at_trajectory(
            row,
            f"event {row['event_id']} of trajectory {row['trajectory_id']}: expected ids in [0, "
            f"{row['vocab_size']}), got "
            f"{row['least']} … {row['most']}",
            event_id=row["event_id"],
            tensor=row["tensor"],
        )
        for row in rows
    ]
    num_tokens = sum(value or 0 for value in found["num"].to_pylist())
    undeclared = sum(1 for value in found["vocab_size"].to_pylist() if value is None)
    return outcome(num_tokens, broken, {"events_without_vocabulary": undeclared})


def completeness(context: Context) -> Outcome:
    """Ended attempts have all their event indexes, and the token counts that their end states."""
    broken = [
        at_trajectory(row, _incomplete(row), index=(row["missing_event_indexes"] or [None])[0])
        for row in context.rows(
            """
            SELECT t.trajectory_id, t.attempt, t.missing_event_indexes, t.untrainable_reasons, t.num_action_tokens,
                t.num_observation_tokens, e.num_action_tokens AS stated_actions,
                e.num_observation_tokens AS stated_observations
            FROM trajectories t
            JOIN rollout_ended e
                ON e.run_id = t.run_id AND e.trajectory_id = t.trajectory_id AND e.attempt = t.attempt
            WHERE t.state <> 'dropped' AND (
                len(t.missing_event_indexes) > 0 OR list_contains(t.untrainable_reasons, 'checksum_mismatch')
                OR list_contains(t.untrainable_reasons, 'event_conflict')
            )
            ORDER BY ALL
            """
        )
    ]
    counts = context.one(
        """
        SELECT count(*) FILTER (WHERE state = 'ended') AS ended, count(*) FILTER (WHERE state = 'open') AS open,
            count(*) FILTER (WHERE state = 'dropped') AS dropped,
            count(*) FILTER (WHERE state = 'abandoned') AS abandoned, count(*) AS num
        FROM trajectories
        """
    )
    return outcome(counts.pop("num"), broken, counts)


def _incomplete(row: dict[str, Any]) -> str:
    name = f"trajectory {row['trajectory_id']} attempt {row['attempt']}"
    if row["missing_event_indexes"]:
        return f"{name}: expected events without gaps, {row['missing_event_indexes']} are missing"
    if "event_conflict" in row["untrainable_reasons"]:
        return f"{name}: expected one event at each index, two claim one, or an event has none"
    return (
        f"{name}: expected {row['stated_actions']} action and {row['stated_observations']} observation tokens "
        "as its end "
        f"states, found {row['num_action_tokens']} and {row['num_observation_tokens']}"
    )


TOKEN_CHECKS: Final = (
    Check(
        contract="token",
        name="prefix_proof",
        doc="contexts of engines are those of the tape",
        unit="attempts",
        run=prefix_proof,
    ),
    Check(contract="token", name="lengths", doc="one log-prob an id", unit="actions", run=lengths),
    Check(contract="token", name="vocabulary", doc="ids inside the vocabulary", unit="tokens", run=vocabulary),
    Check(
        contract="token",
        name="completeness",
        doc="no event index is missing, token counts add up",
        unit="attempts",
        run=completeness,
    ),
    Check(
        contract="token",
        name="content_digests",
        doc="batch members are, bit for bit, what was pinned",
        unit="members",
        run=content_digests,
    ),
)

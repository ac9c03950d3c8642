"""Version contract: tokens carry versions that were in effect, forward only; weight sync kept its order."""

from __future__ import annotations

from typing import Any, Final

from rolltape.store.verify_context import Check, Context, Outcome, at_trajectory, outcome

_RUNS: Final = """
    SELECT a.run_id, a.trajectory_id, a.attempt, a.event_id, a.event_index, a.engine.id AS engine_id, a.kv_version,
        r.start AS start, r.length AS length, r.policy_id AS policy_id, r.run_epoch AS policy_run_epoch,
        r.version AS version, r.weights_digest AS weights_digest
    FROM (SELECT *, unnest(version_runs) AS r FROM action_sampled WHERE {new}) a
"""


def token_versions(context: Context) -> Outcome:
    """Each version that tokens carry was published with those weights, committed, not aborted, and active there."""
    rows = context.rows(
        f"""
        WITH runs AS ({_RUNS.format(new=context.new())}),
        used AS (
            SELECT run_id, policy_id, policy_run_epoch, version, weights_digest, engine_id, sum(length)::BIGINT AS num,
                min_by({{'trajectory_id': trajectory_id, 'attempt': attempt, 'event_id': event_id}}, event_id) AS first
            FROM runs
            WHERE version IS NOT NULL
            GROUP BY ALL
        )
        SELECT u.*, v.state, v.is_published, v.is_committed, v.is_aborted, v.weights_digest AS published_digest,
            v.activated_engines, e.engine_id IS NOT NULL AS is_known_engine
        FROM used u
        LEFT JOIN policy_versions v
            ON v.run_id = u.run_id AND v.policy_id = u.policy_id AND v.policy_run_epoch = u.policy_run_epoch
            AND v.version = u.version
        LEFT JOIN engines e ON e.run_id = u.run_id AND e.engine_id = u.engine_id
        WHERE u.run_id IN (SELECT run_id FROM policy_versions)
        ORDER BY u.run_id, u.policy_id, u.policy_run_epoch, u.version, u.engine_id
        """
    )
    broken = []
    for row in rows:
        problem = _version_problem(row)
        if problem:
            where = f"version {row['version']} of policy {row['policy_id']} (epoch {row['policy_run_epoch']})"
            message = f"{where} on engine {row['engine_id']}, {row['num']} tokens: {problem}"
            broken.append(at_trajectory(row["first"], message, event_id=row["first"]["event_id"]))
    counts = context.one(
        "SELECT count(*) AS num, count(*) FILTER (WHERE policy_version IS NULL) AS unknown_version "
        "FROM tokens WHERE is_action"
    )
    counts["in_runs_with_published_weights"] = sum(row["num"] for row in rows)
    return outcome(counts.pop("num"), broken, counts)


def _version_problem(row: dict[str, Any]) -> str | None:
    if not row["is_published"]:
        return "expected a published version, it never was"
    if row["is_aborted"]:
        return "expected a version in effect, it was aborted"
    if row["weights_digest"] is not None and row["weights_digest"] != row["published_digest"]:
        return f"expected the published weights {row['published_digest']}, got {row['weights_digest']}"
    if not row["is_committed"]:
        return "expected a committed version, it never was"
    if row["is_known_engine"] and row["engine_id"] not in row["activated_engines"]:
        return "expected an engine that had activated it, this one never did"
    return None


def forward_only(context: Context) -> Outcome:
    """Within an attempt versions never go back."""
    rows = context.rows(
        f"""
        WITH runs AS ({_RUNS.format(new=context.new())}),
        stepped AS (
            SELECT *,
                lag({{'epoch': policy_run_epoch, 'version': version}}) OVER (
                    PARTITION BY run_id, trajectory_id, attempt, policy_id ORDER BY event_index, start
                ) AS before
            FROM runs
            WHERE version IS NOT NULL
        )
        SELECT trajectory_id, attempt, event_id, start, version, before.version AS version_before
        FROM stepped
        WHERE before > {{'epoch': policy_run_epoch, 'version': version}}
        ORDER BY ALL
        """
    )
    broken = [
        at_trajectory(
            row,
            f"action {row['event_id']} of trajectory {row['trajectory_id']}: expected versions that do not go "
            "back, got "
            f"{row['version']} after {row['version_before']} at token {row['start']}",
            event_id=row["event_id"],
            tensor="policy_versions",
            index=row["start"],
        )
        for row in rows
    ]
    counts = context.one(
        "SELECT count(*) AS num, count(*) FILTER (WHERE min_version < max_version) AS mixed_versions "
        "FROM trajectories WHERE num_action_tokens > 0"
    )
    return outcome(counts.pop("num"), broken, counts)


def kv_provenance(context: Context) -> Outcome:
    """Cached keys never come from newer weights than the tokens that were sampled with them."""
    rows = context.rows(
        f"""
        WITH runs AS ({_RUNS.format(new=context.new())})
        SELECT trajectory_id, attempt, event_id, kv_version, max(version) AS newest
        FROM runs
        WHERE kv_version IS NOT NULL
        GROUP BY ALL
        HAVING kv_version > max(version)
        ORDER BY ALL
        """
    )
    broken = [
        at_trajectory(
            row,
            f"action {row['event_id']}: expected cached keys of version {row['newest']} or older, got "
            f"{row['kv_version']}",
            event_id=row["event_id"],
        )
        for row in rows
    ]
    counts = context.one(
        f"SELECT count(*) AS num, count(*) FILTER (WHERE kv_version IS NOT NULL) AS kept_caches "
        f"FROM action_sampled WHERE {context.new()}"
    )
    return outcome(counts.pop("num"), broken, counts)


def weight_sync(context: Context) -> Outcome:
    """Published, then staged by every required engine, then committed, then activated; one digest a version."""
    versions = context.rows(
        """
        SELECT v.*, list_filter(v.required_engines, lambda e: NOT list_contains(v.staged_engines, e)) AS unstaged
        FROM policy_versions v
        ORDER BY v.run_id, v.policy_id, v.policy_run_epoch, v.version
        """
    )
    broken = [
        {
            "message": f"version {row['version']} of policy {row['policy_id']} (epoch "
            f"{row['policy_run_epoch']}): {problem}"
        }
        for row in versions
        for problem in _sync_problems(row)
    ]
    broken += _unknown_staged(context) + _engines_going_back(context)
    states: dict[str, int | float] = {}
    for row in versions:
        states[row["state"]] = states.get(row["state"], 0) + 1
    states["awaiting_activation"] = sum(1 for row in versions if row["is_committed"] and row["missing_engines"])
    return outcome(len(versions), broken, states)


def _sync_problems(row: dict[str, Any]) -> list[str]:
    problems = []
    if not row["is_published"]:
        problems.append("expected it to be published before anything else, it never was")
    if row["num_digests"] > 1:
        problems.append(f"expected one weights digest, its events name {row['num_digests']}")
    if row["is_committed"] and row["unstaged"]:
        problems.append(
            f"expected every required engine to have staged it before the commit, {row['unstaged']} did not"
        )
    if row["activated_engines"] and not row["is_committed"]:
        problems.append(f"expected a commit before any activation, {row['activated_engines']} activated without one")
    if row["activated_engines"] and row["is_aborted"]:
        problems.append(f"expected no engine to serve an aborted version, {row['activated_engines']} did")
    idle = [engine for engine in row["activated_engines"] if engine not in row["staged_engines"]]
    if idle:
        problems.append(f"expected engines to stage before they activate, {idle} did not")
    return problems


def _unknown_staged(context: Context) -> list[dict[str, Any]]:
    return [
        {
            "event_id": row["event_id"],
            "message": f"commit of version {row['version']}: expected staged events on the tape, "
            f"{row['unknown']} are not",
        }
        for row in context.rows(
            """
            WITH named AS (
                SELECT event_id, version, unnest(staged_event_ids) AS staged_event_id FROM weights_committed
            )
            SELECT event_id, version, list(staged_event_id ORDER BY staged_event_id) AS unknown
            FROM named
            WHERE staged_event_id NOT IN (SELECT event_id FROM weights_staged)
            GROUP BY event_id, version
            ORDER BY ALL
            """
        )
    ]


def _engines_going_back(context: Context) -> list[dict[str, Any]]:
    return [
        {
            "event_id": row["event_id"],
            "message": f"engine {row['engine_id']}: expected activations forward only, got version "
            f"{row['version']} after "
            f"{row['version_before']}",
        }
        for row in context.rows(
            """
            WITH ordered AS (
                SELECT *, lag({'epoch': policy_run_epoch, 'version': version}) OVER (
                    PARTITION BY run_id, engine_id, policy_id ORDER BY producer_epoch, lane_seq
                ) AS before
                FROM weights_activated
            )
            SELECT event_id, engine_id, version, before.version AS version_before
            FROM ordered
            WHERE before > {'epoch': policy_run_epoch, 'version': version}
            ORDER BY ALL
            """
        )
    ]


def staleness(context: Context) -> Outcome:
    """No batch holds tokens newer than the version that it pinned as the newest."""
    rows = context.rows(
        """
        SELECT m.trajectory_id, m.attempt, m.batch_id, m.step, t.max_version, b.staleness_version
        FROM batch_members m
        JOIN batches b ON b.event_id = m.event_id
        JOIN trajectories t ON t.trajectory_id = m.trajectory_id AND t.attempt = m.attempt
        WHERE t.run_id = m.run_id AND t.max_version > b.staleness_version
        ORDER BY ALL
        """
    )
    broken = [
        at_trajectory(
            row,
            f"trajectory {row['trajectory_id']} of batch {row['batch_id']}: expected versions up to "
            f"{row['staleness_version']}, the newest when the batch was formed, got {row['max_version']}",
            tensor="policy_versions",
        )
        for row in rows
    ]
    counts = context.one(
        """
        SELECT count(*) AS num, max(b.staleness_version - t.min_version) AS largest_lag
        FROM batch_members m
        JOIN batches b ON b.event_id = m.event_id
        JOIN trajectories t ON t.trajectory_id = m.trajectory_id AND t.attempt = m.attempt AND t.run_id = m.run_id
        """
    )
    return outcome(counts.pop("num"), broken, counts)


VERSION_CHECKS: Final = (
    Check(
        contract="version",
        name="token_versions",
        doc="tokens carry versions that were in effect",
        unit="action tokens",
        run=token_versions,
    ),
    Check(
        contract="version",
        name="forward_only",
        doc="versions do not go back within an attempt",
        unit="attempts",
        run=forward_only,
    ),
    Check(
        contract="version",
        name="kv_provenance",
        doc="caches are not newer than their tokens",
        unit="actions",
        run=kv_provenance,
    ),
    Check(
        contract="version",
        name="weight_sync",
        doc="published, staged, committed, activated",
        unit="versions",
        run=weight_sync,
    ),
    Check(contract="version", name="staleness", doc="no token is newer than its batch", unit="members", run=staleness),
)

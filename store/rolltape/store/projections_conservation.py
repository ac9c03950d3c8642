"""Conservation (design §5.6): every rollout that was begun is accounted for exactly once, per trainer.

dispatched + undispatched = trained + dropped + evaluated + superseded + in flight. Each fate is counted from its own
events and none is inferred from the absence of another, save *in flight*, which is what has no fate yet. So an attempt
that met two fates, or was trained without ever having begun, shows as a balance that is not 0.

The live line: what an older run epoch dispatched for steps later than the next one, and the steps that it completed
after the point of resumption, do not count (they are in ``off_line``).
"""

from __future__ import annotations

from typing import Final

from rolltape.store.view import View

ATTEMPTS = View(
    name="attempts",
    needs=(
        "rollout_dispatched",
        "attempt_abandoned",
        "rollout_started",
        "rollout_resumed",
        "action_sampled",
        "rollout_ended",
        "run_started",
        "run_epochs",
    ),
    doc="Every attempt that the tape knows of, without folding: handed out, begun, ended, abandoned, superseded.",
    kept=True,
    columns={
        "is_dispatched": "it was handed out",
        "is_begun": "it has events of its own",
        "is_ended": "it ended by itself",
        "is_live": "on the live line of its run",
        "abandoned_reason": "why it was abandoned",
        "has_later_attempt": "a later attempt of the rollout is on the live line",
    },
    select="""
        WITH purposes AS (
            SELECT run_id, any_value(purpose) AS purpose FROM run_started GROUP BY run_id
        ),
        seen AS (
            SELECT
                d.run_id, d.trajectory_id, d.attempt, d.root_rollout_id, TRUE AS dispatched, FALSE AS ended,
                FALSE AS begun, d.purpose,
                coalesce(d.training_step <= e.last_live_step + 1, TRUE) AS on_line
            FROM rollout_dispatched d
            LEFT JOIN run_epochs e ON e.run_id = d.run_id AND e.run_epoch = d.run_epoch
            UNION ALL
            SELECT run_id, trajectory_id, attempt, root_rollout_id, FALSE, FALSE, TRUE, NULL, NULL FROM rollout_started
            UNION ALL
            SELECT run_id, trajectory_id, attempt, root_rollout_id, FALSE, FALSE, TRUE, NULL, NULL FROM rollout_resumed
            UNION ALL
            SELECT run_id, trajectory_id, attempt, root_rollout_id, FALSE, FALSE, TRUE, NULL, NULL FROM action_sampled
            UNION ALL
            SELECT run_id, trajectory_id, attempt, root_rollout_id, FALSE, TRUE, TRUE, NULL, NULL FROM rollout_ended
        ),
        abandoned AS (
            SELECT run_id, trajectory_id, attempt, any_value(reason) AS reason
            FROM attempt_abandoned
            GROUP BY run_id, trajectory_id, attempt
        ),
        folded AS (
            SELECT
                run_id, trajectory_id, attempt,
                coalesce(any_value(root_rollout_id), trajectory_id) AS root_rollout_id,
                bool_or(dispatched) AS is_dispatched, bool_or(begun) AS is_begun, bool_or(ended) AS is_ended,
                any_value(purpose) AS purpose,
                coalesce(bool_or(on_line), TRUE) AS is_live
            FROM seen
            GROUP BY run_id, trajectory_id, attempt
        )
        SELECT
            f.run_id, f.trajectory_id, f.attempt, f.root_rollout_id, f.is_dispatched, f.is_begun, f.is_ended, f.is_live,
            coalesce(f.purpose, p.purpose) AS purpose,
            a.reason AS abandoned_reason,
            f.attempt < max(f.attempt) FILTER (WHERE f.is_live) OVER (PARTITION BY f.run_id, f.trajectory_id)
                AS has_later_attempt
        FROM folded f
        LEFT JOIN abandoned a
            ON a.run_id = f.run_id AND a.trajectory_id = f.trajectory_id AND a.attempt = f.attempt
        LEFT JOIN purposes p ON p.run_id = f.run_id
    """,
)

ATTEMPT_FATES = View(
    name="attempt_fates",
    needs=("attempts", "batches", "train_step_completed"),
    doc="Each attempt under each trainer that may consume it, with the number of times that each fate met it.",
    kept=True,
    columns={
        "run_id": "run of the trainer",
        "trainer_id": "trainer; null for a run that has none",
        "source_run_id": "run of the attempt",
        "dispatched": "1 if handed out on the live line",
        "undispatched": "1 if it began without being handed out (imports, gateway sessions, forks)",
        "trained": "completed batches that hold it as a member, padding aside",
        "dropped": "completed batches that dropped it, or 1 if the orchestrator cancelled it",
        "evaluated": "1 if it was an evaluation that ended",
        "superseded": "1 if a later attempt took over",
        "in_flight": "1 if nothing of this has happened yet",
        "balance": "begun minus fates; anything but 0 is an error",
        "drop_reason": "why it was dropped",
    },
    select="""
        WITH pinned AS MATERIALIZED (
            SELECT
                run_id, trainer_id, num_completions, source_run_ids, is_completed,
                CASE WHEN is_completed THEN list_transform(
                    list_filter(members, lambda m: NOT coalesce(m.is_padding, FALSE)),
                    lambda m: {'trajectory_id': m.trajectory_id, 'attempt': m.attempt}
                ) END AS members,
                CASE WHEN is_completed THEN dropped END AS dropped
            FROM batches
        ),
        trainers AS (
            SELECT run_id, trainer_id FROM pinned
            UNION
            SELECT run_id, trainer_id FROM train_step_completed
        ),
        lines AS (
            SELECT run_id, trainer_id, run_id AS source_run_id FROM trainers
            UNION
            SELECT run_id, trainer_id, unnest(source_run_ids) AS source_run_id FROM pinned
            UNION
            SELECT run_id, NULL, run_id FROM attempts WHERE run_id NOT IN (SELECT run_id FROM trainers)
        ),
        units AS (
            SELECT
                l.run_id, coalesce(l.trainer_id, '') AS trainer_id, a.trajectory_id, a.attempt, a.root_rollout_id,
                a.run_id AS source_run_id, a.is_live, a.is_dispatched::INTEGER AS dispatched,
                (NOT a.is_dispatched)::INTEGER AS undispatched,
                (a.purpose = 'evaluate' AND a.is_ended AND a.abandoned_reason IS NULL)::INTEGER AS evaluated,
                (a.has_later_attempt OR coalesce(a.abandoned_reason = 'superseded', FALSE))::INTEGER AS superseded,
                a.abandoned_reason
            FROM lines l
            JOIN attempts a ON a.run_id = l.source_run_id
        ),
        trained AS (
            SELECT run_id, trainer_id, trajectory_id, attempt, sum(num_completions)::INTEGER AS trained
            FROM (
                SELECT run_id, trainer_id, num_completions, unnest(members, recursive := TRUE) FROM pinned
            )
            GROUP BY run_id, trainer_id, trajectory_id, attempt
        ),
        dropped AS (
            -- A drop that only restates another fate (the attempt was superseded, or is an evaluation) is no fate of
            -- its own where that fate is known from its own events. So it is with an attempt that was still open when
            -- its group was given up, and that a later one took over at the same time.
            SELECT
                run_id, trainer_id, trajectory_id, attempt,
                (sum(num_completions) FILTER (
                    WHERE reason IN ('superseded', 'abandoned', 'open', 'group_incomplete')
                ))::INTEGER AS as_superseded,
                (sum(num_completions) FILTER (WHERE reason = 'evaluation'))::INTEGER AS as_evaluated,
                (sum(num_completions) FILTER (
                    WHERE reason IS NULL OR reason NOT IN (
                        'superseded', 'abandoned', 'open', 'group_incomplete', 'evaluation', 'already_trained'
                    )
                ))::INTEGER AS for_itself,
                string_agg(DISTINCT reason, ', ' ORDER BY reason) AS reason
            FROM (
                SELECT run_id, trainer_id, num_completions, d.trajectory_id AS trajectory_id,
                    coalesce(d.attempt, 0) AS attempt, d.reason AS reason
                FROM (SELECT run_id, trainer_id, num_completions, unnest(dropped) AS d FROM pinned)
            )
            GROUP BY run_id, trainer_id, trajectory_id, attempt
        ),
        named AS (
            SELECT
                coalesce(t.run_id, d.run_id) AS run_id, coalesce(t.trainer_id, d.trainer_id) AS trainer_id,
                coalesce(t.trajectory_id, d.trajectory_id) AS trajectory_id, coalesce(t.attempt, d.attempt) AS attempt,
                coalesce(t.trained, 0) AS trained, coalesce(d.for_itself, 0) AS for_itself,
                coalesce(d.as_superseded, 0) AS as_superseded, coalesce(d.as_evaluated, 0) AS as_evaluated, d.reason
            FROM trained t
            FULL JOIN dropped d
                ON d.run_id = t.run_id AND d.trainer_id = t.trainer_id AND d.trajectory_id = t.trajectory_id
                AND d.attempt = t.attempt
        ),
        met AS (
            SELECT
                coalesce(u.run_id, n.run_id) AS run_id,
                nullif(coalesce(u.trainer_id, n.trainer_id), '') AS trainer_id,
                coalesce(u.trajectory_id, n.trajectory_id) AS trajectory_id,
                coalesce(u.attempt, n.attempt) AS attempt,
                coalesce(u.root_rollout_id, n.trajectory_id) AS root_rollout_id,
                u.source_run_id,
                coalesce(u.is_live, FALSE) AS is_live,
                coalesce(u.dispatched, 0) AS dispatched, coalesce(u.undispatched, 0) AS undispatched,
                coalesce(n.trained, 0) AS trained,
                coalesce(n.for_itself, 0)
                    + CASE WHEN coalesce(u.superseded, 0) = 0 THEN coalesce(n.as_superseded, 0) ELSE 0 END
                    + CASE WHEN coalesce(u.evaluated, 0) = 0 THEN coalesce(n.as_evaluated, 0) ELSE 0 END
                    AS named_dropped,
                coalesce(u.evaluated, 0) AS evaluated,
                coalesce(u.superseded, 0) AS superseded,
                coalesce(u.abandoned_reason = 'cancelled', FALSE) AS is_cancelled,
                n.reason
            FROM units u
            FULL JOIN named n
                ON n.run_id = u.run_id AND n.trainer_id = u.trainer_id AND n.trajectory_id = u.trajectory_id
                AND n.attempt = u.attempt
        ),
        decided AS (
            -- A cancelled attempt that no batch names was dropped by the orchestrator.
            SELECT
                *, is_cancelled AND trained + named_dropped + superseded = 0 AS is_orchestrator_drop
            FROM met
            WHERE is_live OR trained + named_dropped > 0
        )
        SELECT
            run_id, trainer_id, trajectory_id, attempt, root_rollout_id, source_run_id,
            -- A dispatch off the live line began nothing that counts; if it was consumed all the same, that shows.
            CASE WHEN is_live THEN dispatched ELSE 0 END AS dispatched,
            CASE WHEN is_live THEN undispatched ELSE 0 END AS undispatched,
            trained,
            named_dropped + is_orchestrator_drop::INTEGER AS dropped,
            CASE WHEN is_orchestrator_drop THEN 'cancelled' ELSE reason END AS drop_reason,
            evaluated, superseded,
            (trained + named_dropped + evaluated + superseded = 0 AND NOT is_orchestrator_drop)::INTEGER AS in_flight,
            CASE WHEN is_live THEN dispatched + undispatched ELSE 0 END - (
                trained + named_dropped + is_orchestrator_drop::INTEGER + evaluated + superseded
                + (trained + named_dropped + evaluated + superseded = 0 AND NOT is_orchestrator_drop)::INTEGER
            ) AS balance
        FROM decided
    """,
)

CONSERVATION = View(
    name="conservation",
    needs=("attempt_fates", "attempts"),
    doc="Per trainer of a run: begun = what became of it; balance and num_unbalanced are 0, or something is wrong.",
    columns={
        "dispatched": "attempts handed out on the live line",
        "undispatched": "attempts that began without being handed out",
        "trained": "trained, each time counted",
        "dropped": "dropped, for drop_reasons",
        "evaluated": "evaluations that ended",
        "superseded": "attempts that a later one took over",
        "in_flight": "attempts without a fate yet",
        "balance": "begun minus fates; anything but 0 is an error",
        "num_unbalanced": "attempts whose own balance is not 0",
        "off_line": "attempts handed out on an abandoned part of the line; they do not count",
        "drop_reasons": "dropped attempts by reason",
    },
    select="""
        WITH reasons AS (
            SELECT run_id, trainer_id, list({'reason': drop_reason, 'num': num} ORDER BY drop_reason) AS drop_reasons
            FROM (
                SELECT run_id, trainer_id, drop_reason, sum(dropped)::BIGINT AS num
                FROM attempt_fates
                WHERE dropped > 0
                GROUP BY run_id, trainer_id, drop_reason
            )
            GROUP BY run_id, trainer_id
        ),
        off AS (
            SELECT run_id, count(*) AS off_line FROM attempts WHERE NOT is_live GROUP BY run_id
        ),
        summed AS (
            SELECT
                run_id, trainer_id,
                sum(dispatched)::BIGINT AS dispatched, sum(undispatched)::BIGINT AS undispatched,
                sum(trained)::BIGINT AS trained, sum(dropped)::BIGINT AS dropped,
                sum(evaluated)::BIGINT AS evaluated, sum(superseded)::BIGINT AS superseded,
                sum(in_flight)::BIGINT AS in_flight, sum(balance)::BIGINT AS balance,
                count(*) FILTER (WHERE balance <> 0) AS num_unbalanced
            FROM attempt_fates
            GROUP BY run_id, trainer_id
        )
        SELECT
            s.*, coalesce(o.off_line, 0) AS off_line, coalesce(r.drop_reasons, []) AS drop_reasons
        FROM summed s
        LEFT JOIN off o ON o.run_id = s.run_id
        LEFT JOIN reasons r ON r.run_id = s.run_id AND r.trainer_id IS NOT DISTINCT FROM s.trainer_id
    """,
)

CONSERVATION_VIEWS: Final = (ATTEMPTS, ATTEMPT_FATES, CONSERVATION)

"""Projections of what was asked, done and judged: problems, trajectories, segments, tokens, rewards, groups."""

from __future__ import annotations

from typing import Final

from rolltape.schema.trust import MAX_LOG_PROB, SENTINELS
from rolltape.store.view import View

_SENTINELS: Final = ", ".join(f"{value!r}::FLOAT" for value in SENTINELS)

RUN_EPOCHS = View(
    name="run_epochs",
    needs=("run_started", "run_resumed"),
    doc="Epochs of each run; last_live_step: the last step of that epoch that still counts, null where unbounded.",
    columns={
        "last_live_step": "last step of the epoch that still counts; null: no later epoch bounds it",
        "is_newest": "whether it is the newest epoch of the run",
    },
    select="""
        WITH epochs AS (
            SELECT run_id, run_epoch, min(continues_from_step) AS continues_from_step
            FROM (
                SELECT run_id, run_epoch, 0::BIGINT AS continues_from_step FROM run_started
                UNION ALL
                SELECT run_id, run_epoch, continues_from_step FROM run_resumed
            )
            GROUP BY run_id, run_epoch
        )
        SELECT
            run_id,
            run_epoch,
            continues_from_step,
            min(continues_from_step) OVER (
                PARTITION BY run_id ORDER BY run_epoch ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING
            ) AS last_live_step,
            run_epoch = max(run_epoch) OVER (PARTITION BY run_id) AS is_newest
        FROM epochs
    """,
)

PROBLEMS = View(
    name="problems",
    needs=("problem_registered",),
    doc="Problems as last registered.",
    select="""
        SELECT
            run_id, problem_id, domain, source, split, prompt, messages_json, verifier, verifier_version, answer,
            human_reference, pass_rates, difficulty_verdict, event_id
        FROM problem_registered
        QUALIFY row_number() OVER (
            PARTITION BY run_id, problem_id ORDER BY run_epoch DESC, log_offset DESC, lane_seq DESC
        ) = 1
    """,
)

TRAJECTORIES = View(
    name="trajectories",
    needs=("folded_trajectories", "run_epochs"),
    doc="One row per attempt at a rollout, folded; is_live: on the run's live line.",
    columns={
        "is_live": "whether it is on the live line of its run",
    },
    select="""
        SELECT
            t.*,
            coalesce(t.training_step <= e.last_live_step + 1, TRUE) AS is_live
        FROM folded_trajectories t
        LEFT JOIN run_epochs e ON e.run_id = t.run_id AND e.run_epoch = t.run_epoch
    """,
)

SEGMENTS = View(
    name="segments",
    needs=("folded_segments",),
    doc="One row per segment: the context, all tokens after it, and what is known of each.",
    select="SELECT * FROM folded_segments",
)

TOKENS = View(
    name="tokens",
    needs=("folded_segments",),
    doc="One row per response token; position counts from 0; trusted is null for tokens that are no action.",
    columns={
        "position": "place among the tokens after the context, from 0",
        "token_id": "exact id",
        "log_prob": "log-prob under the rollout policy (nat); null where none is stored",
        "is_action": "sampled, owned by this row, not masked by mask_assigned",
        "is_observation": "tool, environment or template token",
        "policy_version": "version that sampled it; null where it is no action or unknown",
        "trusted": "whether its log-prob can be computed with; null where it is no action",
    },
    select=f"""
        SELECT
            * REPLACE (nullif(policy_version, -1) AS policy_version),
            CASE WHEN is_action THEN
                log_prob IS NOT NULL AND isfinite(log_prob) AND log_prob <= {MAX_LOG_PROB!r}::FLOAT
                AND log_prob NOT IN ({_SENTINELS})
            END AS trusted
        FROM (
            SELECT
                run_id, trajectory_id, attempt, is_current, group_id, problem_id, segment_index, segment_kind,
                (generate_subscripts(response_token_ids, 1) - 1)::INTEGER AS position,
                unnest(response_token_ids) AS token_id,
                unnest(rollout_log_probs) AS log_prob,
                unnest(response_mask) AS is_action,
                unnest(observation_mask) AS is_observation,
                unnest(policy_versions) AS policy_version
            FROM folded_segments
        )
    """,
)

REWARDS = View(
    name="rewards",
    needs=("reward_assigned",),
    doc="Judgements; is_conflict: another one for the same target stands beside it, and neither is superseded.",
    columns={
        "is_superseded": "a later judgement replaces it",
        "is_conflict": "another judgement of the same target stands, and neither is superseded",
    },
    select="""
        WITH superseded AS (
            SELECT DISTINCT run_id, unnest(supersedes) AS event_id FROM reward_assigned
        ),
        judged AS (
            SELECT r.*, s.event_id IS NOT NULL AS is_superseded
            FROM reward_assigned r
            LEFT JOIN superseded s ON s.run_id = r.run_id AND s.event_id = r.event_id
        )
        SELECT
            run_id, trajectory_id, attempt, group_id, problem_id, event_id, state, scalar, components,
            scalariser_version, target_event_id, target_token, supersedes, anchor_id, is_superseded,
            NOT is_superseded AND count(*) FILTER (WHERE NOT is_superseded) OVER (
                PARTITION BY run_id, trajectory_id, attempt, target_event_id, target_token
            ) > 1 AS is_conflict,
            recorded_at, log_partition, log_offset
        FROM judged
    """,
)

GROUPS = View(
    name="groups",
    needs=("trajectories",),
    doc="Groups of root rollouts on the live line. zero_variance: all earned rewards are equal but for rounding.",
    columns={
        "num_members": "current attempts of root rollouts",
        "num_ended": "of them ended",
        "num_rewarded": "of them with an earned reward",
        "num_trainable": "of them trainable as far as the tape alone can say",
        "num_action_tokens": "sampled tokens of all members",
        "reward_mean": "mean of the earned rewards",
        "reward_std": "their sample standard deviation (divisor n - 1)",
        "reward_min": "smallest",
        "reward_max": "largest",
        "zero_variance": "all earned rewards equal but for rounding (1e-6 of their size); null: none is earned",
        "is_complete": "as many members as the group was to have",
    },
    select="""
        SELECT
            run_id,
            group_id,
            min(problem_id) AS problem_id,
            min(purpose) AS purpose,
            min(training_step) AS training_step,
            min(group_ordinal) AS group_ordinal,
            max(group_size) AS group_size,
            count(*)::INTEGER AS num_members,
            (count(*) FILTER (WHERE state = 'ended'))::INTEGER AS num_ended,
            (count(*) FILTER (WHERE reward_state = 'earned'))::INTEGER AS num_rewarded,
            (count(*) FILTER (WHERE len(untrainable_reasons) = 0))::INTEGER AS num_trainable,
            sum(num_action_tokens)::BIGINT AS num_action_tokens,
            avg(reward) AS reward_mean,
            stddev_samp(reward) AS reward_std,
            min(reward) AS reward_min,
            max(reward) AS reward_max,
            max(reward) - min(reward) <= 1e-6 * greatest(1.0, abs(avg(reward))) AS zero_variance,
            count(*) >= coalesce(max(group_size), 1) AS is_complete
        FROM trajectories
        WHERE group_id IS NOT NULL AND is_current AND is_live
            AND coalesce(root_rollout_id, trajectory_id) = trajectory_id
        GROUP BY run_id, group_id
    """,
)

TEACHER_SCORES = View(
    name="teacher_scores",
    needs=("teacher_scored",),
    doc="Teachers' log-probs of recorded tokens.",
    columns={
        "num_tokens": "ids that were scored",
        "mean_log_prob": "mean log-prob of them (nat)",
    },
    select="""
        SELECT
            run_id, trajectory_id, attempt, group_id, problem_id, segment_index, event_id, teacher_id, weights_digest,
            logprobs_mode, temperature, template_digest, tokenizer_digest, prefix_digest, index_digest, start_position,
            len(scored_token_ids)::INTEGER AS num_tokens, scored_token_ids, log_probs, top_k, top_k_token_ids,
            top_k_log_probs, tail_mass, list_avg(log_probs) AS mean_log_prob, log_offset
        FROM teacher_scored
    """,
)

ROLLOUT_VIEWS: Final = (
    RUN_EPOCHS,
    PROBLEMS,
    TRAJECTORIES,
    SEGMENTS,
    TOKENS,
    REWARDS,
    GROUPS,
    TEACHER_SCORES,
)

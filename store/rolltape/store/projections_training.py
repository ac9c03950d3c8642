"""Projections of what was learnt and what serves: batches, steps, policy versions, engines, dead letters."""

from __future__ import annotations

from typing import Final

from rolltape.store.view import View

BATCHES = View(
    name="batches",
    needs=("batch_formed", "steps"),
    doc="Batches as pinned. is_completed: a step on the live line names it, so that it counts.",
    columns={
        "num_members": "members, padding included",
        "num_padding": "of them padding copies",
        "num_dropped": "candidates that were dropped",
        "num_completions": "steps on the live line that name it; more than 1 is an error",
        "is_completed": "whether a step on the live line names it",
        "is_skipped": "whether that step skipped the optimizer",
    },
    select="""
        WITH pinned AS (
            SELECT *
            FROM batch_formed
            QUALIFY row_number() OVER (
                PARTITION BY run_id, trainer_id, batch_id ORDER BY run_epoch DESC, log_offset DESC, lane_seq DESC
            ) = 1
        ),
        completed AS (
            SELECT
                run_id, trainer_id, batch_id,
                count(*)::INTEGER AS num_completions,
                bool_and(skipped) AS is_skipped
            FROM steps
            WHERE is_live
            GROUP BY run_id, trainer_id, batch_id
        )
        SELECT
            p.run_id, p.run_epoch, p.trainer_id, p.batch_id, p.algorithm, p.step,
            len(p.members)::INTEGER AS num_members,
            len(list_filter(p.members, lambda m: coalesce(m.is_padding, FALSE)))::INTEGER AS num_padding,
            coalesce(len(p.dropped), 0)::INTEGER AS num_dropped,
            coalesce(c.num_completions, 0) AS num_completions,
            c.batch_id IS NOT NULL AS is_completed,
            c.is_skipped,
            p.staleness_version, p.staleness_run_epoch, p.batch_digest, p.source_run_ids, p.cursor_before,
            p.cursor_after, p.members, p.dropped, p.event_id, p.log_partition, p.log_offset
        FROM pinned p
        LEFT JOIN completed c
            ON c.run_id = p.run_id AND c.trainer_id = p.trainer_id AND c.batch_id = p.batch_id
    """,
)

BATCH_MEMBERS = View(
    name="batch_members",
    needs=("batches",),
    doc="Members of every batch, in the order in which they are trained (place counts from 0).",
    columns={
        "is_completed": "whether a step on the live line names the batch",
        "num_completions": "steps on the live line that name it",
        "place": "place in the batch, from 0",
        "group_ordinal": "place of its group in the step",
        "member": "place in its group",
        "last_event_index": "last event of the attempt that the batch saw",
        "reward": "scalar reward that it was trained with",
        "is_padding": "a padding copy: not counted as trained",
        "source_trajectory_id": "trajectory that a padding copy repeats",
        "content_digest": "digest over all that it is trained from",
        "token_ids_digest": "of its token ids",
        "log_probs_digest": "of its rollout log-probs",
        "masks_digest": "of its masks",
        "versions_digest": "of its policy versions",
        "rewards_digest": "of its reward",
        "teacher_digest": "of its teacher scores",
        "reward_event_ids": "reward events used",
        "teacher_event_ids": "teacher scores used",
        "mask_event_ids": "mask events used",
        "attempt": "try at the rollout, from 0",
        "group_id": "group",
    },
    select="""
        SELECT
            run_id, run_epoch, trainer_id, batch_id, step, event_id, is_completed, num_completions, place,
            m.trajectory_id AS trajectory_id, m.attempt AS attempt, m.group_id AS group_id,
            m.group_ordinal AS group_ordinal, m.member AS member, m.last_event_index AS last_event_index,
            m.reward AS reward, coalesce(m.is_padding, FALSE) AS is_padding,
            m.source_trajectory_id AS source_trajectory_id, m.content_digest AS content_digest,
            m.token_ids_digest AS token_ids_digest, m.log_probs_digest AS log_probs_digest,
            m.masks_digest AS masks_digest, m.versions_digest AS versions_digest,
            m.rewards_digest AS rewards_digest, m.teacher_digest AS teacher_digest,
            m.reward_event_ids AS reward_event_ids,
            m.teacher_event_ids AS teacher_event_ids, m.mask_event_ids AS mask_event_ids
        FROM (
            SELECT
                run_id, run_epoch, trainer_id, batch_id, step, event_id, is_completed, num_completions,
                (generate_subscripts(members, 1) - 1)::INTEGER AS place, unnest(members) AS m
            FROM batches
        )
    """,
)

BATCH_DROPS = View(
    name="batch_drops",
    needs=("batches",),
    doc="Candidates that a batch did not train, and why.",
    columns={
        "is_completed": "whether a step on the live line names the batch",
        "num_completions": "steps on the live line that name it",
        "reason": "named reason",
    },
    select="""
        SELECT
            run_id, run_epoch, trainer_id, batch_id, step, is_completed, num_completions,
            d.trajectory_id AS trajectory_id, coalesce(d.attempt, 0) AS attempt, d.group_id AS group_id,
            d.reason AS reason
        FROM (
            SELECT
                run_id, run_epoch, trainer_id, batch_id, step, is_completed, num_completions, unnest(dropped) AS d
            FROM batches
        )
    """,
)

STEPS = View(
    name="steps",
    needs=("train_step_completed", "checkpoint_saved", "run_epochs"),
    doc="Completed steps; is_live: not abandoned by a later run epoch.",
    columns={
        "is_live": "not abandoned by a later run epoch",
        "checkpoint_path": "place of the checkpoint, relative to the lake",
        "checkpoint_num_bytes": "its size",
    },
    select="""
        WITH saved AS (
            SELECT run_id, trainer_id, step, digest, any_value(path) AS path, max(num_bytes) AS num_bytes
            FROM checkpoint_saved
            GROUP BY run_id, trainer_id, step, digest
        )
        SELECT
            s.run_id, s.run_epoch, s.trainer_id, s.step,
            coalesce(s.step <= e.last_live_step, TRUE) AS is_live,
            s.batch_id, s.skipped, s.policy_id, s.version_in, s.version_out, s.loss, s.loss_bits, s.grad_norm,
            s.batch_digest, s.gradient_digest, s.weights_digest, s.rng_state_digest, s.checkpoint_digest,
            c.path AS checkpoint_path, c.num_bytes AS checkpoint_num_bytes,
            s.micro_batches, s.metrics, s.duration_s, s.recorded_at, s.event_id, s.log_partition, s.log_offset
        FROM train_step_completed s
        LEFT JOIN run_epochs e ON e.run_id = s.run_id AND e.run_epoch = s.run_epoch
        LEFT JOIN saved c
            ON c.run_id = s.run_id AND c.trainer_id = s.trainer_id AND c.step = s.step
            AND c.digest = s.checkpoint_digest
    """,
)

STEP_METRICS = View(
    name="step_metrics",
    needs=("steps",),
    doc="Metrics of every step, one a row.",
    columns={
        "is_live": "not abandoned by a later run epoch",
        "name": "metric",
        "value": "value",
    },
    select="""
        SELECT run_id, run_epoch, trainer_id, step, is_live, m.name AS name, m.value AS value
        FROM (SELECT run_id, run_epoch, trainer_id, step, is_live, unnest(metrics) AS m FROM steps)
    """,
)

POLICY_VERSIONS = View(
    name="policy_versions",
    needs=("weights_published", "weights_staged", "weights_committed", "weights_activated", "weights_aborted"),
    doc="One row per version of a policy, and which engines acknowledged what. Without a commit it never serves.",
    columns={
        "state": "the furthest it came: published, staged, committed, activated; or aborted",
        "is_published": "its bytes are in the lake",
        "is_committed": "the decision that it serves was taken",
        "is_aborted": "it never serves",
        "staged_engines": "engines that hold its verified bytes",
        "activated_engines": "engines that served it",
        "missing_engines": "required engines that have not activated it",
        "num_digests": "weights digests that its events name; more than 1 is an error",
        "num_bytes": "size of its shards",
        "published_at": "clock of the publisher; information only",
        "committed_at": "clock of the coordinator; information only",
    },
    select="""
        WITH moves AS (
            SELECT run_id, policy_id, policy_run_epoch, version, weights_digest, 'published' AS move,
                NULL::VARCHAR AS engine_id, recorded_at FROM weights_published
            UNION ALL
            SELECT run_id, policy_id, policy_run_epoch, version, weights_digest, 'staged', engine_id, recorded_at
                FROM weights_staged
            UNION ALL
            SELECT run_id, policy_id, policy_run_epoch, version, weights_digest, 'committed', NULL, recorded_at
                FROM weights_committed
            UNION ALL
            SELECT run_id, policy_id, policy_run_epoch, version, weights_digest, 'activated', engine_id, recorded_at
                FROM weights_activated
            UNION ALL
            SELECT run_id, policy_id, policy_run_epoch, version, weights_digest, 'aborted', NULL, recorded_at
                FROM weights_aborted
        ),
        folded AS (
            SELECT
                run_id, policy_id, policy_run_epoch, version,
                bool_or(move = 'published') AS is_published,
                bool_or(move = 'committed') AS is_committed,
                bool_or(move = 'aborted') AS is_aborted,
                list_sort(coalesce(list(DISTINCT engine_id) FILTER (WHERE move = 'staged'), []::VARCHAR[]))
                    AS staged_engines,
                list_sort(coalesce(list(DISTINCT engine_id) FILTER (WHERE move = 'activated'), []::VARCHAR[]))
                    AS activated_engines,
                min(recorded_at) FILTER (WHERE move = 'published') AS published_at,
                min(recorded_at) FILTER (WHERE move = 'committed') AS committed_at,
                count(DISTINCT weights_digest)::INTEGER AS num_digests
            FROM moves
            GROUP BY run_id, policy_id, policy_run_epoch, version
        ),
        published AS (
            SELECT *
            FROM weights_published
            QUALIFY row_number() OVER (
                PARTITION BY run_id, policy_id, policy_run_epoch, version ORDER BY log_offset, lane_seq
            ) = 1
        ),
        required AS (
            SELECT
                run_id, policy_id, policy_run_epoch, version,
                list_sort(list_distinct(flatten(list(required_engines)))) AS required_engines
            FROM weights_committed
            GROUP BY run_id, policy_id, policy_run_epoch, version
        )
        SELECT
            f.run_id, f.policy_id, f.policy_run_epoch, f.version, p.role, p.step, p.parent_version,
            CASE
                WHEN f.is_aborted THEN 'aborted'
                WHEN len(f.activated_engines) > 0 THEN 'activated'
                WHEN f.is_committed THEN 'committed'
                WHEN len(f.staged_engines) > 0 THEN 'staged'
                ELSE 'published'
            END AS state,
            f.is_published, f.is_committed, f.is_aborted,
            r.required_engines, f.staged_engines, f.activated_engines,
            list_filter(r.required_engines, lambda e: NOT list_contains(f.activated_engines, e)) AS missing_engines,
            p.payload, p.weights_digest, f.num_digests, p.path,
            list_sum(list_transform(p.shards, lambda s: s.num_bytes))::BIGINT AS num_bytes,
            f.published_at, f.committed_at
        FROM folded f
        LEFT JOIN published p
            ON p.run_id = f.run_id AND p.policy_id = f.policy_id AND p.policy_run_epoch = f.policy_run_epoch
            AND p.version = f.version
        LEFT JOIN required r
            ON r.run_id = f.run_id AND r.policy_id = f.policy_id AND r.policy_run_epoch = f.policy_run_epoch
            AND r.version = f.version
    """,
)

ENGINES = View(
    name="engines",
    needs=("engine_joined", "engine_left", "weights_staged", "weights_activated"),
    doc="One row per engine: whether it serves, and the newest version that it staged and activated.",
    columns={
        "engine_version": "version of the engine's software",
        "num_joins": "times that it joined",
        "state": "joined or left",
        "left_reason": "why it left",
        "staged_version": "newest version that it staged",
        "active_version": "newest version that it activated",
        "num_activations": "versions that it activated",
    },
    select="""
        WITH joined AS (
            SELECT
                run_id, engine_id, count(*)::INTEGER AS num_joins,
                arg_max({
                    'incarnation': incarnation, 'name': name, 'version': version, 'policy_id': policy_id,
                    'device': device, 'dtype': dtype
                }, log_offset) AS last,
                max(log_offset) AS joined_offset
            FROM engine_joined
            GROUP BY run_id, engine_id
        ),
        departed AS (
            SELECT run_id, engine_id, arg_max(reason, log_offset) AS reason, max(log_offset) AS left_offset
            FROM engine_left
            GROUP BY run_id, engine_id
        ),
        staged AS (
            SELECT run_id, engine_id, max({'epoch': policy_run_epoch, 'version': version}) AS newest
            FROM weights_staged
            GROUP BY run_id, engine_id
        ),
        activated AS (
            SELECT
                run_id, engine_id, max({'epoch': policy_run_epoch, 'version': version}) AS newest,
                count(*)::INTEGER AS num_activations
            FROM weights_activated
            GROUP BY run_id, engine_id
        )
        SELECT
            j.run_id, j.engine_id, j.last.incarnation AS incarnation, j.last.name AS name,
            j.last.version AS engine_version, j.last.policy_id AS policy_id, j.last.device AS device,
            j.last.dtype AS dtype, j.num_joins,
            CASE WHEN d.left_offset > j.joined_offset THEN 'left' ELSE 'joined' END AS state,
            CASE WHEN d.left_offset > j.joined_offset THEN d.reason END AS left_reason,
            s.newest.version AS staged_version, a.newest.version AS active_version,
            coalesce(a.num_activations, 0) AS num_activations
        FROM joined j
        LEFT JOIN departed d ON d.run_id = j.run_id AND d.engine_id = j.engine_id
        LEFT JOIN staged s ON s.run_id = j.run_id AND s.engine_id = j.engine_id
        LEFT JOIN activated a ON a.run_id = j.run_id AND a.engine_id = j.engine_id
    """,
)

DEAD_LETTERS = View(
    name="dead_letters",
    needs=("dead_letter", "dead_letter_redriven"),
    doc="Refused records with their reason; is_redriven: a repaired one stands in its place.",
    columns={
        "payload_bytes": "size of the refused bytes",
        "is_redriven": "a repaired record stands in its place",
    },
    select="""
        WITH redriven AS (
            SELECT
                dead_letter_event_id, any_value(repair) AS repair,
                flatten(list(coalesce(replacement_event_ids, []))) AS replacement_event_ids
            FROM dead_letter_redriven
            GROUP BY dead_letter_event_id
        )
        SELECT
            d.run_id, d.event_id, d.reason, d.detail, d.payload_kind, d.payload_format,
            octet_length(d.payload) AS payload_bytes, d.payload_sha256, d.payload, d.trajectory_id, d.attempt,
            d.first_event_index, d.last_event_index, d.source_event_id, d.source_topic, d.source_partition,
            d.source_offset, d.source_producer_id, d.source_producer_epoch, d.first_lane_seq, d.last_lane_seq,
            r.dead_letter_event_id IS NOT NULL AS is_redriven, r.repair, r.replacement_event_ids,
            d.producer_id, d.recorded_at, d.log_topic, d.log_partition, d.log_offset
        FROM dead_letter d
        LEFT JOIN redriven r ON r.dead_letter_event_id = d.event_id
    """,
)

TRAINING_VIEWS: Final = (
    BATCHES,
    BATCH_MEMBERS,
    BATCH_DROPS,
    STEPS,
    STEP_METRICS,
    POLICY_VERSIONS,
    ENGINES,
    DEAD_LETTERS,
)

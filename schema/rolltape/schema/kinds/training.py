"""Training and weights planes: what was learnt from which tokens, and which weights serve."""

from __future__ import annotations

from rolltape.schema.columns import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    STRING,
    column,
    list_of,
    struct_of,
)
from rolltape.schema.kinds._kind import Kind

POSITION_TYPE = list_of(struct_of(topic=STRING, partition=INT32, offset=INT64))
NAMED_DIGEST_TYPE = list_of(struct_of(name=STRING, digest=STRING))
METRICS_TYPE = list_of(struct_of(name=STRING, value=FLOAT64))

MEMBER_TYPE = struct_of(
    trajectory_id=STRING,
    attempt=INT32,
    group_id=STRING,
    group_ordinal=INT32,
    member=INT32,
    last_event_index=INT32,
    reward_event_ids=list_of(STRING),
    teacher_event_ids=list_of(STRING),
    mask_event_ids=list_of(STRING),
    reward=FLOAT64,
    is_padding=BOOL,
    source_trajectory_id=STRING,
    content_digest=STRING,
    token_ids_digest=INT64,
    log_probs_digest=INT64,
    masks_digest=INT64,
    versions_digest=INT64,
    rewards_digest=INT64,
    teacher_digest=INT64,
)

_POLICY = (
    column("policy_id", STRING, "line of models", required=True),
    column("policy_run_epoch", INT32, "run epoch that published the version", required=True),
    column("version", INT64, "version number", required=True, minimum=0),
    column("weights_digest", STRING, "digest over names, shapes, dtypes and bytes of all tensors"),
)

TRAINING_KINDS = (
    Kind(
        name="batch_formed",
        plane="training",
        doc="A batch is pinned. The only place where cursors are recorded.",
        columns=(
            column("batch_id", STRING, "id of the batch", required=True),
            column("trainer_id", STRING, "trainer", required=True),
            column("algorithm", STRING, "algorithm", required=True),
            column("step", INT64, "step that will train it", required=True, minimum=0),
            column("members", list_of(MEMBER_TYPE), "in the order in which they are trained", required=True),
            column(
                "dropped",
                list_of(struct_of(trajectory_id=STRING, attempt=INT32, group_id=STRING, reason=STRING)),
                "candidates that are not trained, and why",
            ),
            column("staleness_version", INT64, "newest published version without an abort, as pinned"),
            column("staleness_run_epoch", INT32, "its run epoch"),
            column("cursor_before", POSITION_TYPE, "next offsets before"),
            column("cursor_after", POSITION_TYPE, "next offsets after"),
            column("batch_digest", STRING, "SHA-256 over the members' content digests, in order"),
            column("source_run_ids", list_of(STRING), "other runs that the recipe names as sources"),
        ),
    ),
    Kind(
        name="tokens_trained",
        plane="training",
        doc="What each token of a group was trained with. Tokens of all members, concatenated in batch order.",
        requires=("group_id",),
        columns=(
            column("batch_id", STRING, "batch", required=True),
            column("step", INT64, "step", required=True),
            column("trajectory_ids", list_of(STRING), "members"),
            column("num_tokens", list_of(INT32), "response tokens of each member"),
            column("old_log_probs", list_of(FLOAT32), "trainer's log-probs under the old policy", unit="nat"),
            column("current_log_probs", list_of(FLOAT32), "trainer's log-probs at the update", unit="nat"),
            column("advantages", list_of(FLOAT32), "advantage"),
            column("gate_weights", list_of(FLOAT32), "weight that the gate gave; 0 is rejected"),
            column("trusted", list_of(BOOL), "gate verdict"),
            column("task_advantages", list_of(FLOAT32), "the task's part of a mixed advantage, before its coefficient"),
            column(
                "teacher_gaps", list_of(FLOAT32), "teacher minus student, clipped if asked; distillation", unit="nat"
            ),
            column("divergences", list_of(FLOAT32), "reverse KL to the teacher at the token's state", unit="nat"),
            column("values", list_of(FLOAT32), "critic's value before the token and before the critic's update"),
            column("value_targets", list_of(FLOAT32), "what the critic learnt there"),
        ),
    ),
    Kind(
        name="train_step_completed",
        plane="training",
        doc="A step is done, trained or skipped. A batch counts when this names it.",
        columns=(
            column("trainer_id", STRING, "trainer", required=True),
            column("step", INT64, "step, from 1", required=True, minimum=0),
            column("batch_id", STRING, "batch", required=True),
            column("skipped", BOOL, "nothing to learn: the optimizer was not called", required=True),
            column("checkpoint_digest", STRING, "checkpoint saved at this step, if any"),
            column("policy_id", STRING, "policy"),
            column("version_in", INT64, "version that the step started from"),
            column("version_out", INT64, "version that it made (the same when skipped)"),
            column("micro_batches", list_of(INT32), "rows of each micro-batch"),
            column("rng_state_digest", STRING, "RNG state after the step"),
            column("batch_digest", STRING, "digest of the inputs"),
            column("loss_bits", INT64, "bit pattern of the float64 loss"),
            column("loss", FLOAT64, "loss, for reading; null when not finite"),
            column("grad_norm", FLOAT64, "gradient norm before clipping; null when not finite"),
            column("gradient_digest", STRING, "digest over all gradients before clipping"),
            column("weights_digest", STRING, "digest over all new weights"),
            column("gradient_digests", NAMED_DIGEST_TYPE, "by tensor"),
            column("weight_digests", NAMED_DIGEST_TYPE, "by tensor"),
            column("metrics", METRICS_TYPE, "metrics of algorithms.md §2.6"),
            column("duration_s", FLOAT64, "wall time of the step", unit="s"),
        ),
    ),
    Kind(
        name="checkpoint_saved",
        plane="training",
        doc="Full state: parameters, moments, scheduler, RNG.",
        columns=(
            column("trainer_id", STRING, "trainer", required=True),
            column("step", INT64, "step after which it was saved", required=True, minimum=0),
            column("path", STRING, "place, relative to the lake", required=True),
            column("num_bytes", INT64, "size", unit="bytes"),
            column("digest", STRING, "digest over all files", required=True),
        ),
    ),
    Kind(
        name="optimizer_reset",
        plane="training",
        doc="Optimizer state was reset after a rollout weight update.",
        columns=(
            column("step", INT64, "step", required=True),
            column("extent", STRING, "what was reset", required=True),
            column("reason", STRING, "why"),
            column("policy_id", STRING, "policy whose optimizer it is"),
            column("policy_run_epoch", INT32, "run epoch that published the version that serves since"),
            column("version", INT64, "its number"),
            column("weights_digest", STRING, "digest over its weights"),
        ),
    ),
    Kind(
        name="evaluation_completed",
        plane="training",
        doc="Metrics of one policy version on one problem set.",
        columns=(
            *_POLICY,
            column("problem_set", STRING, "problem set", required=True),
            column("num_problems", INT32, "problems"),
            column("metrics", METRICS_TYPE, "metrics"),
        ),
    ),
)

WEIGHTS_KINDS = (
    Kind(
        name="weights_published",
        plane="weights",
        doc="New weights lie in the lake. Published is not in effect.",
        columns=(
            *_POLICY,
            column(
                "role", STRING, "what the policy is to the run", choices=("actor", "critic", "reference", "teacher")
            ),
            column("parent_version", INT64, "version that it came from"),
            column("step", INT64, "training step"),
            column("stage", STRING, "training stage"),
            column(
                "payload",
                STRING,
                "what the shards hold",
                required=True,
                choices=("full", "delta", "adapter", "unchanged"),
            ),
            column("base_digest", STRING, "base of a delta or adapter"),
            column("path", STRING, "folder of the shards, relative to the lake"),
            column("parallel_layout", STRING, "layout of the shards"),
            column(
                "shards",
                list_of(struct_of(file=STRING, num_bytes=INT64, sha256=STRING)),
                "shard files",
            ),
            column(
                "manifest",
                list_of(struct_of(name=STRING, shape=list_of(INT64), dtype=STRING, sha256=STRING, file=STRING)),
                "tensors",
            ),
            column("quantization", list_of(struct_of(module=STRING, scheme=STRING)), "by module"),
        ),
    ),
    Kind(
        name="weights_staged",
        plane="weights",
        doc="An engine holds verified bytes of a version, not yet serving.",
        columns=(
            *_POLICY,
            column("engine_id", STRING, "engine", required=True),
            column("duration_s", FLOAT64, "time", unit="s"),
        ),
    ),
    Kind(
        name="weights_committed",
        plane="weights",
        doc="The sole decision that a version will serve.",
        columns=(
            *_POLICY,
            column("required_engines", list_of(STRING), "engines that had to stage"),
            column("staged_event_ids", list_of(STRING), "the staged events that it rests on"),
            column("coordinator_id", STRING, "who decided"),
        ),
    ),
    Kind(
        name="weights_activated",
        plane="weights",
        doc="An engine serves the version from its next decode step on.",
        columns=(
            *_POLICY,
            column("engine_id", STRING, "engine", required=True),
            column("caches", STRING, "what became of caches of older versions", choices=("dropped", "kept")),
            column("duration_s", FLOAT64, "time of the switch", unit="s"),
        ),
    ),
    Kind(
        name="weights_aborted",
        plane="weights",
        doc="The version never serves.",
        columns=(*_POLICY, column("reason", STRING, "why", required=True)),
    ),
)

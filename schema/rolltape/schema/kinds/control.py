"""Control and keeping planes: who serves, what went wrong, what was refused or deleted."""

from __future__ import annotations

from rolltape.schema.columns import BINARY, BOOL, FLOAT64, INT32, INT64, STRING, column, list_of, struct_of
from rolltape.schema.kinds._kind import Kind
from rolltape.schema.kinds.training import METRICS_TYPE

CONTROL_KINDS = (
    Kind(
        name="engine_joined",
        plane="control",
        doc="An engine offers to serve.",
        columns=(
            column("engine_id", STRING, "engine", required=True),
            column("incarnation", STRING, "start of the engine; a restart has a new one"),
            column("name", STRING, "kind of engine"),
            column("version", STRING, "its version"),
            column("policy_id", STRING, "policy that it serves"),
            column("device", STRING, "device type"),
            column("dtype", STRING, "dtype"),
            column("dp_size", INT32, "data-parallel ranks"),
            column("capabilities", list_of(STRING), "declared capabilities"),
        ),
    ),
    Kind(
        name="engine_left",
        plane="control",
        doc="An engine left, or was deregistered.",
        columns=(
            column("engine_id", STRING, "engine", required=True),
            column(
                "reason",
                STRING,
                "why",
                required=True,
                choices=("left", "silent", "failed", "digest_mismatch"),
            ),
        ),
    ),
    Kind(
        name="session_routed",
        plane="control",
        doc="Where a session's keys and values live.",
        columns=(
            column("session_id", STRING, "session", required=True),
            column("engine_id", STRING, "engine"),
            column("dp_rank", INT32, "rank"),
            column("routing_epoch", INT32, "epoch of the table"),
            column("kv_version", INT64, "version of its cache"),
            column("reason", STRING, "why there", choices=("first", "moved", "rebalanced")),
        ),
    ),
    Kind(
        name="memory_sampled",
        plane="control",
        doc="Object ledger.",
        columns=(
            column(
                "entries",
                list_of(
                    struct_of(
                        name=STRING,
                        logical_shape=list_of(INT64),
                        layout=STRING,
                        dtype=STRING,
                        producer=STRING,
                        consumer=STRING,
                        owner=STRING,
                        device=STRING,
                        process=STRING,
                        state=STRING,
                        num_bytes=INT64,
                        term=STRING,
                    )
                ),
                "objects and their term of the peak",
            ),
            column("peak_bytes", INT64, "measured peak", unit="bytes"),
        ),
    ),
    Kind(
        name="mismatch_probed",
        plane="control",
        doc="Same-checkpoint comparison of sampled and recomputed log-probs.",
        columns=(
            column("policy_id", STRING, "policy"),
            column("version", INT64, "version"),
            column("weights_digest", STRING, "weights on both sides"),
            column("step", INT64, "step"),
            column("num_tokens", INT64, "action tokens compared"),
            column("mean_abs_delta", FLOAT64, "mean |train - rollout|", unit="nat"),
            column("max_abs_delta", FLOAT64, "largest |train - rollout|", unit="nat"),
            column("outside_share", FLOAT64, "share outside [1/beta, beta]"),
            column("control_max_abs_delta", FLOAT64, "the same with ids shifted by one, as control", unit="nat"),
            column("metrics", METRICS_TYPE, "others"),
        ),
    ),
    Kind(
        name="alarm_raised",
        plane="control",
        doc="Something that a person should see.",
        columns=(
            column(
                "alarm", STRING, "lane_gap, entropy_collapse, trusted_share, mean_abs_delta, domain_kl …", required=True
            ),
            column("severity", STRING, "how bad", choices=("warning", "error")),
            column("value", FLOAT64, "measured"),
            column("threshold", FLOAT64, "limit"),
            column("detail", STRING, "for people"),
        ),
    ),
)

KEEPING_KINDS = (
    Kind(
        name="dead_letter",
        plane="keeping",
        doc="Refused bytes, and why. Accounts for the lane and event-index range that they would have filled.",
        columns=(
            column("reason", STRING, "named reason", required=True),
            column("detail", STRING, "what was expected, what came, where"),
            column("payload", BINARY, "the bytes"),
            column("payload_sha256", STRING, "their SHA-256"),
            column("payload_kind", STRING, "kind that they claim to be"),
            column("payload_format", STRING, "how to read the bytes", choices=("arrow_ipc", "json_line", "raw")),
            column("source_topic", STRING, "topic"),
            column("source_partition", INT32, "partition"),
            column("source_offset", INT64, "offset"),
            column("source_producer_id", STRING, "producer"),
            column("source_producer_epoch", INT32, "its epoch"),
            column("first_lane_seq", INT64, "first lane number that it accounts for"),
            column("last_lane_seq", INT64, "last lane number"),
            column("first_event_index", INT32, "first event index that it accounts for"),
            column("last_event_index", INT32, "last event index"),
            column("source_event_id", STRING, "event id, where it could be read"),
        ),
    ),
    Kind(
        name="dead_letter_redriven",
        plane="keeping",
        doc="A dead letter was repaired; what it had closed opens again.",
        columns=(
            column("dead_letter_event_id", STRING, "dead letter that it replaces", required=True),
            column("replacement_event_ids", list_of(STRING), "the repaired events"),
            column("repair", STRING, "rule that was applied"),
            column("repaired_by", STRING, "by whom"),
        ),
    ),
    Kind(
        name="artifacts_released",
        plane="keeping",
        doc="Shards, blobs and checkpoints deleted by retention.",
        columns=(
            column("paths", list_of(STRING), "relative to the lake", required=True),
            column("num_bytes", INT64, "freed", unit="bytes"),
            column("policy", STRING, "retention rule"),
        ),
    ),
    Kind(
        name="events_erased",
        plane="keeping",
        doc="An administrator erased a subject's data.",
        columns=(
            column("erased_subject_id", STRING, "whose data", required=True),
            column("num_events", INT64, "events"),
            column("scope", list_of(STRING), "lake files, table versions, blobs, spools, exports"),
            column("log_retention_until", STRING, "date until which the log may still hold them"),
            column("requested_by", STRING, "by whom"),
            column("complete", BOOL, "whether every place was covered"),
        ),
    ),
)

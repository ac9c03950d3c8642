"""The envelope: the columns that every event carries, and the token columns that kinds share (design §4)."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from rolltape.schema.columns import (
    BINARY,
    FLOAT32,
    INT32,
    INT64,
    STRING,
    TIMESTAMP_US,
    Column,
    column,
    list_of,
)

SCHEMA_MAJOR: Final = 1
SCHEMA_MINOR: Final = 1
SCHEMA_VERSION: Final = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"

ENVELOPE: Final[tuple[Column, ...]] = (
    column("event_id", STRING, "UUIDv7 minted once, before spooling; a resend reuses it and its bytes", required=True),
    column("kind", STRING, "name of the event kind", required=True),
    column("schema_version", STRING, "major.minor of the specs that the producer wrote with", required=True),
    column("run_id", STRING, "the run that the event belongs to", required=True),
    column("run_epoch", INT32, "raised when the run is resumed or rewound", required=True, minimum=0),
    column("producer_id", STRING, "who wrote it", required=True),
    column("producer_epoch", INT32, "fsynced counter of the producer's spool", required=True, minimum=0),
    column("lane_seq", INT64, "gap-free from 0 per (producer, epoch, topic, partition)", required=True, minimum=0),
    column("log_topic", STRING, "topic of the log; stamped by the sink or committer"),
    column("log_partition", INT32, "partition of the topic; stamped likewise", minimum=0),
    column("log_offset", INT64, "offset of the record in the partition; rows of one record share it", minimum=0),
    column("tenant", STRING, "whose installation"),
    column("subject_id", STRING, "whose data, for access and erasure"),
    column("trajectory_id", STRING, "UUIDv7; names a trajectory, never orders it"),
    column("attempt", INT32, "try at one rollout by one owner, from 0", minimum=0),
    column("group_id", STRING, "rollouts of one problem that are compared"),
    column("problem_id", STRING, "the problem that was posed"),
    column("root_rollout_id", STRING, "trajectory from which a concurrent branch forked (its own id for a root)"),
    column("segment_index", INT32, "segment of the trajectory, from 0", minimum=0),
    column("turn_index", INT32, "turn of the trajectory, from 0", minimum=0),
    column("event_index", INT32, "gap-free from 0 per (trajectory, attempt); rollout plane only", minimum=0),
    column("parent_event_id", STRING, "the event that caused this one, or that a branch forked from"),
    column("recorded_at", TIMESTAMP_US, "producer's clock; information only, never an order", required=True),
)

TOKEN_COLUMNS: Final[tuple[Column, ...]] = (
    column("token_ids", list_of(INT32), "exact token ids, as sampled or as observed"),
    column(
        "rollout_log_probs", list_of(FLOAT32), "log-prob of each sampled token under the rollout policy", unit="nat"
    ),
)

EXTENSIONS: Final = column(
    "extensions",
    BINARY,
    "columns of a newer minor schema version that this reader does not know, as a one-row Arrow IPC stream",
)

STAMPED_BY_LOG: Final = ("log_topic", "log_partition", "log_offset")
STAMPED_BY_RECORDER: Final = (
    "event_id",
    "kind",
    "schema_version",
    "run_id",
    "run_epoch",
    "producer_id",
    "producer_epoch",
    "lane_seq",
    "recorded_at",
)

ENVELOPE_SCHEMA: Final = pa.schema([spec.field for spec in ENVELOPE])

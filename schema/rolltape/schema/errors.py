"""The error tree: every error is also the standard error that a caller would expect.

::

    RolltapeError
    ├── ValidationError (ValueError)         an event breaks its spec
    │   ├── UnknownKindError                 no such event kind
    │   └── SchemaVersionError               a newer major version, or none
    ├── CodecError (ValueError)              bytes that are no record of ours
    │   └── HeaderMismatchError              a record's headers contradict its rows
    ├── CursorError (ValueError)             a cursor that cannot be read
    ├── ConfigError (ValueError)             an option outside its range, or unknown
    ├── IntegrityError (RuntimeError)        the tape contradicts itself or a digest
    │   ├── ConflictError                    one event id, two contents
    │   ├── LaneGapError                     a lane skips sequence numbers
    │   └── DigestMismatchError              bytes are not what the tape says they are
    ├── StoreError (RuntimeError)            the lake refuses
    │   ├── LakeNotFoundError (FileNotFoundError)
    │   ├── LakeFormatError                  written by a newer Rolltape, or not a lake
    │   ├── CommitterFencedError             another committer owns the lake
    │   ├── StorageFullError                 no room left; nothing acknowledged was lost
    │   ├── StoreUnreachableError (ConnectionError)  no answer in time; nothing acknowledged was lost
    │   ├── StoreAccessError (PermissionError)  no such bucket, or credentials that are missing, wrong or too weak
    │   └── VacuumedError                    a data file of this snapshot was deleted
    ├── LogError (RuntimeError)              a log that brokers keep refuses
    │   ├── LogUnreachableError (ConnectionError)    no broker answers
    │   ├── LogAuthenticationError (PermissionError) the brokers do not know who asks
    │   ├── LogAuthorizationError (PermissionError)  they know, and do not allow it
    │   ├── TopicError                       a topic is missing, or is not as planned
    │   ├── RecordTooLargeError              above what the topic takes, and no place for a claim check
    │   ├── OffsetGoneError                  a position outside what the log still holds
    │   └── LogMismatchError                 log and lake do not belong together, or one lost a part
    │       ├── OtherClusterError            another cluster than the lake was fed from
    │       ├── TopicRecreatedError          a topic of the same name, but another one
    │       ├── OffsetLostError              retention or truncation passed what was not archived yet
    │       └── LakeAheadError               the lake holds offsets that the log does not have
    ├── ProducerFencedError (RuntimeError)   another writer uses this producer id
    ├── BackpressureTimeout (TimeoutError)   the log did not take what is spooled
    ├── FlushTimeout (TimeoutError)          not proven durable within the time allowed
    ├── SqlError (ValueError)                a statement that does not parse, bind or run
    ├── SqlRefusedError (PermissionError)    not a single SELECT, or outside what is allowed
    ├── UntrainableError (ValueError)        data that a trainer must refuse, by named reason
    ├── ReplayError (RuntimeError)           a replay that is impossible here, or that differs
    ├── EngineError (RuntimeError)           an engine failed or broke the weight-sync order
    ├── NotPublishedError (LookupError)      a run, or a version of its weights, that no tape holds (yet)
    └── ChildFailedError (RuntimeError)      a process of a run died more often than allowed
"""

from __future__ import annotations


class RolltapeError(Exception):
    """Base of all errors that Rolltape raises on purpose."""


class ValidationError(RolltapeError, ValueError):
    """An event breaks its spec. The message names what was expected, what came and where."""


class UnknownKindError(ValidationError):
    """No event kind has this name."""


class SchemaVersionError(ValidationError):
    """A schema version that this reader cannot read."""


class CodecError(RolltapeError, ValueError):
    """Bytes that are not a record of ours, or a truncated one."""


class HeaderMismatchError(CodecError):
    """A record whose headers contradict its rows; names both."""


class CursorError(RolltapeError, ValueError):
    """A cursor that cannot be read, or that points outside the log."""


class ConfigError(RolltapeError, ValueError):
    """A configuration value outside its range; names the field and the range."""


class IntegrityError(RolltapeError, RuntimeError):
    """The tape contradicts itself."""


class ConflictError(IntegrityError):
    """One event id with two contents."""


class LaneGapError(IntegrityError):
    """A lane skips sequence numbers; names the missing range."""


class DigestMismatchError(IntegrityError):
    """Bytes whose digest is not the recorded one; names the trajectory or file, and the tensor."""


class StoreError(RolltapeError, RuntimeError):
    """The lake refuses an operation."""


class LakeNotFoundError(StoreError, FileNotFoundError):
    """There is no lake at this location."""


class LakeFormatError(StoreError):
    """The location holds a lake of a newer format, or something else."""


class CommitterFencedError(StoreError):
    """Another committer owns the lake, or took it over."""


class StorageFullError(StoreError):
    """No room left. What was acknowledged is kept; what was not stays in the spool."""


class StoreUnreachableError(StoreError, ConnectionError):
    """The store did not answer within the time allowed, or only that it cannot now. Trying again later is right."""


class StoreAccessError(StoreError, PermissionError):
    """The store refuses: no such bucket, or credentials that are missing, wrong or too weak. Trying again is no use."""


class VacuumedError(StoreError):
    """A data file of the snapshot was deleted by a vacuum; a newer snapshot names its rows elsewhere."""


class LogError(RolltapeError, RuntimeError):
    """A log that brokers keep refuses an operation; the message is ours, the vendor's error is its cause."""


class LogUnreachableError(LogError, ConnectionError):
    """No broker answers; names the bootstrap addresses and what the connection failed of."""


class LogAuthenticationError(LogError, PermissionError):
    """The brokers refuse this user, or their certificate is not one that we trust. Never holds a secret."""


class LogAuthorizationError(LogError, PermissionError):
    """The brokers know this user, who may not do this to the named topic or group."""


class TopicError(LogError):
    """A topic is missing, or its settings differ from the plan; names the topic and the command that makes it."""


class RecordTooLargeError(LogError):
    """A record above what its topic takes, where no lake is given to keep its payload beside."""


class OffsetGoneError(LogError):
    """A position before the oldest or after the newest offset that a partition of the log holds.

    ``partition`` (topic, partition) and ``offset`` name it, None where several are at stake.
    """

    def __init__(self, message: str, *, partition: tuple[str, int] | None = None, offset: int | None = None) -> None:
        """Keep what the reader needs to go on from somewhere else."""
        super().__init__(message)
        self.partition = partition
        self.offset = offset


class LogMismatchError(LogError):
    """Log and lake do not belong together, or one of them lost a part; names what is at stake and the ways out."""


class OtherClusterError(LogMismatchError):
    """The lake was fed from another cluster."""


class TopicRecreatedError(LogMismatchError):
    """The lake was fed from a topic of this name that was deleted; this one starts anew."""


class OffsetLostError(LogMismatchError):
    """Retention or truncation took records that no sink had archived."""


class LakeAheadError(LogMismatchError):
    """The lake holds offsets that the log does not have, or fills otherwise: it lost its end, or is another one."""


class ProducerFencedError(RolltapeError, RuntimeError):
    """Another live writer uses this producer id."""


class BackpressureTimeout(RolltapeError, TimeoutError):
    """The spool is full and the log did not take anything within the time allowed."""


class FlushTimeout(RolltapeError, TimeoutError):
    """Not proven durable within the time allowed; nothing is lost, the spool keeps it."""


class SqlError(RolltapeError, ValueError):
    """A statement that does not parse, bind or run; the message is the engine's, without local paths."""


class SqlRefusedError(RolltapeError, PermissionError):
    """The statement is not a single SELECT, or reaches outside what is allowed."""


class UntrainableError(RolltapeError, ValueError):
    """Data that a trainer must refuse; the message starts with the reason's name."""


class ReplayError(RolltapeError, RuntimeError):
    """A replay that is impossible here (says what is missing), or whose bits differ (names the first tensor)."""


class EngineError(RolltapeError, RuntimeError):
    """An engine failed, or was asked to serve weights that it did not stage."""


class NotPublishedError(RolltapeError, LookupError):
    """A run, or a version of its weights, that the lake does not hold (yet); names those that it does."""


class ChildFailedError(RolltapeError, RuntimeError):
    """A process of a run died more often than allowed; the message ends with the tail of its log."""

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
    │   └── VacuumedError                    a data file of this snapshot was deleted
    ├── ProducerFencedError (RuntimeError)   another writer uses this producer id
    ├── BackpressureTimeout (TimeoutError)   the log did not take what is spooled
    ├── FlushTimeout (TimeoutError)          not proven durable within the time allowed
    ├── SqlError (ValueError)                a statement that does not parse, bind or run
    ├── SqlRefusedError (PermissionError)    not a single SELECT, or outside what is allowed
    ├── UntrainableError (ValueError)        data that a trainer must refuse, by named reason
    ├── ReplayError (RuntimeError)           a replay that is impossible here, or that differs
    ├── EngineError (RuntimeError)           an engine failed or broke the weight-sync order
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


class VacuumedError(StoreError):
    """A data file of the snapshot was deleted by a vacuum; a newer snapshot names its rows elsewhere."""


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


class ChildFailedError(RolltapeError, RuntimeError):
    """A process of a run died more often than allowed; the message ends with the tail of its log."""

"""How a sink works: latency, memory, and what it does beside."""

from __future__ import annotations

from dataclasses import dataclass

from rolltape.ingest.parking import MAX_PARKED_BYTES
from rolltape.schema.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """How a sink trades latency against commits, and what it holds in memory. Times in seconds.

    Attributes:
        linger_s: a commit is made once nothing came for so long.
        max_linger_s: and at the latest so long after the first record of it came.
        max_commit_bytes: or once so many bytes of rows are staged in memory.
        max_parked_bytes: bytes of records behind a gap that are kept; of more only the place is known.
        retry_s: pause after an error that passes; doubled up to ``max_retry_s``.
        max_retry_s: see ``retry_s``.
        status_s: how often lag and age are looked at and the group's offsets are stored.
        alarm_after_s: how long a lane must stand still before an alarm is sent.
        maintenance: whether to look after the lake beside.
        metrics_port: answer Prometheus there; 0 for any free port, None for nowhere.
    """

    linger_s: float = 0.05
    max_linger_s: float = 1.0
    max_commit_bytes: int = 32 << 20
    max_parked_bytes: int = MAX_PARKED_BYTES
    retry_s: float = 0.25
    max_retry_s: float = 5.0
    status_s: float = 2.0
    alarm_after_s: float = 1.0
    maintenance: bool = True
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a value that must be above 0 is not.
        """
        for name in ("linger_s", "max_linger_s", "max_commit_bytes", "max_parked_bytes", "retry_s", "status_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: expected more than 0, got {getattr(self, name)}")

"""Lanes: what one producer epoch writes to one log partition, numbered from 0 without gaps (design §5.5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from rolltape.schema.cursor import Partition
from rolltape.schema.errors import ConfigError, LaneGapError

LANE_PREFIX: Final = "lane/"
LOG_PREFIX: Final = "log/"
BEHIND_PREFIX: Final = "behind/"
FOREIGN_PREFIX: Final = "foreign/"
NOTHING: Final = -1
"""The mark of a lane or partition of which nothing is archived yet."""

_PRODUCER_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")


class Lane(NamedTuple):
    """One lane. Its Delta application transaction holds the last ``lane_seq`` that is archived.

    >>> Lane("worker-0", 3, "rollout", 0).app_id
    'lane/worker-0/3/rollout/0'
    """

    producer_id: str
    producer_epoch: int
    topic: str
    partition: int

    @property
    def app_id(self) -> str:
        """Name of the lane's application transaction."""
        return f"{LANE_PREFIX}{self.producer_id}/{self.producer_epoch}/{self.topic}/{self.partition}"

    @property
    def log_partition(self) -> Partition:
        """The partition that the lane writes to."""
        return Partition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.producer_id} epoch {self.producer_epoch} on {self.topic}/{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A lane that stands still: ``first`` to ``last`` are missing, ``waiting`` are there behind them."""

    lane: Lane
    first: int
    last: int

    def error(self) -> LaneGapError:
        """The error that names the range."""
        return LaneGapError(str(self))

    def __str__(self) -> str:
        return (
            f"lane {self.lane}: expected lane_seq {self.first}, got {self.last + 1}: "
            f"{self.first} to {self.last} are missing; the lane stands still until they come, or until an operator "
            "accepts the loss (rolltape.ingest.deadletters: accept_loss, over Kafka accept_loss_in_log)"
        )


def parse_lane(app_id: str) -> Lane | None:
    """The lane that an application transaction stands for; None for other transactions."""
    if not app_id.startswith(LANE_PREFIX):
        return None
    producer_id, epoch, topic, partition = app_id.removeprefix(LANE_PREFIX).rsplit("/", 3)
    return Lane(producer_id, int(epoch), topic, int(partition))


def lane_marks(transactions: Mapping[str, int]) -> dict[Lane, int]:
    """Last archived ``lane_seq`` of every lane that the transactions name."""
    marks = ((parse_lane(app_id), version) for app_id, version in transactions.items())
    return {lane: version for lane, version in marks if lane is not None}


def log_app_id(partition: Partition) -> str:
    """Name of the application transaction that holds a partition's last archived offset."""
    return f"{LOG_PREFIX}{partition.topic}/{partition.partition}"


def behind_app_id(lane: Lane) -> str:
    """Name of the transaction that holds the offset at which what had waited in a lane is admitted."""
    return f"{BEHIND_PREFIX}{lane.app_id.removeprefix(LANE_PREFIX)}"


def behind_marks(transactions: Mapping[str, int]) -> dict[Lane, int]:
    """The offsets that :func:`behind_app_id` names, by lane."""
    marks = {
        f"{LANE_PREFIX}{app_id.removeprefix(BEHIND_PREFIX)}": version
        for app_id, version in transactions.items()
        if app_id.startswith(BEHIND_PREFIX)
    }
    return lane_marks(marks)


def foreign_app_id(partition: Partition) -> str:
    """Name of the transaction that holds the last offset of a partition at which a foreign message is archived."""
    return f"{FOREIGN_PREFIX}{partition.topic}/{partition.partition}"


def newest_epoch(transactions: Mapping[str, int], producer_id: str) -> int:
    """Newest epoch of a producer of which something is archived; 0 when nothing is."""
    return max((lane.producer_epoch for lane in lane_marks(transactions) if lane.producer_id == producer_id), default=0)


def checked_producer_id(producer_id: str) -> str:
    """``producer_id``, if it can name a folder and a transaction.

    Raises:
        ConfigError: it is empty, longer than 200 characters, or has others than letters, digits and ``._:-``.
    """
    if not _PRODUCER_ID.fullmatch(producer_id):
        raise ConfigError(
            f"expected a producer id of 1 to 200 letters, digits, '.', '_', ':' or '-', got {producer_id!r}; "
            "rename the producer"
        )
    return producer_id

"""Retention of claimed payloads: a blob goes with the log's own retention, once the lake holds what it carried.

The sink puts a payload into the table, so a blob is needed only as long as the log may be read at its record. A blob is
deleted when it is older than every topic keeps records and older than everything that is not archived yet. What is
deleted is an ``artifacts_released`` event first.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa

from rolltape.ingest.kafka.blobs import BlobStore
from rolltape.ingest.kafka.client import BrokerConsumer, KafkaClient
from rolltape.ingest.kafka.own_events import send_events
from rolltape.ingest.kafka.positions import LogIdentity, identify, log_bases
from rolltape.ingest.lanes import NOTHING, log_app_id
from rolltape.ingest.refused import UNKNOWN_RUN
from rolltape.schema.build import build_batch
from rolltape.schema.codec import Record, make_record
from rolltape.schema.columns import TIMESTAMP_US
from rolltape.schema.cursor import Partition
from rolltape.schema.identity import derived_id
from rolltape.store.lake import Lake
from rolltape.store.location import FileInfo

INTERVAL_S: Final = 3600.0
MARGIN_S: Final = 24 * 3600.0
"""A blob stays so much longer: it is put before its record is sent, and a claim of an older one refreshes it."""

_BATCH: Final = 1_000
_PEEK_S: Final = 5.0
_LOG: Final = logging.getLogger(__name__)


class BlobRetention:
    """Deletes blobs that nobody needs, at most every ``interval_s``. Two at the same time do no harm."""

    def __init__(
        self, client: KafkaClient, lake: Lake, *, interval_s: float = INTERVAL_S, margin_s: float = MARGIN_S
    ) -> None:
        """Look after the blobs beside ``lake``."""
        self._client = client
        self._lake = lake
        self._interval_s = interval_s
        self._margin_s = margin_s
        self._last_s = -interval_s

    def run(self) -> int:
        """Delete what is due, if it is time to look; returns how many.

        Raises:
            LogError, StoreError: for now; what is left is deleted the next time.
        """
        now = time.monotonic()
        if now - self._last_s < self._interval_s:
            return 0
        self._last_s = now
        blobs = BlobStore(self._lake.location)
        found = blobs.root.list(recursive=True)
        if not found:
            return 0
        identity = identify(self._client)
        horizon_s = self._horizon_s(identity)
        due = [info for info in found if info.modified_s < horizon_s]
        for start in range(0, len(due), _BATCH):
            batch = due[start : start + _BATCH]
            send_events(self._client, identity.topics, [_released(batch, horizon_s)])
            blobs.root.delete_files([info.path for info in batch])
        return len(due)

    def _horizon_s(self, identity: LogIdentity) -> float:
        """Blobs that were written before this time of the clock are needed by nobody."""
        hidden = [topic for topic, info in identity.topics.items() if "retention.ms" not in info.configs]
        if hidden:
            _LOG.warning(
                "deletes no claimed payloads: expected to see retention.ms of topics %s, got nothing; ask whoever runs "
                "the cluster for the right DescribeConfigs on them",
                ", ".join(hidden),
            )
            return 0.0
        kept_ms = [int(info.configs["retention.ms"]) for info in identity.topics.values()]
        if min(kept_ms) < 0:
            return 0.0
        with contextlib.closing(self._client.consumer()) as consumer:
            oldest_s = oldest_unarchived_s(consumer, identity, self._lake.snapshot().transactions)
        by_age_s = time.time() - max(kept_ms) / 1000
        return min(by_age_s, oldest_s) - self._margin_s


def oldest_unarchived_s(consumer: BrokerConsumer, identity: LogIdentity, transactions: Mapping[str, int]) -> float:
    """The log's time stamp of the oldest record that is not archived, in seconds; now where everything is."""
    places = identity.partitions()
    begins, ends = consumer.begin_offsets(places), consumer.end_offsets(places)
    bases = log_bases(transactions, identity.topic_ids)
    oldest_s = time.time()
    for place in places:
        position = transactions.get(log_app_id(place), NOTHING) + 1 - bases.get(place, 0)
        if max(position, begins[place]) < ends[place]:
            oldest_s = min(oldest_s, _time_s(consumer, place, max(position, begins[place])))
    return oldest_s


def _time_s(consumer: BrokerConsumer, place: Partition, offset: int) -> float:
    consumer.assign([place])
    consumer.seek(place, offset)
    messages = consumer.poll(_PEEK_S, 1).get(place)
    # A record that cannot be looked at now may be of any age.
    return messages[0].timestamp_ms / 1000 if messages else 0.0


def _released(blobs: Sequence[FileInfo], horizon_s: float) -> Record:
    paths = [f"blobs/sha256/{info.path}" for info in blobs]
    event_id = derived_id("artifacts_released", *paths)
    _LOG.info("deletes %d blobs of %d bytes", len(blobs), sum(info.size_bytes for info in blobs))
    columns = {
        "event_id": event_id,
        "run_id": UNKNOWN_RUN,
        "run_epoch": 0,
        "producer_id": f"retention-{event_id}",
        "producer_epoch": 1,
        "lane_seq": [0],
        "recorded_at": pa.scalar(int(horizon_s * 1e6), TIMESTAMP_US),
        "paths": [paths],
        "num_bytes": sum(info.size_bytes for info in blobs),
        "policy": "claimed payloads older than the log's retention, whose records are archived",
    }
    return make_record(build_batch("artifacts_released", columns, 1).batch)

"""Alarms about lanes that stand still, as events of the log: each is sent once, whichever sinks see the gap."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from rolltape.ingest.alarms import alarm_record
from rolltape.ingest.kafka.client import KafkaClient, TopicInfo
from rolltape.ingest.kafka.own_events import send_events
from rolltape.ingest.lanes import Gap, Lane

_LOG: Final = logging.getLogger(__name__)


class GapAlarms:
    """Sends an alarm for each gap that lasts."""

    def __init__(self, client: KafkaClient, topics: Mapping[str, TopicInfo], after_s: float) -> None:
        """Send to ``client`` once a gap lasted ``after_s``."""
        self._client = client
        self._topics = topics
        self._after_s = after_s
        self._seen: dict[Gap, float] = {}
        self._sent: set[Gap] = set()

    def send(self, gaps: Collection[Gap], waiting_since_us: Callable[[Lane], int | None]) -> None:
        """Send what is due.

        Raises:
            LogError: it could not be sent; the next call tries again.
        """
        now = time.monotonic()
        self._seen = {gap: self._seen.get(gap, now) for gap in gaps}
        self._sent &= set(gaps)
        due = [gap for gap, since in self._seen.items() if now - since >= self._after_s and gap not in self._sent]
        if not due:
            return
        for gap in due:
            _LOG.error("%s", gap)
        # The record that waits has a time of the log's, so that every sink makes the same bytes of the alarm.
        send_events(self._client, self._topics, [alarm_record(gap, waiting_since_us(gap.lane) or 0) for gap in due])
        self._sent.update(due)

"""Ingest: from events to the log, and from the log to the lake, exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rolltape.ingest.deadletters import accept_loss, list_dead_letters, redrive
    from rolltape.ingest.embedded import EmbeddedLog
    from rolltape.ingest.kafka.config import KafkaConfig
    from rolltape.ingest.kafka.log import KafkaLog
    from rolltape.ingest.log import Delivery, EventLog, LogProducer, LogReader, open_log
    from rolltape.ingest.memory import MemoryLog
    from rolltape.ingest.recorder import Receipt, Recorder

_PLACES: Final = {
    "Delivery": "log",
    "EmbeddedLog": "embedded",
    "EventLog": "log",
    "KafkaConfig": "kafka.config",
    "KafkaLog": "kafka.log",
    "LogProducer": "log",
    "LogReader": "log",
    "MemoryLog": "memory",
    "Receipt": "recorder",
    "Recorder": "recorder",
    "accept_loss": "deadletters",
    "list_dead_letters": "deadletters",
    "open_log": "log",
    "redrive": "deadletters",
}

__all__ = [
    "Delivery",
    "EmbeddedLog",
    "EventLog",
    "KafkaConfig",
    "KafkaLog",
    "LogProducer",
    "LogReader",
    "MemoryLog",
    "Receipt",
    "Recorder",
    "accept_loss",
    "list_dead_letters",
    "open_log",
    "redrive",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use: the command line's ``--help`` imports none of them."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rolltape.ingest.{_PLACES[name]}"), name)

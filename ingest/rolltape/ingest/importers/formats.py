"""The formats that can be imported, and how a file's format is told from its first row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from rolltape.ingest.importers import gsm8k, nemogym, nemorl
from rolltape.ingest.importers.rows import EventRows, Ids
from rolltape.ingest.importers.source import Source
from rolltape.schema.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFormat:
    """One format. ``matches`` looks at the first row; ``convert`` makes the events of one row.

    ``convert(ids, row_number, document, rows)`` adds to ``rows`` and raises ``MalformedRowError`` for a row that
    cannot become events. ``model_name`` says which model a row names, if it does.
    """

    name: str
    doc: str
    matches: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[Ids, int, Mapping[str, Any], EventRows], None]
    model_name: Callable[[Mapping[str, Any]], str | None] = lambda _: None


FORMATS: Final[Mapping[str, ImportFormat]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            ImportFormat(
                name="nemogym_rollouts",
                doc="NeMo Gym rollouts, one a line, with or without token ids",
                matches=nemogym.is_rollout,
                convert=nemogym.convert_rollout,
                model_name=nemogym.model_of_rollout,
            ),
            ImportFormat(
                name="nemogym_response",
                doc="one Responses-API object of NeMo Gym with token ids on the last item of each model call",
                matches=nemogym.is_response,
                convert=nemogym.convert_response,
                model_name=nemogym.model_of_response,
            ),
            ImportFormat(
                name="nemorl_drift",
                doc="ids that NeMo RL had seen, beside the prompt that was rendered again from text",
                matches=nemorl.is_drift,
                convert=nemorl.convert_drift,
            ),
            ImportFormat(
                name="nemorl_message_logs",
                doc="message logs of NeMo RL environments, with token ids by message",
                matches=nemorl.is_message_logs,
                convert=nemorl.convert_message_logs,
            ),
            ImportFormat(
                name="gsm8k_solutions",
                doc="four model solutions to each GSM8K problem, text only",
                matches=gsm8k.is_solutions,
                convert=gsm8k.convert_solutions,
            ),
            ImportFormat(
                name="gsm8k_problems",
                doc="GSM8K problems with worked answers",
                matches=gsm8k.is_problem,
                convert=gsm8k.convert_problem,
            ),
        )
    }
)


def format_named(name: str) -> ImportFormat:
    """The format called ``name``.

    Raises:
        ConfigError: there is none.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(f"expected an import format of {', '.join(FORMATS)}, got {name!r}") from None


def detect_format(source: Source) -> ImportFormat:
    """The format of a file, by its first readable row.

    Raises:
        ConfigError: no row can be read, or no format knows it.
    """
    document = source.first_document()
    if document is None:
        raise ConfigError(f"expected JSON objects in {source.name}, found no row that can be read")
    for entry in FORMATS.values():
        if entry.matches(document):
            return entry
    keys = ", ".join(sorted(map(str, document))[:12])
    raise ConfigError(
        f"expected one of the formats {', '.join(FORMATS)}; no one knows {source.name}, whose first row has the keys "
        f"{keys}; name the format if it is one of these"
    )

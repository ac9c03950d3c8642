"""The file that is imported: its digest, its rows, and where a row cannot be read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from rolltape.schema import reasons
from rolltape.schema.errors import ConfigError
from rolltape.store.location import Location

_READ_BYTES: Final = 1 << 20


class MalformedRowError(Exception):
    """A row that cannot become events. It never leaves the importer: the row becomes a dead letter."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a file: a line of a JSON-lines file, or a whole JSON document.

    ``number`` counts from 0. ``payload`` is the bytes as they stand in the file, without the line end.
    """

    number: int
    payload: bytes

    def document(self) -> dict[str, Any]:
        """The row as a JSON object.

        Raises:
            MalformedRowError: it is not UTF-8, not JSON, or no object.
        """
        try:
            document = json.loads(self.payload.decode("utf-8"))
        except UnicodeDecodeError as error:
            detail = f"expected UTF-8 in row {self.number}, got byte {self.payload[error.start]:#04x} at {error.start}"
            raise MalformedRowError(reasons.BROKEN_UTF8, detail) from None
        except json.JSONDecodeError as error:
            cut_off = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
            reason = reasons.TRUNCATED_PAYLOAD if cut_off else reasons.BAD_VALUE
            detail = f"expected a JSON object in row {self.number}, got {error.msg} at character {error.pos}"
            raise MalformedRowError(reason, detail) from None
        if not isinstance(document, dict):
            detail = f"expected a JSON object in row {self.number}, got {type(document).__name__}"
            raise MalformedRowError(reasons.BAD_VALUE, detail)
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file to import. ``sha256`` is the hex digest of all its bytes; ``name`` is its last path part."""

    location: Location
    name: str
    sha256: str
    one_document: bool

    @classmethod
    def open(cls, path: str) -> Source:
        """The file at a path or URL, read once for its digest.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        location = Location.parse(path)
        digest = hashlib.sha256()
        try:
            with location.open_input() as stream:
                while block := stream.read(_READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise ConfigError(f"expected a file to import at {path}, got {type(error).__name__}: {error}") from error
        name = location.path.rstrip("/").rsplit("/", 1)[-1]
        return cls(
            location=location,
            name=name,
            sha256=digest.hexdigest(),
            one_document=not name.endswith((".jsonl", ".ndjson")) and not _first_line_is_a_document(location),
        )

    @property
    def run_id(self) -> str:
        """Run that the file's events belong to; the same bytes give the same run."""
        return f"import-{self.sha256[:16]}"

    def rows(self) -> Iterator[Row]:
        """All rows in file order, blank lines left out (they keep their number)."""
        if self.one_document:
            yield Row(number=0, payload=self.location.read_bytes())
            return
        for number, line in enumerate(_lines(self.location)):
            payload = line.rstrip(b"\r\n")
            if payload.strip():
                yield Row(number=number, payload=payload)

    def first_document(self) -> dict[str, Any] | None:
        """The first row that can be read, to tell the format by; None when none can."""
        for row in self.rows():
            try:
                return row.document()
            except MalformedRowError:
                continue
        return None


def _lines(location: Location) -> Iterator[bytes]:
    rest = b""
    with location.open_input() as stream:
        while block := stream.read(_READ_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
    if rest:
        yield rest


def _first_line_is_a_document(location: Location) -> bool:
    line = next(_lines(location), b"")
    try:
        json.loads(line)
    except ValueError:
        return False
    return True

"""Printing: JSON lines into pipes, tables and progress on terminals."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout.isatty()


def clean(text: str) -> str:
    """Model text is data: control characters must not reach a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def to_json(row: Mapping[str, Any]) -> str:
    """One JSON line; what JSON cannot say (bytes, NaN, infinities, times) becomes text, so that it stays valid JSON."""
    return json.dumps(_jsonable(row), ensure_ascii=False, separators=(",", ":"))


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return str(value)


def print_rows(rows: Iterable[Mapping[str, Any]], *, title: str = "", columns: Sequence[str] | None = None) -> None:
    """Print rows: a table on a terminal, JSON lines otherwise."""
    if not is_terminal():
        for row in rows:
            print(to_json(row))
        return
    from rich.console import Console
    from rich.table import Table

    listed = list(rows)
    names = list(columns or (listed[0] if listed else ()))
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    for row in listed:
        table.add_row(*(_cell(row.get(name)) for name in names))
    Console().print(table if names else f"{title}: no rows")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)) and len(value) > 12:
        return f"[{', '.join(_cell(item) for item in value[:12])}, … {len(value)} in all]"
    return clean(str(value))


def say(message: str, **facts: Any) -> None:
    """One line of progress: text on a terminal, a JSON line with its facts otherwise."""
    if is_terminal():
        from rich.console import Console

        Console().print(message, highlight=False, markup=False)
    else:
        print(to_json({"message": message, **facts}), flush=True)

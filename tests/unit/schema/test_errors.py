"""The error tree is what its docstring draws, and every error is also a standard one."""

from __future__ import annotations

import builtins
import re

from rolltape.schema import errors
from rolltape.schema.errors import RolltapeError


def drawn_tree() -> list[tuple[str, str, str | None]]:
    """(name, parent, standard error) of every line of the drawing."""
    rows, parents = [], {0: "RolltapeError"}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"\s*([│├└─ ]*)── (\w+)(?: \((\w+)\))?", line)
        if match:
            depth = 1 + line[: match.start(2)].replace("    RolltapeError", "").count("│")
            rows.append((match.group(2), parents[depth - 1], match.group(3)))
            parents[depth] = match.group(2)
    return rows


def test_the_drawing_is_true() -> None:
    rows = drawn_tree()
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, RolltapeError) and value is not RolltapeError
    }
    assert {name for name, _, _ in rows} == defined
    for name, parent, standard in rows:
        error = getattr(errors, name)
        assert issubclass(error, getattr(errors, parent)), (name, parent)
        assert standard is None or issubclass(error, getattr(builtins, standard)), (name, standard)


def test_every_error_is_a_standard_one_too() -> None:
    standard = tuple(
        value for value in vars(builtins).values() if isinstance(value, type) and issubclass(value, Exception)
    )
    for name, _, _ in drawn_tree():
        bases = [base for base in getattr(errors, name).__mro__ if base in standard and base is not Exception]
        assert bases, f"{name} is caught by no standard except clause"

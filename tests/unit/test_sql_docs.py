"""The page about SQL is what is rendered, and its queries run."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from rolltape.store.docs import QUERIES, render_sql
from rolltape.store.projections import VIEW_NAMES
from rolltape.store.sources import TableSource
from rolltape.store.sql import query_source
from rolltape.store.statement import read_statement

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "sql.md"


def test_the_page_is_what_is_rendered() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_sql(), (
        "render it again: python -m rolltape.store.docs > docs/sql.md"
    )


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_queries_run(tape: Any, title: str, query: str) -> None:
    tape.rollout("t")
    assert title
    query_source(TableSource(tape.tables()), read_statement(query, VIEW_NAMES)).arrow()

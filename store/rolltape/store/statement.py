"""What a statement may be: one SELECT over the lake's views, read from DuckDB's own syntax tree (design §11).

Only what is on a list passes: the kinds of query nodes, the table functions, the names of tables. So a ``COPY … TO``, a
write inside a ``WITH``, a function that reads files or settings, or a path in place of a table never reach the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rolltape.schema.errors import SqlError, SqlRefusedError
from rolltape.store.duck import statement_kinds, syntax_tree

_QUERY_NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
_TABLE_REFS: Final = frozenset(
    {"BASE_TABLE", "SUBQUERY", "JOIN", "TABLE_FUNCTION", "EMPTY", "EMPTY_FROM", "EXPRESSION_LIST", "PIVOT", "CTE"}
)
_TABLE_FUNCTIONS: Final = frozenset({"range", "generate_series", "unnest", "repeat", "json_each", "json_tree"})
_REFUSED_FUNCTIONS: Final = frozenset({"current_setting", "getvariable", "write_log", "pg_sleep", "set_config"})
_FILTERS: Final = ("run_id", "trajectory_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement that may run.

    ``tables``: lower-case names of the views that it reads. ``run_ids`` and ``trajectory_ids``: what a plain
    ``WHERE trajectory_id = '…'`` (or ``IN``) over a single view restricts it to; None: no restriction that is
    understood. They only serve to read less: the engine applies the condition itself.
    """

    sql: str
    tables: frozenset[str]
    run_ids: frozenset[str] | None = None
    trajectory_ids: frozenset[str] | None = None


def read_statement(sql: str, views: Collection[str]) -> Statement:
    """Check ``sql`` against the lists and name what it reads.

    Raises:
        SqlError: it does not parse.
        SqlRefusedError: it is not a single SELECT, or names something else than ``views``.
    """
    _check_text(sql)
    kinds = statement_kinds(sql)
    if kinds != ["SELECT"]:
        came = "nothing" if not kinds else " and ".join(kinds) if len(kinds) < 4 else f"{len(kinds)} statements"
        raise SqlRefusedError(f"expected a single SELECT, got {came}; a lake is queried, never changed, by SQL")
    (root,) = syntax_tree(sql)
    return _checked(sql, root, views)


def _check_text(sql: str) -> None:
    """Text whose characters every parser on the way reads alike."""
    try:
        has_nul = b"\0" in sql.encode()
    except UnicodeEncodeError:
        raise SqlError("expected a statement in plain text, got half of a surrogate pair in it") from None
    if has_nul:
        raise SqlError("expected a statement in plain text, got a NUL in it")


def _checked(sql: str, root: dict[str, Any], views: Collection[str]) -> Statement:
    named_here = {key.lower() for node in _nodes(root) for key in _cte_names(node)}
    tables: list[str] = []
    for node in _nodes(root):
        _check_node(node)
        if node.get("type") == "BASE_TABLE":
            tables.append(_check_table(node, named_here, views))
    tables_read = frozenset(name for name in tables if name not in named_here or name in views)
    runs, trajectories = _restrictions(root) if len(tables) == 1 and not named_here else (None, None)
    return Statement(sql=sql, tables=tables_read, run_ids=runs, trajectory_ids=trajectories)


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every dictionary of the tree, the root first."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _cte_names(node: dict[str, Any]) -> Iterator[str]:
    for entry in (node.get("cte_map") or {}).get("map", ()):
        yield entry["key"]
    if node.get("type") in ("RECURSIVE_CTE_NODE", "CTE_NODE") and node.get("cte_name"):
        yield node["cte_name"]


def _check_node(node: dict[str, Any]) -> None:
    type_ = node.get("type")
    if not isinstance(type_, str):
        return
    if type_.endswith("_NODE") and type_ not in _QUERY_NODES:
        raise SqlRefusedError(f"expected a SELECT in every part of the statement, got {type_.split('_')[0]}")
    if type_.endswith("_REF") and type_ != "COLUMN_REF" and "class" not in node:
        raise SqlRefusedError(
            "expected tables that are views of the lake, got a DESCRIBE, SHOW or SUMMARIZE; "
            "SELECT * FROM view_columns lists every view and column"
        )
    if type_ == "TABLE_FUNCTION":
        name = str(node["function"]["function_name"]).lower()
        if name not in _TABLE_FUNCTIONS:
            allowed = ", ".join(sorted(_TABLE_FUNCTIONS))
            raise SqlRefusedError(f"expected one of the table functions {allowed}, got {name}()")
    if str(node.get("function_name", "")).lower() in _REFUSED_FUNCTIONS:
        raise SqlRefusedError(f"expected a function of the data alone, got {node['function_name']}()")
    # A table reference has an alias and a sample clause but no expression class; whatever is not listed is refused.
    if "sample" in node and "alias" in node and type_ not in _TABLE_REFS:
        raise SqlRefusedError(f"expected views of the lake, joins and sub-queries, got {type_}")


def _check_table(node: dict[str, Any], named_here: Collection[str], views: Collection[str]) -> str:
    name = str(node["table_name"]).lower()
    if node.get("schema_name") or node.get("catalog_name"):
        raise SqlRefusedError(
            f"expected the plain name of a view, got "
            f"{node['schema_name'] or node['catalog_name']}.{node['table_name']}; "
            "SELECT * FROM view_columns lists every view and column"
        )
    if name not in named_here and name not in views:
        near = difflib.get_close_matches(name, views, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "SELECT DISTINCT view FROM view_columns lists them"
        raise SqlRefusedError(f"expected a view of the lake, got {node['table_name']!r}; {hint}")
    return name


def _restrictions(root: dict[str, Any]) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    found: dict[str, frozenset[str]] = {}
    if root.get("type") == "SELECT_NODE" and (root.get("from_table") or {}).get("type") == "BASE_TABLE":
        for condition in _conjuncts(root.get("where_clause")):
            name, values = _equality(condition)
            if name in _FILTERS and values is not None:
                found[name] = found[name] & values if name in found else values
    return found.get("run_id"), found.get("trajectory_id")


def _conjuncts(condition: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if condition is None:
        return
    if condition.get("type") == "CONJUNCTION_AND":
        for child in condition["children"]:
            yield from _conjuncts(child)
    else:
        yield condition


def _equality(condition: dict[str, Any]) -> tuple[str, frozenset[str] | None]:
    """(column, values) of ``column = 'a'`` or ``column IN ('a', 'b')``; ("", None) of anything else."""
    if condition.get("type") == "COMPARE_EQUAL":
        left, *right = condition["left"], condition["right"]
    elif condition.get("type") == "COMPARE_IN":
        left, *right = condition["children"]
    else:
        return "", None
    if left.get("type") != "COLUMN_REF":
        return "", None
    values = [_string(item) for item in right]
    return left["column_names"][-1].lower(), None if None in values else frozenset(v for v in values if v is not None)


def _string(node: dict[str, Any]) -> str | None:
    text = (node.get("literal") or {}).get("text")
    return text if node.get("type") == "VALUE_CONSTANT" and node["literal"].get("kind") == "STRING" else None

"""``rolltape show``: one trajectory, token for token."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rolltape.recipes.commands._common import add_lake, open_lake

if TYPE_CHECKING:
    from rolltape.store.lake import Lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument("trajectory", metavar="TRAJECTORY", help="trajectory id, or a beginning of one that is unique")
    parser.add_argument("--tokens", action="store_true", help="one row a response token")


def run(options: argparse.Namespace) -> int:
    """Print the trajectory's attempts, segments, actions and (on request) tokens."""
    from rolltape.recipes.output import print_rows

    lake = open_lake(options.lake)
    trajectory = find(lake, options.trajectory)
    where = f"where trajectory_id = '{trajectory}' order by attempt"
    print_rows(_tall(_ask(lake, f"select * from trajectories {where}")), title=f"trajectory {trajectory}")
    columns = "attempt, segment_index, segment_kind, prompt_token_ids, response_token_ids"
    print_rows(_ask(lake, f"select {columns} from segments {where}, segment_index"), title="segments")
    print_rows(
        _ask(lake, f"select attempt, event_index, text from action_sampled {where}, event_index"), title="actions"
    )
    if options.tokens:
        columns = "* exclude (run_id, trajectory_id)"
        print_rows(_ask(lake, f"select {columns} from tokens {where}, segment_index, position"), title="tokens")
    return 0


def find(lake: Lake, beginning: str) -> str:
    """The id of the one trajectory that begins so.

    Raises:
        ConfigError: none does, or several do.
    """
    from rolltape.schema.errors import ConfigError

    if not beginning or not set(beginning.lower()) <= set("0123456789abcdef-"):
        raise ConfigError(f"expected a trajectory id (hexadecimal digits and dashes), got {beginning!r}")
    query = (
        f"select distinct trajectory_id from rollout_started where trajectory_id like '{beginning.lower()}%' limit 3"
    )
    found = [row["trajectory_id"] for row in _ask(lake, query)]
    if len(found) != 1:
        raise ConfigError(f"expected one trajectory that begins with {beginning!r}, found {len(found)}")
    return str(found[0])


def _ask(lake: Lake, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = lake.sql(query).arrow().to_pylist()
    return rows


def _tall(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a terminal one field a line; in a pipe the rows as they are."""
    from rolltape.recipes.output import is_terminal

    if not is_terminal():
        return rows
    return [
        {"attempt": row["attempt"], "field": key, "value": value}
        for row in rows
        for key, value in row.items()
        if value not in (None, [])
    ]

"""``rolltape show``: one trajectory, token for token."""

from __future__ import annotations

import argparse
from typing import Any

from rolltape.recipes.commands._common import add_lake, open_lake


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_lake(parser)
    parser.add_argument("trajectory", metavar="TRAJECTORY", help="trajectory id, or a beginning of one that is unique")
    parser.add_argument("--tokens", action="store_true", help="one row a response token")


def run(options: argparse.Namespace) -> int:
    """Print the trajectory's attempts, segments, rewards and (on request) tokens."""
    from rolltape.recipes.output import print_rows
    from rolltape.schema.errors import ConfigError

    lake = open_lake(options.lake)
    like = options.trajectory.replace("'", "").replace("%", "").replace("_", "")
    found = lake.sql(f"select * from trajectories where trajectory_id like '{like}%' order by trajectory_id, attempt").arrow().to_pylist()
    ids = sorted({row["trajectory_id"] for row in found})
    if len(ids) != 1:
        raise ConfigError(f"expected one trajectory that begins with {options.trajectory!r}, found {len(ids)}")
    print_rows([{key: value for key, value in row.items() if value is not None} for row in _tall(found)], title="trajectory")
    segments = lake.sql(
        "select attempt, segment_index, segment_kind, len(prompt_token_ids) as num_prompt_tokens, prompt_token_ids, "
        f"response_token_ids from segments where trajectory_id = '{ids[0]}' order by attempt, segment_index"
    )
    print_rows(segments.arrow().to_pylist(), title="segments")
    text = lake.sql(f"select attempt, event_index, text from action_sampled where trajectory_id = '{ids[0]}' order by attempt, event_index")
    print_rows(text.arrow().to_pylist(), title="actions")
    if options.tokens:
        tokens = lake.sql(f"select * exclude (run_id, trajectory_id) from tokens where trajectory_id = '{ids[0]}' order by attempt, segment_index, position")
        print_rows(tokens.arrow().to_pylist(), title="tokens")
    return 0


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

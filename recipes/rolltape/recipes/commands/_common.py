"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolltape.store.lake import Lake


def add_lake(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """``--lake``: path or URL."""
    parser.add_argument(
        "--lake", required=default is None, default=default, metavar="URL", help="path or URL of the lake"
    )


def add_log(parser: argparse.ArgumentParser) -> None:
    """``--log``: the Kafka log that events go through."""
    parser.add_argument(
        "--log",
        default="",
        metavar="URL",
        help="kafka://host1:9092,host2:9092/PREFIX (default: the lake itself is the log)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """``--run``: a run of the lake."""
    parser.add_argument("--run", metavar="ID", default="", help="run id (default: the only run that trained)")


def open_lake(url: str, *, read_only: bool = True) -> Lake:
    """Open the lake that a command names."""
    from rolltape.store.lake import Lake
    from rolltape.store.location import Location

    return Lake.open(Location.parse(url), read_only=read_only)


def the_run(lake: Lake, run_id: str) -> str:
    """``run_id``, or the lake's only training run.

    Raises:
        ConfigError: there is none, or more than one.
    """
    from rolltape.schema.errors import ConfigError

    if run_id:
        return run_id
    table = lake.read("run_started")
    purposes = table["run_started"].to_pylist()
    runs = sorted(
        {run for run, row in zip(table["run_id"].to_pylist(), purposes, strict=True) if row["purpose"] == "train"}
    )
    if len(runs) != 1:
        raise ConfigError(f"--run: expected the id of a run, the lake has {len(runs)}: {', '.join(runs) or 'none'}")
    return str(runs[0])

"""The soak: ``python -m tests.faults --rounds N --seed S [--rows NAME …]`` plays rows again and again with other seeds.

It starts three brokers, an S3 server and toxiproxy from ``ROLLTAPE_KAFKA_HOME``, ``ROLLTAPE_S3_SERVER`` and
``ROLLTAPE_TOXIPROXY``, prints a line of JSON a row as it goes, and the table at the end. The exit status is 1 if a row
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from tests.faults.servers import Servers
from tests.faults.stage import StageError
from tests.faults.table import ROWS, Result, Row, lines, play_row
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.fixtures import QUICK
from tests.servers.s3_server import S3Server
from tests.servers.toxiproxy import Toxiproxy


def main(arguments: list[str] | None = None) -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Play the table of faults.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each row is played")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round; the next ones count on")
    parser.add_argument("--rows", nargs="*", default=[row.name for row in ROWS], help="names of rows; all of them")
    parser.add_argument("--keep", type=Path, help="folder that keeps lakes, ledgers and logs")
    options = parser.parse_args(arguments)
    unknown = set(options.rows) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no rows {sorted(unknown)}; there are {[row.name for row in ROWS]}")
    chosen = [row for row in ROWS if row.name in options.rows]
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = _start(stack, folder, chosen)
        seeds = range(options.seed, options.seed + options.rounds)
        results = [_played(row, servers, folder / f"{row.name}-{seed}", seed) for seed in seeds for row in chosen]
    for line in lines(results):
        print(line)
    return 0 if all(result.ok for result in results) else 1


def _start(stack: ExitStack, folder: Path, rows: Iterable[Row]) -> Servers:
    needs = {name for row in rows for name in row.needs}
    s3 = S3Server(os.environ["ROLLTAPE_S3_SERVER"], folder / "s3") if "s3" in needs else None
    proxies = Toxiproxy(os.environ["ROLLTAPE_TOXIPROXY"], folder / "toxiproxy") if "toxiproxy" in needs else None
    cluster = KafkaCluster(os.environ["ROLLTAPE_KAFKA_HOME"], folder / "kafka", 3, QUICK, proxied=True)
    return Servers(
        cluster=stack.enter_context(cluster),
        s3=None if s3 is None else stack.enter_context(s3),
        toxiproxy=None if proxies is None else stack.enter_context(proxies),
    )


def _played(row: Row, servers: Servers, folder: Path, seed: int) -> Result:
    folder.mkdir(parents=True)
    try:
        result = play_row(row, servers, folder, seed)
    except StageError as error:
        result = Result(row=row.name, seed=seed, problems=[str(error)])
    print(json.dumps(result.to_json()), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())

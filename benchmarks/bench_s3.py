"""What a lake on S3 costs beside one on a disk: ``python benchmarks/bench_s3.py``, with ``ROLLTAPE_S3_SERVER`` set.

* ``commit``: one durable commit of four rollouts (two data files), median and worst of ``COMMITS``, on S3 (a server on
  this machine: what the network adds comes on top, two round trips a commit) and on the disk, by turns.
* ``requests``: what a commit asks of the store: the data files beside each other, then the version.
* ``flush``: an event recorded and proven to be in the lake by the embedded log.
* ``sql``: one statement over 2 × ``SQL_COMMITS`` data files: first (everything is fetched), then again with nothing in
  memory (mapped from the cache), and on the disk.

Prints one JSON line a case. Absolute times move with other programs on the machine; the ratios are of one run.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from tests.conftest import Feed
from tests.servers.s3_server import S3Server

from rolltape.ingest import Recorder, open_log
from rolltape.store import Lake, remote_dataset
from rolltape.store.cache import shared_cache
from rolltape.store.objects import Bucket
from rolltape.store.parquet import forget_footers

COMMITS = 200
FLUSHES = 100
SQL_COMMITS = 61
QUERY = "SELECT kind, count(*) AS n, sum(len(token_ids)) AS tokens FROM events GROUP BY kind ORDER BY kind"


def say(case: str, **figures: Any) -> None:
    print(json.dumps({"case": case, **figures}), flush=True)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_ms": round(statistics.median(ordered) * 1e3, 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1e3, 2),
        "worst_ms": round(ordered[-1] * 1e3, 2),
    }


def bench_commit(lakes: dict[str, Lake]) -> None:
    feeds = {name: Feed() for name in lakes}
    seconds: dict[str, list[float]] = {name: [] for name in lakes}
    for _ in range(COMMITS):
        for name, lake in lakes.items():
            work = feeds[name].commit()
            started = time.perf_counter()
            lake.append(*work)
            seconds[name].append(time.perf_counter() - started)
    for name, taken in seconds.items():
        say("commit", lake=name, commits=COMMITS, **milliseconds(taken))


def bench_requests(lake: Lake) -> None:
    counts: Counter[str] = Counter()
    kept = {name: getattr(Bucket, name) for name in ("get", "put", "put_if_absent", "list", "size_bytes", "delete")}
    for name, act in kept.items():

        def counted(self: Bucket, *words: Any, _name: str = name, _act: Any = act, **more: Any) -> Any:
            counts[_name] += 1
            return _act(self, *words, **more)

        setattr(Bucket, name, counted)
    feed = Feed()
    for _ in range(20):
        tables, _ = feed.commit()
        lake.append(tables, {})
    for name, act in kept.items():
        setattr(Bucket, name, act)
    say("requests", commits=20, **counts)


def bench_flush(url: str) -> None:
    with open_log(url) as log, Recorder(log, producer_id="bench", run_id="run") as recorder:
        seconds = []
        for _ in range(FLUSHES):
            started = time.perf_counter()
            recorder.record("alarm_raised", alarm="entropy_collapse")
            recorder.flush("logged")
            seconds.append(time.perf_counter() - started)
    say("flush", flushes=FLUSHES, **milliseconds(seconds))


def bench_sql(lakes: dict[str, Lake]) -> None:
    for name, lake in lakes.items():
        feed = Feed()
        for _ in range(SQL_COMMITS):
            lake.append(*feed.commit())
        for attempt in ("first", "again", "once more"):
            forget_footers()
            remote_dataset.forget_fragments()
            started = time.perf_counter()
            lake.sql(QUERY).rows()
            say("sql", lake=name, attempt=attempt, ms=round((time.perf_counter() - started) * 1e3, 1))
            shared_cache().settle()


def main() -> None:
    if not os.environ.get("ROLLTAPE_S3_SERVER"):
        print("NOT RUN: set ROLLTAPE_S3_SERVER to the program versitygw", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        os.environ["XDG_CACHE_HOME"], os.environ["XDG_STATE_HOME"] = str(root / "cache"), str(root / "state")
        with S3Server(os.environ["ROLLTAPE_S3_SERVER"], root / "server") as server:
            os.environ.update(server.options)
            lakes = {"s3": Lake.create(f"{server.bucket().url}/lake"), "disk": Lake.create(root / "disk")}
            bench_commit(lakes)
            bench_requests(Lake.create(f"{server.bucket().url}/lake"))
            bench_flush(Lake.create(f"{server.bucket().url}/lake").location.url)
            bench_sql({"s3": Lake.create(f"{server.bucket().url}/lake"), "disk": Lake.create(root / "sql")})


if __name__ == "__main__":
    main()

"""Faults of an object store: answers that are lost, refused or late; servers that die. Nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.servers.faulty_http import FaultyHttp
from tests.servers.s3_server import S3Server

from rolltape.ingest import Recorder
from rolltape.ingest.committer import CommitterOptions
from rolltape.ingest.embedded import EmbeddedLog
from rolltape.schema.errors import StoreUnreachableError
from rolltape.store import Lake
from rolltape.store.verify import verify

QUICK = {"timeout": "2", "connect_timeout": "0.5", "retry_timeout": "2"}


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> Iterator[int]:
    """A seed that a failing test prints."""
    number = random.SystemRandom().randrange(1 << 32)
    yield number
    print(f"seed {number}")


@pytest.fixture
def way(s3_server: S3Server, seed: int) -> Iterator[FaultyHttp]:
    """A proxy before the server that fails as told."""
    with FaultyHttp(s3_server.address, seed=seed) as proxy:
        yield proxy


def lake_through(way: FaultyHttp, s3_server: S3Server, **options: str) -> Lake:
    """A new lake that is reached through the proxy."""
    bucket = s3_server.bucket()
    return Lake.create(f"{bucket.url}/lake", options={**s3_server.options_through(way.listen), **options})


@pytest.mark.parametrize("fault", ["deny", "swallow_answers", "answer_503"])
def test_a_commit_whose_answer_is_lost_is_made_once(
    way: FaultyHttp, s3_server: S3Server, feed: Any, fault: str
) -> None:
    lake = lake_through(way, s3_server)
    for number in range(6):
        tables, transactions = feed.commit()
        # Data files go first: the third write is the version itself.
        getattr(way, fault)(next_requests=3, methods={"PUT"})
        commit = lake.append(tables, transactions)
        assert commit.version == number + 1
    assert sum(way.counts[name] for name in ("denied", "swallowed", "refused")) == 18
    way.clear()
    again = Lake.open(lake.location, read_only=True)
    assert again.snapshot().version == 6
    assert again.read("reward_assigned").num_rows == again.read("action_sampled").num_rows == 24
    assert again.snapshot().transactions == lake.snapshot().transactions


def test_two_committers_whose_answers_are_lost_never_both_win(way: FaultyHttp, s3_server: S3Server, feed: Any) -> None:
    first = lake_through(way, s3_server)
    second = Lake.open(first.location)
    way.swallow_answers(share=0.3, methods={"PUT"})
    for number in range(20):
        writer = (first, second)[number % 2]
        writer.append({}, {f"lane/{number}/1/rollout/0": number})
    first.append(*feed.commit())
    way.clear()
    newest = Lake.open(first.location, read_only=True).snapshot()
    assert newest.version == 21
    assert {app: version for app, version in newest.transactions.items() if app.endswith("/1/rollout/0")} == {
        "lane/p/1/rollout/0": 1,
        **{f"lane/{number}/1/rollout/0": number for number in range(20)},
    }
    assert way.counts["swallowed"]


def test_a_store_that_only_refuses_is_an_error_in_time_and_nothing_is_lost(
    way: FaultyHttp, s3_server: S3Server, feed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltape.store.transaction_log.UNCLEAR_S", 3.0)
    lake = lake_through(way, s3_server, **QUICK)
    tables, transactions = feed.commit()
    way.answer_503(share=1.0)
    started = time.monotonic()
    with pytest.raises(StoreUnreachableError, match="did not answer in time"):
        lake.append(tables, transactions)
    with pytest.raises(StoreUnreachableError):
        lake.snapshot()
    assert time.monotonic() - started < 60
    way.clear()
    lake.append(tables, transactions)
    assert Lake.open(lake.location).read("reward_assigned").num_rows == 4


def test_an_unclear_commit_that_did_arrive_is_found_by_the_next_look(
    way: FaultyHttp, s3_server: S3Server, feed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolltape.store.transaction_log.UNCLEAR_S", 0.0)
    lake = lake_through(way, s3_server, **QUICK)
    _, transactions = feed.commit()
    # The write is done, and every answer to it denies that; whoever then asks for it hears 503 too.
    way.decide = lambda method: "denied" if method == "PUT" else "refused"  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError):
        lake.append({}, transactions)
    del way.decide
    assert lake.snapshot().transactions.items() >= transactions.items()
    assert lake.snapshot().version == 1


def test_a_server_that_is_killed_again_and_again_loses_and_doubles_nothing(s3_server: S3Server, seed: int) -> None:
    """Writers go on beside a server that dies; what was acknowledged as logged is there, once."""
    chance = random.Random(seed)
    bucket = s3_server.bucket()
    lake = Lake.create(f"{bucket.url}/lake", options=bucket.options)
    acknowledged: list[str] = []
    struck = 0
    with (
        EmbeddedLog(lake, "thread", options=CommitterOptions(maintenance=False)) as log,
        Recorder(log, producer_id="p", run_id="run") as recorder,
        _written(recorder, acknowledged) as writing,
    ):
        while struck < 8:
            time.sleep(chance.uniform(0.1, 0.5))
            s3_server.kill()
            struck += 1
            time.sleep(chance.uniform(0.0, 0.4))
            s3_server.start()
        writing.set()
    lake = Lake.open(lake.location)
    found = lake.read("alarm_raised")["event_id"].to_pylist()
    assert len(found) == len(set(found))
    assert set(acknowledged) == set(found)
    assert len(acknowledged) > 50
    report = verify(lake)
    assert report.ok, report.to_rows()


@contextlib.contextmanager
def _written(recorder: Recorder, acknowledged: list[str]) -> Iterator[threading.Event]:
    """Record beside the caller until the event is set; note what was proven to be logged."""
    stop, errors = threading.Event(), []

    def write() -> None:
        try:
            while not stop.is_set():
                ids = [recorder.record("alarm_raised", alarm="entropy_collapse") for _ in range(5)]
                recorder.flush("logged", timeout_s=120)
                acknowledged.extend(ids)
        except Exception as error:  # noqa: BLE001 (raised by the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(150)
    assert not errors, errors


def test_a_paused_server_delays_a_commit_and_no_more(s3_server: S3Server, feed: Any) -> None:
    bucket = s3_server.bucket()
    lake = Lake.create(f"{bucket.url}/lake", options={**bucket.options, "timeout": "1", "connect_timeout": "0.5"})
    lake.append(*feed.commit())
    s3_server.pause()
    resume = threading.Timer(4.0, s3_server.resume)
    resume.start()
    try:
        lake.append(*feed.commit())
    finally:
        resume.join()
    assert Lake.open(lake.location).read("reward_assigned").num_rows == 8

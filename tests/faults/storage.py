"""Faults of where the lake lies: a full disk, and an S3 server that dies, is slow, refuses, or loses its answers."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from tests.faults.servers import Servers
from tests.faults.stage import Place, Stage, local_place
from tests.servers.faulty_http import DENIED, REFUSED, SWALLOWED, FaultyHttp
from tests.servers.toxiproxy import Proxy

_DISK: Final = "192m"
_FULL_S: Final = 4.0
_FEW: Final = 3


# A full disk


@contextmanager
def small_disk(folder: Path, servers: Servers) -> Iterator[Place]:
    """A lake on a disk of its own where this user may mount one, else on the common one."""
    place = local_place(folder)
    place.table.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "rolltape-faults", str(place.table)],
        capture_output=True,
        check=False,
    )
    try:
        yield place
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(place.table)], check=True)


@contextmanager
def _no_room(stage: Stage) -> Iterator[None]:
    """The lake's disk is full inside; where it is not a disk of its own, the sink's files cannot grow."""
    disk = stage.place.table
    if os.path.ismount(disk):
        filler = disk / "filler"
        with filler.open("wb") as file, suppress(OSError):
            while True:
                file.write(b"\0" * (1 << 16))
                file.flush()
        yield
        filler.unlink()
        return
    pid = stage.sinks["sink-0"].pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, hard))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


def fill_disk(stage: Stage, servers: Servers) -> None:
    """The sink finds no room for some seconds, twice; producers go on, and so does the sink when there is room."""
    stage.start()
    for share in (0.2, 0.5):
        stage.until_sinking(share)
        full = _no_room(stage)
        stage.strike(full.__enter__, share=share)
        time.sleep(0.5)
        before = stage.num_archived()
        time.sleep(_FULL_S)
        if stage.num_archived() > before:
            stage.problems.append("the sink archived something on a full disk: the fault did not strike")
        if not stage.sinks["sink-0"].is_alive:
            stage.problems.append("the sink died of a full disk")
        full.__exit__(None, None, None)
        stage.until_archiving(before)
    stage.settle()


# An S3 server


@contextmanager
def bucket(folder: Path, servers: Servers) -> Iterator[Place]:
    """A lake in a bucket of its own."""
    made = servers.objects.bucket()
    name = made.url.removeprefix("s3://")
    yield Place(url=f"{made.url}/lake", table=servers.objects.objects / name / "lake", environment=dict(made.options))


def _behind(place: Place, servers: Servers, way: Proxy | FaultyHttp) -> Place:
    return Place(
        way=way,
        url=place.url,
        table=place.table,
        environment=servers.objects.options_through(way.listen),
        direct=servers.objects.options,
    )


@contextmanager
def bucket_behind_toxiproxy(folder: Path, servers: Servers) -> Iterator[Place]:
    """The same, which our processes reach through a proxy."""
    proxy = servers.proxies.proxy(f"s3-{folder.name}", servers.objects.address)
    with bucket(folder, servers) as place:
        yield _behind(place, servers, proxy)
    proxy.remove()


@contextmanager
def bucket_behind_faulty_http(folder: Path, servers: Servers) -> Iterator[Place]:
    """The same through a proxy that refuses requests and swallows answers."""
    with FaultyHttp(servers.objects.address, seed=1) as front, bucket(folder, servers) as place:
        yield _behind(place, servers, front)


def kill_s3(stage: Stage, servers: Servers) -> None:
    """The server dies every second or so while the sink commits; what it acknowledged it keeps."""
    stage.pace(0.6)
    stage.start()
    stage.until_sinking(0.1)
    stage.flow()
    try:
        while stage.standing().acknowledged < 0.8 * stage.num_planned:
            stage.strike(servers.objects.kill)
            time.sleep(stage.chance.uniform(0.05, 0.4))
            servers.objects.start()
            time.sleep(stage.chance.uniform(0.3, 1.2))
    finally:
        servers.objects.start()
    stage.settle()


def slow_s3(stage: Stage, servers: Servers) -> None:
    """Each answer takes 100 to 500 ms more, then requests trickle, then all is well."""
    way = stage.place.way
    assert isinstance(way, Proxy)
    stage.start()
    stage.until_sinking(0.15)
    stage.strike(lambda: way.slow(300, 200), share=0.15)
    stage.until_sinking(0.5)
    stage.strike(lambda: way.narrow(500), share=0.5)
    stage.until_sinking(0.8)
    way.clear()
    stage.settle()


def refuse_s3(stage: Stage, servers: Servers) -> None:
    """A third of all requests get 503; then writes happen whose answer says 503; then some whose answer never comes."""
    way = stage.place.way
    assert isinstance(way, FaultyHttp)
    stage.pace(0.7)
    stage.start()
    stage.until_sinking(0.1)
    stage.flow()
    for fault, arm in ((REFUSED, way.answer_503), (DENIED, way.deny), (SWALLOWED, way.swallow_answers)):
        stage.strike(partial(arm, share=0.3))
        stage.until(partial(_struck, way, fault), f"requests that are {fault}")
        way.clear()
    stage.settle()


def _struck(way: FaultyHttp, fault: str) -> bool:
    return way.counts[fault] >= _FEW

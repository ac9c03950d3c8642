"""Faults of the network between producers and brokers; the sink reaches the brokers by another way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from tests.faults.servers import Servers
from tests.faults.stage import Stage
from tests.servers.toxiproxy import Proxy


@contextmanager
def _behind_proxies(stage: Stage, servers: Servers) -> Iterator[list[Proxy]]:
    """Writers of the stage reach each broker through a proxy, which the broker advertises."""
    proxies = list(servers.cluster.proxies(servers.proxies).values())
    stage.writer_bootstrap = servers.cluster.proxied_bootstrap
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.remove()


def _each(proxies: Iterable[Proxy], act: Callable[[Proxy], None]) -> None:
    for proxy in proxies:
        act(proxy)


def cut(stage: Stage, servers: Servers) -> None:
    """All connections end for some seconds; later each breaks in the middle of a request."""
    with _behind_proxies(stage, servers) as proxies:
        stage.start()
        stage.strike(partial(_each, proxies, Proxy.cut), share=0.2)
        time.sleep(stage.chance.uniform(3.0, 6.0))
        for proxy in proxies:
            proxy.mend()
        stage.strike(partial(_each, proxies, lambda proxy: proxy.cut_after(stage.chance.randint(1, 60_000))), share=0.5)
        time.sleep(stage.chance.uniform(1.0, 3.0))
        for proxy in proxies:
            proxy.clear()
        stage.settle()


def swallow_answers(stage: Stage, servers: Servers) -> None:
    """The brokers take everything and the producers hear nothing of it, for longer than their request timeout."""
    stage.options = {"request_timeout_s": "3", "delivery_timeout_s": "6"}
    with _behind_proxies(stage, servers) as proxies:
        stage.start()
        stage.strike(partial(_each, proxies, Proxy.swallow_answers), share=0.25)
        time.sleep(stage.chance.uniform(4.0, 9.0))
        for proxy in proxies:
            # Connections whose answers were swallowed stay deaf: they end with the cut.
            proxy.clear()
        stage.settle()

"""toxiproxy: connections that can be cut, slowed and made to swallow answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.servers.process import Server, ServerError, ServerProcess, free_port, is_open


class Proxy:
    """One way through the network: clients connect to :attr:`listen` and reach ``upstream``."""

    def __init__(self, server: Toxiproxy, name: str, listen: str, upstream: str) -> None:
        """Use :meth:`Toxiproxy.proxy`."""
        self.name = name
        self.listen = listen
        self.upstream = upstream
        self._server = server

    def cut(self) -> None:
        """End all connections and refuse new ones, until :meth:`mend`."""
        self._server.call("POST", f"/proxies/{self.name}", {"enabled": False})

    def mend(self) -> None:
        """Take connections again."""
        self._server.call("POST", f"/proxies/{self.name}", {"enabled": True})

    def swallow_answers(self) -> None:
        """Requests arrive, answers vanish, until :meth:`clear`."""
        self.toxic("timeout", "downstream", timeout=0)

    def swallow_requests(self) -> None:
        """Requests vanish, until :meth:`clear`."""
        self.toxic("timeout", "upstream", timeout=0)

    def slow(self, latency_ms: int, jitter_ms: int = 0) -> None:
        """Delay answers by ``latency_ms`` ± ``jitter_ms`` milliseconds, until :meth:`clear`."""
        self.toxic("latency", "downstream", latency=latency_ms, jitter=jitter_ms)

    def narrow(self, kilobytes_per_s: int) -> None:
        """Bound the rate of requests, until :meth:`clear`."""
        self.toxic("bandwidth", "upstream", rate=kilobytes_per_s)

    def cut_after(self, num_bytes: int) -> None:
        """Close each connection after so many bytes of requests: in the middle of one, until :meth:`clear`."""
        self.toxic("limit_data", "upstream", bytes=num_bytes)

    def toxic(self, kind: str, stream: str, **attributes: int) -> None:
        """Add a toxic of any kind (toxiproxy's own names) to the ``upstream`` or ``downstream`` of this proxy."""
        body = {"name": f"{kind}_{stream}", "type": kind, "stream": stream, "attributes": attributes}
        self._server.call("POST", f"/proxies/{self.name}/toxics", body)

    def clear(self) -> None:
        """Take all toxics away."""
        for toxic in self._server.call("GET", f"/proxies/{self.name}/toxics"):
            self._server.call("DELETE", f"/proxies/{self.name}/toxics/{toxic['name']}")

    def remove(self) -> None:
        """End the proxy and its connections."""
        self._server.call("DELETE", f"/proxies/{self.name}")


class Toxiproxy(Server):
    """The server that holds the proxies; use it as a context manager."""

    def __init__(self, program: Path | str, folder: Path) -> None:
        """``program`` is the toxiproxy-server; its log goes to ``folder``."""
        self.port = free_port()
        command = [str(program), "-host", "127.0.0.1", "-port", str(self.port)]
        self.process = ServerProcess("toxiproxy", command, folder / "toxiproxy.out")

    def start(self) -> None:
        """Start it; returns once it answers. It has no proxies then."""
        self.process.start()
        self.process.wait_until(lambda: is_open(self.port), 30)

    def proxy(self, name: str, upstream: str, listen: str | None = None) -> Proxy:
        """A new way to ``upstream`` (host:port), at ``listen`` or at a free port."""
        body = {"name": name, "listen": listen or f"127.0.0.1:{free_port()}", "upstream": upstream, "enabled": True}
        answer = self.call("POST", "/proxies", body)
        return Proxy(self, name, answer["listen"], upstream)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request to the server's own interface; its answer as Python values."""
        data = None if body is None else json.dumps(body).encode()
        # It refuses whatever looks like a browser.
        headers = {"User-Agent": "rolltape-tests", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, method=method, headers=headers
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(f"toxiproxy refused {method} {path} {body}: {error.read().decode()}") from error
        return json.loads(text) if text else None

"""An HTTP proxy that answers 503 in a server's place, or swallows the server's answer after the deed was done.

For S3 servers: what a client signed stays as it is, so requests pass through untouched.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import random
import socket
import sys
import threading
from collections import Counter
from collections.abc import Collection
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, Self

from tests.servers.process import free_port

PASSED: Final = "passed"
REFUSED: Final = "refused"
DENIED: Final = "denied"
SWALLOWED: Final = "swallowed"


class _Answer(NamedTuple):
    """What a server says to a request."""

    status: int
    headers: list[tuple[str, str]]
    content: bytes


_SLOW_DOWN: Final = _Answer(
    503,
    [("Content-Type", "application/xml")],
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
)
_HOP_BY_HOP: Final = frozenset({"connection", "keep-alive", "transfer-encoding"})
_WRITES: Final = frozenset({"PUT", "POST", "DELETE"})
_READS: Final = frozenset({"GET", "HEAD"})


class FaultyHttp:
    """The proxy, in threads of this process; use it as a context manager.

    Attributes:
        listen: where clients connect, host:port.
        counts: how many requests so far were ``passed``, ``refused`` (503, nothing reached the server), ``denied``
            (503, though the server did it) or ``swallowed`` (no answer, though the server did it).
    """

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        """Before ``upstream`` (host:port); ``seed`` chooses the requests that are struck."""
        self.listen = f"127.0.0.1:{free_port()}"
        self.counts: Counter[str] = Counter()
        self._upstream = upstream
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._share: dict[str, float] = {}
        self._next: dict[str, int] = {}
        self._methods: frozenset[str] = _WRITES

    def answer_503(
        self, *, share: float = 0.0, next_requests: int = 0, methods: Collection[str] = _WRITES | _READS
    ) -> None:
        """Refuse a share of the requests, or the next ones, with 503 SlowDown; nothing of them reaches the server."""
        self._arm(REFUSED, share, next_requests, methods)

    def deny(self, *, share: float = 0.0, next_requests: int = 0, methods: Collection[str] = _WRITES) -> None:
        """Let a share of the writes, or the next ones, reach the server, and answer 503 SlowDown all the same."""
        self._arm(DENIED, share, next_requests, methods)

    def swallow_answers(
        self, *, share: float = 0.0, next_requests: int = 0, methods: Collection[str] = _WRITES
    ) -> None:
        """Let a share of the writes, or the next ones, reach the server, and hang up in place of its answer."""
        self._arm(SWALLOWED, share, next_requests, methods)

    def clear(self) -> None:
        """Pass everything."""
        with self._lock:
            self._share.clear()
            self._next.clear()
            self._methods = _WRITES

    def _arm(self, fault: str, share: float, next_requests: int, methods: Collection[str]) -> None:
        with self._lock:
            self._share[fault], self._next[fault] = share, next_requests
            self._methods = frozenset(methods)

    def decide(self, method: str) -> str:
        """What happens to a request: one of the names of ``counts``."""
        with self._lock:
            fault = self._fault() if method in self._methods else PASSED
            self.counts[fault] += 1
            return fault

    def _fault(self) -> str:
        for fault, share in self._share.items():
            if self._next[fault] > 0:
                self._next[fault] -= 1
                return fault
            if self._random.random() < share:
                return fault
        return PASSED

    def forward(self, method: str, target: str, headers: list[tuple[str, str]], body: bytes) -> _Answer:
        """The server's answer to a request."""
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(body or None)
            with connection.getresponse() as answer:
                return _Answer(answer.status, answer.getheaders(), answer.read())

    def __enter__(self) -> Self:
        host, _, port = self.listen.partition(":")
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server((host, int(port)), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.close_connections()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    """Threads for connections, which are ended with the proxy."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        for connection in list(self._open):
            super().shutdown_request(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or a server that did, is what faults are about; anything else is printed."""
        if not isinstance(sys.exception(), OSError | http.client.HTTPException):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    proxy: ClassVar[FaultyHttp]
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline:
            self.close_connection = True
            return
        if self.parse_request():
            self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Nothing: the server keeps its own log."""

    def _answer(self) -> None:
        body = self._body()
        fate = self.proxy.decide(self.command)
        if fate == REFUSED:
            self._send(_SLOW_DOWN)
            return
        answer = self.proxy.forward(self.command, self.path, list(self.headers.items()), body)
        if fate == SWALLOWED:
            self.close_connection = True
        elif fate == DENIED:
            self._send(_SLOW_DOWN)
        else:
            kept = [(name, value) for name, value in answer.headers if name.lower() not in _HOP_BY_HOP]
            self._send(answer._replace(headers=kept))

    def _body(self) -> bytes:
        """The request's body as it is on the wire, chunks with their frames."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts: list[bytes] = []
        size = -1
        while size != 0:
            parts.append(self.rfile.readline())
            size = int(parts[-1].split(b";")[0], 16)
            parts.append(self.rfile.read(size) if size else b"")
            parts.append(self.rfile.readline())
        # Trailers end with an empty line, which may be the one that was just read.
        while parts[-1].strip():
            parts.append(self.rfile.readline())
        return b"".join(parts)

    def _send(self, answer: _Answer) -> None:
        self.send_response_only(answer.status)
        names = {name.lower() for name, _ in answer.headers}
        for name, value in answer.headers:
            self.send_header(name, value)
        if "content-length" not in names and answer.status != http.HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)
        self.wfile.flush()

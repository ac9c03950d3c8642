"""Object stores: buckets of S3 (and of what else Apache Arrow's ``object_store`` reaches), through ``obstore``.

The only module that imports ``obstore``. One request is one call here; failed ones are made again with back-off for a
bounded time, which the client does by itself. What a store says is raised as what it means: nothing there, not allowed,
not reachable. Its runtime does not survive ``fork``: start processes with ``spawn``.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import os
import pathlib
import re
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

import obstore
import pyarrow as pa
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store, from_url

from rolltape.schema.errors import ConfigError, StoreAccessError, StoreError, StoreUnreachableError
from rolltape.store import credentials
from rolltape.store.cache import shared_cache
from rolltape.store.credentials import Credentials

if TYPE_CHECKING:
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig, S3Config, S3Credential, S3CredentialProvider

_Store: TypeAlias = S3Store | GCSStore | AzureStore

_LIMITS: Final = (("timeout", 30.0), ("connect_timeout", 3.0), ("retry_timeout", 30.0))
MAX_RETRIES: Final = 60
_BACKOFF: Final[BackoffConfig] = {
    "init_backoff": dt.timedelta(milliseconds=50),
    "max_backoff": dt.timedelta(seconds=1),
    "base": 2,
}

# Larger reads and writes go in parts of this size, several at once: no single request takes long.
PART_BYTES: Final = 8 << 20
PARTS_AT_ONCE: Final = 4

_CODE: Final = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_ABSENT: Final = frozenset({"NoSuchKey", "404", ""})
_REFUSED: Final = frozenset({"401", "403"})
_METADATA_SERVICE: Final = "169.254.169.254"


class ObjectInfo(NamedTuple):
    """One object: its key, its size in bytes, and when it was written (seconds since the epoch, the store's clock)."""

    key: str
    size_bytes: int
    modified_s: float


class Bucket:
    """One bucket of an object store. Safe to share between threads; not between a process and its forked child."""

    def __init__(self, url: str, store: _Store, found: Credentials | None = None, retry_s: float = 0.0) -> None:
        """Use :func:`open_bucket`."""
        self._retry_s = retry_s
        self.url = url
        self._store = store
        self._credentials = found
        self._pid = os.getpid()

    # Reading

    def get(self, key: str) -> pa.Buffer:
        """All bytes of an object.

        Raises:
            FileNotFoundError: there is none.
            StoreAccessError, StoreUnreachableError: as the store says.
        """
        with self._errors(key):
            result = obstore.get(self._store, key)
            size = result.meta["size"]
            if size <= PART_BYTES:
                return pa.py_buffer(result.bytes())
        return self._get_parts(key, size)

    def get_range(self, key: str, start: int, end: int) -> pa.Buffer:
        """Bytes ``start`` to ``end`` (exclusive) of an object."""
        with self._errors(key):
            return pa.py_buffer(obstore.get_range(self._store, key, start=start, end=end))

    def _get_parts(self, key: str, size: int) -> pa.Buffer:
        with self._errors(key):
            starts = list(range(0, size, PART_BYTES))
            ends = [min(size, start + PART_BYTES) for start in starts]
            parts = obstore.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=0)
        whole = pa.allocate_buffer(size)
        target = memoryview(whole).cast("B")
        for start, part in zip(starts, parts, strict=True):
            target[start : start + len(part)] = memoryview(part)
        return whole

    def size_bytes(self, key: str) -> int | None:
        """Size of an object, None where there is none."""
        try:
            with self._errors(key):
                return int(obstore.head(self._store, key)["size"])
        except FileNotFoundError:
            return None

    def list(self, prefix: str, *, recursive: bool = False) -> list[ObjectInfo]:
        """Objects whose key begins with ``prefix`` and a slash, by key."""
        with self._errors(prefix):
            if recursive:
                found = obstore.list(self._store, prefix or None, chunk_size=1000).collect()
            else:
                found = obstore.list_with_delimiter(self._store, prefix or None)["objects"]
        infos = [ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in found]
        return sorted(infos)

    def has_any(self, prefix: str) -> bool:
        """Whether there is an object whose key begins with ``prefix`` and a slash."""
        with self._errors(prefix):
            return any(obstore.list(self._store, prefix or None, chunk_size=1))

    # Writing

    def put(self, key: str, data: Any) -> None:
        """Write an object as one act; large ones in parts. A request that got no answer is made again."""
        deadline = time.monotonic() + self._retry_s
        while True:
            try:
                with self._errors(key, writing=True):
                    obstore.put(self._store, key, _view(data), chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)
            except StoreUnreachableError:
                # The client makes refused requests again by itself, but not writes that ran out of time.
                if time.monotonic() >= deadline:
                    raise
                continue
            return

    def put_if_absent(self, key: str, data: Any) -> bool:
        """Write an object unless there is one; tells whether it did.

        False also where an answer was lost and the request was made again: compare the bytes to know whose they are.
        """
        try:
            with self._errors(key, writing=True):
                obstore.put(self._store, key, _view(data), mode="create")
        except FileExistsError:
            return False
        return True

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there do no harm."""
        if not keys:
            return
        with contextlib.suppress(FileNotFoundError), self._errors(keys[0], writing=True):
            obstore.delete(self._store, list(keys))

    # For others

    def read_unchanging(self, key: str, size_bytes: int | None = None) -> tuple[pa.Buffer, bool]:
        """An object that is never written over, and whether it is mapped from the local cache (else: in memory)."""
        size = self.size_bytes(key) if size_bytes is None else size_bytes
        if size is None:
            raise FileNotFoundError(f"there is no {self.url}/{key}")
        fetch = self.get if size <= PART_BYTES else functools.partial(self._get_parts, size=size)
        return shared_cache().read(f"{self.url}/{key}", size, lambda: fetch(key))

    def options(self) -> dict[str, str]:
        """Storage options under the names that delta-rs uses, with the key of this moment. Never printed."""
        if self._credentials is None:
            return {}
        options = dict(self._credentials.options)
        key = self._credentials.current()
        if key is not None:
            options[credentials.KEY], options[credentials.SECRET] = key.access_key_id, key.secret
            if key.token:
                options[credentials.TOKEN] = key.token
        return options

    @contextlib.contextmanager
    def _errors(self, key: str, *, writing: bool = False) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.url} was opened before this process was forked, and its connections do not survive that; "
                "start processes with the 'spawn' method"
            )
        try:
            yield
        except FileNotFoundError as error:
            raise self._absent(key, str(error)) from None
        except exceptions.AlreadyExistsError:
            raise FileExistsError(f"{self.url}/{key}") from None
        except exceptions.UnauthenticatedError as error:
            said = _short(str(error)).rpartition(f"{StoreAccessError.__name__}: ")[2]
            raise StoreAccessError(f"{self.url}: {said}") from None
        except (exceptions.BaseError, ValueError, OSError) as error:
            raise self._failed(key, str(error), writing=writing) from None

    def _absent(self, key: str, said: str) -> Exception:
        """A 404: no such object, or nothing at all there."""
        code, message = _what_it_says(said)
        if code in _ABSENT:
            return FileNotFoundError(f"there is no {self.url}/{key}")
        return self._refused(code, message)

    def _failed(self, key: str, said: str, *, writing: bool) -> StoreError:
        code, message = _what_it_says(said)
        status = _STATUS.search(said)
        number = status.group(1) if status else ""
        if _METADATA_SERVICE in said:
            return StoreAccessError(f"{credentials.NO_CREDENTIALS} ({self.url}; this machine's own service has none)")
        if code == "AccessDenied" and writing:
            return StoreAccessError(
                f"{self.url} may not be written with these credentials ({code}: {message}); open the lake with "
                "read_only=True, or use other credentials"
            )
        if number in _REFUSED or number == "404" or code in {"NoSuchBucket", "SignatureDoesNotMatch"}:
            return self._refused(code or number, message)
        if number.startswith("4") and number not in {"408", "409", "429"}:
            return StoreError(f"{self.url} refused {key!r}: {code or number} {message}".rstrip())
        return StoreUnreachableError(
            f"{self.url} did not answer in time ({_short(said)}); nothing acknowledged was lost: look at the end "
            "point, the network and the store, and try again"
        )

    def _refused(self, code: str, message: str) -> StoreAccessError:
        if code == "NoSuchBucket":
            return StoreAccessError(f"there is no bucket {self.url}; make it, or correct the URL or the end point")
        return StoreAccessError(
            f"{self.url} refused the credentials ({code}{': ' if message else ''}{message}); look at AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or at AWS_PROFILE"
        )

    def __repr__(self) -> str:
        return f"Bucket({self.url!r})"


class _Limits(NamedTuple):
    """Seconds: for one request, for a connection, and for all tries of a request together."""

    request: float
    connect: float
    retry: float


_BUCKETS: Final[dict[tuple[Hashable, ...], Bucket]] = {}
_BUCKETS_LOCK: Final = threading.Lock()


def open_bucket(url: str, given: Mapping[str, str] | None = None) -> Bucket:
    """The bucket (or container) that ``url`` names, without a path; one client a process for each set of options.

    ``timeout``, ``connect_timeout`` and ``retry_timeout`` among ``given`` (seconds) replace the usual ones.

    Raises:
        StoreAccessError: a profile that is named is not there.
        ConfigError: an option that the store does not know, or half a key.
    """
    options = dict(given or {})
    limits = _Limits(*(_seconds(options, *limit) for limit in _LIMITS))
    found = credentials.resolve(options) if url.startswith("s3://") else None
    known = options if found is None else found.options
    key = (os.getpid(), url, limits, tuple(sorted(known.items())), found and (found.key, found.process))
    with _BUCKETS_LOCK:
        if key not in _BUCKETS:
            _BUCKETS[key] = Bucket(url, _open_store(url, known, found, limits), found, limits.retry)
        return _BUCKETS[key]


def _seconds(options: dict[str, str], name: str, usual: float) -> float:
    text = options.pop(name, usual)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}: expected seconds, got {text!r}") from None


def _open_store(url: str, options: Mapping[str, str], found: Credentials | None, limits: _Limits) -> _Store:
    timeout, connect, retry = (dt.timedelta(seconds=limit) for limit in limits)
    client: ClientConfig = {"timeout": timeout, "connect_timeout": connect}
    bundle = options.get("AWS_CA_BUNDLE")
    if bundle:
        try:
            client["root_certificate"] = pathlib.Path(bundle).read_bytes()
        except OSError as error:
            raise ConfigError(f"AWS_CA_BUNDLE: expected a file of certificates (PEM), got {bundle}: {error}") from error
    again: RetryConfig = {"max_retries": MAX_RETRIES, "retry_timeout": retry, "backoff": _BACKOFF}
    try:
        if found is None:
            return cast("_Store", from_url(url, config=cast("Any", options), client_options=client, retry_config=again))
        client["allow_http"] = options.get(credentials.ALLOW_HTTP, "").lower() == "true"
        config: S3Config = {"region": options[credentials.REGION]}
        if credentials.ENDPOINT in options:
            config["endpoint"] = options[credentials.ENDPOINT]
        provider = _provider(found) if found.key or found.process else None
        bucket = url.removeprefix("s3://")
        return S3Store(bucket, config=config, client_options=client, retry_config=again, credential_provider=provider)
    except (exceptions.BaseError, ValueError) as error:
        raise ConfigError(f"expected options that {url} can be opened with: {_short(str(error))}") from None


def _provider(found: Credentials) -> S3CredentialProvider:
    def provide() -> S3Credential:
        key = found.current()
        assert key is not None
        return {
            "access_key_id": key.access_key_id,
            "secret_access_key": key.secret,
            "token": key.token,
            "expires_at": key.expires_at,
        }

    return provide


def _what_it_says(said: str) -> tuple[str, str]:
    """Code and message of a store's answer; empty where it gave none. The rest of it may quote a key: never shown."""
    match = _CODE.search(said)
    return (match.group(1), match.group(2) or "") if match else ("", "")


def _short(said: str) -> str:
    return said.split("\n", 1)[0][:200]


def _view(data: Any) -> memoryview:
    return memoryview(data).cast("B")

"""A real S3 server (versitygw) over a folder of this machine."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers.process import Server, ServerProcess, free_port, is_open

_ACCESS_KEY = "rolltape"
_SECRET_KEY = "rolltape-tests-only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket of an S3 server.

    Attributes:
        url: ``s3://name``.
        options: storage options, which are also the environment variables of programs that find the bucket.
    """

    url: str
    options: Mapping[str, str] = field(repr=False)


class S3Server(Server):
    """versitygw; use it as a context manager. Its objects lie below ``folder`` and survive a kill.

    Args:
        program: the server's program.
        folder: objects and log.
        port: where it listens; a free one unless told.
    """

    def __init__(self, program: Path | str, folder: Path, port: int | None = None) -> None:
        """Nothing runs before the context is entered, or :meth:`start`."""
        self.port = port or free_port()
        self.objects = folder / "objects"
        self.objects.mkdir(parents=True, exist_ok=True)
        command = [str(program), "--port", f"127.0.0.1:{self.port}", "posix"]
        if not _has_extended_attributes(self.objects):
            (folder / "metadata").mkdir(exist_ok=True)
            command += ["--sidecar", str(folder / "metadata")]
        keys = {"ROOT_ACCESS_KEY": _ACCESS_KEY, "ROOT_SECRET_KEY": _SECRET_KEY}
        self.process = ServerProcess("versitygw", [*command, str(self.objects)], folder / "versitygw.out", keys)

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """Storage options of this server."""
        return self.options_through(self.address)

    def options_through(self, address: str) -> dict[str, str]:
        """Storage options of clients that reach this server through a proxy at ``address`` (host:port)."""
        return {
            "AWS_ENDPOINT_URL": f"http://{address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
        }

    def bucket(self, name: str | None = None) -> Bucket:
        """A new bucket, or the one of this name."""
        name = name or f"test-{uuid.uuid4().hex[:16]}"
        (self.objects / name).mkdir(exist_ok=True)
        return Bucket(url=f"s3://{name}", options=self.options)

    def start(self) -> None:
        """Start it, or start it again on its objects; returns once it answers."""
        self.process.start()
        self.process.wait_until(lambda: is_open(self.port), 30)


def _has_extended_attributes(folder: Path) -> bool:
    """Whether objects can carry their metadata; elsewhere the server keeps it in files beside them."""
    probe = folder.parent / "probe"
    probe.touch()
    try:
        os.setxattr(probe, "user.rolltape", b"1")
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):
            return False
        raise
    except AttributeError:  # not a Linux system
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return True

"""Lakes in a bucket that no other test uses, reached by options or by the environment."""

from __future__ import annotations

import os

import pytest
from tests.servers.s3_server import Bucket

from rolltape.store import Lake


@pytest.fixture
def s3_lake(s3_bucket: Bucket) -> Lake:
    """An empty lake, with its options given."""
    return Lake.create(f"{s3_bucket.url}/lake", options=s3_bucket.options)


@pytest.fixture
def s3_environment(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The bucket, which this process and its children reach by their environment alone."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_bucket.options.items():
        monkeypatch.setenv(name, value)
    return s3_bucket

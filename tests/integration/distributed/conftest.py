"""Two ranks, for every test that needs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Started once: two processes that import torch take a while."""
    with Ranks(2, tmp_path_factory.mktemp("ranks") / "store") as ranks:
        yield ranks

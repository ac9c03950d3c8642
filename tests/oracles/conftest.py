"""The peers, for every test that compares with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.oracles.peers import Peers


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    """verl, TRL and OpenRLHF, started once. Where they are not installed, tests that ask for them do not run."""
    with Peers() as started:
        yield started

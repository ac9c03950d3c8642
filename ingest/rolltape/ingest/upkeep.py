"""Maintenance of the lake beside its commits: in a thread of its own, so that no commit waits for a compaction."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from rolltape.schema.errors import LogError, StoreError
from rolltape.store.lake import Lake
from rolltape.store.maintenance import Maintenance, Policy, maintain

_BUSY_COMMITS: Final = 32
"""Commits after which maintenance no longer waits for a moment without work."""

_LOG: Final = logging.getLogger(__name__)


class Upkeep:
    """Calls :func:`rolltape.store.maintenance.maintain` now and then. One round at a time, never fatal.

    ``also`` is called after each round that did something, in its thread, with what it did.
    """

    def __init__(self, lake: Lake, also: Callable[[Maintenance], None] | None = None) -> None:
        """Look after ``lake``, through a handle of its own."""
        self._lake = Lake.open(lake.location)
        # What the other handle just wrote need not be decoded again.
        self._lake.recent = lake.recent
        self._also = also
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rolltape-upkeep")
        self._round: Future[Maintenance | None] | None = None
        self._policy = Policy()
        self._version = lake.snapshot().version
        self._commits = 0
        self._submitted = 0

    def after_round(self, *, committed: bool, version: int | None = None) -> None:
        """Tell of a committer's round; starts maintenance if some is due and nothing waits, or much was committed.

        ``version`` is the table's, where others commit too.
        """
        if version is None:
            self._commits += committed
        else:
            self._commits += version - self._version
            self._version = version
        if self._round is not None:
            if not self._round.done():
                return
            self._finish(self._round)
        if self._commits >= (_BUSY_COMMITS if committed else self._policy.commits_between):
            self._round = self._pool.submit(self._work, self._commits)
            self._submitted = self._commits

    def _work(self, num_commits: int) -> Maintenance | None:
        done = maintain(self._lake, num_commits, self._policy)
        if done is not None and self._also is not None:
            self._also(done)
        return done

    def _finish(self, done: Future[Maintenance | None]) -> None:
        self._round = None
        try:
            worked = done.result() is not None
        except (StoreError, LogError) as error:
            worked = True
            _LOG.warning("maintenance put off, nothing is lost: %s", error)
        if worked:
            self._commits -= self._submitted

    def close(self) -> None:
        """Wait for a round that runs. Idempotent."""
        self._pool.shutdown(wait=True)

"""The live line of a run: which steps and dispatches of which run epochs still count (design §2, §4).

A run epoch is raised when a run is resumed or rewound, and says from which step it continues. Later steps of older
epochs are abandoned. A dispatch of an older epoch stays live for the first step that the new epoch makes, since it was
sampled from the version that this step starts from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa


@dataclass(frozen=True, slots=True)
class RunLine:
    """Run epochs of one run, each with the step that it continues from (0 for the first).

    >>> line = RunLine(((1, 0), (2, 12)))
    >>> line.epoch, line.is_live_step(1, 12), line.is_live_step(1, 13), line.is_live_dispatch(1, 13)
    (2, True, False, True)
    """

    epochs: tuple[tuple[int, int], ...]

    @property
    def epoch(self) -> int:
        """The newest run epoch; 0 where the run has not started."""
        return self.epochs[-1][0] if self.epochs else 0

    def last_live_step(self, epoch: int) -> int | None:
        """The last step of ``epoch`` that still counts; None where there is no bound (the newest epoch)."""
        return min((continues for later, continues in self.epochs if later > epoch), default=None)

    def is_live_step(self, epoch: int, step: int) -> bool:
        """Whether ``step`` as completed in ``epoch`` is on the live line."""
        bound = self.last_live_step(epoch)
        return bound is None or step <= bound

    def is_live_dispatch(self, epoch: int, training_step: int) -> bool:
        """Whether a rollout dispatched in ``epoch`` for ``training_step`` may still be trained."""
        bound = self.last_live_step(epoch)
        return bound is None or training_step <= bound + 1

    @classmethod
    def from_events(cls, started: pa.Table, resumed: pa.Table, run_id: str) -> RunLine:
        """Read the line of ``run_id`` from its ``run_started`` and ``run_resumed`` events."""
        return cls.from_pairs(
            [
                *((epoch, 0) for run, epoch in _pairs(started) if run == run_id),
                *(
                    (epoch, step)
                    for (run, epoch), step in zip(
                        _pairs(resumed),
                        resumed["run_resumed"].combine_chunks().field("continues_from_step").to_pylist()
                        if resumed.num_rows
                        else (),
                        strict=True,
                    )
                    if run == run_id
                ),
            ]
        )

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[int, int]]) -> RunLine:
        """Build from (epoch, continues_from_step) pairs in any order."""
        return cls(tuple(sorted(dict(pairs).items())))


def _pairs(table: pa.Table) -> list[tuple[str, int]]:
    return list(zip(table["run_id"].to_pylist(), table["run_epoch"].to_pylist(), strict=True))

"""What a worker makes next: its share of the next step (lock step), or of the run, ahead of the trainer by a bound.

In lock step nothing of a step begins before the one before is completed. A worker that runs ahead makes round after
round, each as large as its share of a step, for no step in particular; what holds it back is what the trainer has
consumed of its groups, trained or dropped, as ``batch_formed`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rolltape.rollout.attempts import Place
from rolltape.rollout.environment import Problem
from rolltape.rollout.seeds import problem_slots, sampling_seed
from rolltape.rollout.step import StepRows, group_id_of
from rolltape.rollout.tape import RunTape


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Rollouts that a worker makes in one go."""

    number: int  # of the step or round, from 1
    rows: StepRows
    version: int | None  # that must sample them; None: whichever is in effect


class Pace(Protocol):
    """Decides what comes next, from the tape alone."""

    def due(self, tape: RunTape, done: int) -> Share | None:
        """The share after number ``done`` (0: of a fresh start), if it may be made now."""
        ...

    def is_past(self, place: Place, done: int) -> bool:
        """Whether nobody asks for this place again, once share ``done`` is complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Which groups and problems are one worker's.

    ``index`` of ``num_workers`` workers, each making every ``num_workers``-th group of a step or round.
    """

    run_id: str
    seed: int
    index: int
    num_workers: int
    groups_per_step: int
    group_size: int
    problems: Sequence[Problem]

    @property
    def ordinals(self) -> range:
        """The worker's groups of a step, by ordinal in the step."""
        return range(self.index, self.groups_per_step, self.num_workers)

    def rows(self, step: int, ordinals: Sequence[int], *, for_step: bool) -> StepRows:
        """Rollouts of these groups of ``step``. Problems and seeds are the same whether or not they are meant for it.

        Args:
            step: step or round, from 1.
            ordinals: groups, by ordinal in the step.
            for_step: whether only that step may train them; else ordinals are counted in the run.
        """
        slots = problem_slots(self.seed, step, self.groups_per_step, len(self.problems))
        pairs = [(ordinal, member) for ordinal in ordinals for member in range(self.group_size)]
        first = 0 if for_step else (step - 1) * self.groups_per_step
        return StepRows(
            purpose="train",
            step=step if for_step else None,
            group_size=self.group_size,
            problems=[self.problems[slots[ordinal]] for ordinal, _ in pairs],
            group_ordinals=[first + ordinal for ordinal, _ in pairs],
            members=[member for _, member in pairs],
            seeds=[sampling_seed(self.seed, step, ordinal, member) for ordinal, member in pairs],
        )


class LockStep:
    """One step after the other; the version that came of the last one samples the next."""

    def __init__(self, portion: Portion, *, max_steps: int) -> None:
        self._portion = portion
        self._max_steps = max_steps

    def due(self, tape: RunTape, done: int) -> Share | None:
        """The step after the last completed one, unless it is made already."""
        last = tape.last_step
        step = 1 if last is None else last.step + 1
        if step > self._max_steps or step == done:
            return None
        rows = self._portion.rows(step, self._portion.ordinals, for_step=True)
        return Share(number=step, rows=rows, version=0 if last is None else last.version_out)

    def is_past(self, place: Place, done: int) -> bool:
        """Steps before the one that was just made."""
        return place[1] is not None and place[1] < done


class RunAhead:
    """Round after round, at most ``max_lead_steps`` steps' worth of groups ahead of what the trainer consumed.

    A worker counts its own groups alone, so one that stands still does not hold up the others.
    """

    def __init__(self, portion: Portion, *, max_lead_steps: int) -> None:
        self._portion = portion
        self._rounds = 1 + max_lead_steps
        self._epoch = 0  # run epoch that the next was found in
        self._prefix = 0  # own groups before this one are consumed

    def due(self, tape: RunTape, done: int) -> Share | None:
        """The next round of which the trainer has not consumed everything, if the bound allows it."""
        if tape.line.epoch != self._epoch:
            self._epoch, self._prefix = tape.line.epoch, 0  # what was consumed may not count any more
        consumed = tape.consumed_groups
        last = self._allowed(consumed)
        for number in range(max(done, self._prefix // self._size) + 1, last + 1):
            ordinals = [at for at in self._portion.ordinals if self._group(number, at) not in consumed]
            if ordinals:
                rows = self._portion.rows(number, ordinals, for_step=False)
                return Share(number=number, rows=rows, version=None)
        return None

    def is_past(self, place: Place, done: int) -> bool:
        """Rounds up to the one that was just made."""
        return place[1] is None and place[2] < done * self._portion.groups_per_step

    @property
    def _size(self) -> int:
        return len(self._portion.ordinals)

    def _allowed(self, consumed: set[str]) -> int:
        """The last round that may be begun.

        Own groups are dispatched in order and never beyond the bound; where the bound that those counted so far give
        is reached, no later one can have been consumed.
        """
        count = own = self._prefix
        while own < (count // self._size + self._rounds) * self._size:
            if self._group(own // self._size + 1, self._portion.ordinals[own % self._size]) in consumed:
                count += 1
                if own == self._prefix:
                    self._prefix += 1
            own += 1
        return count // self._size + self._rounds

    def _group(self, number: int, ordinal: int) -> str:
        place = (number - 1) * self._portion.groups_per_step + ordinal
        return group_id_of(self._portion.run_id, "train", None, place)

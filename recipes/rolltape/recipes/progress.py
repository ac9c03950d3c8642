"""Live progress of a run: a bar with the reward on a terminal, a JSON line now and then in a pipe."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rolltape.recipes.output import is_terminal, say
from rolltape.recipes.runs import StepSeen


class StepPrinter:
    """Shows completed steps. ``every`` is for pipes: a line each so many steps."""

    def __init__(self, max_steps: int, *, every: int = 10) -> None:
        self._max_steps = max_steps
        self._every = every
        self._bar: Any = None
        self._task: Any = None
        self.last: StepSeen | None = None

    def __enter__(self) -> Self:
        if is_terminal():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("step"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[facts]}"),
            )
            self._task = self._bar.add_task("train", total=self._max_steps, facts="starting processes …")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, seen: StepSeen) -> None:
        """Show one completed step."""
        self.last = seen
        shown = shown_metrics(seen)
        if self._bar is not None:
            text = "  ".join(f"{key} {value:g}" for key, value in shown.items())
            self._bar.update(self._task, completed=seen.step, facts=f"version {seen.version}  {text}")
        elif seen.step % self._every == 0 or seen.metrics.get("final") == 1.0:
            say(f"step {seen.step}", step=seen.step, version=seen.version, **shown)


def shown_metrics(seen: StepSeen) -> dict[str, float]:
    """The few metrics that a line of progress has room for, those that the step has."""
    names = {
        "reward": "reward_mean",
        "exact": "reward_component/exact",
        "trusted": "trusted_frac",
        "grad_norm": "grad_norm",
    }
    found = {key: seen.metrics.get(name) for key, name in names.items()}
    return {key: round(value, 4) for key, value in found.items() if value is not None}

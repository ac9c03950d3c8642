"""Forgetting the optimizer's moments once new weights serve (D25), and saying so on the tape.

When weights come to serve is the engines' doing in an asynchronous run, so a replay does not guess: it follows the
events ``optimizer_reset``. One that names step s lies between s and the step after it.
"""

from __future__ import annotations

from rolltape.ingest.recorder import Recorder
from rolltape.schema.policy import PolicyVersion
from rolltape.trainers.history import RunHistory
from rolltape.trainers.learner import Learner, reset_optimizer


class OptimizerResets:
    """The resets of one trainer process; ``enabled`` says whether there are any."""

    def __init__(self, recorder: Recorder, *, enabled: bool) -> None:
        self._recorder = recorder
        self._enabled = enabled
        self._known: tuple[int, int] | None = None

    def begin(self, history: RunHistory, served: PolicyVersion) -> None:
        """``served`` serves when the process begins: news, unless a reset on the tape is its, or no step made any.

        The step that made it need not be the last one: others may lie between a version and its coming into effect.
        """
        was_trained = any(row["version_out"] != row["version_in"] for row in history.steps.values())
        is_news = was_trained and served.key not in history.reset_versions
        self._known = None if is_news else served.key

    def settle(self, learner: Learner, served: PolicyVersion, *, step: int) -> None:
        """Reset after ``step``, if other weights serve than at the last look."""
        if not self._enabled or served.key == self._known:
            return
        self._known = served.key
        self._recorder.record(
            "optimizer_reset",
            step=step,
            extent=f"{served.policy_id}: {reset_optimizer(learner.optimizer)}",
            reason=f"version {served.version} of run epoch {served.run_epoch} serves",
            **served.fields,
        )

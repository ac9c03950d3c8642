"""One step's share of one worker where rollouts have several turns."""

from __future__ import annotations

from collections.abc import Callable

from rolltape.ingest.recorder import Recorder
from rolltape.rollout.agent_ends import Judged
from rolltape.rollout.agent_harness import AgentHarness
from rolltape.rollout.agent_loop import AgentLoop
from rolltape.rollout.attempts import Attempt, AttemptBook
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.environment import Problem
from rolltape.rollout.rewards import failed_component
from rolltape.rollout.step import Chunk, RunnerOptions, StepRunner
from rolltape.schema.reward import RewardComponent


class AgentRunner(StepRunner[AgentHarness]):
    """Steps of rollouts of several turns.

    Args:
        harness: engine, environment and budgets.
        recorder: takes the events.
        options: how the worker makes its rollouts.
        before_turn: called before each turn of rollouts that are trained, for example to take new weights.
    """

    def __init__(
        self,
        harness: AgentHarness,
        recorder: Recorder,
        options: RunnerOptions,
        *,
        before_turn: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(harness, recorder, options)
        self._before_turn = before_turn

    def _generate(self, chunk: Chunk, book: AttemptBook, sampling: SamplingConfig) -> None:
        """Play the whole chunk, turn by turn."""
        is_training = chunk.rows.purpose == "train"
        is_control = self._options.shuffle_rewards and is_training
        loop = AgentLoop(
            self._harness,
            self._recorder,
            chunk.batch,
            sampling,
            before_turn=self._before_turn if is_training else lambda: None,
            relabel=(lambda components: self._shuffled(chunk.rows, components)) if is_control else None,
        )
        _note(chunk, book, loop.run(chunk.problems, chunk.starts))

    def _judge_again(self, problem: Problem, attempt: Attempt) -> tuple[RewardComponent, ...]:
        """Labels come before the end, so this one was lost: nobody can earn it any more."""
        del problem, attempt
        environment = self._harness.environment
        lost = RuntimeError("the attempt ended and its judgement is not on the tape")
        return (failed_component(environment.name, environment.version, lost),)


def _note(chunk: Chunk, book: AttemptBook, judged: list[Judged]) -> None:
    """Enter what was recorded into the book, as a later start would read it from the tape."""
    places = chunk.places
    for row in chunk.wanted.tolist():
        attempt = book.newest(places[row])
        assert attempt is not None, f"no attempt at {places[row]}: it was dispatched before it was played"
        attempt.ended = judged[row].play.status
        attempt.components = judged[row].components
        attempt.rewarded = True

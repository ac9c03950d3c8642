"""The agent loop: the rollouts of a batch, turn by turn, ids appended to ids (design §8).

Every turn the engine continues all rollouts that are not over, in order, as one batch; then the environment replies to
each. So a batch of the same rollouts takes the same turns with the same bits, whoever of them is recorded.

What a rollout earned and what of it is masked is recorded before its end: an attempt that has ended is labelled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rolltape.ingest.recorder import Recorder
from rolltape.rollout import agent_recording
from rolltape.rollout.agent_calls import EXECUTION, AgentCalls
from rolltape.rollout.agent_context import Context, Span
from rolltape.rollout.agent_ends import Judged, Relabel, judge, record_ends, relabelled
from rolltape.rollout.agent_environment import Observation, Reply
from rolltape.rollout.agent_harness import AgentHarness
from rolltape.rollout.agent_play import Play
from rolltape.rollout.agent_recording import Masked
from rolltape.rollout.agent_rewrites import Rewriter
from rolltape.rollout.engine import Int32, SamplingConfig
from rolltape.rollout.environment import Problem
from rolltape.rollout.recording import RolloutBatch

_LOG: Final = logging.getLogger(__name__)


class AgentLoop:
    """Plays the rollouts of one batch to their ends.

    Args:
        harness: engine, environment and budgets.
        recorder: takes the events.
        batch: who the rollouts are.
        sampling: of every turn; ``max_tokens`` bounds a turn.
        before_turn: called before each turn, for example to take new weights.
        relabel: a control's judgements in place of the true ones; these are then recorded at the batch's end.
    """

    def __init__(
        self,
        harness: AgentHarness,
        recorder: Recorder,
        batch: RolloutBatch,
        sampling: SamplingConfig,
        *,
        before_turn: Callable[[], None] = lambda: None,
        relabel: Relabel | None = None,
    ) -> None:
        self._harness = harness
        self._sampling = sampling
        self._before_turn = before_turn
        self._relabel = relabel
        self._calls = AgentCalls(harness, recorder, batch)
        self._rewriter = Rewriter(harness, self._calls)

    def run(self, problems: Sequence[Problem], starts: Mapping[int, str]) -> list[Judged]:
        """Play all rollouts; record those that have started.

        Args:
            problems: one for each rollout of the batch.
            starts: event ids of ``rollout_started`` by row of the batch; other rows are only played along.

        Returns:
            Every rollout of the batch, in its order.

        Raises:
            ConfigError: a problem leaves no room for a turn; names it.
        """
        plays = [self._open(row, problem, starts.get(row, "")) for row, problem in enumerate(problems)]
        live, over = plays, []
        try:
            for turn in range(self._harness.config.max_turns):
                over += self._finish([play for play in live if play.is_over])
                live = [play for play in live if not play.is_over]
                if not live:
                    break
                self._before_turn()
                self._turn(live, turn)
            over += self._finish([play for play in live if play.is_over])
        finally:
            for play in plays:
                _close(play)
        if self._relabel is not None:
            over = relabelled(over, self._relabel)
            self._record_ends(over)
        return sorted(over, key=lambda judged: judged.play.row)

    def _open(self, row: int, problem: Problem, start: str) -> Play:
        self._harness.check_room(problem, self._sampling)
        seed = self._calls.seed(row)
        prompt = Span(self._harness.prompt(problem)[0], start or None)
        play = Play(
            row=row, problem=problem, seed=seed, recorded=bool(start), prompt=prompt, context=Context((prompt,))
        )
        try:
            play.episode = self._harness.environment.open(problem, seed)
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is its own failure
            play.fail(error)
        return play

    def _turn(self, live: Sequence[Play], turn: int) -> None:
        self._rewriter.make_room(live, turn, self._sampling)
        acting = [play for play in live if not play.is_over]
        if not acting:
            return
        self._act(acting, turn)
        self._reply([play for play in acting if not play.is_over], turn)

    # The policy's side of a turn.

    def _act(self, acting: Sequence[Play], turn: int) -> None:
        """One action each; where the engine broke off, the next one goes on from there in the same turn."""
        for play in acting:
            play.begin_turn()
        pending = list(acting)
        for call in range(1 + self._harness.config.max_interruptions):
            contexts = [play.context.token_ids for play in pending]
            for play, sampled in zip(
                pending, self._calls.sample(pending, contexts, EXECUTION, turn, call, self._sampling), strict=True
            ):
                play.finish_reason = sampled.finish_reason
                if len(sampled.token_ids):
                    play.context.act(Span(sampled.token_ids, sampled.event_id or None))
                    play.turn_ids.append(sampled.token_ids)
                    play.turn_events.append(sampled.event_id)
            pending = [play for play in pending if play.finish_reason == "abort"]
            for play in pending:
                if len(play.context) + self._sampling.max_tokens > self._harness.budget:
                    play.stop("truncated", "context_overflow")
            pending = [play for play in pending if not play.is_over]
            if not pending:
                return
        for play in pending:
            play.stop("aborted", "interrupted")

    # The environment's side of a turn.

    def _reply(self, acted: Sequence[Play], turn: int) -> None:
        seen: list[tuple[Play, Observation, Int32, float]] = []
        for play in acted:
            started = time.perf_counter()
            reply = self._ask(play)
            if reply is None:
                continue
            self._note(play, reply)
            if reply.observation is not None:
                token_ids = self._harness.observation(play.context, reply.observation.text, play.problem)
                seen.append((play, reply.observation, token_ids, time.perf_counter() - started))
            else:
                play.context.close_step(None)
            ended = play.finish_reason == "stop"
            if reply.done:
                play.stop(*(("completed", "done") if ended else ("truncated", "max_tokens")))
            elif turn + 1 == self._harness.config.max_turns:
                play.stop("truncated", "max_turns")
        self._observe(seen, turn)

    def _ask(self, play: Play) -> Reply | None:
        """The environment's reply; None where it failed, which ends the rollout."""
        assert play.episode is not None
        text = self._harness.turn_text(play.turn_ids)
        try:
            return play.episode.reply(text, ended=play.finish_reason == "stop")
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is its own failure and goes onto the tape as such
            play.fail(error)
            return None

    def _note(self, play: Play, reply: Reply) -> None:
        if reply.reward:
            play.turn_rewards.append((play.turn_events[-1], reply.reward))
        if reply.erroneous is not None and self._harness.config.mask_erroneous:
            play.masks += [
                Masked(event_id=event_id, length=len(token_ids), reason=reply.erroneous)
                for event_id, token_ids in zip(play.turn_events, play.turn_ids, strict=True)
            ]

    def _observe(self, seen: Sequence[tuple[Play, Observation, Int32, float]], turn: int) -> None:
        """Record what is seen, and append it to the contexts."""
        told = [row for row in seen if row[0].recorded and len(row[2])]
        plays = [play for play, *_ in told]
        columns = (
            agent_recording.observed(
                self._calls.rollouts(plays),
                [observation for _, observation, *_ in told],
                [token_ids for *_, token_ids, _ in told],
                segment_indexes=[play.segment for play in plays],
                turn_index=turn,
                latencies_s=[latency for *_, latency in told],
            )
            if told
            else {}
        )
        event_ids = iter(self._calls.record("observation_received", columns, len(told)))
        for play, _, token_ids, _ in seen:
            if not len(token_ids):
                play.context.close_step(None)
                continue
            event_id = next(event_ids) if play.recorded else None
            play.context.close_step(Span(token_ids, event_id))
            play.num_observation_tokens += len(token_ids)

    def _finish(self, over: Sequence[Play]) -> list[Judged]:
        judged = [judge(self._harness.environment, play) for play in over]
        if self._relabel is None:
            self._record_ends(judged)
        return judged

    def _record_ends(self, judged: Sequence[Judged]) -> None:
        record_ends(self._calls, judged, assigned_by=self._harness.environment.name)


def _close(play: Play) -> None:
    if play.episode is None:
        return
    try:
        play.episode.close()
    except Exception:  # noqa: BLE001 - it is over and judged; what cannot be let go of is the environment's own trouble
        _LOG.warning("an episode of %s could not be closed", play.problem.problem_id, exc_info=True)

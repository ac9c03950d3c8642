"""The agent loop: the rollouts of a batch, turn by turn, ids appended to ids (design §8).

Every turn the engine continues all rollouts that are not over, in order, as one batch; then the environment replies to
each. So a batch of the same rollouts takes the same turns with the same bits, whoever of them is recorded.

What a rollout earned and what of it is masked is recorded before its end: an attempt that has ended is labelled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from rolltape.ingest.recorder import Recorder
from rolltape.rollout import agent_recording, recording
from rolltape.rollout.agent_context import Context, Span
from rolltape.rollout.agent_environment import Observation, Reply
from rolltape.rollout.agent_harness import AgentHarness
from rolltape.rollout.agent_play import Play
from rolltape.rollout.agent_recording import Masked
from rolltape.rollout.agent_rewrites import Rewriter
from rolltape.rollout.engine import FinishReason, GenerationRequest, Int32, SamplingConfig
from rolltape.rollout.environment import Problem
from rolltape.rollout.recording import Call, RolloutBatch
from rolltape.rollout.rewards import failed_component
from rolltape.rollout.seeds import call_seed
from rolltape.schema.reward import RewardComponent

EXECUTION: Final = "execution"
_LOG: Final = logging.getLogger(__name__)

Components = tuple[RewardComponent, ...]
Relabel = Callable[[Sequence[Components]], Sequence[Components]]
"""Judgements of a whole batch, in order → those that are recorded in their places."""


class Sampled(NamedTuple):
    """What one call gave one rollout. ``event_id`` is empty where the rollout is not recorded."""

    token_ids: Int32
    event_id: str
    finish_reason: FinishReason


class Judged(NamedTuple):
    """A rollout that is over, with its judgement."""

    play: Play
    components: Components


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
        self._recorder = recorder
        self._batch = batch
        self._sampling = sampling
        self._before_turn = before_turn
        self._relabel = relabel
        self._rewriter = Rewriter(harness, self)

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
            over = self._relabelled(over, self._relabel)
        return sorted(over, key=lambda judged: judged.play.row)

    def _open(self, row: int, problem: Problem, start: str) -> Play:
        self._harness.check_room(problem, self._sampling)
        seed = self._batch.seeds[row]
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
                pending, self.sample(pending, contexts, EXECUTION, turn, call, self._sampling), strict=True
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

    def sample(
        self,
        plays: Sequence[Play],
        contexts: Sequence[Int32],
        kind: str,
        turn: int,
        call: int,
        sampling: SamplingConfig,
    ) -> list[Sampled]:
        """One call of the engine for these rollouts, as one batch; records the actions of those that are recorded."""
        engine = self._harness.engine
        seeds = [call_seed(play.seed, turn, kind, call) for play in plays]
        requests = [
            GenerationRequest(prompt_token_ids=context, seed=seed)
            for context, seed in zip(contexts, seeds, strict=True)
        ]
        generations = engine.generate(requests, sampling)
        texts = self._harness.texts(generations)
        calls = [self._harness.environment.tool_calls(text) if kind == EXECUTION else () for text in texts]
        columns = recording.sampled(
            self._batch.select(_rows(plays)),
            generations,
            sampling,
            engine_id=engine.engine_id,
            engine=engine.info,
            texts=texts,
            call=Call(
                segment_indexes=np.array([play.segment for play in plays]),
                seeds=seeds,
                turn_index=turn,
                action_kind=kind,
                tool_calls=agent_recording.tool_calls(calls),
            ),
        )
        lengths = np.diff(generations.offsets)
        chosen = np.flatnonzero([play.recorded for play in plays] & (lengths > 0))
        event_ids = [""] * len(plays)
        receipt = self.record("action_sampled", recording.select_rows(columns, chosen), len(chosen))
        for place, event_id in zip(chosen.tolist(), receipt, strict=True):
            event_ids[place] = event_id
        for play, length in zip(plays, lengths.tolist(), strict=True):
            play.num_action_tokens += length
        bounds = generations.offsets[1:-1]
        return [
            Sampled(token_ids, event_id, reason)
            for token_ids, event_id, reason in zip(
                np.split(generations.token_ids, bounds), event_ids, generations.finish_reasons, strict=True
            )
        ]

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
                self.rollouts(plays),
                [observation for _, observation, *_ in told],
                [token_ids for *_, token_ids, _ in told],
                segment_indexes=[play.segment for play in plays],
                turn_index=turn,
                latencies_s=[latency for *_, latency in told],
            )
            if told
            else {}
        )
        event_ids = iter(self.record("observation_received", columns, len(told)))
        for play, _, token_ids, _ in seen:
            if not len(token_ids):
                play.context.close_step(None)
                continue
            event_id = next(event_ids) if play.recorded else None
            play.context.close_step(Span(token_ids, event_id))
            play.num_observation_tokens += len(token_ids)

    # Judgement and end.

    def _finish(self, over: Sequence[Play]) -> list[Judged]:
        judged = [Judged(play, self._judge(play)) for play in over]
        if self._relabel is None:
            self._record_ends(judged)
        return judged

    def _judge(self, play: Play) -> Components:
        environment = self._harness.environment
        if play.status == "aborted":
            return (failed_component(environment.name, environment.version, RuntimeError(play.cause)),)
        if play.failure is not None or play.episode is None:
            error = play.failure or RuntimeError("no episode")
            return (failed_component(environment.name, environment.version, error),)
        try:
            return tuple(play.episode.judge())
        except Exception as error:  # noqa: BLE001 - whatever a verifier raises is its own failure and goes onto the tape as such
            return (failed_component(environment.name, environment.version, error),)

    def _relabelled(self, over: Sequence[Judged], relabel: Relabel) -> list[Judged]:
        ordered = sorted(over, key=lambda judged: judged.play.row)
        changed = relabel([judged.components for judged in ordered])
        of_turns = iter(relabel([reward for one in ordered for _, reward in one.play.turn_rewards]))
        for one in ordered:
            one.play.turn_rewards = [(event_id, next(of_turns)) for event_id, _ in one.play.turn_rewards]
        judged = [Judged(one.play, components) for one, components in zip(ordered, changed, strict=True)]
        self._record_ends(judged)
        return judged

    def _record_ends(self, judged: Sequence[Judged]) -> None:
        """Masks, rewards of single actions and of the whole, then the end."""
        told = [one for one in judged if one.play.recorded]
        masked = [one.play for one in told if one.play.masks]
        if masked:
            columns = agent_recording.masked(
                self.rollouts(masked),
                [play.masks for play in masked],
                assigned_by=self._harness.environment.name,
            )
            self.record("mask_assigned", columns, len(masked))
        labels = [(one.play, *label) for one in told for label in _labels(one)]
        if labels:
            columns = agent_recording.rewarded(
                self.rollouts([play for play, *_ in labels]),
                [components for *_, components in labels],
                [target for _, target, _ in labels],
            )
            self.record("reward_assigned", columns, len(labels))
        if told:
            plays = [one.play for one in told]
            columns = agent_recording.ended(self.rollouts(plays), [play.end for play in plays])
            self.record("rollout_ended", columns, len(plays))

    # Shared with the rewriter.

    def rollouts(self, plays: Sequence[Play]) -> RolloutBatch:
        """Who these rollouts are."""
        return self._batch.select(_rows(plays))

    def record(self, kind: str, columns: Mapping[str, Any], num_rows: int) -> list[str]:
        """Record events, if there are any; their ids."""
        return self._recorder.record_batch(kind, columns, num_rows).event_ids if num_rows else []


def _labels(judged: Judged) -> list[tuple[str | None, Components]]:
    """Rewards by target (None: the whole rollout). Where only turns are rewarded the whole is not."""
    of_turns: list[tuple[str | None, Components]] = list(judged.play.turn_rewards)
    if of_turns and not judged.components:
        return of_turns
    return [*of_turns, (None, judged.components)]


def _rows(plays: Sequence[Play]) -> recording.Rows:
    return np.array([play.row for play in plays], dtype=np.int64)


def _close(play: Play) -> None:
    if play.episode is None:
        return
    try:
        play.episode.close()
    except Exception:  # noqa: BLE001 - it is over and judged; what cannot be let go of is the environment's own trouble
        _LOG.warning("an episode of %s could not be closed", play.problem.problem_id, exc_info=True)

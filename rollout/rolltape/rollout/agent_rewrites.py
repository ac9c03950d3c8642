"""Making room before a turn: summaries, folded observations, and the end where nothing helps (algorithms.md §4.12)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from rolltape.rollout import agent_recording
from rolltape.rollout.agent_calls import SUMMARY, AgentCalls, Sampled
from rolltape.rollout.agent_context import Context, Span, joined
from rolltape.rollout.agent_harness import AgentHarness
from rolltape.rollout.agent_play import Play
from rolltape.rollout.agent_recording import Rewrite
from rolltape.rollout.compaction import COMPACTION, SUMMARY_CALL, Trigger, resumed, shortened, without_stop
from rolltape.rollout.engine import SamplingConfig


@dataclasses.dataclass(slots=True, kw_only=True)
class _Summary:
    """A summary that is being asked for."""

    play: Play
    spans: list[Span]  # what the policy is asked with
    trigger: Trigger
    prompt: Span
    rejected: list[str] = dataclasses.field(default_factory=list)
    num_tries: int = 0  # that the engine did not break off
    is_segment_open: bool = True  # the segment of the next try has no tokens yet
    accepted: Span | None = None


class Rewriter:
    """Rewrites the contexts of the rollouts of one batch, and records it."""

    def __init__(self, harness: AgentHarness, calls: AgentCalls) -> None:
        self._harness = harness
        self._calls = calls
        self._config = harness.config.compaction

    def make_room(self, live: Sequence[Play], turn: int, sampling: SamplingConfig) -> None:
        """Before a turn: shorten the contexts that ask for it, and end the rollouts that have no room."""
        if self._config.is_on:
            self._summarise(live, turn, sampling)
        elif self._harness.config.keep_recent_observations:
            self._fold(live, turn)
        for play in live:
            if not play.is_over and len(play.context) + sampling.max_tokens > self._harness.budget:
                play.stop("truncated", "context_overflow")

    # Summaries.

    def _summarise(self, live: Sequence[Play], turn: int, sampling: SamplingConfig) -> None:
        asked = [
            self._ask(play)
            for play in live
            if play.num_compactions < self._config.max_compactions and self._harness.needs_summary(len(play.context))
        ]
        asked = [one for one in asked if self._has_room(one)]
        if not asked:
            return
        self._record([one.play for one in asked], [self._call(one) for one in asked], [SUMMARY_CALL] * len(asked), turn)
        summary_sampling = dataclasses.replace(sampling, max_tokens=self._config.max_summary_tokens)
        pending = asked
        for call in range(self._config.summary_attempts + self._harness.config.max_interruptions):
            self._try(pending, turn, call, summary_sampling)
            pending = [one for one in pending if one.accepted is None]
            if not pending:
                break
        for one in pending:
            one.play.stop("aborted", "interrupted")
        self._resume([one for one in asked if one.accepted is not None], turn, sampling)

    def _ask(self, play: Play) -> _Summary:
        instruction = self._harness.observation(
            play.context, self._harness.environment.summary_instruction, play.problem
        )
        trigger = Trigger(self._harness.budget, len(play.context), self._config.threshold)
        spans = [*play.context.spans, Span(instruction)]
        return _Summary(play=play, spans=spans, trigger=trigger, prompt=play.prompt)

    def _has_room(self, one: _Summary) -> bool:
        """Whether instruction and summary fit; the rollout ends where they do not."""
        length = sum(len(span.token_ids) for span in one.spans)
        if length + self._config.max_summary_tokens > self._harness.budget:
            one.play.stop("truncated", "context_overflow")
            return False
        return True

    def _call(self, one: _Summary) -> Rewrite:
        one.play.segment += 1
        return Rewrite(segment_index=one.play.segment, spans=one.spans, trigger=one.trigger)

    def _try(self, pending: Sequence[_Summary], turn: int, call: int, sampling: SamplingConfig) -> None:
        """One more summary of each; another try starts another segment from the same context."""
        for one in pending:
            if not one.is_segment_open:
                one.play.segment += 1
        plays = [one.play for one in pending]
        contexts = [joined(one.spans) for one in pending]
        for one, sampled in zip(
            pending, self._calls.sample(plays, contexts, SUMMARY, turn, call, sampling), strict=True
        ):
            one.is_segment_open = not len(sampled.token_ids)
            one.num_tries += sampled.finish_reason != "abort"
            copied = without_stop(sampled.token_ids, sampling.stop_token_ids)
            if self._is_accepted(one, sampled, is_empty=not len(copied)):
                one.accepted = Span(copied, sampled.event_id or None)
            elif sampled.event_id:
                one.rejected.append(sampled.event_id)

    def _is_accepted(self, one: _Summary, sampled: Sampled, *, is_empty: bool) -> bool:
        """A whole summary that says something; the last try counts whatever it is, unless the engine broke it off."""
        if sampled.finish_reason == "abort":
            return False
        is_good = sampled.finish_reason == "stop" and not is_empty
        return is_good or one.num_tries >= self._config.summary_attempts

    def _resume(self, accepted: Sequence[_Summary], turn: int, sampling: SamplingConfig) -> None:
        """Put the summary in the place of what it summarises; where nothing fits the rollout ends."""
        plays, rewrites = [], []
        for one in accepted:
            context = self._opened(one, sampling)
            if context is None:
                one.play.stop("truncated", "context_overflow")
                continue
            play = one.play
            play.context = context
            play.num_compactions += 1
            play.segment += 1
            plays.append(play)
            rewrites.append(
                Rewrite(
                    segment_index=play.segment,
                    spans=context.spans,
                    trigger=one.trigger,
                    summary_event_id=one.accepted.event_id if one.accepted else None,
                    rejected_event_ids=one.rejected,
                )
            )
        self._record(plays, rewrites, [COMPACTION] * len(plays), turn)

    def _opened(self, one: _Summary, sampling: SamplingConfig) -> Context | None:
        assert one.accepted is not None
        budget = self._harness.budget

        def fits(length: int) -> bool:
            """Room for a turn, and no call for another summary at once."""
            return length + sampling.max_tokens <= budget and not self._harness.needs_summary(length)

        frame = self._harness.frame(one.play.problem, one.prompt)
        return resumed(one.play.context, one.accepted, frame, keep_recent=self._config.keep_recent, fits=fits)

    # Folded observations.

    def _fold(self, live: Sequence[Play], turn: int) -> None:
        config = self._harness.config
        plays, rewrites, reasons = [], [], []
        for play in live:
            used = len(play.context)
            changed = shortened(
                play.context,
                keep=config.keep_recent_observations,
                discard_above=config.discard_above,
                placeholder=partial(self._harness.placeholder, problem=play.problem),
            )
            if changed is None:
                continue
            play.context, reason = changed
            play.segment += 1
            trigger = Trigger(self._harness.budget, used, config.discard_above)
            plays.append(play)
            rewrites.append(Rewrite(segment_index=play.segment, spans=play.context.spans, trigger=trigger))
            reasons.append(reason)
        self._record(plays, rewrites, reasons, turn)

    def _record(self, plays: Sequence[Play], rewrites: Sequence[Rewrite], reasons: Sequence[str], turn: int) -> None:
        told = [place for place, play in enumerate(plays) if play.recorded]
        if not told:
            return
        columns = agent_recording.rewritten(
            self._calls.rollouts([plays[place] for place in told]),
            [rewrites[place] for place in told],
            reasons=[reasons[place] for place in told],
            turn_index=turn,
        )
        self._calls.record("context_rewritten", columns, len(told))

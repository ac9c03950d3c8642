"""Calls of the engine for some rollouts of a batch, and the way to the tape that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from rolltape.ingest.recorder import Recorder
from rolltape.rollout import agent_recording, recording
from rolltape.rollout.agent_harness import AgentHarness
from rolltape.rollout.agent_play import Play
from rolltape.rollout.engine import FinishReason, GenerationRequest, Int32, SamplingConfig
from rolltape.rollout.recording import Call, RolloutBatch
from rolltape.rollout.seeds import call_seed

EXECUTION: Final = "execution"
SUMMARY: Final = "summary"


class Sampled(NamedTuple):
    """What one call gave one rollout. ``event_id`` is empty where the rollout is not recorded."""

    token_ids: Int32
    event_id: str
    finish_reason: FinishReason


class AgentCalls:
    """The engine and the recorder, as seen from the rollouts of one batch.

    Args:
        harness: the engine, and the environment that reads tool calls.
        recorder: takes the events.
        batch: who the rollouts are.
    """

    def __init__(self, harness: AgentHarness, recorder: Recorder, batch: RolloutBatch) -> None:
        self._harness = harness
        self._recorder = recorder
        self._batch = batch

    def seed(self, row: int) -> int:
        """The seed of a rollout."""
        return self._batch.seeds[row]

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

    def rollouts(self, plays: Sequence[Play]) -> RolloutBatch:
        """Who these rollouts are."""
        return self._batch.select(_rows(plays))

    def record(self, kind: str, columns: Mapping[str, Any], num_rows: int) -> list[str]:
        """Record events, if there are any; their ids."""
        return self._recorder.record_batch(kind, columns, num_rows).event_ids if num_rows else []


def _rows(plays: Sequence[Play]) -> recording.Rows:
    return np.array([play.row for play in plays], dtype=np.int64)

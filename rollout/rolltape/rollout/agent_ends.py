"""How rollouts end: what they earned and what of them is masked, then the end itself.

Labels are recorded first: an attempt that has ended is labelled, and whoever finds it so has nothing to judge again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rolltape.rollout import agent_recording
from rolltape.rollout.agent_calls import AgentCalls
from rolltape.rollout.agent_environment import AgentEnvironment
from rolltape.rollout.agent_play import Play
from rolltape.rollout.rewards import failed_component
from rolltape.schema.reward import RewardComponent

Components = tuple[RewardComponent, ...]
Relabel = Callable[[Sequence[Components]], Sequence[Components]]
"""Judgements of a whole batch, in order → those that are recorded in their places."""


class Judged(NamedTuple):
    """A rollout that is over, with its judgement."""

    play: Play
    components: Components


def judge(environment: AgentEnvironment, play: Play) -> Judged:
    """Judge a rollout that is over. Whatever fails makes its reward invalid, never 0."""
    return Judged(play, _components(environment, play))


def _components(environment: AgentEnvironment, play: Play) -> Components:
    if play.status == "aborted":
        return (failed_component(environment.name, environment.version, RuntimeError(play.cause)),)
    if play.failure is not None or play.episode is None:
        error = play.failure or RuntimeError("no episode")
        return (failed_component(environment.name, environment.version, error),)
    try:
        return tuple(play.episode.judge())
    except Exception as error:  # noqa: BLE001 - whatever a verifier raises is its own failure and goes onto the tape as such
        return (failed_component(environment.name, environment.version, error),)


def relabelled(over: Sequence[Judged], relabel: Relabel) -> list[Judged]:
    """All rollouts of a batch, in order, with the judgements of a control."""
    ordered = sorted(over, key=lambda judged: judged.play.row)
    changed = relabel([judged.components for judged in ordered])
    of_turns = iter(relabel([reward for one in ordered for _, reward in one.play.turn_rewards]))
    for one in ordered:
        one.play.turn_rewards = [(event_id, next(of_turns)) for event_id, _ in one.play.turn_rewards]
    return [Judged(one.play, components) for one, components in zip(ordered, changed, strict=True)]


def record_ends(calls: AgentCalls, judged: Sequence[Judged], *, assigned_by: str) -> None:
    """Masks, rewards of single actions and of the whole, then the end."""
    told = [one for one in judged if one.play.recorded]
    masked = [one.play for one in told if one.play.masks]
    if masked:
        columns = agent_recording.masked(
            calls.rollouts(masked),
            [play.masks for play in masked],
            assigned_by=assigned_by,
        )
        calls.record("mask_assigned", columns, len(masked))
    labels = [(one.play, *label) for one in told for label in _labels(one)]
    if labels:
        columns = agent_recording.rewarded(
            calls.rollouts([play for play, *_ in labels]),
            [components for *_, components in labels],
            [target for _, target, _ in labels],
        )
        calls.record("reward_assigned", columns, len(labels))
    if told:
        plays = [one.play for one in told]
        columns = agent_recording.ended(calls.rollouts(plays), [play.end for play in plays])
        calls.record("rollout_ended", columns, len(plays))


def _labels(judged: Judged) -> list[tuple[str | None, Components]]:
    """Rewards by target (None: the whole rollout). Where only turns are rewarded the whole is not."""
    of_turns: list[tuple[str | None, Components]] = list(judged.play.turn_rewards)
    if of_turns and not judged.components:
        return of_turns
    return [*of_turns, (None, judged.components)]

"""When an agent's history gives way to a summary, and what the context is after that (algorithms.md §4.12, §4.19)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from rolltape.rollout.agent_config import AgentConfig
from rolltape.rollout.agent_context import Context, Span, Step
from rolltape.rollout.engine import Int32, SamplingConfig
from rolltape.schema.errors import ConfigError

SUMMARY_CALL: Final = "summary_call"
COMPACTION: Final = "compaction"
KEEP_RECENT: Final = "keep_recent_k"
DISCARD_ALL: Final = "discard_all"


class Trigger(NamedTuple):
    """Numbers behind a rewrite, in tokens, as ``context_rewritten`` has them."""

    budget: int
    used: int
    threshold: int


def needs_summary(used: int, *, budget: int, threshold: int) -> bool:
    """Whether fewer than ``threshold`` tokens of the budget are left.

    >>> needs_summary(55_296, budget=65_536, threshold=10_240), needs_summary(55_297, budget=65_536, threshold=10_240)
    (False, True)
    """
    return budget - used < threshold


class Frame(NamedTuple):
    """Spans around the summary in the context that it opens."""

    before: tuple[Span, ...]
    after: tuple[Span, ...]


def frame_of(before: Int32, after: Int32, prompt: Span) -> Frame:
    """The frame whose ids are ``before`` and ``after``; what it begins with of the prompt is a copy of that."""
    common = 0
    for one, other in zip(before.tolist(), prompt.token_ids.tolist(), strict=False):
        if one != other:
            break
        common += 1
    copied = Span(before[:common], prompt.event_id, prompt.source_start)
    return Frame((copied, Span(before[common:])), (Span(after),))


def resumed(
    context: Context, summary: Span, frame: Frame, *, keep_recent: int, fits: Callable[[int], bool]
) -> Context | None:
    """The context that a summary opens: with the last ``keep_recent`` turns, else the last one, else none.

    Args:
        context: what is summarised.
        summary: the accepted one, without its stop token.
        frame: what comes before and after it.
        keep_recent: turns to keep.
        fits: whether a context of so many tokens will do.

    Returns:
        None where not even the summary alone fits.
    """
    for keep in sorted({keep_recent, min(1, keep_recent), 0}, reverse=True):
        steps = context.steps[len(context.steps) - min(keep, len(context.steps)) :]
        opened = Context((*frame.before, summary, *frame.after), list(steps))
        if fits(len(opened)):
            return opened
    return None


def without_stop(token_ids: Int32, stop_token_ids: tuple[int, ...]) -> Int32:
    """A summary as it is copied: its stop token ended a turn that the new context does not have."""
    if len(token_ids) and int(token_ids[-1]) in stop_token_ids:
        return token_ids[:-1]
    return token_ids


def shortened(
    context: Context, *, keep: int, discard_above: int, placeholder: Callable[[Step], Span]
) -> tuple[Context, str] | None:
    """Keep the last ``keep`` observations; where more than ``discard_above`` tokens are left then, drop all turns.

    Returns:
        The new context and the reason of the rewrite; None where nothing changes: without a turn there is none to drop.
    """
    folded = context.folded(keep, placeholder)
    if discard_above and folded.steps and len(folded) > discard_above:
        return Context(context.head), DISCARD_ALL
    is_same = all(new is old for new, old in zip(folded.steps, context.steps, strict=True))
    return None if is_same else (folded, KEEP_RECENT)


def check_budgets(config: AgentConfig, sampling: SamplingConfig, *, budget: int, instruction_length: int) -> None:
    """Refuse budgets under which no turn, or no summary, could ever be made.

    Raises:
        ConfigError: names the field and the allowed range.
    """
    if sampling.max_tokens >= budget:
        raise ConfigError(
            f"sampling.max_tokens: expected less than the context budget of {budget} tokens, got {sampling.max_tokens}"
        )
    compaction = config.compaction
    if not compaction.is_on:
        return
    needed = max(sampling.max_tokens, instruction_length + compaction.max_summary_tokens + 1)
    if not needed <= compaction.threshold < budget:
        raise ConfigError(
            f"agent.compaction.threshold: expected at least {needed} (a turn of {sampling.max_tokens} tokens, and one "
            f"more than an instruction of {instruction_length} and a summary of {compaction.max_summary_tokens}) and "
            f"less than the context budget of {budget}, got {compaction.threshold}"
        )

"""Rule rewards: pure functions from text to component values in [0, 1], and the components they become.

The scalar is made from the components by :func:`rolltape.schema.reward.scalarise` (algorithms.md §4.13), never here:
an environment says what it saw and what that weighs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final

from rolltape.rollout.seeds import derived_seed, shuffled
from rolltape.schema.reward import RewardComponent

_NUMBER: Final = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
_MARKED: Final = re.compile(r"####\s*\$?\s*([-+]?[\d.,]*\d)")
_LONGEST_NUMBER: Final = 40  # digits; longer strings are no answers, and Decimal would still take them


def rule_component(
    name: str, value: float, weight: float, *, scorer: str, version: str, dimension: str = "", reason: str | None = None
) -> RewardComponent:
    """A required component that a rule computed without fault."""
    return RewardComponent(
        name=name,
        source="rule",
        dimension=dimension or name,
        value=value,
        weight=weight,
        required=True,
        lower=0.0,
        upper=1.0,
        scorer=scorer,
        scorer_version=version,
        reason=reason,
    )


def rule_components(
    values: Iterable[tuple[str, float, float]], *, scorer: str, version: str
) -> tuple[RewardComponent, ...]:
    """A required component for each (name, value, weight)."""
    return tuple(rule_component(name, value, weight, scorer=scorer, version=version) for name, value, weight in values)


def failed_component(scorer: str, version: str, error: BaseException) -> RewardComponent:
    """What takes the place of components whose verifier failed: a required one is missing, so the reward is invalid.

    A failure of ours is never the policy's zero (cases.md D14).
    """
    return RewardComponent(
        name="verifier",
        source="rule",
        dimension="verifier",
        value=None,
        weight=1.0,
        required=True,
        status="missing",
        scorer=scorer,
        scorer_version=version,
        reason=f"{type(error).__name__}: {error}"[:500],
    )


def shuffled_components(
    components: Sequence[tuple[RewardComponent, ...]], seed: int
) -> list[tuple[RewardComponent, ...]]:
    """A control: the judgements of a batch in an order that the seed decides, each scorer marked ``-shuffled``."""
    order = shuffled(derived_seed("shuffle_rewards", seed), len(components))
    return [
        tuple(dataclasses.replace(part, scorer=f"{part.scorer}-shuffled") for part in components[place])
        for place in order.tolist()
    ]


def position_share(text: str, expected: str, *, ended: bool) -> float:
    """Share of right places, the end of the text being one place more.

    >>> position_share("127", "127", ended=True), position_share("172", "127", ended=False)
    (1.0, 0.25)
    """
    matches = sum(came == wanted for came, wanted in zip(text, expected, strict=False))
    ends_right = ended and len(text) == len(expected)
    return (matches + ends_right) / (len(expected) + 1)


def exact_text(text: str, expected: str, *, ended: bool) -> float:
    """1.0 where the text is the expected one and the policy stopped by itself, else 0.0."""
    return float(ended and text == expected)


def as_number(text: str) -> Decimal | None:
    """The exact number that a piece of text writes, or None.

    >>> as_number("$70,000.00") == as_number("70000")
    True
    """
    cleaned = text.strip().lstrip("$").replace(",", "").rstrip(".")
    if not cleaned or len(cleaned) > _LONGEST_NUMBER:
        return None
    try:
        number = Decimal(cleaned)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def final_number(text: str) -> tuple[Decimal | None, bool]:
    """The number that an answer ends with, and whether it is marked with ``####`` as GSM8K asks.

    A marked number wins over later ones; of several the last counts.

    >>> final_number("2 + 3 = 5, so she pays $1,205.00.")
    (Decimal('1205.00'), False)
    """
    marked = _MARKED.findall(text)
    if marked:
        return as_number(marked[-1]), True
    found = _NUMBER.findall(text)
    return (as_number(found[-1]) if found else None), False


def brevity(text: str, *, comfortable: int, longest: int) -> float:
    """1.0 up to ``comfortable`` characters, falling linearly to 0.0 at ``longest``.

    >>> brevity("x" * 150, comfortable=100, longest=200)
    0.5
    """
    return min(1.0, max(0.0, (longest - len(text)) / (longest - comfortable)))

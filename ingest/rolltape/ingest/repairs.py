"""Named repair rules of dead letters. A rule is explicit and recorded; it never shifts, guesses or invents a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from rolltape.schema.errors import ValidationError

Repair = Callable[[dict[str, Any]], dict[str, Any]]
"""From the refused event as flat columns to the repaired one. Raises ValidationError where it does not apply."""


def _lengths(event: Mapping[str, Any]) -> tuple[int, int]:
    token_ids, log_probs = event.get("token_ids"), event.get("rollout_log_probs")
    if token_ids is None or log_probs is None:
        raise ValidationError(
            "expected an action with token_ids and rollout_log_probs, got one without; this rule does not apply"
        )
    return len(token_ids), len(log_probs)


def _stop_token_ids(event: Mapping[str, Any]) -> list[int]:
    known = (event.get("sampling") or {}).get("stop_token_ids") or []
    if event.get("finish_reason") != "stop" or not known:
        raise ValidationError(
            f"expected finish_reason 'stop' and known stop_token_ids, got {event.get('finish_reason')!r} and {known}: "
            "whether the odd item is the stop token cannot be told; this rule does not apply"
        )
    return list(known)


def drop_trailing_stop_log_prob(event: dict[str, Any]) -> dict[str, Any]:
    """The stop token was trimmed from the ids but not from the log-probs (case D4): drop the last log-prob.

    Raises:
        ValidationError: there is not exactly one log-prob too many, or the stop token is among the ids still.
    """
    num_ids, num_log_probs = _lengths(event)
    stop_token_ids = _stop_token_ids(event)
    if num_log_probs != num_ids + 1:
        raise ValidationError(
            f"expected one log-prob more than ids, got {num_log_probs} log-probs and {num_ids} ids; this rule does not "
            "apply"
        )
    if num_ids and event["token_ids"][-1] in stop_token_ids:
        raise ValidationError(
            f"expected ids without the stop token, got {event['token_ids'][-1]} at their end: the extra log-prob is "
            "not the stop token's; this rule does not apply"
        )
    return {**event, "rollout_log_probs": event["rollout_log_probs"][:-1]}


def null_missing_stop_log_prob(event: dict[str, Any]) -> dict[str, Any]:
    """The stop token is among the ids and its log-prob is missing (case D4, the reverse): null, so untrusted.

    Raises:
        ValidationError: there is not exactly one log-prob too few, or the last id is no stop token.
    """
    num_ids, num_log_probs = _lengths(event)
    stop_token_ids = _stop_token_ids(event)
    if num_log_probs != num_ids - 1 or event["token_ids"][-1] not in stop_token_ids:
        raise ValidationError(
            f"expected one log-prob less than ids and a stop token at their end, got {num_log_probs} log-probs and "
            f"{num_ids} ids; this rule does not apply"
        )
    return {**event, "rollout_log_probs": [*event["rollout_log_probs"], None]}


REPAIRS: Final[Mapping[str, Repair]] = MappingProxyType(
    {
        "drop_trailing_stop_log_prob": drop_trailing_stop_log_prob,
        "null_missing_stop_log_prob": null_missing_stop_log_prob,
    }
)


def repair_named(name: str) -> Repair:
    """The rule called ``name``.

    Raises:
        ValidationError: there is none; the message lists those that there are.
    """
    if name not in REPAIRS:
        raise ValidationError(
            f"expected one of the repair rules {', '.join(REPAIRS)}, got {name!r}; or pass a function"
        )
    return REPAIRS[name]

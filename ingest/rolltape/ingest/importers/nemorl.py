"""NeMo RL: message logs with token ids, and a recorded case of re-tokenisation drift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolltape.ingest.importers.reading import (
    canonical_json,
    content_id,
    optional_list,
    optional_mapping,
    optional_text,
    required,
    starts_with,
)
from rolltape.ingest.importers.rows import EventRows, Ids
from rolltape.ingest.importers.source import MalformedRowError
from rolltape.ingest.importers.trajectory import TrajectoryRows
from rolltape.schema import reasons
from rolltape.schema.digest import prefix_digest


def is_drift(document: Mapping[str, Any]) -> bool:
    """Whether the file holds seen ids beside a prompt that was rendered again."""
    return {"seen_token_ids", "output_prompt_token_ids", "expected_output"} <= document.keys()


def convert_drift(ids: Ids, number: int, document: Mapping[str, Any], rows: EventRows) -> None:
    """Add the trajectory whose next call was made under a re-tokenised context.

    The seen ids are the context as recorded; what the repaired prompt adds to them is an observation; the prompt that
    the engine was given instead is the context of the action that follows. That action's own ids are not in the file,
    so they stay unknown, and the trajectory stays open: the file does not say how it ended.
    """
    seen = required(document, "seen_token_ids", list)
    rendered = required(document, "output_prompt_token_ids", list)
    repaired = required(document, "expected_output", list)
    if not starts_with(repaired, seen):
        detail = "expected expected_output to extend seen_token_ids, but it does not start with them"
        raise MalformedRowError(reasons.BAD_VALUE, detail)
    trajectory = TrajectoryRows(
        rows, ids, (number,), group_id=ids.of("group", number), problem_id=content_id("nemorl", seen)
    )
    trajectory.start(prompt_token_ids=seen)
    trajectory.observation(0, repaired[len(seen) :], source="environment")
    trajectory.action(
        1,
        None,
        None,
        prefix_length=len(rendered),
        prefix_digest=prefix_digest(rendered),
        prefix_source="engine",
        prefix_token_ids=rendered,
    )


def is_message_logs(document: Mapping[str, Any]) -> bool:
    """Whether the file holds the inputs of a NeMo RL environment beside the message logs that came out."""
    logs = document.get("expected_output")
    first = logs[0] if isinstance(logs, list) and logs else None
    return "input" in document and isinstance(first, dict) and "message_log" in first


def convert_message_logs(ids: Ids, number: int, document: Mapping[str, Any], rows: EventRows) -> None:
    """Add one trajectory for each message log.

    Messages before the first of the assistant are the context, later ones of others are observations. The log says
    nothing about the context that the engine used, so ``prefix_source`` is unknown; nor about an end or a reward.
    """
    logs = required(document, "expected_output", list)
    inputs = required(document, "input", list)
    for index, log in enumerate(logs):
        posed = inputs[index] if index < len(inputs) else {}
        _add_message_log(ids, (number, index), posed, required(log, "message_log", list), rows)


def _add_message_log(
    ids: Ids, place: tuple[int, int], posed: Mapping[str, Any], messages: list[Mapping[str, Any]], rows: EventRows
) -> None:
    params = optional_mapping(posed, "responses_create_params")
    problem_id = content_id("nemogym", params)
    harness = optional_text(optional_mapping(posed, "agent_ref"), "name")
    rows.add(
        "problem_registered",
        event_id=ids.of("event", *place, "problem"),
        problem_id=problem_id,
        messages_json=canonical_json(params.get("input")),
        source=harness,
    )
    first = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    context = [token for message in messages[:first] for token in required(message, "token_ids", list)]
    trajectory = TrajectoryRows(rows, ids, place, group_id=ids.of("group", *place), problem_id=problem_id)
    trajectory.start(harness=harness, prompt_token_ids=context)
    turn = -1
    for message in messages[first:]:
        token_ids = optional_list(message, "token_ids")
        text = optional_text(message, "content")
        if message.get("role") == "assistant":
            turn += 1
            log_probs = optional_list(message, "generation_logprobs")
            trajectory.action(turn, token_ids, log_probs, text=text, prefix_source="unknown")
        else:
            trajectory.observation(turn, token_ids, source="environment", text=text)

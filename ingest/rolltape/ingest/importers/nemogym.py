"""NeMo Gym: rollouts of its agents in the form of the Responses API, with token ids where the model server kept them.

Of one model call the server puts ``prompt_token_ids``, ``generation_token_ids`` and ``generation_log_probs`` on the
last output item only: a reasoning item and three parallel tool calls are one action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rolltape.ingest.importers.reading import (
    canonical_json,
    content_id,
    optional_float,
    optional_int,
    optional_list,
    optional_mapping,
    optional_text,
    required,
    starts_with,
)
from rolltape.ingest.importers.rows import EventRows, Ids
from rolltape.ingest.importers.trajectory import TrajectoryRows
from rolltape.schema.digest import prefix_digest
from rolltape.schema.reward import RewardComponent

_POSED_BY: Final = ("input", "instructions", "tools", "metadata")
_PLACEHOLDER_MODEL: Final = "model"
_OUTPUT_ITEM: Final = "function_call_output"
_SCORES: Final = ("score", "subtask_score")


def is_rollout(document: Mapping[str, Any]) -> bool:
    """Whether a row is a rollout: the request, and the response that the agent ended with."""
    response = document.get("response")
    return "responses_create_params" in document and isinstance(response, dict) and "output" in response


def model_of_rollout(document: Mapping[str, Any]) -> str | None:
    """Model that the response names; None for the server's placeholder."""
    name = optional_text(optional_mapping(document, "response"), "model")
    return None if name == _PLACEHOLDER_MODEL else name


def is_response(document: Mapping[str, Any]) -> bool:
    """Whether the document wraps one response under ``input``."""
    response = document.get("input")
    return isinstance(response, dict) and response.get("object") == "response" and "output" in response


def model_of_response(document: Mapping[str, Any]) -> str | None:
    """Model that the wrapped response names."""
    return optional_text(optional_mapping(document, "input"), "model")


def convert_rollout(ids: Ids, number: int, document: Mapping[str, Any], rows: EventRows) -> None:
    """Add one rollout: its problem (once for each task of the file), trajectory, end and reward.

    Rows of one ``_ng_task_index`` are one group; without the index, rows of equal request are.
    """
    params = required(document, "responses_create_params", dict)
    response = required(document, "response", dict)
    posed = {name: params.get(name) for name in _POSED_BY}
    problem_id = content_id("nemogym", posed)
    task = optional_int(document, "_ng_task_index")
    harness = optional_text(optional_mapping(document, "agent_ref"), "name")
    trajectory = TrajectoryRows(
        rows,
        ids,
        (number,),
        group_id=ids.of("group", problem_id if task is None else task),
        problem_id=problem_id,
    )
    rows.add(
        "problem_registered",
        event_id=ids.of("event", "problem", problem_id),
        problem_id=problem_id,
        prompt=_prompt_text(params),
        messages_json=canonical_json(params.get("input")),
        source=harness or optional_text(document, "task_name"),
    )
    _add_turns(trajectory, response, _sampling(params, response), harness=harness, prompt_text=_prompt_text(params))
    _add_end(trajectory, response, optional_text(document, "agent_error_kind"))
    trajectory.reward(_reward_components(document, harness))
    if document.get("mask_sample") is True:
        trajectory.mask(harness, "mask_sample")


def convert_response(ids: Ids, number: int, document: Mapping[str, Any], rows: EventRows) -> None:
    """Add the trajectory of one response. The file names no problem, end or reward beyond what the response says."""
    response = required(document, "input", dict)
    problem_id = content_id("nemogym", {"tools": response.get("tools"), "id": response.get("id")})
    trajectory = TrajectoryRows(rows, ids, (number,), group_id=ids.of("group", number), problem_id=problem_id)
    _add_turns(trajectory, response, _sampling(response, response))
    _add_end(trajectory, response, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One model call: the output items that it made, and those that answered it."""

    items: Sequence[Mapping[str, Any]]
    answers: Sequence[Mapping[str, Any]]

    @property
    def last(self) -> Mapping[str, Any]:
        """The item that carries the ids, where the call has any."""
        return self.items[-1]


def _calls(output: Sequence[Mapping[str, Any]]) -> Iterator[_Call]:
    """Output items by model call: a call ends at the item with ids, or where something else than the model speaks."""
    items: list[Mapping[str, Any]] = []
    answers: list[Mapping[str, Any]] = []
    for item in output:
        if _is_answer(item):
            answers.append(item)
            continue
        if items and (answers or "generation_token_ids" in items[-1]):
            yield _Call(items=items, answers=answers)
            items, answers = [], []
        items.append(item)
    if items:
        yield _Call(items=items, answers=answers)


def _is_answer(item: Mapping[str, Any]) -> bool:
    return item.get("type") == _OUTPUT_ITEM or item.get("role") not in {None, "assistant"}


def _add_turns(
    trajectory: TrajectoryRows, response: Mapping[str, Any], sampling: Mapping[str, Any], **start_fields: Any
) -> None:
    calls = list(_calls(required(response, "output", list)))
    context = optional_list(calls[0].last, "prompt_token_ids") if calls else None
    trajectory.start(prompt_token_ids=context, **start_fields)
    for turn, call in enumerate(calls):
        sampled = optional_list(call.last, "generation_token_ids")
        prompt = optional_list(call.last, "prompt_token_ids")
        trajectory.action(
            turn,
            sampled,
            optional_list(call.last, "generation_log_probs"),
            text=_text_of(call.items),
            tool_calls=_tool_calls(call.items),
            sampling=sampling,
            **_prefix(context, prompt),
        )
        following = optional_list(calls[turn + 1].last, "prompt_token_ids") if turn + 1 < len(calls) else None
        context = None if prompt is None or sampled is None else [*prompt, *sampled]
        context = _add_answers(trajectory, turn, call.answers, context, following)


def _prefix(context: Sequence[int] | None, prompt: Sequence[int] | None) -> dict[str, Any]:
    """What the engine reported as its context; its ids are kept where they are not those of the tape."""
    if prompt is None:
        return {"prefix_source": "unknown"}
    return {
        "prefix_length": len(prompt),
        "prefix_digest": prefix_digest(prompt),
        "prefix_source": "engine",
        "prefix_token_ids": None if prompt == context else prompt,
    }


def _add_answers(
    trajectory: TrajectoryRows,
    turn: int,
    answers: Sequence[Mapping[str, Any]],
    context: list[int] | None,
    following: list[int] | None,
) -> list[int] | None:
    """Add what came between two calls; the context after it, None where it is unknown.

    Where the next call's prompt extends what is known, the ids between are exactly what was observed: one event, as
    nothing says which id belongs to which answer. Otherwise each answer is an event of its text alone.
    """
    if context is not None and following is not None and starts_with(following, context):
        between = following[len(context) :]
        if between or answers:
            text = "\n".join(filter(None, map(_answer_text, answers))) or None
            trajectory.observation(turn, between, source="tool" if answers else "template", text=text)
        return following
    for answer in answers:
        trajectory.observation(
            turn,
            None,
            source="tool" if answer.get("type") == _OUTPUT_ITEM else "environment",
            tool_call_id=optional_text(answer, "call_id"),
            text=_answer_text(answer),
        )
    return context


def _add_end(trajectory: TrajectoryRows, response: Mapping[str, Any], error_kind: str | None) -> None:
    """Add the end: cut by length where the response says so. A named error alone is no reason to drop a rollout."""
    cut = optional_text(optional_mapping(response, "incomplete_details"), "reason")
    trajectory.end("truncated" if cut == "max_output_tokens" else "completed", cut or error_kind)


def _sampling(params: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling configuration of every call; None for what neither request nor response says."""

    def stated(name: str) -> float | None:
        value = optional_float(params, name)
        return optional_float(response, name) if value is None else value

    return {
        "temperature": stated("temperature"),
        "top_p": stated("top_p"),
        "max_tokens": optional_int(params, "max_output_tokens"),
    }


def _reward_components(document: Mapping[str, Any], scorer: str | None) -> list[RewardComponent]:
    """The reward, and with weight 0 the scores that the verifier gave beside it."""
    value = optional_float(document, "reward")
    status: Literal["ok", "missing"] = "missing" if value is None else "ok"
    components = [RewardComponent(name="reward", source="rule", value=value, weight=1.0, status=status, scorer=scorer)]
    for name in _SCORES:
        score = optional_float(document, name)
        if score is not None:
            components.append(RewardComponent(name=name, source="rule", value=score, weight=0.0, scorer=scorer))
    return components


def _prompt_text(params: Mapping[str, Any]) -> str | None:
    """The request for reading: its text, or its messages by role."""
    posed = params.get("input")
    if isinstance(posed, str):
        return posed
    if not posed:
        return optional_text(optional_mapping(params, "metadata"), "problem_statement")
    if isinstance(posed, list) and len(posed) == 1:
        return _content_text(posed[0])
    return "\n\n".join(f"{item.get('role')}: {_content_text(item)}" for item in posed)


def _text_of(items: Sequence[Mapping[str, Any]]) -> str | None:
    """Reasoning and message text of one call, for reading only."""
    parts = [part for item in items for part in (_summary_text(item), _content_text(item)) if part]
    return "\n".join(parts) or None


def _content_text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or () if isinstance(part.get("text"), str))


def _summary_text(item: Mapping[str, Any]) -> str:
    return "\n".join(part["text"] for part in item.get("summary") or () if isinstance(part.get("text"), str))


def _answer_text(item: Mapping[str, Any]) -> str | None:
    return optional_text(item, "output") or _content_text(item) or None


def _tool_calls(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    calls = [
        {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
        for item in items
        if item.get("type") == "function_call"
    ]
    return calls or None

"""Whatever a row looks like, importing goes on: the row is events or a named dead letter, the same ones each time."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rolltape.ingest.importers import import_file
from rolltape.ingest.memory import MemoryLog
from rolltape.schema.cursor import Cursor
from rolltape.schema.reasons import DEAD_LETTER_REASONS

ROLLOUT: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "ask"}], "temperature": 1.0, "metadata": {}},
    "response": {
        "model": "m",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [
            {"type": "reasoning", "summary": [{"text": "hm"}]},
            {
                "type": "function_call",
                "call_id": "c",
                "name": "f",
                "arguments": "{}",
                "prompt_token_ids": [1, 2],
                "generation_token_ids": [3, 4],
                "generation_log_probs": [-0.5, 0.0],
            },
            {"type": "function_call_output", "call_id": "c", "output": "4"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"text": "so"}],
                "prompt_token_ids": [1, 2, 3, 4, 5],
                "generation_token_ids": [6],
                "generation_log_probs": [-0.1],
            },
        ],
    },
    "agent_ref": {"name": "a"},
    "mask_sample": True,
    "reward": 1.0,
    "_ng_task_index": 0,
}

NOTHING = object()
REPLACEMENTS = st.sampled_from(
    [NOTHING, None, True, 0, -1, 2**40, 1.5, float("nan"), "", "x", "\ud800", [], [None], ["x"], [2**40], {}, {"a": 1}]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*path, key), *places(inner, (*path, key)))]


def changed(document: dict[str, Any], path: tuple[Any, ...], new: Any) -> dict[str, Any]:
    """A copy in which one place holds ``new``, or is gone."""
    result = copy.deepcopy(document)
    holder: Any = result
    for key in path[:-1]:
        holder = holder[key]
    if new is NOTHING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = new
    return result


@settings(max_examples=80, deadline=None)
@given(path=st.sampled_from(places(ROLLOUT)), new=REPLACEMENTS)
def test_a_row_of_any_shape_is_events_or_a_named_dead_letter(path: tuple[Any, ...], new: Any) -> None:
    lines = [json.dumps(document) for document in (ROLLOUT, changed(ROLLOUT, path, new), ROLLOUT)]
    with tempfile.TemporaryDirectory() as folder, MemoryLog() as log:
        file = Path(folder) / "rollouts.jsonl"
        file.write_text("\n".join(lines))
        report = import_file(log, str(file))
        again = import_file(log, str(file))
        rows = [row for delivery in log.reader(Cursor()).poll(0.0) for row in delivery.table.to_pylist()]
    assert set(report.refused) <= set(DEAD_LETTER_REASONS)
    assert (report.num_rows, report.num_new, again.num_new) == (3, report.num_events, 0)
    assert report.num_trajectories in {2, 3}
    ids = [row["event_id"] for row in rows]
    assert len(ids) == len(set(ids)) == report.num_events

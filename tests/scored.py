"""Teachers' events on a hand-made tape: problems with domains, routes, and scores as a faithful service writes them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from tests.conftest import Tape

from rolltape.schema.digest import prefix_digest
from rolltape.schema.fold import fold

TOKENIZER: Final = "tokenizer-of-the-run"
TEMPLATE: Final = "template-of-the-run"


def start_run(tape: Tape, **columns: Any) -> None:
    """The run's start, with what its tokenizer and its template are."""
    behaviour = {"name": "char", "behaviour_digest": TOKENIZER}
    tape.add("run_started", purpose="train", tokenizer=[behaviour], chat_template_digest=TEMPLATE, **columns)


def problem(tape: Tape, problem_id: str, domain: str | None) -> None:
    """A problem of a domain."""
    tape.add("problem_registered", problem_id=problem_id, domain=domain)


def route(tape: Tape, domain: str, teacher_id: str, **fields: Any) -> None:
    """A domain's teacher."""
    told = {"weights_digest": f"weights-{teacher_id}", "tokenizer_digest": TOKENIZER}
    tape.add(
        "teacher_routed",
        **{"domain": domain, "teacher_id": teacher_id, "student_tokenizer_digest": TOKENIZER, **told, **fields},
    )


def score(
    tape: Tape, trajectory_id: str, teacher_id: str, *, segment: int = 0, log_probs: Any = None, **fields: Any
) -> str:
    """What a teacher says of one segment, as it is folded now; ``fields`` override what a faithful service writes."""
    segments = fold(tape.tables()).segments.to_pylist()
    [row] = [s for s in segments if (s["trajectory_id"], s["segment_index"]) == (trajectory_id, segment)]
    prompt, response = row["prompt_token_ids"], row["response_token_ids"]
    columns: dict[str, Any] = {
        "trajectory_id": trajectory_id,
        "attempt": 0,
        "group_id": row["group_id"],
        "problem_id": row["problem_id"],
        "segment_index": segment,
        "teacher_id": teacher_id,
        "weights_digest": f"weights-{teacher_id}",
        "logprobs_mode": "processed_logprobs",
        "temperature": 1.0,
        "template_digest": TEMPLATE,
        "tokenizer_digest": TOKENIZER,
        "prefix_digest": prefix_digest(prompt),
        "start_position": len(prompt),
        "scored_token_ids": [response],
        "log_probs": [faithful(response) if log_probs is None else log_probs],
        **fields,
    }
    [event_id] = tape.add("teacher_scored", **columns)
    return event_id


def faithful(ids: list[int]) -> list[float]:
    """A log-prob that tells which token it is of."""
    return [-float(np.float32(token) / np.float32(64)) for token in ids]

"""GSM8K: problems with worked answers, and the four model solutions that OpenAI published with them.

Both are text: no token ids, no log-probs, no sampling configuration are known, and none are made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rolltape.ingest.importers.reading import content_id, required
from rolltape.ingest.importers.rows import EventRows, Ids
from rolltape.ingest.importers.trajectory import TrajectoryRows
from rolltape.schema.reward import RewardComponent

SOLVERS: Final = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
"""The models whose solutions a row holds, in the order in which they become the members of its group."""

ANSWER_MARK: Final = "####"


def problem_id_of(question: str) -> str:
    """Id of a problem by its text: the same in the file of problems and in the file of solutions."""
    return content_id("gsm8k", question.strip())


def is_problem(document: Mapping[str, Any]) -> bool:
    """Whether a row is ``{question, answer}``."""
    return {"question", "answer"} <= document.keys()


def is_solutions(document: Mapping[str, Any]) -> bool:
    """Whether a row holds a question and the four models' solutions."""
    return {"question", "ground_truth", *SOLVERS} <= document.keys()


def convert_problem(ids: Ids, number: int, document: Mapping[str, Any], rows: EventRows) -> None:
    """Add the ``problem_registered`` of one row."""
    _add_problem(ids, number, required(document, "question", str), required(document, "answer", str), rows)


def convert_solutions(ids: Ids, number: int, document: Mapping[str, Any], rows: EventRows) -> None:
    """Add one problem and the group of its four text-only trajectories, rewarded 1 or 0 as the file judged them."""
    question = required(document, "question", str)
    _add_problem(ids, number, question, required(document, "ground_truth", str), rows)
    for solver in SOLVERS:
        solution = required(document, solver, dict)
        trajectory = TrajectoryRows(
            rows, ids, (number, solver), group_id=ids.of("group", number), problem_id=problem_id_of(question)
        )
        trajectory.start(environment="gsm8k", prompt_text=question)
        trajectory.action(0, None, None, text=required(solution, "solution", str), engine={"id": solver})
        trajectory.end("completed")
        correct = RewardComponent(
            name="is_correct",
            source="rule",
            value=float(required(solution, "is_correct", bool)),
            weight=1.0,
            scorer="gsm8k_model_solutions",
        )
        trajectory.reward([correct])


def _add_problem(ids: Ids, number: int, question: str, worked_answer: str, rows: EventRows) -> None:
    _, mark, answer = worked_answer.rpartition(ANSWER_MARK)
    rows.add(
        "problem_registered",
        event_id=ids.of("event", number, "problem"),
        problem_id=problem_id_of(question),
        prompt=question,
        domain="math",
        source="gsm8k",
        answer=answer.strip() if mark else None,
        human_reference=worked_answer,
    )

"""Evaluation of one version on the held-out problems: recorded as rollouts like all others, at temperature 0."""

from __future__ import annotations

import dataclasses
from typing import Any

from rolltape.ingest.recorder import Recorder
from rolltape.rollout.attempts import AttemptBook, plan_step
from rolltape.rollout.engine import PolicyVersion, SamplingConfig
from rolltape.rollout.harness import Harness
from rolltape.rollout.seeds import sampling_seed
from rolltape.rollout.step import StepRows, StepRunner
from rolltape.rollout.tape import RunTape
from rolltape.schema.errors import EngineError


def evaluate(
    harness: Harness,
    runner: StepRunner[Any],
    recorder: Recorder,
    book: AttemptBook,
    tape: RunTape,
    *,
    step: int,
    sampling: SamplingConfig,
    seed: int,
) -> None:
    """Evaluate the active version on all held-out problems, once, and record ``evaluation_completed``.

    Every answer counts by the environment's own rule; the metrics are ``exact_match`` and ``num_problems``. The
    rollouts carry the purpose ``evaluate`` and ``step``, whose version they evaluate (0: before any), so trainers leave
    them alone.

    Raises:
        EngineError: nothing is active.
    """
    version = harness.engine.active_version
    if version is None:
        raise EngineError("expected an active version to evaluate, got none")
    problem_set = f"{harness.environment.name}/heldout"
    problems = harness.environment.problems("heldout")
    if not problems or (version.key, problem_set) in tape.evaluated:
        return
    rows = StepRows(
        purpose="evaluate",
        step=step,
        group_size=1,
        problems=problems,
        group_ordinals=list(range(len(problems))),
        members=[0] * len(problems),
        seeds=[sampling_seed(seed, step, ordinal, 0) for ordinal in range(len(problems))],
    )
    plan = plan_step(book, rows.places, tape.line)
    if not plan.is_empty:
        runner.run(rows, plan, book, tape.line, dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0))
    _record(recorder, harness, rows, book, version, problem_set)


def _record(
    recorder: Recorder,
    harness: Harness,
    rows: StepRows,
    book: AttemptBook,
    version: PolicyVersion,
    problem_set: str,
) -> None:
    found = [book.newest(place) for place in rows.places]
    num_correct = sum(
        harness.is_correct(rows.problems[row], attempt) for row, attempt in enumerate(found) if attempt is not None
    )
    recorder.record(
        "evaluation_completed",
        **version.fields,
        problem_set=problem_set,
        num_problems=len(rows.problems),
        metrics=[
            {"name": "exact_match", "value": num_correct / len(rows.problems)},
            {"name": "num_problems", "value": float(len(rows.problems))},
        ],
    )

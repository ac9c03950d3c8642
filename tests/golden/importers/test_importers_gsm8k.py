"""GSM8K: 1,319 groups of four judged solutions, and the problems that they belong to."""

from __future__ import annotations

from collections.abc import Mapping

from rolltape.ingest.importers import ImportReport
from rolltape.store.lake import Lake

SOLUTIONS = "gsm8k/gsm8k_model_solutions.jsonl"
PROBLEMS = "gsm8k/gsm8k_test.jsonl"


def test_every_problem_has_a_group_of_four(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    report = reports[SOLUTIONS]
    assert (report.num_rows, report.num_trajectories, dict(report.refused)) == (1319, 5276, {})
    sizes = lake.sql(
        f"""select size, count(*) as num_groups from (
                select group_id, count(*) as size from trajectories where run_id = '{report.run_id}' group by group_id)
            group by size"""
    ).arrow()
    assert sizes.to_pylist() == [{"size": 4, "num_groups": 1319}]


def test_588_groups_have_no_variance(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    counts = lake.sql(
        f"""select sum((low = high)::int) as flat, sum((high = 0)::int) as all_wrong, sum((low = 1)::int) as all_right,
                   sum((low < high)::int) as mixed
            from (select group_id, min(reward) as low, max(reward) as high from trajectories
                  where run_id = '{reports[SOLUTIONS].run_id}' group by group_id)"""
    ).arrow()
    assert counts.to_pylist() == [{"flat": 588, "all_wrong": 432, "all_right": 156, "mixed": 731}]


def test_solutions_are_text_and_nothing_is_made_up(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    actions = lake.read("action_sampled", run_id=reports[SOLUTIONS].run_id)
    assert actions.num_rows == 5276
    assert actions["token_ids"].null_count == actions["rollout_log_probs"].null_count == 5276
    solvers = {body["engine"]["id"] for body in actions["action_sampled"].to_pylist()}
    assert solvers == {"6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"}
    refused = lake.sql(
        f"""select count(*) as n from trajectories
            where run_id = '{reports[SOLUTIONS].run_id}' and list_contains(untrainable_reasons, 'no_token_ids')"""
    ).arrow()
    assert refused.to_pylist() == [{"n": 5276}]


def test_problems_meet_their_solutions_by_id(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    problems = lake.read("problem_registered", run_id=reports[PROBLEMS].run_id)
    assert problems.num_rows == 1319
    first = next(body for body in problems["problem_registered"].to_pylist() if body["prompt"].startswith("Janet"))
    assert first["answer"] == "18"
    posed = set(problems["problem_id"].to_pylist())
    solved = set(lake.read("rollout_started", run_id=reports[SOLUTIONS].run_id)["problem_id"].to_pylist())
    assert posed == solved
    assert len(posed) == 1319

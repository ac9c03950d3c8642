"""What the NeMo Gym files hold, as counted on the files themselves, comes back from the tape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.ingest.importers import ImportReport
from rolltape.store.lake import Lake

DATA = Path(__file__).parents[2] / "data" / "nemogym"
ROLLOUTS = "nemogym/cc_rollouts_with_logprobs.jsonl"
ROUND_TRIP = "nemogym/round_trip_token_ids.json"
TEXT_ONLY = (
    "nemogym/reasoning_gym_rollouts.jsonl",
    "nemogym/calendar_rollouts.jsonl",
    "nemogym/anyswe_claude_code.jsonl",
)
STOP_TOKEN = 151645


def rows_of(lake: Lake, query: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in lake.sql(query).arrow().to_pylist()]


def actions_of(lake: Lake, report: ImportReport) -> pa.Table:
    table = lake.read("action_sampled", run_id=report.run_id)
    return table.sort_by([("trajectory_id", "ascending"), ("event_index", "ascending")])


def test_rollouts_become_five_trajectories_of_one_group(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    report = reports[ROLLOUTS]
    assert (report.format_name, report.num_rows, report.num_trajectories, dict(report.refused)) == (
        "nemogym_rollouts",
        5,
        5,
        {},
    )
    assert rows_of(
        lake,
        f"""select count(*), count(distinct group_id), count(distinct problem_id), sum(num_action_tokens),
                   sum(num_prompt_tokens), max(reward), min(reward), bool_and(reward_state = 'earned')
            from trajectories where run_id = '{report.run_id}'""",
    ) == [(5, 1, 1, 5023, 5 * 109, 0.0, 0.0, True)]


def test_ids_and_log_probs_are_those_of_the_file_to_the_bit(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    documents = [json.loads(line) for line in (DATA / "cc_rollouts_with_logprobs.jsonl").read_text().splitlines()]
    expected = {}
    for document in documents:
        item = document["response"]["output"][-1]
        log_probs = np.array(item["generation_log_probs"], dtype=np.float32)
        expected[tuple(item["generation_token_ids"])] = log_probs.view(np.int32).tolist()
    table = actions_of(lake, reports[ROLLOUTS])
    stored = {
        tuple(ids): np.array(log_probs, dtype=np.float32).view(np.int32).tolist()
        for ids, log_probs in zip(table["token_ids"].to_pylist(), table["rollout_log_probs"].to_pylist(), strict=True)
    }
    assert stored == expected


def test_zero_log_probs_are_kept_and_trusted(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    lists = actions_of(lake, reports[ROLLOUTS])["rollout_log_probs"].to_pylist()
    log_probs = np.concatenate([np.array(row) for row in lists])
    assert int((log_probs == 0.0).sum()) == 914
    assert float(log_probs.max()) == 0.0
    untrusted = f"select sum(num_untrusted_tokens) from trajectories where run_id = '{reports[ROLLOUTS].run_id}'"
    assert rows_of(lake, untrusted) == [(0,)]


def test_a_score_beside_the_reward_is_kept_and_does_not_count(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    rewards = lake.read("reward_assigned", run_id=reports[ROLLOUTS].run_id)["reward_assigned"].to_pylist()
    assert {reward["scalar"] for reward in rewards} == {0.0}
    kept = {(part["name"], part["value"], part["weight"]) for reward in rewards for part in reward["components"]}
    assert kept == {("reward", 0.0, 1.0), ("subtask_score", 11.0, 0.0)}


def test_the_stop_token_is_in(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    last = {ids[-1] for ids in actions_of(lake, reports[ROLLOUTS])["token_ids"].to_pylist()}
    assert last == {STOP_TOKEN}


def test_unknown_sampling_is_unknown_and_refuses_training_by_name(
    lake: Lake, reports: Mapping[str, ImportReport]
) -> None:
    sampling = actions_of(lake, reports[ROLLOUTS])["action_sampled"].combine_chunks().field("sampling")
    assert {tuple(row.values()) for row in sampling.to_pylist()} == {(None,) * 12}
    reasons = rows_of(
        lake, f"select distinct untrainable_reasons from trajectories where run_id = '{reports[ROLLOUTS].run_id}'"
    )
    assert reasons == [(["unknown_logprobs_mode", "unknown_temperature", "unknown_version"],)]


def test_three_tool_calls_and_a_thought_are_one_action(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    table = actions_of(lake, reports[ROUND_TRIP])
    assert [len(ids) for ids in table["token_ids"].to_pylist()] == [495, 207]
    assert [ids[-2:] for ids in table["token_ids"].to_pylist()] == [[151658, 151645], [198, 151643]]
    bodies = table["action_sampled"].to_pylist()
    assert [call["name"] for call in bodies[0]["tool_calls"]] == [
        "get_synonym_value",
        "get_synonym_value",
        "extract_synonym_values",
    ]
    assert bodies[1]["tool_calls"] is None
    assert [body["prefix_length"] for body in bodies] == [3088, 3637]
    assert {body["prefix_source"] for body in bodies} == {"engine"}


def test_the_thought_that_the_template_dropped_is_a_named_mismatch(
    lake: Lake, reports: Mapping[str, ImportReport]
) -> None:
    """The second call's prompt leaves the first call's thought out: it differs from index 3089 on."""
    assert rows_of(
        lake,
        f"""select num_action_tokens, tito_ok, tito_first_difference,
                   list_contains(untrainable_reasons, 'prefix_mismatch')
            from trajectories where run_id = '{reports[ROUND_TRIP].run_id}'""",
    ) == [(702, False, 3089, True)]


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_text_has_no_ids_and_is_refused_by_name(name: str, lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    report = reports[name]
    assert report.num_trajectories == 5
    table = actions_of(lake, report)
    assert table["token_ids"].null_count == table.num_rows
    assert table["rollout_log_probs"].null_count == table.num_rows
    assert all(body["text"] or body["tool_calls"] for body in table["action_sampled"].to_pylist())
    assert rows_of(
        lake,
        f"""select count(*), bool_and(list_contains(untrainable_reasons, 'no_token_ids'))
            from trajectories where run_id = '{report.run_id}'""",
    ) == [(5, True)]


def test_a_group_out_of_order_is_one_group_and_an_error_kind_drops_nothing(
    lake: Lake, reports: Mapping[str, ImportReport]
) -> None:
    report = reports["nemogym/anyswe_claude_code.jsonl"]
    assert rows_of(
        lake,
        f"""select count(*), count(distinct group_id), sum(reward), any_value(status), any_value(cause)
            from trajectories where run_id = '{report.run_id}'""",
    ) == [(5, 1, 1.0, "completed", "other")]
    sampling = [body["sampling"] for body in actions_of(lake, report)["action_sampled"].to_pylist()]
    assert {(one["temperature"], one["top_p"], one["max_tokens"]) for one in sampling} == {(0.7, 0.8, 12288)}


def test_each_reasoning_problem_is_a_group_of_its_own(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    run_id = reports["nemogym/reasoning_gym_rollouts.jsonl"].run_id
    assert rows_of(
        lake, f"select count(distinct group_id), sum(reward) from trajectories where run_id = '{run_id}'"
    ) == [(5, 2.0)]

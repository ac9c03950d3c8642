"""NeMo RL: real re-tokenisation drift is found at its index; message logs keep their prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rolltape.ingest.importers import ImportReport
from rolltape.store.lake import Lake
from rolltape.store.verify import verify

DATA = Path(__file__).parents[2] / "data" / "nemorl"
DRIFT = "nemorl/merged_tokens_drift.json"
SANITY = "nemorl/nemo_gym_sanity.json"
FIRST_DIFFERENCE = 4647


def test_the_recorded_ids_are_those_that_were_seen(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    document = json.loads((DATA / "merged_tokens_drift.json").read_text())
    run_id = reports[DRIFT].run_id
    started = lake.read("rollout_started", run_id=run_id)["rollout_started"].to_pylist()
    assert [body["prompt_token_ids"] for body in started] == [document["seen_token_ids"]]
    observed = lake.read("observation_received", run_id=run_id)["token_ids"].to_pylist()
    assert [len(ids) for ids in observed] == [22]
    assert document["seen_token_ids"] + observed[0] == document["expected_output"]


def test_the_next_action_keeps_the_context_that_the_engine_used(
    lake: Lake, reports: Mapping[str, ImportReport]
) -> None:
    document = json.loads((DATA / "merged_tokens_drift.json").read_text())
    (action,) = lake.read("action_sampled", run_id=reports[DRIFT].run_id).to_pylist()
    assert action["token_ids"] is None
    assert action["rollout_log_probs"] is None
    assert action["action_sampled"]["prefix_token_ids"] == document["output_prompt_token_ids"]


def test_the_fold_finds_the_first_difference(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    query = f"""select tito_ok, tito_first_difference, list_contains(untrainable_reasons, 'prefix_mismatch') as refused
                from trajectories where run_id = '{reports[DRIFT].run_id}'"""
    assert lake.sql(query).arrow().to_pylist() == [
        {"tito_ok": False, "tito_first_difference": FIRST_DIFFERENCE, "refused": True}
    ]


def test_verify_names_the_index(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    (trajectory_id,) = lake.read("rollout_started", run_id=reports[DRIFT].run_id)["trajectory_id"].to_pylist()
    proof = verify(lake).check("prefix_proof")
    (finding,) = [finding for finding in proof.findings if finding.trajectory_id == trajectory_id]
    assert finding.index == FIRST_DIFFERENCE
    assert f"index {FIRST_DIFFERENCE}" in finding.message


def test_message_logs_keep_prompts_and_empty_actions(lake: Lake, reports: Mapping[str, ImportReport]) -> None:
    run_id = reports[SANITY].run_id
    started = lake.read("rollout_started", run_id=run_id)["rollout_started"].to_pylist()
    assert sorted(len(body["prompt_token_ids"]) for body in started) == [3048, 3080]
    actions = lake.read("action_sampled", run_id=run_id)
    assert actions["token_ids"].to_pylist() == [[]] * 4
    assert actions["rollout_log_probs"].to_pylist() == [[]] * 4
    query = f"""select count(*) as n, bool_and(list_contains(untrainable_reasons, 'open')) as o
                from trajectories where run_id = '{run_id}'"""
    assert lake.sql(query).arrow().to_pylist() == [{"n": 2, "o": True}]

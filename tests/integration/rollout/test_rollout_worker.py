"""The worker against a scripted trainer on the in-memory log: lock step, weight sync, restarts, evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape.numerics.models import build_model
from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.process import DONE, TERMINATED
from rolltape.rollout.seeds import sampling_seed
from rolltape.rollout.sort_digits import SortDigits, SortDigitsConfig
from rolltape.rollout.worker import WorkerConfig
from rolltape.schema.errors import DigestMismatchError, EngineError, ProducerFencedError

from .stage import Killed, Stage

GROUPS, SIZE = 3, 4
PER_STEP = GROUPS * SIZE
CONFIG = WorkerConfig(
    lake="memory://",
    run_id="run",
    environment_options={"num_heldout": 20},
    seed=5,
    groups_per_step=GROUPS,
    group_size=SIZE,
    sampling=SamplingConfig(max_tokens=4),
    poll_s=0.02,
    evaluate_heldout=False,
)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, CONFIG)
    yield made
    made.close()


def undisturbed(folder: Path, **changes: Any) -> dict[tuple[int, int], Any]:
    """What step 1 has where nothing happens."""
    stage = Stage(folder, CONFIG)
    try:
        stage.begin()
        stage.worker(**changes)
        stage.trainer.commit(stage.version_0)
        stage.trainer.wait_for_rewards(1, PER_STEP)
        return stage.contents(1)
    finally:
        stage.close()


def test_lock_step(stage: Stage) -> None:
    stage.begin()
    running = stage.worker()
    key = stage.version_0
    for step in (1, 2):
        stage.trainer.commit(key)
        stage.trainer.wait_for_rewards(step, PER_STEP)
        assert stage.tape.count("rollout_dispatched") == step * PER_STEP, "the next step waits for its release"
        stage.trainer.complete(step, version_out=step, final=step == 2)
        key = stage.trainer.publish(step, step=step)
    stage.trainer.commit(key)
    assert running.join().status == DONE

    for kind in ("rollout_dispatched", "rollout_started", "action_sampled", "rollout_ended", "reward_assigned"):
        assert len(stage.tape.rows(kind)) == 2 * PER_STEP, kind
    for step in (1, 2):
        contents = stage.contents(step)
        assert set(contents) == {(group, member) for group in range(GROUPS) for member in range(SIZE)}
        assert all(versions == [step - 1] for _, _, versions, _, _ in contents.values())
    assert [row["version"] for row in stage.tape.rows("weights_activated")] == [0, 1, 2]
    assert [row["version"] for row in stage.tape.rows("weights_staged")] == [0, 1, 2]
    assert [row["reason"] for row in stage.tape.rows("engine_left")] == ["left"]


def test_what_a_rollout_says_of_itself(stage: Stage) -> None:
    stage.begin()
    stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    problems = {
        problem.problem_id: problem
        for problem in SortDigits(SortDigitsConfig(num_heldout=20), seed=5).problems("train")
    }
    dispatched = stage.tape.rows("rollout_dispatched")
    for row in dispatched:
        assert row["sampling_seed"] == sampling_seed(5, 1, row["group_ordinal"], row["member"])
        assert (row["purpose"], row["group_size"], row["worker_id"], row["attempt"]) == ("train", SIZE, "worker-0", 0)
        assert row["root_rollout_id"] == row["trajectory_id"]
    groups = {row["group_ordinal"]: row["group_id"] for row in dispatched}
    assert len(set(groups.values())) == GROUPS
    for row in stage.tape.rows("rollout_started"):
        assert row["event_index"] == 0
        assert row["prompt_text"] == problems[row["problem_id"]].prompt
        assert len(row["prompt_token_ids"]) == 4
    for row in stage.tape.rows("action_sampled"):
        assert row["event_index"] == 1
        assert len(row["token_ids"]) == len(row["rollout_log_probs"])
        assert row["sampling"]["logprobs_mode"] == "processed_logprobs"
        assert row["sampling"]["temperature"] == 1.0
        assert row["sampling"]["stop_token_ids"] == [2]
        assert (row["prefix_length"], row["prefix_source"], row["engine"]["id"]) == (4, "engine", "worker-0")
        assert row["version_runs"][0]["weights_digest"] == stage.version_0["weights_digest"]
        assert row["truncated"] == (row["token_ids"][-1] != 2)
    for row in stage.tape.rows("rollout_ended"):
        assert row["event_index"] == row["last_event_index"] == 2
    for row in stage.tape.rows("reward_assigned"):
        assert row["state"] == "earned"
        assert row["scalar"] == sum(c["value"] * c["weight"] for c in row["components"])
        assert [component["name"] for component in row["components"]] == ["positions", "exact"]


def test_no_token_leaves_with_a_version_whose_activation_is_not_recorded(stage: Stage) -> None:
    stage.begin()
    stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    stage.trainer.complete(1, version_out=1)
    key = stage.trainer.publish(1, step=1)
    stage.tape.wait_for("version 1 to be staged", lambda: len(stage.tape.rows("weights_staged")) == 2)
    assert stage.tape.count("rollout_dispatched") == PER_STEP, "staged is not committed"
    stage.trainer.commit(key)
    stage.trainer.wait_for_rewards(2, PER_STEP)
    activated = {row["version"]: row["recorded_at"] for row in stage.tape.rows("weights_activated")}
    committed = {row["version"]: row["recorded_at"] for row in stage.tape.rows("weights_committed")}
    for row in stage.tape.rows("action_sampled"):
        for run in row["version_runs"]:
            assert committed[run["version"]] <= activated[run["version"]] <= row["recorded_at"]


def test_workers_share_the_groups_of_a_step(stage: Stage, tmp_path: Path) -> None:
    stage.begin()
    for index in range(2):
        stage.worker(index=index, num_workers=2)
    stage.trainer.commit(stage.version_0, num_engines=2)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    owners = {(row["group_ordinal"], row["worker_id"]) for row in stage.tape.rows("rollout_dispatched")}
    assert owners == {(0, "worker-0"), (1, "worker-1"), (2, "worker-0")}
    alone = undisturbed(tmp_path / "alone")
    together = stage.contents(1)
    assert {place: (ids, reward) for place, (ids, _, _, reward, _) in together.items()} == {
        place: (ids, reward) for place, (ids, _, _, reward, _) in alone.items()
    }


KINDS = ("rollout_dispatched", "rollout_started", "action_sampled", "rollout_ended", "reward_assigned")


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_died_comes_back_to_the_same_bits(stage: Stage, tmp_path: Path, kind: str, num_rows: int) -> None:
    stage.begin()
    dying = stage.worker(dies_at=(kind, num_rows))
    stage.trainer.commit(stage.version_0)
    assert isinstance(dying.join().error, Killed)

    stage.worker()
    stage.trainer.wait_for_rewards(1, PER_STEP)
    assert stage.contents(1) == undisturbed(tmp_path / "undisturbed")

    num_dispatched = num_rows if kind == "rollout_dispatched" else PER_STEP
    num_kept = {"rollout_ended": num_rows, "reward_assigned": PER_STEP}.get(kind, 0)
    abandoned = stage.tape.rows("attempt_abandoned")
    assert len(abandoned) == num_dispatched - num_kept
    assert {row["reason"] for row in abandoned} <= {"worker_lost"}
    again = [row for row in stage.tape.rows("rollout_dispatched") if row["attempt"] == 1]
    assert {row["trajectory_id"] for row in again} == {row["trajectory_id"] for row in abandoned}
    assert len({row["trajectory_id"] for row in stage.tape.rows("rollout_dispatched")}) == PER_STEP
    assert len(stage.tape.rows("reward_assigned")) == PER_STEP


@pytest.mark.parametrize("dies_at", [None, ("reward_assigned", 5), ("rollout_ended", 5)])
def test_a_control_gets_the_rewards_of_others_and_the_same_ones_after_a_crash(
    stage: Stage, tmp_path: Path, dies_at: tuple[str, int] | None
) -> None:
    stage.begin()
    first = stage.worker(shuffle_rewards=True, dies_at=dies_at)
    stage.trainer.commit(stage.version_0)
    if dies_at is not None:
        assert isinstance(first.join().error, Killed)
        stage.worker(shuffle_rewards=True)
    stage.tape.wait_for("all to end", lambda: len(ended(stage)) == PER_STEP)
    true = undisturbed(tmp_path / "true")
    control = stage.contents(1)
    assert {place: row[:3] for place, row in control.items()} == {place: row[:3] for place, row in true.items()}
    rewards = [[row[3] for _, row in sorted(of.items())] for of in (control, true)]
    assert rewards[0] != rewards[1]
    assert sorted(rewards[0]) == sorted(rewards[1])
    assert control == undisturbed(tmp_path / "control", shuffle_rewards=True)
    scorers = {component["scorer"] for row in stage.tape.rows("reward_assigned") for component in row["components"]}
    assert scorers == {"sort_digits-shuffled"}


def ended(stage: Stage) -> set[tuple[str, int]]:
    """Attempts that have ended and were not abandoned."""
    gone = {(row["trajectory_id"], row["attempt"]) for row in stage.tape.rows("attempt_abandoned")}
    return {(row["trajectory_id"], row["attempt"]) for row in stage.tape.rows("rollout_ended")} - gone


def test_a_batch_that_was_half_recorded_is_completed_row_by_row(stage: Stage, tmp_path: Path) -> None:
    """Batches of one group each; the worker dies in the second one, after two of its four rollouts have ended."""
    stage.begin()
    dying = stage.worker(dies_at=("rollout_ended", 2), num_spared=1, rows_per_batch=SIZE)
    stage.trainer.commit(stage.version_0)
    assert isinstance(dying.join().error, Killed)
    stage.worker(rows_per_batch=SIZE)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    assert stage.contents(1) == undisturbed(tmp_path / "undisturbed", rows_per_batch=SIZE)
    abandoned = stage.tape.rows("attempt_abandoned")
    places = {
        row["trajectory_id"]: (row["group_ordinal"], row["member"]) for row in stage.tape.rows("rollout_dispatched")
    }
    assert sorted(places[row["trajectory_id"]] for row in abandoned) == [(1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]


def test_a_worker_that_comes_back_after_its_step_adds_nothing(stage: Stage) -> None:
    stage.begin()
    first = stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    first.worker.stop()
    assert first.join().status == TERMINATED
    stage.worker()
    stage.tape.wait_for("the engine to serve again", lambda: len(stage.tape.rows("weights_activated")) == 2)
    stage.trainer.complete(1, version_out=0)
    stage.trainer.wait_for_rewards(2, PER_STEP)
    assert len(stage.tape.rows("rollout_dispatched")) == 2 * PER_STEP
    assert stage.tape.rows("attempt_abandoned") == []
    assert [row["incarnation"] for row in stage.tape.rows("engine_joined")] == ["run.worker-0/1", "run.worker-0/2"]


def test_two_workers_with_one_index_are_refused(stage: Stage) -> None:
    stage.begin()
    stage.worker()
    with pytest.raises(ProducerFencedError):
        stage.worker()


def test_a_new_run_epoch_makes_abandoned_steps_again(stage: Stage) -> None:
    """Epoch 2 goes back before step 1: its rollouts stay live, those of step 2 are made again for the new line."""
    stage.begin()
    stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    stage.trainer.complete(1, version_out=1)
    stage.trainer.commit(stage.trainer.publish(1, step=1))
    stage.trainer.wait_for_rewards(2, PER_STEP)
    before = stage.contents(2)

    stage.trainer.resume_run(2, continues_from_step=0)
    stage.trainer.complete(1, version_out=1)
    stage.trainer.commit(stage.trainer.publish(1, step=1))
    stage.tape.wait_for("step 2 again", lambda: len(stage.tape.rows("reward_assigned")) == 3 * PER_STEP)

    abandoned = stage.tape.rows("attempt_abandoned")
    assert len(abandoned) == PER_STEP
    assert {row["reason"] for row in abandoned} == {"superseded"}
    again = [row for row in stage.tape.rows("rollout_dispatched") if row["attempt"] == 1]
    assert {(row["training_step"], row["run_epoch"]) for row in again} == {(2, 2)}
    assert {row["trajectory_id"] for row in again} == {row["trajectory_id"] for row in abandoned}
    assert stage.contents(2) == before, "the same weights and seeds give the same bits on the new line"
    epochs = {
        run["run_epoch"]
        for row in stage.tape.rows("action_sampled")
        if row["attempt"] == 1
        for run in row["version_runs"]
    }
    assert epochs == {2}


def test_a_late_worker_finds_what_an_abandoned_line_left(stage: Stage) -> None:
    """The batch of the new line was formed after the rollouts of the old one; the worker sees all of it at once."""
    stage.begin()
    first = stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    stage.trainer.complete(1, version_out=0)
    stage.trainer.wait_for_rewards(2, PER_STEP)
    first.worker.stop()
    first.join()
    stage.trainer.resume_run(2, continues_from_step=0)
    stage.trainer.complete(1, version_out=0)
    stage.worker()
    stage.tape.wait_for("step 2 again", lambda: len(stage.tape.rows("reward_assigned")) == 3 * PER_STEP)
    assert {row["reason"] for row in stage.tape.rows("attempt_abandoned")} == {"superseded"}
    assert len(stage.tape.rows("attempt_abandoned")) == PER_STEP
    assert len({row["trajectory_id"] for row in stage.tape.rows("rollout_dispatched")}) == 2 * PER_STEP


def test_a_step_that_was_skipped_keeps_the_version(stage: Stage) -> None:
    stage.begin()
    stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    stage.trainer.complete(1, version_out=0)
    stage.trainer.wait_for_rewards(2, PER_STEP)
    assert all(versions == [0] for _, _, versions, _, _ in stage.contents(2).values())


def test_an_aborted_version_is_passed_over(stage: Stage) -> None:
    stage.begin()
    stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    stage.trainer.complete(1, version_out=2)
    aborted = stage.trainer.publish(1, step=1)
    stage.tape.wait_for("version 1 to be staged", lambda: len(stage.tape.rows("weights_staged")) == 2)
    stage.trainer.recorder.record("weights_aborted", **aborted, reason="an engine failed")
    stage.trainer.commit(stage.trainer.publish(2, step=1))
    stage.trainer.wait_for_rewards(2, PER_STEP)
    assert [row["version"] for row in stage.tape.rows("weights_activated")] == [0, 2]


def test_other_bytes_than_published_make_the_engine_leave(stage: Stage) -> None:
    stage.trainer.start_run()
    stage.trainer.publish(0, step=0)
    file = next(Path(stage.root.local_path()).rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    running = stage.worker().join()
    assert isinstance(running.error, DigestMismatchError)
    assert [row["reason"] for row in stage.tape.rows("engine_left")] == ["digest_mismatch"]
    assert stage.tape.rows("weights_staged") == []


def test_a_payload_that_the_engine_cannot_read_makes_it_leave(stage: Stage) -> None:
    stage.trainer.start_run()
    stage.trainer.publish(0, step=0, payload="delta")
    running = stage.worker().join()
    assert isinstance(running.error, EngineError)
    assert [row["reason"] for row in stage.tape.rows("engine_left")] == ["failed"]


def test_a_worker_that_is_asked_to_stop_leaves_in_good_order(stage: Stage) -> None:
    stage.begin()
    running = stage.worker()
    stage.tape.wait_for("the engine to join", lambda: bool(stage.tape.rows("engine_joined")))
    running.worker.stop()
    assert running.join().status == TERMINATED
    assert [row["reason"] for row in stage.tape.rows("engine_left")] == ["left"]


def test_the_final_version_is_evaluated_on_the_held_out_problems_once(stage: Stage) -> None:
    stage.begin()
    running = stage.worker(evaluate_heldout=True)
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    stage.trainer.complete(1, version_out=1, final=True)
    key = stage.trainer.publish(1, step=1)
    stage.trainer.commit(key)
    assert running.join().status == DONE

    environment = SortDigits(SortDigitsConfig(num_heldout=20), seed=5)
    heldout = {problem.problem_id: problem for problem in environment.problems("heldout")}
    dispatched = [row for row in stage.tape.rows("rollout_dispatched") if row["purpose"] == "evaluate"]
    assert {row["problem_id"] for row in dispatched} == set(heldout)
    actions = {row["trajectory_id"]: row for row in stage.tape.rows("action_sampled")}
    for row in dispatched:
        assert actions[row["trajectory_id"]]["sampling"]["temperature"] == 0.0
        assert actions[row["trajectory_id"]]["version_runs"][0]["version"] == 1
    evaluated = stage.tape.rows("evaluation_completed")
    assert len(evaluated) == 1
    assert evaluated[0]["problem_set"] == "sort_digits/heldout"
    assert (evaluated[0]["version"], evaluated[0]["num_problems"]) == (1, 20)
    ids = {row["trajectory_id"] for row in dispatched}
    num_correct = sum(
        row["components"][1]["value"] for row in stage.tape.rows("reward_assigned") if row["trajectory_id"] in ids
    )
    assert {m["name"]: m["value"] for m in evaluated[0]["metrics"]} == {
        "exact_match": num_correct / 20,
        "num_problems": 20.0,
    }

    assert stage.worker(evaluate_heldout=True).join().status == DONE
    assert len(stage.tape.rows("evaluation_completed")) == 1
    assert len([row for row in stage.tape.rows("rollout_dispatched") if row["purpose"] == "evaluate"]) == 20


def test_a_verifier_that_fails_makes_the_reward_invalid(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> float:
        raise TimeoutError("the verifier is away")

    monkeypatch.setattr("rolltape.rollout.rewards.position_share", fail)
    stage.begin()
    stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    rows = stage.tape.rows("reward_assigned")
    assert {(row["state"], row["scalar"]) for row in rows} == {("invalid", None)}
    assert rows[0]["components"][0]["reason"] == "TimeoutError: the verifier is away"


def test_batches_are_cut_at_groups_and_give_the_same_tokens(stage: Stage, tmp_path: Path) -> None:
    stage.begin()
    stage.worker(rows_per_batch=5)
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    whole = undisturbed(tmp_path / "whole")
    cut = stage.contents(1)
    assert {place: content[0] for place, content in cut.items()} == {
        place: content[0] for place, content in whole.items()
    }


def test_the_seed_of_the_run_decides_everything(stage: Stage, tmp_path: Path) -> None:
    stage.begin()
    stage.worker(seed=6)
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    assert stage.contents(1) != undisturbed(tmp_path / "other")


def test_versions_before_the_newest_are_not_staged_by_a_late_engine(stage: Stage) -> None:
    stage.begin()
    first = stage.worker()
    stage.trainer.commit(stage.version_0)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    first.worker.stop()
    first.join()
    stage.trainer.complete(1, version_out=1)
    stage.trainer.publish(1, step=1)
    stage.trainer.recorder.record("weights_committed", **stage.version_0 | {"version": 1}, required_engines=[])
    stage.trainer.recorder.flush("logged")
    stage.worker()
    stage.trainer.wait_for_rewards(2, PER_STEP)
    late = [row for row in stage.tape.rows("weights_staged") if row["producer_epoch"] == 2]
    assert [row["version"] for row in late] == [1]


def test_the_model_is_the_configured_one(stage: Stage) -> None:
    """The engine's own initial weights never serve: the published ones do, whatever seed the worker built with."""
    stage.trainer.start_run()
    key = stage.trainer.publish(0, step=0, model=build_model("char-64x2", 123))
    stage.worker()
    stage.trainer.commit(key)
    stage.trainer.wait_for_rewards(1, PER_STEP)
    digests = {run["weights_digest"] for row in stage.tape.rows("action_sampled") for run in row["version_runs"]}
    assert digests == {key["weights_digest"]}

"""The scoring service on the in-memory log: routes, exact ids, restarts, what it holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rolltape.ingest.memory import MemoryLog
from rolltape.numerics.packed import packed_log_probs
from rolltape.rollout.process import DONE, TERMINATED
from rolltape.schema.digest import prefix_digest
from rolltape.schema.errors import DigestMismatchError

from .teacher_stage import MODEL, ROUTES, SEEDS, Rollouts, Serving, made_teacher


class Stage:
    def __init__(self) -> None:
        self.log = MemoryLog()
        self.rollouts = Rollouts(self.log)
        self.rollouts.start_run({"p-up": "up", "p-down": "down"})
        self.running: list[Serving] = []

    def serve(self, **options: object) -> Serving:
        self.running.append(Serving(self.log, **options))  # type: ignore[arg-type]
        return self.running[-1]

    def content(self) -> dict[tuple[str, int], tuple[str, bytes]]:
        """Teacher and log-prob bits of each score, by attempt."""
        found = {}
        for row in self.rollouts.scores():
            key = (row["trajectory_id"], row["attempt"])
            assert key not in found, f"{key} was scored twice"
            found[key] = (row["teacher_id"], np.array(row["log_probs"], np.float32).tobytes())
        return found


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    for serving in made.running:
        serving.stop()
    made.rollouts.close()


def test_each_domain_is_scored_by_its_own_teacher_at_the_very_ids(stage: Stage) -> None:
    serving = stage.serve()
    stage.rollouts.group("p-up", ordinal=0, size=3)
    stage.rollouts.group("p-down", ordinal=1, size=2)
    stage.rollouts.wait_for_scores(5)
    contexts = {row["trajectory_id"]: row["prompt_token_ids"] for row in stage.rollouts.tape.rows("rollout_started")}
    responses: dict[str, list[int]] = {}
    for row in sorted(
        stage.rollouts.tape.rows("action_sampled") + stage.rollouts.tape.rows("observation_received"),
        key=lambda row: row["event_index"],
    ):
        responses.setdefault(row["trajectory_id"], []).extend(row["token_ids"])
    models = {name: made_teacher(seed).model for name, seed in SEEDS.items()}
    for row in stage.rollouts.scores():
        name = row["trajectory_id"]
        context, response = contexts[name], responses[name]
        assert row["teacher_id"] == ("teacher-up" if name.startswith("p-up") else "teacher-down")
        assert row["scored_token_ids"] == response
        assert (row["start_position"], row["prefix_digest"]) == (len(context), prefix_digest(context))
        ids = torch.tensor(context + response)
        model = models[row["teacher_id"]]
        assert model is not None
        with torch.no_grad():
            expected = packed_log_probs(model, ids, torch.tensor([0, len(ids)]), token_budget=4096).log_probs
        np.testing.assert_allclose(row["log_probs"], expected[len(context) :].numpy(), atol=1e-6)
        assert (row["temperature"], row["logprobs_mode"]) == (1.0, "processed_logprobs")
        assert row["segment_index"] == 0
    routes = {row["domain"]: row for row in stage.rollouts.tape.rows("teacher_routed")}
    assert {domain: row["teacher_id"] for domain, row in routes.items()} == {
        "up": "teacher-up",
        "down": "teacher-down",
    }
    assert routes["up"]["weights_digest"] == serving.teachers["teacher-up"].weights_digest
    assert routes["up"]["weights_digest"] != routes["down"]["weights_digest"]
    assert routes["up"]["tokenizer_digest"] == routes["up"]["student_tokenizer_digest"]


def test_every_segment_is_scored_under_its_own_context(stage: Stage) -> None:
    stage.serve()
    contexts, responses = stage.rollouts.rewritten("p-down")
    stage.rollouts.wait_for_scores(2)
    rows = sorted(stage.rollouts.scores(), key=lambda row: row["segment_index"])
    assert [row["segment_index"] for row in rows] == [0, 1]
    assert [row["scored_token_ids"] for row in rows] == responses
    assert [row["prefix_digest"] for row in rows] == [prefix_digest(context) for context in contexts]
    assert [row["start_position"] for row in rows] == [len(context) for context in contexts]
    scorer = made_teacher(SEEDS["teacher-down"]).scorer
    for row, context, response in zip(rows, contexts, responses, strict=True):
        ids = torch.tensor(context + response)
        expected = scorer.score(ids, torch.tensor([0, len(ids)]))[len(context) :]
        np.testing.assert_allclose(row["log_probs"], expected.numpy(), atol=1e-6)


def test_the_service_ends_with_the_run_and_when_told_to(stage: Stage) -> None:
    stage.serve().stop()
    assert stage.running[0].status == TERMINATED
    serving = stage.serve()
    stage.rollouts.group("p-up")
    stage.rollouts.wait_for_scores(2)
    stage.rollouts.finish()
    assert serving.join().status == DONE


def test_one_that_starts_late_scores_all_and_one_that_comes_back_scores_nothing_twice(stage: Stage) -> None:
    for ordinal in range(4):
        stage.rollouts.group("p-up" if ordinal % 2 else "p-down", ordinal=ordinal)
    stage.serve()
    stage.rollouts.wait_for_scores(8)
    stage.running[0].stop()
    first = stage.content()
    stage.serve()
    stage.rollouts.group("p-up", ordinal=4)
    stage.rollouts.wait_for_scores(10)
    stage.running[1].stop()
    again = stage.content()
    assert len(again) == 10
    assert all(again[key] == first[key] for key in first)
    assert stage.rollouts.tape.count("teacher_routed") == 2


def test_a_group_is_scored_when_its_last_rollout_has_ended(stage: Stage) -> None:
    stage.serve()
    handed = stage.rollouts.dispatch("p-up", size=3)
    stage.rollouts.act(handed, [0, 1])
    stage.rollouts.group("p-down", ordinal=1)
    stage.rollouts.wait_for_scores(2)
    assert {row["teacher_id"] for row in stage.rollouts.scores()} == {"teacher-down"}
    stage.rollouts.act(handed, [2])
    stage.rollouts.wait_for_scores(5)
    offsets = {row["log_offset"] for row in stage.rollouts.scores() if row["teacher_id"] == "teacher-up"}
    assert len(offsets) == 1, "in one record: none of them was scored before"


def test_rollouts_of_a_group_that_does_not_end_are_scored_alone(stage: Stage) -> None:
    stage.serve(group_wait_s=0.05)
    handed = stage.rollouts.dispatch("p-up", size=3)
    stage.rollouts.act(handed, [0, 1])
    stage.rollouts.wait_for_scores(2)
    stage.rollouts.act(handed, [2])
    stage.rollouts.wait_for_scores(3)
    assert len(stage.content()) == 3


def test_an_abandoned_attempt_is_not_scored_and_its_successor_is(stage: Stage) -> None:
    handed = stage.rollouts.dispatch("p-up", size=2)
    stage.rollouts.act(handed)
    identity, _ = handed
    stage.rollouts.recorder.record_batch("attempt_abandoned", {**identity, "reason": "superseded"}, 2)
    stage.serve()
    stage.rollouts.group("p-down", ordinal=1)
    stage.rollouts.wait_for_scores(2)
    stage.rollouts.group("p-up", size=2, attempt=1)
    stage.rollouts.wait_for_scores(4)
    assert sorted(attempt for _, attempt in stage.content()) == [0, 0, 1, 1]
    assert all(name.startswith("p-down") or attempt == 1 for name, attempt in stage.content())


def test_a_domain_without_a_teacher_is_held_and_told_once(stage: Stage) -> None:
    stage.rollouts.register({"p-law": "law", "p-nothing": None})
    for _ in range(2):
        serving = stage.serve()
        stage.rollouts.group("p-law", ordinal=10 + len(stage.running), step=2)
        stage.rollouts.group("p-nothing", ordinal=20 + len(stage.running), step=2)
        stage.rollouts.group("p-up", ordinal=len(stage.running))
        stage.rollouts.wait_for_scores(2 * len(stage.running))
        serving.stop()
    assert {row["teacher_id"] for row in stage.rollouts.scores()} == {"teacher-up"}
    alarms = stage.rollouts.alarms()
    assert [name for name, _ in alarms] == ["teacher_unknown_domain"] * 2
    assert "'law'" in alarms[0][1]
    assert "'p-law'" in alarms[0][1]


def test_a_teacher_that_is_not_there_holds_its_domain_alone_until_it_comes(stage: Stage) -> None:
    serving = stage.serve(absent={"teacher-up"})
    stage.rollouts.group("p-up", ordinal=0)
    stage.rollouts.group("p-down", ordinal=1)
    stage.rollouts.wait_for_scores(2)
    stage.rollouts.tape.wait_for("the alarm", lambda: bool(stage.rollouts.alarms()))
    assert {row["teacher_id"] for row in stage.rollouts.scores()} == {"teacher-down"}
    ((name, detail),) = stage.rollouts.alarms()
    assert (name, "teacher-up" in detail) == ("teacher_unavailable", True)
    serving.absent.clear()
    stage.rollouts.wait_for_scores(4)
    assert len(stage.content()) == 4
    assert {row["domain"] for row in stage.rollouts.tape.rows("teacher_routed")} == {"up", "down"}


def test_a_rollout_whose_problem_is_registered_later_is_scored_then(stage: Stage) -> None:
    stage.serve()
    stage.rollouts.group("p-late")
    stage.rollouts.tape.wait_for("the alarm", lambda: bool(stage.rollouts.alarms()))
    assert not stage.rollouts.scores()
    stage.rollouts.register({"p-late": "down"})
    stage.rollouts.wait_for_scores(2)


def test_tokens_sampled_at_another_temperature_are_held(stage: Stage) -> None:
    stage.serve()
    stage.rollouts.act(stage.rollouts.dispatch("p-up", ordinal=0), temperature=0.7)
    stage.rollouts.group("p-down", ordinal=1)
    stage.rollouts.wait_for_scores(2)
    assert {row["teacher_id"] for row in stage.rollouts.scores()} == {"teacher-down"}
    ((name, detail),) = stage.rollouts.alarms()
    assert (name, "0.7" in detail) == ("teacher_other_sampling", True)


def test_another_teacher_within_a_run_is_refused(stage: Stage) -> None:
    stage.serve()
    stage.rollouts.tape.wait_for("routes", lambda: len(stage.rollouts.tape.rows("teacher_routed")) == 2)
    stage.running[0].stop()
    SEEDS["teacher-up"] += 100
    try:
        serving = stage.serve().join()
    finally:
        SEEDS["teacher-up"] -= 100
    assert isinstance(serving.error, DigestMismatchError)
    assert "never changes within a run" in str(serving.error)


def test_weights_that_change_under_the_service_are_found(stage: Stage) -> None:
    serving = stage.serve(verify_every_s=0.05)
    stage.rollouts.group("p-up")
    stage.rollouts.wait_for_scores(2)
    model = serving.teachers["teacher-up"].model
    assert model is not None
    with torch.no_grad():
        next(iter(model.parameters()))[0, 0] += 1.0
    assert isinstance(serving.join().error, DigestMismatchError)
    assert "expected tensor" in str(serving.error)


def test_top_k_payload(stage: Stage) -> None:
    stage.serve(top_k=3)
    stage.rollouts.group("p-up", size=2)
    stage.rollouts.wait_for_scores(2)
    scorer = made_teacher(SEEDS["teacher-up"]).scorer
    contexts = {row["trajectory_id"]: row["prompt_token_ids"] for row in stage.rollouts.tape.rows("rollout_started")}
    for row in stage.rollouts.scores():
        ids = torch.tensor(contexts[row["trajectory_id"]] + row["scored_token_ids"])
        parts = list(scorer.distributions(ids, torch.tensor([0, len(ids)])))
        order = torch.cat([part.flat_index for part in parts]).argsort()
        full = torch.cat([part.log_probs for part in parts])[order][row["start_position"] - 1 :].numpy()
        num = len(row["scored_token_ids"])
        top_ids = np.array(row["top_k_token_ids"]).reshape(num, 3)
        top = np.array(row["top_k_log_probs"], np.float32).reshape(num, 3)
        likeliest = np.lexsort((np.broadcast_to(np.arange(full.shape[1]), full.shape), -full), axis=-1)[:, :3]
        assert (top_ids == likeliest).all()
        np.testing.assert_allclose(top, np.take_along_axis(full, likeliest, 1), atol=1e-6)
        np.testing.assert_allclose(row["tail_mass"], 1 - np.exp(top.astype(np.float64)).sum(1), atol=1e-6)
        own = np.take_along_axis(full, np.array(row["scored_token_ids"])[:, None], 1)[:, 0]
        np.testing.assert_allclose(row["log_probs"], own, atol=1e-6)


def test_shuffled_scores_are_a_permutation_within_a_domain_and_carry_another_name(stage: Stage) -> None:
    for ordinal in range(4):
        stage.rollouts.group("p-up" if ordinal % 2 else "p-down", ordinal=ordinal, size=3)
    first = stage.serve()
    stage.rollouts.wait_for_scores(12)
    first.stop()
    straight = {row["trajectory_id"]: row for row in stage.rollouts.scores()}

    control = Stage()
    for ordinal in range(4):
        control.rollouts.group("p-up" if ordinal % 2 else "p-down", ordinal=ordinal, size=3)
    control.serve(shuffle_scores=True, groups_per_step=4)
    control.rollouts.wait_for_scores(12)
    control.running[0].stop()
    shuffled = {row["trajectory_id"]: row for row in control.rollouts.scores()}
    control.rollouts.close()

    changed = 0
    for domain in ("up", "down"):
        names = [name for name in straight if name.startswith(f"p-{domain}")]
        observed = {name: int(name[-1]) % 2 for name in names}
        values = [np.concatenate([side[name]["log_probs"] for name in names]) for side in (straight, shuffled)]
        np.testing.assert_allclose(np.sort(values[0]), np.sort(values[1]), atol=1e-6)
        changed += int((np.abs(values[0] - values[1]) > 1e-4).sum())
        for name in names:
            assert shuffled[name]["scored_token_ids"] == straight[name]["scored_token_ids"]
            assert shuffled[name]["teacher_id"] == f"teacher-{domain}-shuffled"
            if observed[name]:
                first_action = 2 + 1 % 3
                seen = slice(first_action, first_action + 2)
                still = (shuffled[name]["log_probs"][seen], straight[name]["log_probs"][seen])
                np.testing.assert_allclose(*still, atol=1e-6)
    assert changed > 20
    assert {row["teacher_id"] for row in control.rollouts.tape.rows("teacher_routed")} == {
        "teacher-up-shuffled",
        "teacher-down-shuffled",
    }


def test_one_teacher_may_have_several_domains(stage: Stage) -> None:
    import dataclasses

    both = (ROUTES[0], dataclasses.replace(ROUTES[0], domain="down"))
    serving = stage.serve(routes=both)
    stage.rollouts.group("p-up", ordinal=0)
    stage.rollouts.group("p-down", ordinal=1)
    stage.rollouts.wait_for_scores(4)
    assert {row["teacher_id"] for row in stage.rollouts.scores()} == {"teacher-up"}
    assert len(serving.teachers) == 1
    assert len(stage.rollouts.tape.rows("teacher_routed")) == 2


def test_model_is_the_students() -> None:
    assert made_teacher(1).vocabulary.name == MODEL

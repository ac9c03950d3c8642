"""Who is trained, who is refused and by which name (algorithms.md §2.2, §2.5, §5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rolltape.schema.digest import prefix_digest
from rolltape.schema.errors import UntrainableError
from rolltape.schema.fold import Fold, fold
from rolltape.trainers.assembly import BatchPlan, VersionRules, plan_batch
from rolltape.trainers.batch_rules import BatchRules
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_optimizer
from rolltape.trainers.members import pack_members
from rolltape.trainers.step import train_step

PROMPT = (3, 4)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs_mode": "processed_logprobs"}


def versions(*runs: tuple[int, int]) -> list[dict[str, Any]]:
    """Version runs of (length, version)."""
    start, found = 0, []
    for length, version in runs:
        found.append(
            {
                "start": start,
                "length": length,
                "policy_id": "actor",
                "run_epoch": 1,
                "version": version,
                "weights_digest": f"w{version}",
            }
        )
        start += length
    return found


def rollout(
    tape: Any,
    name: str,
    *,
    member: int = 0,
    group: str = "g0",
    ordinal: int = 0,
    size: int = 2,
    tokens: tuple[int, ...] = (5, 6, 7),
    rewards: tuple[float, ...] = (1.0,),
    status: str = "completed",
    reward_state: str = "earned",
    **action: Any,
) -> None:
    """A rollout of one action; ``action`` overrides columns of the action (None leaves them out)."""
    common = {"trajectory_id": name, "attempt": 0, "group_id": group, "problem_id": f"problem-{group}"}
    tape.add(
        "rollout_dispatched",
        purpose="train",
        training_step=1,
        group_ordinal=ordinal,
        member=member,
        group_size=size,
        worker_id="w0",
        **common,
    )
    tape.add("rollout_started", event_index=0, prompt_token_ids=[list(PROMPT)], **common)
    columns: dict[str, Any] = {
        "action_kind": "execution",
        "token_ids": [list(tokens)],
        "rollout_log_probs": [[-0.5] * len(tokens)],
        "version_runs": [versions((len(tokens), 0))] if tokens else None,
        "sampling": [SAMPLING],
        "prefix_length": len(PROMPT),
        "prefix_digest": prefix_digest(list(PROMPT)),
        "prefix_source": "engine",
        **action,
    }
    given = {key: value for key, value in columns.items() if value is not None}
    tape.add("action_sampled", event_index=1, turn_index=0, **given, **common)
    tape.add("rollout_ended", event_index=2, status=status, num_observation_tokens=0, last_event_index=2, **common)
    for reward in rewards:
        scalar = reward if reward_state == "earned" else None
        tape.add("reward_assigned", state=reward_state, scalar=scalar, scalariser_version="1", **common)


def planned(tape: Any, **rules: Any) -> tuple[Fold, BatchPlan]:
    """Fold and plan with version 0 current."""
    folded = fold(tape.tables())
    return folded, plan_batch(folded, VersionRules(**{"current": 0, "newest": 0, **rules}))


def refused(plan: BatchPlan, name: str) -> str:
    """The reason why ``name`` is not trained."""
    return {item.trajectory_id: item.reason for item in plan.dropped}[name]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"token_ids": None, "rollout_log_probs": None, "version_runs": None}, "no_token_ids"),
        ({"rollout_log_probs": None}, "no_log_probs"),
        ({"version_runs": None}, "unknown_version"),
        ({"sampling": [{**SAMPLING, "logprobs_mode": None}]}, "unknown_logprobs_mode"),
        ({"sampling": [{**SAMPLING, "temperature": None}]}, "unknown_temperature"),
        ({"prefix_source": "unknown"}, "prefix_unknown"),
        ({"prefix_digest": prefix_digest([3, 5]), "prefix_token_ids": [[3, 5]]}, "prefix_mismatch"),
        ({"rewards": (1.0, 0.0)}, "reward_conflict"),
        ({"rewards": ()}, "reward_missing"),
        ({"rewards": (0.0,), "reward_state": "invalid"}, "reward_invalid"),
        ({"status": "env_failed"}, "env_failed"),
        ({"status": "aborted"}, "aborted"),
        ({"version_runs": [versions((1, 0), (2, 1))]}, "mixed_versions"),
    ],
)
def test_refused_by_name_and_the_rest_goes_on(tape: Any, override: dict[str, Any], reason: str) -> None:
    rollout(tape, "bad", member=0, size=3, **override)
    rollout(tape, "good-1", member=1, size=3, rewards=(0.0,))
    rollout(tape, "good-2", member=2, size=3)
    rules = {"newest": 1, "current": 0, "staleness_tau": 1} if reason == "mixed_versions" else {}
    folded, plan = planned(tape, **rules)
    assert refused(plan, "bad") == reason
    # Two of three are valid: more than half, so the group is filled up by repetition.
    assert [(m.trajectory_id, m.is_padding) for m in plan.members] == [
        ("good-1", False),
        ("good-2", False),
        ("good-1", True),
    ]
    assert folded.trajectories.num_rows == 3, "stored and queryable all the same"


def test_mixed_logprobs_mode_in_one_trajectory(tape: Any) -> None:
    rollout(tape, "bad", member=0)
    common = {"trajectory_id": "bad", "attempt": 0, "group_id": "g0", "problem_id": "problem-g0"}
    # A second action of another mode, before the end: rebuild the end behind it.
    tape.batches["rollout_ended"].clear()
    tape.add(
        "action_sampled",
        event_index=2,
        turn_index=1,
        action_kind="execution",
        token_ids=[[8]],
        rollout_log_probs=[[-0.1]],
        version_runs=[versions((1, 0))],
        sampling=[{**SAMPLING, "logprobs_mode": "raw_logprobs"}],
        prefix_length=5,
        prefix_digest=prefix_digest([*PROMPT, 5, 6, 7]),
        prefix_source="engine",
        **common,
    )
    tape.add("rollout_ended", event_index=3, status="completed", last_event_index=3, **common)
    rollout(tape, "good", member=1)
    _, plan = planned(tape)
    assert refused(plan, "bad") == "mixed_logprobs_mode"
    assert refused(plan, "good") == "group_incomplete"
    assert not plan.members


@pytest.mark.parametrize(
    ("version", "rules", "reason"),
    [
        (17, {"current": 19, "newest": 20, "staleness_tau": 2, "single_version": False}, "stale"),
        (21, {"current": 20, "newest": 20}, "future_version"),
        (19, {"current": 19, "newest": 19, "off_line": {("t0", 0), ("t1", 0)}}, "aborted_version"),
        (18, {"current": 19, "newest": 19, "staleness_tau": 5}, "stale"),
    ],
)
def test_versions_that_may_not_be_trained(tape: Any, version: int, rules: dict[str, Any], reason: str) -> None:
    for member in range(2):
        rollout(tape, f"t{member}", member=member, version_runs=[versions((3, version))])
    _, plan = planned(tape, **rules)
    assert {item.reason for item in plan.dropped} == {reason}


def test_lag_at_the_bound_is_kept(tape: Any) -> None:
    for member in range(2):
        rollout(tape, f"t{member}", member=member, version_runs=[versions((1, 17), (1, 18), (1, 19))])
    _, plan = planned(tape, current=19, newest=19, staleness_tau=2, single_version=False)
    assert len(plan.members) == 2


def test_group_of_one_is_an_error_for_a_group_estimator_only(tape: Any) -> None:
    rollout(tape, "lone", size=1)
    folded = fold(tape.tables())
    with pytest.raises(UntrainableError, match=r"group_of_one.*lone"):
        plan_batch(folded, VersionRules(current=0, newest=0))
    plan = plan_batch(folded, VersionRules(current=0, newest=0), BatchRules(uses_groups=False))
    assert [m.trajectory_id for m in plan.members] == ["lone"]


def test_order_is_ordinal_then_member_never_arrival(tape: Any) -> None:
    for ordinal, member in ((1, 1), (0, 1), (1, 0), (0, 0)):
        rollout(tape, f"t{ordinal}{member}", group=f"z{9 - ordinal}", ordinal=ordinal, member=member)
    _, plan = planned(tape)
    assert [m.trajectory_id for m in plan.members] == ["t00", "t01", "t10", "t11"]


def test_empty_response_counts_in_its_group_and_has_no_row(tape: Any) -> None:
    rollout(tape, "empty", member=0, tokens=(), rewards=(10.0,))
    rollout(tape, "full", member=1, rewards=(0.0,))
    folded, plan = planned(tape)
    batch = pack_members(folded, plan.members)
    assert [m.trajectory_id for m in plan.members] == ["empty", "full"]
    assert batch.num_rows == 1
    assert batch.rewards.tolist() == [10.0, 0.0]
    assert batch.row_member.tolist() == [1]


def test_packed_rows_hold_exactly_their_own_tokens(tape: Any) -> None:
    rollout(tape, "a", member=0, tokens=(5,), rollout_log_probs=[[-0.25]], version_runs=[versions((1, 0))])
    rollout(tape, "b", member=1, tokens=(6, 7, 8), rollout_log_probs=[[-1.0, None, 0.0]])
    folded, plan = planned(tape)
    batch = pack_members(folded, plan.members)
    assert batch.token_ids.tolist() == [3, 4, 5, 3, 4, 6, 7, 8]
    assert batch.cu_seqlens.tolist() == [0, 3, 8]
    assert batch.action_mask.tolist() == [False, False, True, False, False, True, True, True]
    assert batch.policy_versions.tolist() == [-1, -1, 0, -1, -1, 0, 0, 0]
    log_probs = batch.rollout_log_probs
    assert log_probs[2] == -0.25
    assert torch.isnan(log_probs[6]), "a null log-prob is not 0"
    assert log_probs[7] == 0.0, "0.0 is a legal log-prob"
    assert log_probs[3] == 0.0


def _trained(tape: Any, **config: Any) -> tuple[Any, torch.nn.Module, dict[str, torch.Tensor]]:
    from rolltape.numerics.models import build_model

    folded, plan = planned(tape)
    model = build_model("char-64x2", 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = TrainerConfig(**config)
    outcome = train_step(
        Learner(model, make_optimizer(model, trainer)),
        pack_members(folded, plan.members),
        trainer,
        step=1,
        temperature=1.0,
    )
    return outcome, model, before


@pytest.mark.parametrize(
    ("override", "untrusted"),
    [
        ({"rollout_log_probs": [[-0.5, float("nan"), None]]}, 2),
        ({"rollout_log_probs": [[-0.5, float("-inf"), -9999.0]]}, 2),
        ({"rollout_log_probs": [[-0.5, 0.01, float("inf")]]}, 2),
    ],
)
def test_bad_log_probs_leave_the_sample_valid_and_the_loss_finite(
    tape: Any, override: dict[str, Any], untrusted: int
) -> None:
    rollout(tape, "odd", member=0, rewards=(1.0,), **override)
    rollout(tape, "even", member=1, rewards=(0.0,))
    folded, plan = planned(tape)
    assert not plan.dropped
    counted = {
        row["trajectory_id"]: row["num_untrusted_tokens"]
        for row in folded.trajectories.select(["trajectory_id", "num_untrusted_tokens"]).to_pylist()
    }
    assert counted == {"odd": untrusted, "even": 0}
    outcome, model, _ = _trained(tape, icepop_beta=1e6)
    assert torch.isfinite(torch.tensor([outcome.loss, outcome.grad_norm])).all()
    assert int((~outcome.trusted[pack_members(folded, plan.members).action_mask]).sum()) == untrusted
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_all_rejected_batch_moves_nothing(tape: Any) -> None:
    for member in range(2):
        rollout(tape, f"t{member}", member=member, rewards=(float(member),), rollout_log_probs=[[-90.0] * 3])
    outcome, model, before = _trained(tape, weight_decay=0.1)
    assert outcome.skipped
    assert outcome.loss == 0.0
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_zero_variance_group_has_zero_advantages_and_stays(tape: Any) -> None:
    for member, reward in enumerate((0.1 + 0.2, 0.3)):
        rollout(tape, f"t{member}", member=member, rewards=(reward,))
    outcome, _, _ = _trained(tape, icepop_beta=1e6)
    assert not outcome.skipped
    assert outcome.member_advantages.tolist() == [0.0, 0.0]
    assert outcome.grad_norm == 0.0

"""Every method through a step: how a batch is cut and ordered does not matter, and only what shall is trained."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, Literal

import pytest
import torch
from tests.methods import CONFIGS, TEMPERATURE, batch, gradients, learner, reordered, scorers
from torch import Tensor

from rolltape.numerics.models import build_model, model_parts
from rolltape.numerics.scoring import ModelScorer
from rolltape.numerics.top_k import teacher_top_k
from rolltape.numerics.weights import named_weights
from rolltape.schema.errors import ConfigError, UntrainableError
from rolltape.trainers.algorithms import make_algorithm
from rolltape.trainers.algorithms.base import CriticAlgorithm, Method, PartTokens
from rolltape.trainers.batch import PackedBatch
from rolltape.trainers.compute import recompute_backbone
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner
from rolltape.trainers.reverse_kl import TokenDivergence
from rolltape.trainers.step import StepOutcome, train_step

ROWS = [7, 2, 9, 0, 5, 3, 8, 1, 6, 4]
MEMBERS = [4, 1, 5, 0, 3, 2]


def step(config: TrainerConfig, on: PackedBatch | None = None) -> tuple[StepOutcome, Learner]:
    """A first step, and the learner after it."""
    made = learner(config)
    outcome = train_step(made, on or batch(), config, step=1, temperature=TEMPERATURE, scorers=scorers())
    return outcome, made


@cache
def whole(name: str) -> tuple[StepOutcome, dict[str, Tensor]]:
    outcome, made = step(one_update(name))
    return outcome, gradients(made)


def one_update(name: str) -> TrainerConfig:
    """With one update of the critic: the gradients of a second one start from weights that agree less closely."""
    return dataclasses.replace(CONFIGS[name], critic_updates=1)


def assert_same(name: str, outcome: StepOutcome, made: Learner) -> None:
    expected, expected_gradients = whole(name)
    assert outcome.loss == pytest.approx(expected.loss, abs=1e-6)
    found = gradients(made)
    assert found.keys() == expected_gradients.keys()
    for key, gradient in expected_gradients.items():
        torch.testing.assert_close(found[key], gradient, atol=1e-6, rtol=1e-5)
    assert int(outcome.trusted.sum()) == int(expected.trusted.sum())
    if expected.critic is not None:
        assert outcome.critic is not None
        assert outcome.critic.losses == pytest.approx(expected.critic.losses, abs=1e-6)
        assert outcome.critic.explained_variance == pytest.approx(expected.critic.explained_variance, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_batch_is_mixed(name: str) -> None:
    outcome, found = whole(name)
    action = batch().action_mask
    assert 0 < int(outcome.trusted.sum()) < int(action.sum())
    assert not outcome.trusted[~action].any()
    assert outcome.advantages[~action].abs().sum() == 0
    assert outcome.grad_norm > 0
    assert not outcome.skipped
    assert outcome.actor_updates == 1
    assert any(name.startswith("critic/") for name in found) == (outcome.critic is not None)


def test_no_two_methods_have_one_gradient() -> None:
    norms = [whole(name)[0].grad_norm for name in CONFIGS]
    assert len({round(norm, 6) for norm in norms}) == len(norms)


@pytest.mark.parametrize("token_budget", [1, 12, 30])
@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_do_not_matter(name: str, token_budget: int) -> None:
    outcome, made = step(dataclasses.replace(one_update(name), token_budget=token_budget))
    assert len(outcome.micro_batches) > 1
    assert_same(name, outcome, made)


@pytest.mark.parametrize("name", CONFIGS)
def test_neither_the_order_of_rows_nor_of_members_matters(name: str) -> None:
    outcome, made = step(one_update(name), reordered(batch(), ROWS, MEMBERS))
    assert_same(name, outcome, made)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_step_has_the_same_bits(name: str) -> None:
    first, second = step(CONFIGS[name])[0], step(CONFIGS[name])[0]
    assert first.loss_bits == second.loss_bits
    assert first.gradient_digests == second.gradient_digests
    assert first.weight_digests == second.weight_digests


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_recorded_at_other_tokens_changes_no_bit(name: str) -> None:
    whole_batch = batch()
    teacher = whole_batch.teacher
    assert teacher is not None
    assert teacher.top_k_ids is not None
    assert teacher.top_k_log_probs is not None
    action = whole_batch.action_mask
    poisoned = dataclasses.replace(
        whole_batch,
        rollout_log_probs=torch.where(action, whole_batch.rollout_log_probs, torch.nan),
        teacher=dataclasses.replace(
            teacher,
            log_probs=torch.where(action, teacher.log_probs, torch.inf),
            top_k_ids=torch.where(action[:, None], teacher.top_k_ids, 7),
            top_k_log_probs=torch.where(action[:, None], teacher.top_k_log_probs, -torch.inf),
        ),
    )
    assert step(CONFIGS[name], poisoned)[0].weight_digests == step(CONFIGS[name])[0].weight_digests


@pytest.mark.parametrize("name", CONFIGS)
def test_untrusted_tokens_have_no_gradient(name: str) -> None:
    """Gradients with respect to each token's own log-prob (or divergence): exactly 0, and not 0 elsewhere."""
    config = dataclasses.replace(CONFIGS[name], entropy_coef=0.0)
    outcome, _ = step(config)
    algorithm = make_algorithm(Method(batch=batch(), config=config, temperature=TEMPERATURE, scorers=scorers()))
    if isinstance(algorithm, CriticAlgorithm):
        assert outcome.critic is not None
        algorithm.estimate(outcome.critic.values, None)
    index = torch.nonzero(algorithm.trained).flatten()
    current = outcome.current_log_probs[index].clone().requires_grad_()
    leaf, divergence = current, None
    if algorithm.needs_hidden:
        leaf = outcome.parts["divergence"][index].clone().requires_grad_()
        divergence = TokenDivergence(divergence=leaf, trusted=outcome.trusted[index])
    found = algorithm.loss(
        PartTokens(index=index, current=current, old=current.detach(), entropy=None, divergence=divergence)
    )
    torch.autograd.backward(found.policy.loss)
    assert leaf.grad is not None
    trusted = outcome.trusted[index]
    assert torch.equal(found.policy.trusted, trusted)
    assert leaf.grad[~trusted].abs().sum() == 0
    learnt = leaf.grad[trusted] != 0
    # A gap or an advantage may be 0 here and there, as for a whole rollout with its group's mean reward.
    assert int(learnt.sum()) > 0.6 * len(learnt)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_a_trusted_token_moves_no_policy(name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], weight_decay=0.1)
    far = dataclasses.replace(batch(), rollout_log_probs=torch.full_like(batch().rollout_log_probs, torch.nan))
    made = learner(config)
    before = {name: weight.clone() for name, weight in named_weights(made.model).items()}
    outcome = train_step(made, far, config, step=1, temperature=TEMPERATURE, scorers=scorers())
    assert outcome.skipped
    assert outcome.actor_updates == 0
    assert outcome.loss == 0.0
    assert not made.optimizer.state
    assert all(torch.equal(weight, before[name]) for name, weight in named_weights(made.model).items())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_of_no_one_is_skipped(name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], weight_decay=0.1)
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = PackedBatch(
        token_ids=nothing.int(),
        cu_seqlens=torch.zeros(1, dtype=torch.int64),
        context_lengths=nothing,
        action_mask=nothing.bool(),
        rollout_log_probs=torch.zeros(0),
        policy_versions=nothing.int(),
        row_member=nothing,
        rewards=torch.zeros(0, dtype=torch.float64),
        groups=nothing,
        is_padding=nothing.bool(),
    )
    made = learner(config)
    outcome = train_step(made, empty, config, step=1, temperature=1.0, scorers={})
    assert outcome.skipped
    assert outcome.critic is None
    assert not made.optimizer.state
    if made.critic is not None:
        assert not made.critic.optimizer.state
        assert made.critic.counts.batches == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_recomputed_blocks_change_no_bit(name: str) -> None:
    config = CONFIGS[name]
    made = learner(config)
    recompute_backbone(model_parts(made.model).backbone)
    if made.critic is not None:
        recompute_backbone(made.critic.model.backbone)
    outcome = train_step(made, batch(), config, step=1, temperature=TEMPERATURE, scorers=scorers())
    assert outcome.gradient_digests == step(config)[0].gradient_digests


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["grpo", "opd-full", "sao", "compaction"])
def test_bfloat16_is_for_computing_alone(name: str, recompute: bool) -> None:
    """The forward pass is that of bfloat16 parameters; log-probs, gradients and parameters are float32."""
    config = dataclasses.replace(CONFIGS[name], compute_dtype="bfloat16")
    made = learner(config)
    if recompute:
        recompute_backbone(model_parts(made.model).backbone, dtype=torch.bfloat16)
    outcome = train_step(made, batch(), config, step=1, temperature=TEMPERATURE, scorers=scorers())
    rounded = learner(CONFIGS[name], dtype="bfloat16")
    expected = train_step(rounded, batch(), CONFIGS[name], step=1, temperature=TEMPERATURE, scorers=scorers())
    assert outcome.current_log_probs.dtype == torch.float32
    torch.testing.assert_close(outcome.current_log_probs, expected.current_log_probs, atol=1e-6, rtol=0.0)
    assert not torch.equal(outcome.current_log_probs, whole(name)[0].current_log_probs)
    assert all(weight.dtype == torch.float32 for weight in named_weights(made.model).values())
    found, exact = gradients(made), whole(name)[1]
    assert found.keys() == exact.keys()
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    for key in (key for key in exact if not key.startswith("critic/")):
        norm = float(exact[key].norm())
        assert float((found[key] - exact[key]).norm()) < 0.25 * norm + 1e-3, key


def test_several_updates_gate_against_the_weights_before_the_first() -> None:
    config = dataclasses.replace(CONFIGS["grpo"], updates_per_batch=3, lr=1e-2)
    outcome, _ = step(config)
    action = batch().action_mask
    once = whole("grpo")[0]
    torch.testing.assert_close(outcome.old_log_probs, once.old_log_probs, atol=1e-6, rtol=0.0)
    assert (outcome.current_log_probs - outcome.old_log_probs)[action].abs().max() > 1e-3
    assert torch.equal(outcome.trusted, once.trusted)
    assert outcome.actor_updates == 3


def test_updates_that_a_moving_gate_ends_are_counted() -> None:
    """DIS's gate moves with θ: after a huge first update nothing is trusted any more, and the first still counts."""
    config = dataclasses.replace(CONFIGS["dis"], updates_per_batch=3, lr=1.0)
    outcome, _ = step(config)
    assert 0 < outcome.actor_updates < 3
    assert not outcome.skipped


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    """Tokens that became three times as likely, with negative advantages: their loss ends, and so does learning."""
    old = whole("grpo")[0].current_log_probs
    found = {}
    for bound in (None, 2.0):
        config = dataclasses.replace(CONFIGS["grpo"], dual_clip=bound, entropy_coef=0.0)
        algorithm = make_algorithm(Method(batch=batch(), config=config, temperature=TEMPERATURE))
        index = torch.nonzero(whole("grpo")[0].trusted & (algorithm.advantages < 0)).flatten()
        current = (old[index] + torch.tensor(3.0).log()).requires_grad_()
        tokens = PartTokens(index=index, current=current, old=old[index], entropy=None)
        policy = algorithm.loss(tokens).policy
        torch.autograd.backward(policy.loss)
        assert current.grad is not None
        found[bound] = (policy.token_losses, current.grad)
    torch.testing.assert_close(found[2.0][0] * 3.0, found[None][0] * 2.0)
    assert found[2.0][1].abs().sum() == 0
    assert (found[None][1] > 0).all()


def test_the_gap_is_of_the_current_policy_or_of_the_one_before_the_update() -> None:
    """D12: the same for one update of a batch, not for several."""
    config = CONFIGS["opd"]
    assert step(config)[0].loss_bits == step(dataclasses.replace(config, opd_gap="old"))[0].loss_bits
    twice = dataclasses.replace(config, updates_per_batch=2, lr=1e-2)
    students: tuple[tuple[Literal["current", "old"], str], ...] = (
        ("current", "current_log_probs"),
        ("old", "old_log_probs"),
    )
    for gap, student in students:
        outcome, _ = step(dataclasses.replace(twice, opd_gap=gap))
        teacher = batch().teacher
        assert teacher is not None
        used = outcome.trusted
        expected = teacher.log_probs[used] - getattr(outcome, student)[used]
        torch.testing.assert_close(outcome.parts["teacher_gap"][used], expected, atol=1e-6, rtol=0.0)


def test_copies_count_in_their_groups_statistics_unless_the_option_says_else() -> None:
    """D10, through a step."""
    copied = dataclasses.replace(
        batch(),
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.25, 0.0], dtype=torch.float64),
        is_padding=torch.tensor([False, False, True, False, False, False]),
    )
    config = dataclasses.replace(CONFIGS["grpo"], adv_norm="mean")
    padded, _ = step(config, copied)
    assert padded.member_advantages[:3].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    valid, _ = step(dataclasses.replace(config, stats="valid_only"), copied)
    assert valid.member_advantages[:3].tolist() == pytest.approx([0.5, -0.5, -0.5])
    assert valid.member_advantages[3:].tolist() == padded.member_advantages[3:].tolist()


def test_task_and_teacher_are_logged_apart() -> None:
    outcome = whole("opd-task")[0]
    used = outcome.trusted
    task, gap = outcome.parts["task_advantage"], outcome.parts["teacher_gap"]
    torch.testing.assert_close(outcome.advantages[used], (0.7 * task + 0.3 * gap)[used])
    torch.testing.assert_close(task, whole("grpo")[0].advantages)
    torch.testing.assert_close(gap[used], whole("opd")[0].parts["teacher_gap"][used])


@pytest.mark.parametrize("name", ["opd", "opd-score", "opd-full", "opd-top-k"])
def test_a_student_that_is_its_teacher_learns_nothing(name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], entropy_coef=0.0)
    scorer = ModelScorer(build_model("char-64x2", 1), temperature=TEMPERATURE, token_budget=1000)
    whole_batch = batch()
    teacher = whole_batch.teacher
    assert teacher is not None
    ids, log_probs = torch.full((whole_batch.num_tokens, 5), -1), torch.full((whole_batch.num_tokens, 5), torch.nan)
    for part in scorer.distributions(whole_batch.token_ids, whole_batch.cu_seqlens, scored=whole_batch.action_mask):
        ids[part.flat_index], log_probs[part.flat_index] = teacher_top_k(part.log_probs, 5)
    own = dataclasses.replace(
        teacher,
        log_probs=scorer.score(whole_batch.token_ids, whole_batch.cu_seqlens),
        top_k_ids=ids,
        top_k_log_probs=log_probs,
    )
    made = learner(config)
    outcome = train_step(
        made,
        dataclasses.replace(whole_batch, teacher=own),
        config,
        step=1,
        temperature=TEMPERATURE,
        scorers=dict.fromkeys(("teacher-a", "teacher-b"), scorer),
    )
    assert int(outcome.trusted.sum()) > 15
    assert outcome.grad_norm < 1e-5
    assert abs(outcome.loss) < 1e-6


def without(name: str) -> dict[str, Any]:
    teacher = batch().teacher
    assert teacher is not None
    changes: dict[str, dict[str, Any]] = {
        "scores": {"teacher": None},
        "one teacher": {
            "teacher": dataclasses.replace(teacher, teacher_ids=("teacher-a", None, *teacher.teacher_ids[2:]))
        },
        "top k": {"teacher": dataclasses.replace(teacher, top_k_ids=None, top_k_log_probs=None)},
        "reward": {"rewards": batch().rewards.where(torch.arange(6) != 2, torch.nan)},
        "segment": {"num_segments": batch().num_segments + (torch.arange(6) == 1)},
    }
    return changes[name]


@pytest.mark.parametrize(
    ("name", "lacking", "message"),
    [
        ("opd", "scores", "teacher_unavailable"),
        ("mopd", "one teacher", r"teacher_unavailable: members \[1\] of domains \['b'\]"),
        ("opd-full", "scores", "teacher_unavailable"),
        ("opd-top-k", "top k", "expected the top 5 of each token, got none"),
        ("grpo", "reward", "reward_invalid"),
        ("sao", "reward", "reward_invalid"),
        ("compaction", "reward", "reward_invalid"),
        ("compaction", "segment", r"members \[1\]"),
    ],
)
def test_a_batch_that_lacks_something_is_refused_by_name(name: str, lacking: str, message: str) -> None:
    with pytest.raises(UntrainableError, match=message):
        step(CONFIGS[name], dataclasses.replace(batch(), **without(lacking)))


def test_full_distributions_need_a_scorer_at_the_rollouts_temperature() -> None:
    made, config = learner(CONFIGS["opd-full"]), CONFIGS["opd-full"]
    with pytest.raises(UntrainableError, match="scorer of teacher teacher-b"):
        train_step(
            made, batch(), config, step=1, temperature=TEMPERATURE, scorers={"teacher-a": scorers()["teacher-a"]}
        )
    with pytest.raises(ConfigError, match=r"temperature 0\.5"):
        train_step(made, batch(), config, step=1, temperature=0.5, scorers=scorers())


def test_rewards_of_tokens_alone_are_rewards() -> None:
    """A rollout whose tokens have rewards needs none as a whole; both add up where there are both."""
    rewards = batch().rewards.where(torch.arange(6) != 0, torch.nan)
    only = dataclasses.replace(batch(), rewards=rewards)
    none = dataclasses.replace(batch(), rewards=rewards.nan_to_num(0.0))
    for name in ("sao", "compaction"):
        assert step(CONFIGS[name], only)[0].weight_digests == step(CONFIGS[name], none)[0].weight_digests
        assert step(CONFIGS[name], only)[0].weight_digests != step(CONFIGS[name])[0].weight_digests


def test_teachers_floor_takes_the_place_of_what_is_below() -> None:
    teacher = batch().teacher
    assert teacher is not None
    place = int(torch.nonzero(whole("opd")[0].trusted).flatten()[0])
    low = teacher.log_probs.clone()
    low[place] = -torch.inf
    on = dataclasses.replace(batch(), teacher=dataclasses.replace(teacher, log_probs=low))
    assert not step(CONFIGS["opd"], on)[0].trusted[place]
    outcome = step(dataclasses.replace(CONFIGS["opd"], teacher_floor=-8.0), on)[0]
    assert outcome.trusted[place]
    assert float(outcome.parts["teacher_gap"][place]) == pytest.approx(-8.0 - float(outcome.current_log_probs[place]))

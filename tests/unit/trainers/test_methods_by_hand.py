"""Each method's step against the same sums written out token by token: losses, and gradients of every parameter."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping

import pytest
import torch
from tests.methods import CONFIGS, ROWS, TEACHERS, TEMPERATURE, batch, gradients, learner, scorers
from torch import Tensor

from rolltape.numerics.models import build_model, model_parts
from rolltape.numerics.packed import packed_log_probs
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic_model import CriticModel
from rolltape.trainers.dis import dis_policy_loss
from rolltape.trainers.gates import no_gate
from rolltape.trainers.losses import clipped_policy_loss, icepop_policy_loss
from rolltape.trainers.step import train_step

GAMMA = 0.97


def tokens_of_rows() -> list[list[int]]:
    """Places of each row's action tokens, in order."""
    whole = batch()
    bounds = whole.cu_seqlens.tolist()
    action = whole.action_mask.tolist()
    return [[t for t in range(bounds[row], bounds[row + 1]) if action[t]] for row in range(whole.num_rows)]


def rows_of_members() -> list[list[int]]:
    """Each member's rows, by segment."""
    return [
        sorted((row for row, made in enumerate(ROWS) if made.member == member), key=lambda row: ROWS[row].segment)
        for member in range(6)
    ]


def sequence_weights() -> Tensor:
    """``1 / (S n_i)``."""
    weights = torch.zeros(batch().num_tokens)
    for tokens in tokens_of_rows():
        weights[tokens] = 1.0 / (len(tokens) * len(ROWS))
    return weights


def token_weights(rows: list[int] | None = None) -> Tensor:
    """``1 / N`` over the tokens of all rows, or of some."""
    tokens = [t for row, own in enumerate(tokens_of_rows()) if rows is None or row in rows for t in own]
    weights = torch.zeros(batch().num_tokens)
    weights[tokens] = 1.0 / len(tokens)
    return weights


def group_advantages(*, divided: bool) -> Tensor:
    """``[N]``: each token has its rollout's reward relative to its group's."""
    rewards = batch().rewards.tolist()
    found = torch.zeros(batch().num_tokens)
    for group in ((0, 1, 2), (3, 4, 5)):
        mean = sum(rewards[m] for m in group) / 3
        std = math.sqrt(sum((rewards[m] - mean) ** 2 for m in group) / 2)
        for member in group:
            value = (rewards[member] - mean) / (std + 1e-6) if divided else rewards[member] - mean
            for row in rows_of_members()[member]:
                found[tokens_of_rows()[row]] = value
    return found


class Policy:
    """The policy before the step, and its log-probs of all tokens in one pass."""

    def __init__(self) -> None:
        self.model = build_model("char-64x2", 1)
        whole = batch()
        scores = packed_log_probs(
            self.model,
            whole.token_ids,
            whole.cu_seqlens,
            token_budget=1000,
            temperature=TEMPERATURE,
            with_entropy=True,
            scored=whole.action_mask,
        )
        assert scores.entropy is not None
        self.action = whole.action_mask
        self.current, self.entropy = scores.log_probs[self.action], scores.entropy[self.action]
        self.rollout = whole.rollout_log_probs[self.action]

    def distributions(self, model: torch.nn.Module | None = None) -> Tensor:
        """Log-probs ``[N, V]`` at each token's state, row by row; 0 at the rows' first tokens."""
        model = model or self.model
        whole = batch()
        bounds = whole.cu_seqlens.tolist()
        backbone, weight = model_parts(model)
        rows = []
        for begin, end in itertools.pairwise(bounds):
            hidden = backbone(input_ids=whole.token_ids[begin:end].long()[None]).last_hidden_state[0, :-1]
            rows.append(torch.zeros(1, weight.shape[0]))
            rows.append(torch.log_softmax(hidden @ weight.T / TEMPERATURE, -1))
        return torch.cat(rows)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Of every parameter."""
        loss.backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def teacher_logp() -> Tensor:
    teacher = batch().teacher
    assert teacher is not None
    return teacher.log_probs[batch().action_mask]


def grpo(policy: Policy, config: TrainerConfig) -> Tensor:
    del config
    return icepop_policy_loss(
        policy.current,
        policy.current.detach(),
        policy.rollout,
        group_advantages(divided=True)[policy.action],
        sequence_weights()[policy.action],
        beta=1.3,
    ).loss


def dis(policy: Policy, config: TrainerConfig) -> Tensor:
    advantage = group_advantages(divided=False)[policy.action]
    return direct_loss(policy, config, advantage)


def direct_loss(policy: Policy, config: TrainerConfig, advantage: Tensor) -> Tensor:
    return dis_policy_loss(
        policy.current,
        policy.rollout,
        advantage,
        token_weights()[policy.action],
        eps_low=config.epsilon_low,
        eps_high=config.epsilon_high,
    ).loss


def opd(policy: Policy, config: TrainerConfig) -> Tensor:
    gap = teacher_logp() - policy.current.detach()
    if config.max_gap is not None:
        gap = torch.where(gap.isfinite(), gap.clamp(-config.max_gap, config.max_gap), gap)
    advantage = gap
    if config.task_coef:
        advantage = 0.7 * group_advantages(divided=True)[policy.action] + 0.3 * gap
    weights = sequence_weights()[policy.action]
    return icepop_policy_loss(
        policy.current, policy.current.detach(), policy.rollout, advantage, weights, beta=1.3
    ).loss


def opd_score(policy: Policy, config: TrainerConfig) -> Tensor:
    del config
    gap = teacher_logp() - policy.current.detach()
    ratio = (policy.current.detach() - policy.rollout).exp()
    kept = (ratio >= 0.7) & (ratio <= 1.3) & gap.isfinite()
    terms = torch.where(kept, -ratio * gap, 0.0) * policy.current
    return (sequence_weights()[policy.action] * torch.where(kept, terms, 0.0)).double().sum()


def opd_full(policy: Policy, config: TrainerConfig) -> Tensor:
    del config
    log_pi = policy.distributions()
    log_q = torch.zeros_like(log_pi)
    with torch.no_grad():
        for name, seed in TEACHERS.items():
            found = policy.distributions(build_model("char-64x2", seed))
            for member, rows in enumerate(rows_of_members()):
                for row in rows:
                    if f"teacher-{'ab'[member % 2]}" == name:
                        log_q[tokens_of_rows()[row]] = found[tokens_of_rows()[row]]
    divergence = (log_pi.exp() * (log_pi - log_q)).sum(-1)[policy.action]
    used = policy.rollout.isfinite()
    return (sequence_weights()[policy.action] * torch.where(used, divergence, 0.0)).double().sum()


def opd_top_k(policy: Policy, config: TrainerConfig) -> Tensor:
    del config
    teacher = batch().teacher
    assert teacher is not None
    assert teacher.top_k_ids is not None
    assert teacher.top_k_log_probs is not None
    ids, log_q = teacher.top_k_ids[policy.action], teacher.top_k_log_probs[policy.action]
    log_pi = policy.distributions()[policy.action].gather(1, ids)
    used = policy.rollout.isfinite() & log_q.isfinite().all(-1)
    log_q = torch.where(log_q.isfinite(), log_q, 0.0)
    terms = log_pi.exp() * (log_pi - log_q) - log_pi.exp() + log_q.exp()
    return (sequence_weights()[policy.action] * torch.where(used, terms.sum(-1), 0.0)).double().sum()


class Values:
    """The critic before the step, row by row: values before action tokens, and after each row."""

    def __init__(self, model: CriticModel) -> None:
        self.model = model
        whole = batch()
        bounds = whole.cu_seqlens.tolist()
        before, self.after = torch.zeros(whole.num_tokens), []
        for row, (begin, end) in enumerate(itertools.pairwise(bounds)):
            hidden = model.backbone(input_ids=whole.token_ids[begin:end].long()[None]).last_hidden_state[0]
            states = model.head(hidden)[:, 0]
            own = torch.tensor(tokens_of_rows()[row])
            before = before.index_copy(0, own, states[own - begin - 1])
            self.after.append(float(states[-1].detach()))
        self.before = before

    def gradients(self, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """Of the weighted sum of squared errors."""
        (weights * (self.before - targets).square()).double().sum().backward()  # type: ignore[no-untyped-call]
        return {f"critic/{name}": p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def backwards(
    values: list[float], rewards: list[float], lam: float, after: float, gamma: float = GAMMA
) -> tuple[list[float], list[float]]:
    """Advantages and rewards to go of one line of action tokens."""
    advantages, returns = [], []
    advantage, following, to_go = 0.0, after, after
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        to_go = reward + gamma * to_go
        following = value
        advantages.append(advantage)
        returns.append(to_go)
    return advantages[::-1], returns[::-1]


# Where the three token rewards belong: an observation's place goes to the action before it, in whatever segment.
CREDITED = {0: {1: 0.1}, 1: {5: -0.2}, 5: {1: 0.3}}  # member -> place among its action tokens -> amount


def test_the_batch_has_what_it_is_said_to_have() -> None:
    rows, members = tokens_of_rows(), rows_of_members()
    assert [len(tokens) for tokens in rows] == [4, 3, 3, 3, 2, 3, 2, 2, 3, 6]
    assert members[1] == [1, 2, 3]
    assert 0 < int(batch().rollout_log_probs.isnan().sum()) < 3


def sao_by_hand(values: Values, *, bootstrap: bool) -> tuple[Tensor, Tensor]:
    advantages, targets = torch.zeros(batch().num_tokens), torch.zeros(batch().num_tokens)
    for member, rows in enumerate(rows_of_members()):
        tokens = [t for row in rows for t in tokens_of_rows()[row]]
        rewards = [0.0] * len(tokens)
        rewards[-1] += float(batch().rewards[member])
        for place, amount in CREDITED.get(member, {}).items():
            rewards[place] += amount
        after = values.after[rows[-1]] if bootstrap and member >= 4 else 0.0
        lam = 1.0 - 1.0 / (1.5 * len(tokens))
        found = backwards(values.before[tokens].detach().tolist(), rewards, lam, after)
        advantages[tokens], targets[tokens] = torch.tensor(found[0]), torch.tensor(found[1])
    return advantages, targets


def compaction_by_hand(values: Values, *, train_summary: bool = True) -> tuple[Tensor, Tensor]:
    advantages, targets = torch.zeros(batch().num_tokens), torch.zeros(batch().num_tokens)
    for member, all_rows in enumerate(rows_of_members()):
        rows = [row for row in all_rows if train_summary or not ROWS[row].is_summary]
        reward = float(batch().rewards[member]) + sum(CREDITED.get(member, {}).values())
        lengths = [len(tokens_of_rows()[row]) for row in rows]
        lam = 1.0 - 1.0 / (1.5 * sum(lengths))
        for place, row in enumerate(rows):
            tokens, after = tokens_of_rows()[row], sum(lengths[place + 1 :])
            rewards = [0.0] * (len(tokens) - 1) + [reward]
            local, to_go = backwards(values.before[tokens].detach().tolist(), rewards, lam, 0.0)
            advantages[tokens] = torch.tensor([a * (GAMMA * lam) ** after for a in local])
            targets[tokens] = torch.tensor([r * GAMMA**after for r in to_go])
    return advantages, targets


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


LOSSES: dict[str, Callable[[Policy, TrainerConfig], Tensor]] = {
    "grpo": grpo,
    "dis": dis,
    "opd": opd,
    "opd-score": opd_score,
    "opd-full": opd_full,
    "opd-top-k": opd_top_k,
    "opd-task": opd,
    "mopd": opd,
}


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_the_sum_written_out(name: str, entropy_coef: float) -> None:
    config = dataclasses.replace(CONFIGS[name], entropy_coef=entropy_coef)
    made, policy = learner(config), Policy()
    outcome = train_step(made, batch(), config, step=1, temperature=TEMPERATURE, scorers=scorers())
    weights = token_weights() if name == "dis" else sequence_weights()
    loss = LOSSES[name](policy, config)
    loss = loss - entropy_coef * (weights[policy.action] * policy.entropy).double().sum()
    assert outcome.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert_equal(gradients(made), policy.gradients(loss))


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_step_of_sao_is_the_sum_written_out(bootstrap: bool) -> None:
    config = dataclasses.replace(
        CONFIGS["sao"], entropy_coef=0.0, critic_updates=1, gamma=GAMMA, bootstrap_truncated=bootstrap
    )
    policy, critic = Policy(), learner(config).critic
    assert critic is not None
    values = Values(critic.model)
    advantages, targets = sao_by_hand(values, bootstrap=bootstrap)
    made = learner(config)
    outcome = train_step(made, batch(), config, step=1, temperature=TEMPERATURE)
    loss = direct_loss(policy, config, advantages[policy.action])
    assert outcome.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    torch.testing.assert_close(outcome.advantages, advantages, atol=1e-6, rtol=1e-5)
    assert_equal(gradients(made), policy.gradients(loss) | values.gradients(targets, token_weights()))


@pytest.mark.parametrize("train_summary", [True, False])
@pytest.mark.parametrize("name", ["compaction", "compaction-dis"])
def test_a_step_of_compaction_is_the_sum_written_out(name: str, train_summary: bool) -> None:
    config = dataclasses.replace(
        CONFIGS[name], entropy_coef=0.0, critic_updates=1, gamma=GAMMA, train_summary=train_summary
    )
    policy, critic = Policy(), learner(config).critic
    assert critic is not None
    values = Values(critic.model)
    advantages, targets = compaction_by_hand(values, train_summary=train_summary)
    made = learner(config)
    outcome = train_step(made, batch(), config, step=1, temperature=TEMPERATURE)
    rows = None if train_summary else [row for row, spec in enumerate(ROWS) if not spec.is_summary]
    weights = token_weights(rows)
    if name == "compaction":
        loss = clipped_policy_loss(
            policy.current,
            policy.current.detach(),
            no_gate(torch.ones_like(policy.current)),
            advantages[policy.action],
            weights[policy.action],
            eps_low=0.2,
            eps_high=0.2,
            rollout_logp=policy.rollout,
        ).loss
    else:
        loss = dis_policy_loss(
            policy.current,
            policy.rollout,
            advantages[policy.action],
            weights[policy.action],
            eps_low=config.epsilon_low,
            eps_high=config.epsilon_high,
        ).loss
    assert outcome.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    torch.testing.assert_close(outcome.advantages, advantages, atol=1e-6, rtol=1e-5)
    assert_equal(gradients(made), policy.gradients(loss) | values.gradients(targets, weights))

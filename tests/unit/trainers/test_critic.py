"""The critic's life: what of it learns, when, how often, and what the policy is told."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.methods import CONFIGS, TEMPERATURE, batch, gradients, learner
from torch import nn

from rolltape.numerics.models import build_model
from rolltape.numerics.weights import named_weights, tensor_digests, weights_digest
from rolltape.schema.errors import ConfigError, IntegrityError, ReplayError
from rolltape.store.location import Location
from rolltape.trainers import critic_step as critic_step_module
from rolltape.trainers import step as step_module
from rolltape.trainers.checkpoint import Progress, load_checkpoint, save_checkpoint
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.critic import ValueNormaliser
from rolltape.trainers.critic_model import CriticCounts, freeze, train_only
from rolltape.trainers.gae import whitened
from rolltape.trainers.learner import Learner, make_critic, make_optimizer, reset_optimizer
from rolltape.trainers.step import StepOutcome, train_step

SAO = CONFIGS["sao"]


def step(made: Learner, config: TrainerConfig = SAO, *, number: int = 1) -> StepOutcome:
    return train_step(made, batch(), config, step=number, temperature=TEMPERATURE)


def changed(**changes: Any) -> TrainerConfig:
    return dataclasses.replace(SAO, **changes)


def of_critic(made: Learner) -> dict[str, str]:
    assert made.critic is not None
    return tensor_digests(named_weights(made.critic.model))


@pytest.mark.parametrize(
    ("changes", "is_learning"),
    [
        ({}, lambda name: ".mlp." in name or name.startswith("head.")),
        ({"train_critic": ()}, lambda name: "attn" not in name),
        (
            {"train_critic": ("ln_", "head"), "freeze_critic": ("ln_f",)},
            lambda name: name.startswith("head.") or ("ln_" in name and "ln_f" not in name),
        ),
    ],
)
def test_the_critics_own_modules_learn_and_the_others_stay(
    changes: dict[str, Any], is_learning: Callable[[str], bool]
) -> None:
    """By default its MLPs and its head (D27). Weight decay would move the others if the optimizer had them (§4.11)."""
    config = changed(weight_decay=0.1, critic_updates=3, **changes)
    made = learner(config)
    before = of_critic(made)
    step(made, config)
    after = of_critic(made)
    wanted = {name for name in before if is_learning(name)}
    moved = {name for name in before if before[name] != after[name]}
    assert moved == wanted
    assert {"head.weight", "head.bias"} <= moved
    assert made.critic is not None
    owned = {id(p) for group in made.critic.optimizer.param_groups for p in group["params"]}
    assert all((id(p) in owned) == (name in wanted) for name, p in made.critic.model.named_parameters())
    assert {name.removeprefix("critic/") for name in gradients(made) if name.startswith("critic/")} == wanted


@pytest.mark.parametrize(
    ("train", "is_learning"),
    [
        (SAO.train_critic, lambda name: ".experts." in name or ".mlp.down_proj." in name or name.startswith("head.")),
        (("experts", "head"), lambda name: ".experts." in name or name.startswith("head.")),
        (("gate", "head"), lambda name: ".mlp.gate." in name or name.startswith("head.")),
    ],
)
def test_the_critic_of_a_mixture_learns_in_its_experts_and_not_in_its_router(
    train: tuple[str, ...], is_learning: Callable[[str], bool]
) -> None:
    """D27, with the module names of a family that has both dense layers and mixtures."""
    critic = nn.Module()
    critic.backbone = nn.ModuleDict(
        {
            "dense": nn.ModuleDict(
                {"self_attn": nn.Linear(2, 2), "mlp": nn.ModuleDict({"down_proj": nn.Linear(2, 2)})}
            ),
            "mixed": nn.ModuleDict(
                {
                    "self_attn": nn.Linear(2, 2),
                    "mlp": nn.ModuleDict({"gate": nn.Linear(2, 2), "experts": nn.ModuleDict({"0": nn.Linear(2, 2)})}),
                }
            ),
        }
    )
    critic.head = nn.Linear(2, 1)
    train_only(critic, train)
    learning = {name for name, p in critic.named_parameters() if p.requires_grad}
    assert learning == {name for name, _ in critic.named_parameters() if is_learning(name)}
    assert learning


def test_modules_to_train_or_to_freeze_have_to_exist() -> None:
    for name in ("train_critic", "freeze_critic"):
        with pytest.raises(ConfigError, match=rf"{name}: expected parts of .*attn.*, got 'attention'"):
            make_critic(build_model("char-64x2", 1), changed(**{name: ("attention",)}))
    with pytest.raises(
        ConfigError, match=r"train_critic, .*freeze_critic: expected a module of the critic that learns"
    ):
        make_critic(build_model("char-64x2", 1), changed(train_critic=("mlp",), freeze_critic=("attn", "mlp")))
    model = make_critic(build_model("char-64x2", 1), changed(train_critic=(), freeze_critic=())).model
    assert all(p.requires_grad for p in model.parameters())
    freeze(model, ("mlp", "head"))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".mlp." in name or name.startswith("head")}


def test_a_new_critic_knows_nothing_and_begins_with_the_policys_body() -> None:
    made = make_critic(build_model("char-64x2", 1), SAO)
    fresh = Learner(build_model("char-64x2", 1), learner(SAO).optimizer, made)
    fresh.optimizer = make_optimizer(fresh.model, SAO)
    policy = named_weights(build_model("char-64x2", 1))
    for name, weight in named_weights(made.model).items():
        if name.startswith("backbone."):
            assert torch.equal(weight, policy[name.replace("backbone.", "transformer.")])
    outcome = step(fresh)
    assert outcome.critic is not None
    assert outcome.critic.values.abs().sum() == 0


def test_warm_up_trains_the_critic_alone() -> None:
    config = changed(critic_warmup_steps=2)
    made = learner(config)
    start = weights_digest(named_weights(made.model))
    for number in (1, 2):
        before = of_critic(made)
        outcome = step(made, config, number=number)
        assert not outcome.skipped
        assert outcome.actor_updates == 0
        assert outcome.actor_digest == start
        assert of_critic(made) != before
        assert not made.optimizer.state
        assert outcome.grad_norm == 0.0
        # What the policy would do is looked at all the same: a trusted share of 0 would be an alarm.
        assert int(outcome.trusted.sum()) > 0
        assert outcome.advantages.abs().sum() > 0
        assert all(name.startswith("critic/") for name in outcome.gradient_digests)
    outcome = step(made, config, number=3)
    assert outcome.actor_updates == 1
    assert outcome.actor_digest != start
    assert made.critic is not None
    assert made.critic.counts == CriticCounts(warmup_steps=2, batches=1, critic_updates=2, actor_updates=1)


def test_updates_are_two_to_one_after_the_warm_up() -> None:
    config = changed(critic_warmup_steps=1)
    made = learner(config)
    for number in range(1, 5):
        step(made, config, number=number)
    assert made.critic is not None
    assert made.critic.counts == CriticCounts(warmup_steps=1, batches=3, critic_updates=6, actor_updates=3)
    made.critic.counts.critic_updates -= 1
    with pytest.raises(IntegrityError, match=r"expected 8 updates of the critic and 4 of the policy.* got 7 and 4"):
        step(made, config, number=5)


@pytest.mark.parametrize(
    ("patched", "found"),
    [("learn_values", "got 4 and 1"), ("clip_gradients", "got 2 and 2")],
)
def test_updates_that_nobody_tells_of_are_counted(monkeypatch: pytest.MonkeyPatch, patched: str, found: str) -> None:
    """The ratio is of what the optimizers did, so a phase that runs twice is found whatever it says of itself."""
    made = learner(SAO)
    real: Any = getattr(step_module, patched)

    def twice(*args: Any) -> Any:
        if patched == "clip_gradients":
            made.optimizer.step()
        else:
            real(*args)
        return real(*args)

    monkeypatch.setattr(step_module, patched, twice)
    with pytest.raises(IntegrityError, match=rf"expected 2 updates of the critic and 1 of the policy.* {found}"):
        step(made)


def test_updates_that_are_left_out_without_a_reason_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(critic_step_module, "range", lambda count: builtins.range(count - 1), raising=False)
    with pytest.raises(IntegrityError, match=r"expected 2 updates of the critic and 1 of the policy.* got 1 and 1"):
        step(learner(SAO))


def test_a_policy_that_is_skipped_counts_as_skipped() -> None:
    made = learner(SAO)
    far = dataclasses.replace(batch(), rollout_log_probs=torch.full_like(batch().rollout_log_probs, torch.nan))
    outcome = train_step(made, far, SAO, step=1, temperature=TEMPERATURE)
    assert outcome.skipped
    assert made.critic is not None
    # The critic judges states, which no gate concerns.
    assert made.critic.counts == CriticCounts(batches=1, critic_updates=2, skipped_actor=1)


def test_the_policy_is_told_values_from_before_or_after_the_critics_updates() -> None:
    """D14. With λ_critic = 1 targets are the same; advantages are those of the values that were read."""
    before, after = learner(SAO), learner(SAO)
    early = step(before)
    late = step(after, changed(advantage_values="post_update"))
    assert of_critic(before) == of_critic(after)
    assert early.critic is not None
    assert late.critic is not None
    assert torch.equal(early.critic.values, late.critic.values)
    assert not torch.equal(early.advantages, late.advantages)
    # Values of the critic as the updates left it, read in a step that updates it no more.
    frozen = learner(changed(critic_lr=1e-12))
    assert frozen.critic is not None
    assert before.critic is not None
    frozen.critic.model.load_state_dict(before.critic.model.state_dict())
    reread = step(frozen, changed(critic_lr=1e-12))
    torch.testing.assert_close(reread.advantages, late.advantages, atol=1e-5, rtol=1e-5)


def test_whitened_advantages_are_those_whitened() -> None:
    plain, white = step(learner(SAO)), step(learner(SAO), changed(whiten=True))
    action = batch().action_mask
    torch.testing.assert_close(
        white.advantages[action], whitened(plain.advantages[action].double()).float(), atol=1e-5, rtol=1e-5
    )
    assert white.advantages[~action].abs().sum() == 0


def test_gamma_and_lambda_reach_the_targets() -> None:
    made = learner(SAO)
    plain = step(made).critic
    discounted = step(learner(SAO), changed(gamma=0.9)).critic
    mixed = step(learner(SAO), changed(critic_lambda=0.5)).critic
    assert plain is not None
    assert discounted is not None
    assert mixed is not None
    assert not torch.equal(plain.targets, discounted.targets)
    assert not torch.equal(plain.targets, mixed.targets)
    # With λ_critic 0 the target of a token is its reward and the next value.
    short = step(learner(SAO), changed(critic_lambda=0.0)).critic
    assert short is not None
    tokens = torch.nonzero(batch().action_mask).flatten()[:4]  # the one row of member 0
    values, rewards = short.values[tokens].double(), torch.tensor([0.0, 0.1, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(short.targets[tokens], rewards + torch.cat([values[1:], torch.zeros(1)]).double())


def test_boundaries_and_targets_of_compaction_are_options() -> None:
    """D17. With a bootstrapped boundary a rollout is one line: its advantages are SAO's, with the same rewards."""
    config = CONFIGS["compaction"]
    plain = train_step(learner(config), batch(), config, step=1, temperature=TEMPERATURE)
    local_config = dataclasses.replace(config, critic_target="local", gamma=0.9)
    local = train_step(learner(config), batch(), local_config, step=1, temperature=TEMPERATURE)
    stitched_config = dataclasses.replace(config, boundary_value="bootstrap")
    whole = dataclasses.replace(
        batch(),
        rewards=torch.tensor([1.1, -0.2, 0.5, 1.0, 0.25, 0.3], dtype=torch.float64),
        token_rewards=type(batch().token_rewards).none(),
    )
    stitched = train_step(learner(config), whole, stitched_config, step=1, temperature=TEMPERATURE)
    line = train_step(learner(SAO), whole, SAO, step=1, temperature=TEMPERATURE)
    torch.testing.assert_close(stitched.advantages, line.advantages, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(plain.advantages, stitched.advantages)
    assert plain.critic is not None
    assert local.critic is not None
    # Locally a segment's last token is at the reward, globally only the rollout's last is.
    ends = (batch().cu_seqlens[1:] - 1)[batch().row_member == 4]
    torch.testing.assert_close(local.critic.targets[ends], torch.full((3,), 0.25, dtype=torch.float64))
    far = dataclasses.replace(config, gamma=0.9)
    distant = train_step(learner(config), batch(), far, step=1, temperature=TEMPERATURE).critic
    assert distant is not None
    expected = 0.25 * 0.9 ** torch.tensor([5.0, 3.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(distant.targets[ends], expected)


def test_only_the_end_of_a_truncated_rollout_is_valued() -> None:
    config = changed(bootstrap_truncated=True)
    plain, valued = step(learner(SAO)), step(learner(config), config)
    truncated = batch().is_truncated[batch().row_member][batch().row_of_token()] & batch().action_mask
    others = batch().action_mask & ~truncated
    torch.testing.assert_close(valued.advantages[others], plain.advantages[others], atol=1e-6, rtol=1e-6)
    assert (plain.advantages - valued.advantages)[truncated].abs().min() > 1e-3
    for name in ("zero", "bootstrap"):
        of = dataclasses.replace(CONFIGS["compaction"], boundary_value=name)
        base = train_step(learner(of), batch(), of, step=1, temperature=TEMPERATURE)
        ends = dataclasses.replace(of, bootstrap_truncated=True)
        found = train_step(learner(of), batch(), ends, step=1, temperature=TEMPERATURE)
        torch.testing.assert_close(found.advantages[others], base.advantages[others], atol=1e-6, rtol=1e-6)
        assert (base.advantages - found.advantages)[truncated].abs().max() > 1e-3


def test_a_clipped_value_loss_keeps_near_the_old_values() -> None:
    wide, narrow = step(learner(SAO)), step(learner(SAO), changed(value_clip=1e-3))
    assert wide.critic is not None
    assert narrow.critic is not None
    assert wide.critic.losses[0] == narrow.critic.losses[0]  # the first update starts from the old values
    assert narrow.critic.losses[1] >= wide.critic.losses[1]


def test_a_normaliser_moves_no_value_but_learns_in_its_own_scale() -> None:
    config = changed(value_norm=True, value_norm_rate=0.5, critic_lr=1e-12)
    made = learner(config)
    plain = step(learner(changed(critic_lr=1e-12)))
    normal = step(made, config)
    assert made.critic is not None
    assert made.critic.normaliser != ValueNormaliser()
    assert plain.critic is not None
    assert normal.critic is not None
    # The head was rescaled for new statistics: read again, values are the same.
    second = step(made, changed(value_norm=True, value_norm_rate=0.5, critic_lr=1e-12), number=2)
    assert second.critic is not None
    torch.testing.assert_close(second.critic.values, plain.critic.values, atol=1e-5, rtol=1e-5)
    first = made.critic.normaliser
    assert normal.critic.losses[0] != plain.critic.losses[0]
    assert first.std > 0


def test_values_without_variance_to_explain_have_no_share() -> None:
    same = dataclasses.replace(
        batch(), rewards=torch.ones(6, dtype=torch.float64), token_rewards=type(batch().token_rewards).none()
    )
    outcome = train_step(learner(SAO), same, SAO, step=1, temperature=TEMPERATURE)
    assert outcome.critic is not None
    assert outcome.critic.explained_variance is None


def test_a_method_with_a_critic_needs_one() -> None:
    made = learner(SAO)
    made.critic = None
    with pytest.raises(ConfigError, match="algorithm sao: expected a learner with a critic"):
        step(made)


def test_gradients_of_critic_and_policy_are_clipped_apart() -> None:
    config = changed(max_grad_norm=0.5, critic_updates=1)
    made = learner(config)
    outcome = step(made, config)
    assert outcome.critic is not None
    assert outcome.grad_norm > 0.5
    assert outcome.critic.grad_norm > 0.5
    found = gradients(made)
    for is_critic in (True, False):
        own = [g for name, g in found.items() if name.startswith("critic/") == is_critic]
        assert float(torch.stack([g.double().square().sum() for g in own]).sum().sqrt()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["sao", "compaction"])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path, name: str) -> None:
    """Through the end of the warm-up, with a normaliser: all that a critic is made of comes back."""
    config = dataclasses.replace(CONFIGS[name], critic_warmup_steps=2, value_norm=True, value_norm_rate=0.3)
    made = learner(config)
    for number in (1, 2, 3):
        step(made, config, number=number)
    assert made.critic is not None
    made.critic.version = 4
    place = Location.parse(str(tmp_path))
    saved = save_checkpoint(place, "c/3", made, Progress(step=3))
    assert {file.name for file in (tmp_path / "c" / "3").iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "critic-model.safetensors",
        "critic-optimizer.safetensors",
        "state.json",
    }
    expected = [step(made, config, number=number).weight_digests for number in (4, 5)]
    other = learner(config)
    load_checkpoint(place, "c/3", saved.digest, other)
    assert other.critic is not None
    assert other.critic.version == 4
    assert [step(other, config, number=number).weight_digests for number in (4, 5)] == expected
    assert other.critic.counts == made.critic.counts
    assert other.critic.normaliser == made.critic.normaliser


def test_a_checkpoint_without_a_critic_is_no_checkpoint_of_one(tmp_path: Path) -> None:
    place = Location.parse(str(tmp_path))
    saved = save_checkpoint(place, "c/1", learner(CONFIGS["grpo"]), Progress())
    with pytest.raises(ReplayError, match="expected a critic's state"):
        load_checkpoint(place, "c/1", saved.digest, learner(SAO))


def test_a_reset_forgets_moments_and_keeps_weights() -> None:
    """D25: the step after it is that of a new optimizer on the same weights, at the same learning rate."""
    config = dataclasses.replace(CONFIGS["grpo"], warmup_steps=10)
    made = learner(config)
    for number in (1, 2):
        step(made, config, number=number)
    weights = weights_digest(named_weights(made.model))
    assert reset_optimizer(made.optimizer) == "exp_avg, exp_avg_sq, step"
    assert weights_digest(named_weights(made.model)) == weights
    fresh = Learner(made.model, make_optimizer(made.model, config))
    copy = learner(config)
    copy.model.load_state_dict(made.model.state_dict())
    assert step(made, config, number=3).weight_digests == step(copy, config, number=3).weight_digests
    assert fresh.optimizer.param_groups[0]["lr"] == config.lr
    assert made.optimizer.param_groups[0]["lr"] == config.lr_at(3)

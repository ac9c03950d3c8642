"""PPO under IcePop, TIS and no correction, DIS, and the value loss: values and gradients of verl and OpenRLHF.

Where the definitions agree the numbers agree to 1e-6. Where ours differs on purpose, a test says why and shows by how
much.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.oracles.batches import Batch, assert_agree, random_batch
from tests.oracles.peers import Peers
from torch import Tensor

from rolltape.trainers.aggregation import Mode
from rolltape.trainers.critic import value_loss
from rolltape.trainers.dis import dis_policy_loss, dis_surrogate
from rolltape.trainers.gates import no_gate
from rolltape.trainers.losses import Correction, PolicyLoss, clipped_policy_loss, icepop_policy_loss

SEEDS = range(3)
EPSILON: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28}
NO_DUAL_CLIP = 1e9

VERL_MODES: dict[Mode, str] = {
    "token_mean": "token-mean",
    "seq_mean": "seq-mean-token-mean",
    "seq_sum": "seq-mean-token-sum",
    "const": "seq-mean-token-sum-norm",
}


def ours(batch: Batch, mode: Mode, correction: Correction, **options: Any) -> tuple[PolicyLoss, Tensor]:
    """Loss and padded gradient."""
    current = batch.current.clone().requires_grad_()
    result = icepop_policy_loss(
        batch.flat(current),
        batch.flat(batch.old),
        batch.flat(batch.rollout),
        batch.flat(batch.advantage),
        batch.weights(mode, max_length=batch.mask.shape[1] if mode == "const" else None),
        correction=correction,
        **EPSILON,
        **options,
    )
    return result, torch.autograd.grad(result.loss, current)[0]


def verl_ppo(peers: Peers, batch: Batch, mode: Mode, weights: Tensor | None) -> dict[str, Any]:
    return peers.ask(
        "verl_ppo",
        gradients_of=("current",),
        current=batch.current,
        old=batch.old,
        advantage=batch.advantage,
        mask=batch.mask,
        weights=weights,
        mode=VERL_MODES[mode],
        dual_clip=NO_DUAL_CLIP,
        **EPSILON,
    )


def openrlhf_ppo(peers: Peers, batch: Batch, mode: Mode, **options: Any) -> dict[str, Any]:
    return peers.ask(
        "openrlhf_ppo",
        gradients_of=("current",),
        current=batch.current,
        old=batch.old,
        rollout=batch.rollout,
        advantage=batch.advantage,
        mask=batch.mask,
        token_mean=mode == "token_mean",
        clip_eps_low=EPSILON["eps_low"],
        clip_eps_high=EPSILON["eps_high"],
        **options,
    )


def assert_same(found: tuple[PolicyLoss, Tensor], answer: dict[str, Any]) -> None:
    result, gradient = found
    assert_agree(result.loss, answer["loss"])
    assert_agree(gradient, answer["gradients"][0])
    assert bool(gradient.any())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", list(VERL_MODES))
def test_icepop_over_ppo_is_verls(peers: Peers, seed: int, mode: Mode) -> None:
    batch = random_batch(seed)
    answer = peers.ask("verl_weights", log_ratio=batch.old - batch.rollout, mask=batch.mask, threshold="0.5_2.0")
    found = ours(batch, mode, "icepop", beta=2.0)
    assert_agree(found[0].gate_weights, batch.flat(answer["weights"]))
    assert 0.0 < float(found[0].gate.low.double().mean()) < 1.0
    assert 0.0 < float(found[0].gate.high.double().mean()) < 1.0
    assert_same(found, verl_ppo(peers, batch, mode, answer["weights"]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", list(VERL_MODES))
def test_truncated_importance_sampling_is_verls(peers: Peers, seed: int, mode: Mode) -> None:
    batch = random_batch(seed)
    answer = peers.ask("verl_weights", log_ratio=batch.old - batch.rollout, mask=batch.mask, threshold=2.0)
    found = ours(batch, mode, "tis", tis_low=0.0, tis_high=2.0)
    assert_agree(found[0].gate_weights, batch.flat(answer["weights"]))
    assert_same(found, verl_ppo(peers, batch, mode, answer["weights"]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", list(VERL_MODES))
def test_plain_ppo_is_verls(peers: Peers, seed: int, mode: Mode) -> None:
    batch = random_batch(seed)
    found = ours(batch, mode, "none")
    assert bool(found[0].clip_low.any())
    assert bool(found[0].clip_high.any())
    assert_same(found, verl_ppo(peers, batch, mode, None))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean"])
def test_icepop_over_ppo_is_openrlhfs(peers: Peers, seed: int, mode: Mode) -> None:
    batch = random_batch(seed)
    answer = openrlhf_ppo(
        peers, batch, mode, is_correction_level="token", is_correction_mode="mask", is_correction_threshold=[0.5, 2.0]
    )
    found = ours(batch, mode, "icepop", beta=2.0)
    assert_same(found, answer)
    rejected = (found[0].gate.low | found[0].gate.high).double().mean()
    assert float(rejected) == pytest.approx(float(answer["filtered"]), abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.0, 2.0)])
def test_truncated_importance_sampling_is_openrlhfs(peers: Peers, seed: int, bounds: tuple[float, float]) -> None:
    batch = random_batch(seed)
    answer = openrlhf_ppo(
        peers, batch, "seq_mean", is_correction_level="token", is_correction_mode="clip", is_correction_threshold=bounds
    )
    assert_same(ours(batch, "seq_mean", "tis", tis_low=bounds[0], tis_high=bounds[1]), answer)


@pytest.mark.parametrize("seed", SEEDS)
def test_dual_clip_is_verls_and_openrlhfs(peers: Peers, seed: int) -> None:
    """Off in every method here (D13); verl's default is 3, so a comparison with it has to ask for it."""
    batch = random_batch(seed)
    far = batch.flat(batch.old) + torch.linspace(-1.0, 2.5, len(batch.rows), dtype=torch.float64)
    moved = batch.current.masked_scatter(batch.actions, far)
    current = moved.clone().requires_grad_()
    result = clipped_policy_loss(
        batch.flat(current),
        batch.flat(batch.old),
        no_gate(torch.ones(len(batch.rows), dtype=torch.float64)),
        batch.flat(batch.advantage),
        batch.weights("token_mean"),
        dual_clip=3.0,
        **EPSILON,
    )
    (gradient,) = torch.autograd.grad(result.loss, current)
    common = {"current": moved, "old": batch.old, "advantage": batch.advantage, "mask": batch.mask}
    verl = peers.ask(
        "verl_ppo", gradients_of=("current",), weights=None, mode="token-mean", dual_clip=3.0, **common, **EPSILON
    )
    openrlhf = peers.ask(
        "openrlhf_ppo",
        gradients_of=("current",),
        rollout=batch.rollout,
        token_mean=True,
        dual_clip=3.0,
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        **common,
    )
    for answer in (verl, openrlhf):
        assert_same((result, gradient), answer)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["token_mean", "seq_sum"])
@pytest.mark.parametrize("bounds", [(0.3, 0.5), (0.2, 0.28)])
def test_dis_is_verls_score_loss_with_rejection(
    peers: Peers, seed: int, mode: Mode, bounds: tuple[float, float]
) -> None:
    """verl's bypass mode with an interval on current / rollout. Ours has it open, theirs closed: see the ends below."""
    batch = random_batch(seed)
    current = batch.current.clone().requires_grad_()
    arguments = (batch.flat(current), batch.flat(batch.rollout), batch.flat(batch.advantage), batch.weights(mode))
    result = dis_policy_loss(*arguments, eps_low=bounds[0], eps_high=bounds[1])
    (gradient,) = torch.autograd.grad(result.loss, current, retain_graph=True)
    answer = peers.ask(
        "verl_score",
        gradients_of=("current",),
        current=batch.current,
        rollout=batch.rollout,
        advantage=batch.advantage,
        mask=batch.mask,
        threshold=f"{1.0 - bounds[0]}_{1.0 + bounds[1]}",
        mode=VERL_MODES[mode],
    )
    assert_same((result, gradient), answer)
    assert_agree(result.gate_weights, batch.flat(answer["weights"]))
    (other,) = torch.autograd.grad(dis_surrogate(*arguments, eps_low=bounds[0], eps_high=bounds[1]), current)
    assert_agree(other, answer["gradients"][0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_is_twice_the_peers(peers: Peers, seed: int, clip: float | None) -> None:
    """Ours has scale 1; verl and OpenRLHF take the convention of ½ (algorithms.md §4.11: fixed at 1, documented)."""
    batch = random_batch(seed)
    returns, old = batch.advantage, batch.values + 0.3 * batch.current
    values = batch.values.clone().requires_grad_()
    result = value_loss(
        batch.flat(values),
        batch.flat(returns),
        batch.weights("token_mean"),
        clip=clip,
        old_values=batch.flat(old),
    )
    (gradient,) = torch.autograd.grad(result.loss, values)
    common = {"values": batch.values, "returns": returns, "old": old, "mask": batch.mask}
    answers = [peers.ask("openrlhf_value_loss", gradients_of=("values",), clip=clip, **common)]
    answers.append(
        peers.ask("verl_value_loss", gradients_of=("values",), clip=clip or math.inf, mode="token-mean", **common)
    )
    for answer in answers:
        assert_agree(result.loss, 2.0 * answer["loss"])
        assert_agree(gradient, 2.0 * answer["gradients"][0])


# On purpose


def test_the_ends_of_dis_are_open_and_verls_closed(peers: Peers) -> None:
    """D2: a ratio of exactly 1 - eps_low or 1 + eps_high is rejected. With both 0 nothing is kept, not even 1."""
    logp = torch.full((1, 2), -1.0, dtype=torch.float64)
    advantage = mask = torch.ones_like(logp)
    answer = peers.ask(
        "verl_score",
        current=logp,
        rollout=logp,
        advantage=advantage,
        mask=mask,
        threshold="1.0_1.0",
        mode="token-mean",
    )
    assert answer["weights"].tolist() == [[1.0, 1.0]]
    result = dis_policy_loss(logp[0], logp[0], advantage[0], torch.full((2,), 0.5), eps_low=0.0, eps_high=0.0)
    assert result.gate_weights.tolist() == [0.0, 0.0]
    assert result.skip_step


def test_verls_default_dual_clip_bounds_what_ours_does_not(peers: Peers) -> None:
    """D13: no method here has dual clipping, so a token with A < 0 and a large ratio keeps its whole loss."""
    old = torch.full((1, 1), -3.0, dtype=torch.float64)
    current, advantage, mask = old + math.log(5.0), -torch.ones_like(old), torch.ones_like(old)
    answer = peers.ask(
        "verl_ppo",
        current=current,
        old=old,
        advantage=advantage,
        mask=mask,
        weights=None,
        mode="token-mean",
        dual_clip=3.0,
        **EPSILON,
    )
    result = icepop_policy_loss(current[0], old[0], old[0], advantage[0], torch.ones(1), **EPSILON)
    assert float(answer["loss"]) == pytest.approx(3.0)
    assert float(result.loss) == pytest.approx(5.0)


def test_a_rejected_token_stays_in_our_denominator_and_leaves_verls_rejection_mask(peers: Peers) -> None:
    """D3: otherwise the fewer tokens are trusted, the more each of them moves the weights."""
    batch = random_batch(0)
    log_ratio = batch.old - batch.rollout
    left = peers.ask("verl_rejection", log_ratio=log_ratio, mask=batch.mask, option="token_k1", threshold="0.5_2.0")
    found, _ = ours(batch, "token_mean", "icepop", beta=2.0)
    assert torch.equal(batch.flat(left["mask"]).bool(), found.trusted)
    weights = peers.ask("verl_weights", log_ratio=log_ratio, mask=batch.mask, threshold="0.5_2.0")["weights"]
    answer = peers.ask(
        "verl_ppo",
        current=batch.current,
        old=batch.old,
        advantage=batch.advantage,
        mask=left["mask"],
        weights=weights,
        mode="token-mean",
        dual_clip=NO_DUAL_CLIP,
        **EPSILON,
    )
    share = found.num_trusted / len(batch.rows)
    assert share < 0.9
    assert_agree(found.loss, answer["loss"] * share)


def test_verls_token_k1_bounds_the_inverse_of_the_ratio_that_icepop_bounds(peers: Peers) -> None:
    """Only an interval that is its own inverse (as [1/beta, beta]) means the same; any other has to be turned over."""
    ratio = torch.tensor([[0.55, 0.9, 1.5, 1.9]], dtype=torch.float64)
    mask = torch.ones_like(ratio)

    def kept(threshold: str) -> list[float]:
        asked: dict[str, Any] = {"log_ratio": ratio.log(), "mask": mask, "option": "token_k1", "threshold": threshold}
        answer: list[float] = peers.ask("verl_rejection", **asked)["mask"][0].tolist()
        return answer

    inside = ((ratio >= 0.8) & (ratio <= 1.6))[0].double().tolist()
    assert kept("0.8_1.6") == [0.0, 1.0, 0.0, 0.0]
    assert kept(f"{1 / 1.6}_{1 / 0.8}") == inside == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_bad_log_prob_costs_only_its_token_here(peers: Peers, bad: float) -> None:
    """D30: stored as it is, untrusted, counted, never imputed; the other tokens train.

    Times a mask NaN stays NaN. An infinite ratio is clamped: a token of which nothing is known gets the largest weight.
    """
    batch = random_batch(1)
    batch.rollout[0, 0] = bad
    found, gradient = ours(batch, "token_mean", "tis", tis_low=0.5, tis_high=2.0)
    assert int(found.nonfinite.sum()) == 1
    assert bool(torch.isfinite(gradient).all())
    assert float(gradient[0, 0]) == 0.0
    answer = openrlhf_ppo(
        peers,
        batch,
        "token_mean",
        is_correction_level="token",
        is_correction_mode="clip",
        is_correction_threshold=[0.5, 2.0],
    )
    theirs: Tensor = answer["gradients"][0]
    if math.isnan(bad):
        assert bool(torch.isnan(theirs[0, 0]))
    else:
        assert float(theirs[0, 0].abs()) > 0.01
        rest = batch.mask.clone().bool()
        rest[0, 0] = False
        assert_agree(gradient[rest], theirs[rest])

"""KL estimators and mismatch metrics of verl and OpenRLHF, and TRL's off-policy mask."""

from __future__ import annotations

import pytest
import torch
from tests.oracles.batches import Batch, assert_agree, random_batch
from tests.oracles.peers import Peers
from torch import Tensor

from rolltape.trainers.dis import dis_policy_loss
from rolltape.trainers.metrics import Verdicts, effective_sample_size, kl_estimate, kl_terms, policy_metrics

SEEDS = range(3)
KINDS = ("k1", "k2", "k3")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("peer", ["verl_kl", "openrlhf_kl"])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_estimators_are_the_peers(peers: Peers, seed: int, peer: str, kind: str) -> None:
    """Values and gradients at each token. OpenRLHF works in float32: it is given numbers that float32 holds."""
    batch = random_batch(seed)
    current, old = batch.current.float().double(), batch.old.float().double()
    ours = current.clone().requires_grad_()
    terms = kl_terms(ours - old)[KINDS.index(kind)]
    answer = peers.ask(peer, gradients_of=("log_prob",), log_prob=current, reference=old, kind=kind)
    assert_agree(terms, answer["terms"])
    assert_agree(torch.autograd.grad(terms.sum(), ours)[0], answer["gradients"][0])


@pytest.mark.parametrize("seed", SEEDS)
def test_mismatch_metrics_are_verls(peers: Peers, seed: int) -> None:
    batch = random_batch(seed)
    answer = peers.ask("verl_mismatch_metrics", old=batch.old, rollout=batch.rollout, mask=batch.mask)
    metrics = metrics_of(batch)
    assert metrics["kl_rollout_train_k1"] == pytest.approx(answer["kl"], abs=1e-6)
    assert metrics["kl_rollout_train_k3"] == pytest.approx(answer["k3_kl"], abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_our_effective_sample_size_is_verls_times_the_number_of_tokens(peers: Peers, seed: int) -> None:
    """verl gives a share, we a number of tokens, as the metric's name says."""
    batch = random_batch(seed)
    answer = peers.ask("verl_weights", log_ratio=batch.old - batch.rollout, mask=batch.mask, threshold=2.0)
    share = answer["metrics"]["rollout_is_eff_sample_size"]
    found = effective_sample_size(batch.flat(answer["weights"]))
    assert found == pytest.approx(share * len(batch.rows), rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_trls_off_policy_mask_decides_on_the_k1_of_our_metrics(peers: Peers, seed: int) -> None:
    """A sequence stays if its advantage is not negative or KL(rollout || current) of its action tokens is small."""
    batch = random_batch(seed)
    advantage = batch.advantage[:, :1]
    threshold = 0.05
    answer = trl_mask(peers, batch, advantage, threshold)
    divergences = [
        kl_estimate((batch.rollout - batch.current)[row][batch.actions[row]]).k1 for row in range(len(batch.mask))
    ]
    expected = [
        1.0 if float(advantage[row]) >= 0.0 or divergences[row] <= threshold else 0.0 for row in range(len(batch.mask))
    ]
    assert answer[:, 0].tolist() == expected


# On purpose


def test_trls_mask_is_for_sequences_and_one_sided_our_gates_are_for_tokens_and_two_sided(peers: Peers) -> None:
    """Token-level on purpose (§4.3): one far token does not cost its sequence, and no token far off is kept.

    The first row is on policy but for one token; TRL drops all of it. The second is far off at every token, but with a
    positive advantage, and the fourth is too likely now: TRL keeps both. The third is on policy for both.
    """
    rollout = torch.full((4, 5), -2.0, dtype=torch.float64)
    current = rollout.clone()
    current[0, 2] -= 3.0
    current[1] -= 3.0
    current[3] += 1.5
    advantage = torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)
    batch = Batch(
        mask=torch.ones_like(rollout),
        current=current,
        old=current,
        rollout=rollout,
        advantage=advantage.expand(4, 5),
        values=rollout,
    )
    assert trl_mask(peers, batch, advantage, 0.1)[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0]
    result = dis_policy_loss(
        batch.flat(current),
        batch.flat(rollout),
        batch.flat(batch.advantage),
        batch.weights("token_mean"),
        eps_low=0.5,
        eps_high=1.0,
    )
    trusted = result.trusted.view(4, 5)
    assert trusted.sum(1).tolist() == [4, 0, 5, 0]
    assert not bool(trusted[0, 2])


def test_our_k3_is_not_cut_off_where_the_peers_is(peers: Peers) -> None:
    """Both cut the estimator at 10, value and gradient. Ours are metrics: a divergence that large shall be seen."""
    current, reference = torch.tensor([[-6.0]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64)
    true = float(kl_terms(current - reference)[2])
    assert true == pytest.approx(142.413159, abs=1e-6)
    for peer in ("verl_kl", "openrlhf_kl"):
        answer = peers.ask(peer, gradients_of=("log_prob",), log_prob=current, reference=reference, kind="k3")
        assert float(answer["terms"]) == 10.0
        assert float(answer["gradients"][0]) == 0.0


def trl_mask(peers: Peers, batch: Batch, advantage: Tensor, threshold: float) -> Tensor:
    keep: Tensor = peers.ask(
        "trl_off_policy_mask",
        advantage=advantage,
        current=batch.current,
        rollout=batch.rollout,
        mask=batch.mask,
        threshold=threshold,
    )["keep"]
    return keep


def metrics_of(batch: Batch) -> dict[str, float]:
    everything = torch.ones(len(batch.rows), dtype=torch.bool)
    return policy_metrics(
        current_logp=batch.flat(batch.current),
        old_logp=batch.flat(batch.old),
        rollout_logp=batch.flat(batch.rollout),
        advantage=batch.flat(batch.advantage),
        entropy=None,
        gate_weight=everything.double(),
        trusted=everything,
        verdicts=Verdicts(*(~everything for _ in range(4))),
    )

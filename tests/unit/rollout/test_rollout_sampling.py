"""The declared distribution, and one token of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolltape.rollout.engine import SamplingConfig
from rolltape.rollout.sampling import sample_tokens, support_mask
from rolltape.schema.errors import ConfigError

PROBABILITIES = torch.tensor([[0.5, 0.125, 0.25, 0.125]])
LOGITS = PROBABILITIES.log()


def sample(uniform: float, sampling: SamplingConfig, logits: torch.Tensor = LOGITS) -> tuple[int, float]:
    sampled = sample_tokens(logits, torch.tensor([uniform], dtype=torch.float64), sampling)
    return int(sampled.token_ids[0]), float(sampled.log_probs[0].exp())


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.499, 0), (0.501, 1), (0.62, 1), (0.63, 2), (0.874, 2), (0.876, 3), (1 - 2**-53, 3)],
)
def test_a_token_is_where_the_cumulative_probability_exceeds_the_number(uniform: float, token: int) -> None:
    found, probability = sample(uniform, SamplingConfig())
    assert found == token
    assert probability == pytest.approx(float(PROBABILITIES[0, token]), rel=1e-6)


def test_sampled_shares_are_the_probabilities() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 7)
    count = 20_000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    sampled = sample_tokens(logits.expand(count, -1), numbers, SamplingConfig(temperature=0.7))
    shares = torch.bincount(sampled.token_ids, minlength=7) / count
    assert torch.allclose(shares, torch.softmax(logits[0] / 0.7, -1), atol=2e-4)


def test_temperature_divides_logits_and_log_probs_are_of_that_distribution() -> None:
    _, probability = sample(0.0, SamplingConfig(temperature=2.0))
    weights = PROBABILITIES[0].sqrt()
    assert probability == pytest.approx(float(weights[0] / weights.sum()), rel=1e-6)


def test_temperature_zero_takes_the_likeliest_and_reports_the_models_own_log_prob() -> None:
    sampling = SamplingConfig(temperature=0.0)
    token, probability = sample(0.99, sampling)
    assert token == 0
    assert probability == pytest.approx(0.5, rel=1e-6)
    assert sampling.logprobs_mode == "raw_logprobs"
    tie = torch.tensor([[0.0, 2.0, 2.0, 2.0]])
    assert sample(0.99, sampling, tie)[0] == 1


def test_top_k_keeps_the_likeliest_and_of_equal_ones_the_lowest_ids() -> None:
    assert support_mask(LOGITS, top_k=3, top_p=1.0).tolist() == [[True, True, True, False]]
    token, probability = sample(0.99, SamplingConfig(top_k=3))
    assert token == 2
    assert probability == pytest.approx(0.25 / 0.875, rel=1e-6)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.3, [0]), (0.5, [0]), (0.51, [0, 2]), (0.75, [0, 2]), (0.76, [0, 1, 2]), (0.99, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_shortest_head_that_reaches_it(top_p: float, kept: list[int]) -> None:
    mask = support_mask(LOGITS, top_k=0, top_p=top_p)
    assert torch.nonzero(mask[0])[:, 0].tolist() == kept


def test_top_p_that_is_reached_exactly_is_enough() -> None:
    assert support_mask(torch.zeros(1, 4), top_k=0, top_p=0.5).tolist() == [[True, True, False, False]]


def test_top_p_counts_within_what_top_k_kept() -> None:
    # of {0, 2} token 0 holds two thirds
    assert support_mask(LOGITS, top_k=2, top_p=0.6).tolist() == [[True, False, False, False]]


def test_the_support_is_reported_exactly_where_it_is_limited() -> None:
    numbers = torch.zeros(1, dtype=torch.float64)
    assert sample_tokens(LOGITS, numbers, SamplingConfig()).support is None
    limited = sample_tokens(LOGITS, numbers, SamplingConfig(top_p=0.6)).support
    assert limited is not None
    assert limited.tolist() == [[True, False, True, False]]


def test_a_cut_token_is_never_sampled_whatever_the_number() -> None:
    torch.manual_seed(1)
    logits = torch.randn(500, 50)
    numbers = torch.from_numpy(np.linspace(0, 1, 500, endpoint=False))
    sampled = sample_tokens(logits, numbers, SamplingConfig(top_k=5, top_p=0.8))
    assert sampled.support is not None
    assert bool(sampled.support.gather(1, sampled.token_ids[:, None]).all())
    assert bool((sampled.support.sum(-1) <= 5).all())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    logits, numbers = torch.randn(8, 30), torch.rand(8, dtype=torch.float64)
    together = sample_tokens(logits, numbers, SamplingConfig(temperature=0.9))
    for row in range(8):
        alone = sample_tokens(logits[row : row + 1], numbers[row : row + 1], SamplingConfig(temperature=0.9))
        assert alone.token_ids[0] == together.token_ids[row]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
    ],
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingConfig(**options)  # type: ignore[arg-type]  # wrong on purpose

"""Methods with a critic, whatever rollouts look like: action tokens and their order count, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rolltape.trainers.algorithms import make_algorithm
from rolltape.trainers.algorithms.base import CriticAlgorithm, Method
from rolltape.trainers.batch import PackedBatch, TokenRewards
from rolltape.trainers.config import TrainerConfig

SAO = TrainerConfig(algorithm="sao", epsilon_low=0.3, epsilon_high=5.0)
COMPACTION = TrainerConfig(algorithm="compaction")

# A rollout is a list of segments, a segment a list of tokens: True was sampled, False was observed.
segments = st.lists(st.booleans(), min_size=0, max_size=5).map(lambda tokens: [*tokens, True])
rollouts = st.lists(st.lists(segments, min_size=1, max_size=3), min_size=1, max_size=4)


class Built:
    """A batch of rollouts, and where each rollout's action tokens are in it."""

    def __init__(self, made: list[list[list[bool]]], seed: int, *, contexts: int = 1, shuffled: bool = False) -> None:
        rows = [(member, place, tokens) for member, own in enumerate(made) for place, tokens in enumerate(own)]
        if shuffled:
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
            rows = [rows[place] for place in order]
        mask = [([False] * contexts) + tokens for _, _, tokens in rows]
        lengths = torch.tensor([len(row) for row in mask])
        action = torch.tensor([token for row in mask for token in row])
        self.bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.randn(len(made), dtype=torch.float64, generator=generator)
        # One reward at each rollout's first action token, and one at its last.
        amounts = torch.randn(2 * len(made), dtype=torch.float64, generator=generator)
        at = []
        for member, own in enumerate(made):
            index = {place: row for row, (of, place, _) in enumerate(rows) if of == member}
            at.append((index[0], own[0].index(True)))
            at.append((index[len(own) - 1], len(own[-1]) - 1))
        self.batch = PackedBatch(
            token_ids=torch.zeros(int(self.bounds[-1]), dtype=torch.int32),
            cu_seqlens=self.bounds,
            context_lengths=torch.full((len(rows),), contexts),
            action_mask=action,
            rollout_log_probs=torch.zeros(len(action)),
            policy_versions=torch.zeros(len(action), dtype=torch.int32),
            row_member=torch.tensor([member for member, _, _ in rows]),
            rewards=rewards,
            groups=torch.arange(len(made)),
            is_padding=torch.zeros(len(made), dtype=torch.bool),
            segment_index=torch.tensor([place for _, place, _ in rows]),
            token_rewards=TokenRewards(
                amounts=amounts,
                rows=torch.tensor([row for row, _ in at]),
                positions=torch.tensor([place for _, place in at]),
            ),
        )
        key = [(member, place) for member, place, _ in rows]
        self.index = torch.tensor(
            [
                int(self.bounds[row]) + contexts + place
                for row in sorted(range(len(rows)), key=lambda row: key[row])
                for place, sampled in enumerate(rows[row][2])
                if sampled
            ]
        )
        """Places of action tokens, rollout by rollout."""

    def run(self, config: TrainerConfig, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and targets of the action tokens, rollout by rollout, from their values in that order."""
        algorithm = make_algorithm(Method(batch=self.batch, config=config, temperature=1.0))
        assert isinstance(algorithm, CriticAlgorithm)
        at = torch.full((self.batch.num_tokens,), 17.0).index_copy(0, self.index, values)
        algorithm.estimate(at, None)
        targets = algorithm.targets(at, None)
        assert algorithm.advantages[~self.batch.action_mask].abs().sum() == 0
        assert targets[~self.batch.action_mask].abs().sum() == 0
        return algorithm.advantages[self.index], targets[self.index]


def values_of(made: list[list[list[bool]]], seed: int) -> Tensor:
    count = sum(token for own in made for tokens in own for token in tokens)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed + 1))


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


options: Any = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([0.9, 1.0]),
        "critic_lambda": st.sampled_from([0.0, 0.7, 1.0]),
        "whiten": st.booleans(),
        "critic_target": st.sampled_from(["global", "local"]),
        "boundary_value": st.sampled_from(["zero", "bootstrap"]),
    }
)


def allowed(base: TrainerConfig, changes: dict[str, Any]) -> TrainerConfig:
    """Global targets of compaction take no λ."""
    is_global = base.algorithm == "compaction" and changes["critic_target"] == "global"
    return dataclasses.replace(base, **{**changes, **({"critic_lambda": 1.0} if is_global else {})})


@settings(max_examples=60, deadline=None)
@given(made=rollouts, seed=st.integers(0, 1000), changes=options, base=st.sampled_from([SAO, COMPACTION]))
def test_neither_contexts_nor_the_order_of_rows_matters(
    made: list[list[list[bool]]], seed: int, changes: dict[str, Any], base: TrainerConfig
) -> None:
    config, values = allowed(base, changes), values_of(made, seed)
    expected = Built(made, seed).run(config, values)
    assert_same(Built(made, seed, contexts=3, shuffled=True).run(config, values), expected)


@settings(max_examples=60, deadline=None)
@given(made=rollouts, seed=st.integers(0, 1000), changes=options)
def test_a_rollout_of_sao_is_one_line_wherever_its_context_was_cut(
    made: list[list[list[bool]]], seed: int, changes: dict[str, Any]
) -> None:
    config, values = dataclasses.replace(SAO, **changes), values_of(made, seed)
    joined = [[[token for tokens in own for token in tokens]] for own in made]
    assert_same(Built(joined, seed).run(config, values), Built(made, seed).run(config, values))


@settings(max_examples=60, deadline=None)
@given(made=rollouts, seed=st.integers(0, 1000), gamma=st.sampled_from([0.9, 1.0]))
def test_observations_are_not_there(made: list[list[list[bool]]], seed: int, gamma: float) -> None:
    values = values_of(made, seed)
    silent: list[list[list[bool]]] = [[[token for token in tokens if token] for tokens in own] for own in made]
    for base in (SAO, COMPACTION):
        config = dataclasses.replace(base, gamma=gamma)
        assert_same(Built(silent, seed).run(config, values), Built(made, seed).run(config, values))


@settings(max_examples=60, deadline=None)
@given(made=rollouts, seed=st.integers(0, 1000), gamma=st.sampled_from([0.9, 1.0]))
def test_compaction_of_worthless_states_is_the_rollout_as_one_line(
    made: list[list[list[bool]]], seed: int, gamma: float
) -> None:
    """The exact identity (§4.12): with V = 0 corrected advantages are the stitched ones; and so are targets."""
    config = dataclasses.replace(COMPACTION, gamma=gamma)
    built, nothing = Built(made, seed), torch.zeros_like(values_of(made, seed))
    stitched = dataclasses.replace(config, boundary_value="bootstrap")
    assert_same(built.run(config, nothing), built.run(stitched, nothing))


@settings(max_examples=60, deadline=None)
@given(
    made=st.lists(st.lists(segments, min_size=1, max_size=1), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    gamma=st.sampled_from([0.9, 1.0]),
)
def test_compaction_of_one_segment_is_sao(made: list[list[list[bool]]], seed: int, gamma: float) -> None:
    """Where the reward is the rollout's as a whole."""
    built, values = Built(made, seed), values_of(made, seed)
    built.batch = dataclasses.replace(built.batch, token_rewards=TokenRewards.none())
    sao, compaction = (dataclasses.replace(base, gamma=gamma) for base in (SAO, COMPACTION))
    assert_same(built.run(compaction, values), built.run(sao, values))

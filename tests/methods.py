"""One batch that every method can train, and a configuration of each: segments, summaries, observations, rewards of
tokens, scores of two teachers, a truncated rollout, bad log-probs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rolltape.numerics.models import ModelSpec, build_model
from rolltape.numerics.packed import packed_log_probs
from rolltape.numerics.scoring import ModelScorer
from rolltape.numerics.top_k import teacher_top_k
from rolltape.trainers.batch import PackedBatch, TeacherScores, TokenRewards
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_critic, make_optimizer
from rolltape.trainers.ranks import Ranks

MODEL: Final = "char-64x2"
TEMPERATURE: Final = 0.9
TOP_K: Final = 5
TEACHERS: Final[Mapping[str, int]] = {"teacher-a": 11, "teacher-b": 12}
"""Seeds of their models."""


class Row(NamedTuple):
    """A row: member, segment, tokens of context and response, places of observations, whether it is a summary."""

    member: int
    segment: int
    context: int
    response: int
    observed: tuple[int, ...] = ()
    is_summary: bool = False


ROWS: Final = (
    Row(0, 0, 3, 6, observed=(2, 3)),
    Row(1, 0, 2, 4, observed=(3,)),
    Row(1, 1, 6, 3, is_summary=True),
    Row(1, 2, 4, 5, observed=(0, 2)),
    Row(2, 0, 4, 2),
    Row(3, 0, 1, 3),
    Row(4, 0, 3, 2),
    Row(4, 1, 5, 2, is_summary=True),
    Row(4, 2, 2, 4, observed=(1,)),
    Row(5, 0, 2, 7, observed=(4,)),
)
DOMAINS: Final = ("a", "b", "a", "b", "a", "b")

_BASE: Final = TrainerConfig(max_grad_norm=1e9, entropy_coef=0.01, token_budget=1000, lr=1e-3)
_DIS: Final[dict[str, Any]] = {"epsilon_low": 0.25, "epsilon_high": 0.4}
_CRITIC: Final[dict[str, Any]] = {"critic_warmup_steps": 0, "critic_lr": 1e-3}
CONFIGS: Final[Mapping[str, TrainerConfig]] = {
    "grpo": dataclasses.replace(_BASE, icepop_beta=1.3),
    "dis": _BASE.with_algorithm("dis", **_DIS),
    "opd": _BASE.with_algorithm("opd", icepop_beta=1.3),
    "opd-score": _BASE.with_algorithm("opd", opd_form="score", score_low=0.7, score_high=1.3),
    "opd-full": _BASE.with_algorithm("opd", opd_form="full"),
    "opd-top-k": _BASE.with_algorithm("opd", opd_form="top_k", top_k=TOP_K),
    "opd-task": _BASE.with_algorithm("opd", icepop_beta=1.3, task_coef=0.7, opd_coef=0.3),
    "mopd": _BASE.with_algorithm("mopd", icepop_beta=1.3, max_gap=0.5),
    "sao": _BASE.with_algorithm("sao", **_DIS, **_CRITIC),
    "compaction": _BASE.with_algorithm("compaction", **_CRITIC),
    "compaction-dis": _BASE.with_algorithm("compaction", compaction_ratio="dis", **_DIS, **_CRITIC),
}
"""Every method and form, none of them in a critic's warm-up, gradients not clipped."""


@cache
def batch() -> PackedBatch:
    """Six members in two groups; recorded log-probs near the model's own, so that gates take some and reject some."""
    generator = torch.Generator().manual_seed(0)
    contexts = torch.tensor([row.context for row in ROWS])
    lengths = contexts + torch.tensor([row.response for row in ROWS])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(3, 16, (int(bounds[-1]),), generator=generator, dtype=torch.int32)
    action = torch.zeros(len(ids), dtype=torch.bool)
    for row, start in zip(ROWS, (bounds[:-1] + contexts).tolist(), strict=True):
        action[start : start + row.response] = True
        action[[start + place for place in row.observed]] = False
    own = _scores(build_model(MODEL, 1), ids, bounds)
    recorded = torch.where(action, own + 0.3 * torch.randn(len(ids), generator=generator), 0.0).clamp(max=0.0)
    recorded[torch.nonzero(action).flatten()[5]] = torch.nan
    return PackedBatch(
        token_ids=ids,
        cu_seqlens=bounds,
        context_lengths=contexts,
        action_mask=action,
        rollout_log_probs=recorded,
        policy_versions=torch.where(action, 0, -1).int(),
        row_member=torch.tensor([row.member for row in ROWS]),
        rewards=torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25, 0.0], dtype=torch.float64),
        groups=torch.tensor([0, 0, 0, 1, 1, 1]),
        is_padding=torch.zeros(6, dtype=torch.bool),
        segment_index=torch.tensor([row.segment for row in ROWS]),
        is_summary=torch.tensor([row.is_summary for row in ROWS]),
        is_truncated=torch.tensor([False, False, False, False, True, True]),
        token_rewards=TokenRewards(
            amounts=torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64),
            rows=torch.tensor([0, 3, 9]),
            positions=torch.tensor([3, 0, 1]),  # an observation's place; before the row's first action; an action's
        ),
        teacher=_teacher(ids, bounds, action),
        domains=DOMAINS,
    )


def _scores(model: torch.nn.Module, ids: Tensor, bounds: Tensor) -> Tensor:
    with torch.no_grad():
        return packed_log_probs(model, ids, bounds, token_budget=1000, temperature=TEMPERATURE).log_probs


@cache
def scorers() -> dict[str, ModelScorer]:
    """The teachers, for full distributions."""
    return {
        name: ModelScorer(build_model(MODEL, seed), temperature=TEMPERATURE, token_budget=24, rows_per_part=3)
        for name, seed in TEACHERS.items()
    }


def _teacher(ids: Tensor, bounds: Tensor, action: Tensor) -> TeacherScores:
    member_of_token = torch.repeat_interleave(torch.tensor([row.member for row in ROWS]), bounds.diff())
    names = tuple(f"teacher-{domain}" for domain in DOMAINS)
    log_probs = torch.full((len(ids),), torch.nan)
    top_ids = torch.full((len(ids), TOP_K), -1)
    top_log_probs = torch.full((len(ids), TOP_K), torch.nan)
    for name, scorer in scorers().items():
        own = action & torch.tensor([other == name for other in names])[member_of_token]
        log_probs = torch.where(own, scorer.score(ids, bounds), log_probs)
        for part in scorer.distributions(ids, bounds, scored=own):
            top_ids[part.flat_index], top_log_probs[part.flat_index] = teacher_top_k(part.log_probs, TOP_K)
    bad = torch.nonzero(action).flatten()[9]
    log_probs[bad], top_log_probs[bad] = torch.nan, torch.nan
    return TeacherScores(log_probs=log_probs, teacher_ids=names, top_k_ids=top_ids, top_k_log_probs=top_log_probs)


def reordered(whole: PackedBatch, rows: list[int], members: list[int]) -> PackedBatch:
    """The same batch, its rows and its members in another order."""
    bounds = whole.cu_seqlens.tolist()
    index = torch.cat([torch.arange(bounds[row], bounds[row + 1]) for row in rows])
    new_row = torch.argsort(torch.tensor(rows))
    new_member = torch.argsort(torch.tensor(members))
    teacher = whole.teacher
    assert teacher is not None
    assert teacher.top_k_ids is not None
    assert teacher.top_k_log_probs is not None
    changes: dict[str, Any] = {
        name: getattr(whole, name)[index]
        for name in ("token_ids", "action_mask", "rollout_log_probs", "policy_versions")
    }
    changes |= {name: getattr(whole, name)[rows] for name in ("context_lengths", "segment_index", "is_summary")}
    changes |= {
        name: getattr(whole, name)[members]
        for name in ("rewards", "groups", "is_padding", "num_segments", "is_truncated")
    }
    return dataclasses.replace(
        whole,
        **changes,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), whole.cu_seqlens.diff()[rows].cumsum(0)]),
        row_member=new_member[whole.row_member[rows]],
        token_rewards=dataclasses.replace(whole.token_rewards, rows=new_row[whole.token_rewards.rows]),
        teacher=TeacherScores(
            log_probs=teacher.log_probs[index],
            teacher_ids=tuple(teacher.teacher_ids[member] for member in members),
            top_k_ids=teacher.top_k_ids[index],
            top_k_log_probs=teacher.top_k_log_probs[index],
        ),
        domains=tuple(whole.domains[member] for member in members),
    )


def learner(config: TrainerConfig, *, dtype: Any = "float32") -> Learner:
    """A policy and, if the method has one, a critic whose head says something already: its body has gradients then."""
    spec = ModelSpec(name=MODEL, family="char", dtype=dtype)
    model = build_model(spec, 1)
    made = Learner(model, make_optimizer(model, config))
    if config.uses_critic:
        made.critic = make_critic(build_model(spec, 1), config)
        with torch.no_grad():
            head = made.critic.model.head
            head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(2)))
            head.bias.fill_(0.2)
    return made


def gradients(made: Learner, ranks: Ranks | None = None) -> dict[str, Tensor]:
    """Copies of all gradients, the critic's with a prefix."""
    found = {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}
    if made.critic is not None:
        found |= {f"critic/{n}": p.grad for n, p in made.critic.model.named_parameters() if p.grad is not None}
    whole = found if ranks is None else ranks.whole(found)
    return {name: whole[name].detach().clone() for name in whole}

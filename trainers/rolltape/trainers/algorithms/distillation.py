"""OPD and MOPD: a teacher's opinion of the student's own tokens (algorithms.md §4.7 to §4.10).

Both are one method: a row's teacher is the one that scored it on the tape, by its domain; MOPD has several, and clips
the gap.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rolltape.numerics.packed import MicroBatch
from rolltape.schema.errors import UntrainableError
from rolltape.trainers.algorithms.base import Algorithm, Method, PartLoss, PartTokens
from rolltape.trainers.algorithms.teachers import TeacherBlocks
from rolltape.trainers.batch import TeacherScores
from rolltape.trainers.distill import Gap, divergence_policy_loss, mixed_advantage, opd_gap, opd_policy_loss
from rolltape.trainers.reverse_kl import TokenDivergence, full_reverse_kl, top_k_reverse_kl


class Distillation(Algorithm):
    """What the three forms have in common: every member that is trained has a teacher."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.teacher = _teacher(method)


class SampledDistillation(Distillation):
    """The gap at sampled tokens as the advantage, alone or mixed with the task's (forms eq1 and score)."""

    logged: ClassVar[tuple[str, ...]] = ("advantage", "teacher_gap")

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        if self.config.task_coef > 0:
            self.member_advantages = self._group_advantages()
            self.fixed_parts["task_advantage"] = self._to_tokens(self.member_advantages)

    def gap(self, index: Tensor, current: Tensor, old: Tensor) -> Gap:
        """Teacher minus student at tokens ``index`` of the batch, clipped if so configured; the student is D12's."""
        student = old if self.config.opd_gap == "old" else current.detach()
        return opd_gap(floored(self.teacher.log_probs[index], self.config.teacher_floor), student, max_gap=self.max_gap)

    @property
    def max_gap(self) -> float | None:
        """The ends of the clip."""
        return self.config.max_gap

    def loss(self, tokens: PartTokens) -> PartLoss:
        """See :func:`rolltape.trainers.distill.opd_policy_loss`."""
        config, index = self.config, tokens.index
        gap = self.gap(index, tokens.current, tokens.old).advantage
        task = self.fixed_parts["task_advantage"][index] if config.task_coef > 0 else torch.zeros_like(gap)
        advantage = mixed_advantage(task, gap, task_coef=config.task_coef, opd_coef=config.opd_coef)
        policy = opd_policy_loss(
            tokens.current,
            tokens.old,
            self.batch.rollout_log_probs[index],
            advantage,
            self.weights[index],
            form=config.opd_form,  # type: ignore[arg-type]
            beta=config.icepop_beta,
            eps_low=config.epsilon_low,
            eps_high=config.epsilon_high,
            pop_value=config.pop_value,
            correction=config.correction,  # type: ignore[arg-type]
            tis_low=config.tis_low,
            tis_high=config.tis_high,
            score_low=config.score_low,
            score_high=config.score_high,
            entropy=tokens.entropy,
            entropy_coef=config.entropy_coef,
            is_partial=True,
        )
        return PartLoss(policy=policy, logged={"advantage": advantage, "teacher_gap": gap})


class DivergenceDistillation(Distillation):
    """The reverse KL at each token's state, over the vocabulary or the teacher's top k (forms full and top_k)."""

    logged: ClassVar[tuple[str, ...]] = ("divergence",)

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.blocks = TeacherBlocks(method, self.teacher) if self.config.opd_form == "full" else None

    @property
    def needs_hidden(self) -> bool:
        """Divergences are made of whole distributions."""
        return True

    def divergence(self, part: MicroBatch, hidden: Tensor, weight: Tensor) -> TokenDivergence:
        """See :mod:`rolltape.trainers.reverse_kl`."""
        floor, temperature = self.config.teacher_floor, self.method.temperature
        if self.blocks is not None:
            teacher = self.blocks.of(part, num_ids=weight.shape[0])
            return full_reverse_kl(hidden, weight, teacher, temperature=temperature, floor=floor)
        ids, log_probs = self._top_k(part.flat_index, weight.shape[0])
        found = top_k_reverse_kl(hidden, weight, ids, log_probs, temperature=temperature, floor=floor)
        # A token without any of its teacher's ids has no divergence, which is not a divergence of 0.
        scored = (ids >= 0).any(-1)
        return TokenDivergence(
            divergence=torch.where(scored, found.divergence, 0.0), trusted=found.trusted & scored.to(found.trusted)
        )

    def loss(self, tokens: PartTokens) -> PartLoss:
        """See :func:`rolltape.trainers.distill.divergence_policy_loss`."""
        assert tokens.divergence is not None
        policy = divergence_policy_loss(
            tokens.current,
            tokens.divergence,
            self.weights[tokens.index],
            rollout_logp=self.batch.rollout_log_probs[tokens.index],
            coefficient=self.config.opd_coef,
            entropy=tokens.entropy,
            entropy_coef=self.config.entropy_coef,
            is_partial=True,
        )
        return PartLoss(policy=policy, logged={"divergence": tokens.divergence.divergence.detach().float()})

    def _top_k(self, index: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
        ids, log_probs = self.teacher.top_k_ids, self.teacher.top_k_log_probs
        k = min(self.config.top_k, num_ids)
        if ids is None or log_probs is None or ids.shape[1] < k:
            got = "none" if ids is None else f"{ids.shape[1]}"
            raise UntrainableError(
                f"teacher scores: expected the top {k} of each token, got {got}; let the teachers record them, or set "
                "trainer.top_k"
            )
        return ids[index, :k], log_probs[index, :k]


def floored(teacher_logp: Tensor, floor: float | None) -> Tensor:
    """The teacher's log-probs, raised to ``floor`` if there is one; what is no number stays so."""
    return teacher_logp if floor is None else torch.where(teacher_logp < floor, floor, teacher_logp)


def distillation(method: Method) -> Distillation:
    """The method in the configured form."""
    return (SampledDistillation if method.config.opd_form in {"eq1", "score"} else DivergenceDistillation)(method)


def _teacher(method: Method) -> TeacherScores:
    """The batch's teacher scores; fail closed.

    Raises:
        UntrainableError: a member that has tokens to train has no teacher (``teacher_unavailable``).
    """
    batch = method.batch
    teacher = batch.teacher
    if teacher is None:
        if not batch.num_rows:
            return TeacherScores(log_probs=torch.zeros(0), teacher_ids=(None,) * batch.num_members)
        raise UntrainableError(
            f"teacher_unavailable: algorithm {method.config.algorithm} expected teacher scores, got a batch without any"
        )
    held = sorted({member for member in batch.row_member.tolist() if teacher.teacher_ids[member] is None})
    if held:
        raise UntrainableError(
            f"teacher_unavailable: members {held[:5]} of domains {[batch.domains[m] for m in held[:5]]} have no "
            "teacher; hold them, no other teacher stands in"
        )
    return teacher

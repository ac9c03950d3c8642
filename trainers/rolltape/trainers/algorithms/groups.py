"""Methods that compare the rollouts of a group: GRPO with IcePop, and DIS (algorithms.md §4.1 to §4.4)."""

from __future__ import annotations

from rolltape.trainers.algorithms.base import Algorithm, Method, PartLoss, PartTokens
from rolltape.trainers.dis import dis_policy_loss
from rolltape.trainers.losses import icepop_policy_loss


class Grpo(Algorithm):
    """The clipped loss under a gate on the mismatch of the two engines."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.member_advantages = self._group_advantages()
        self.advantages = self._to_tokens(self.member_advantages)

    def loss(self, tokens: PartTokens) -> PartLoss:
        """See :func:`rolltape.trainers.losses.icepop_policy_loss`."""
        config, index = self.config, tokens.index
        return PartLoss(
            policy=icepop_policy_loss(
                tokens.current,
                tokens.old,
                self.batch.rollout_log_probs[index],
                self.advantages[index],
                self.weights[index],
                beta=config.icepop_beta,
                eps_low=config.epsilon_low,
                eps_high=config.epsilon_high,
                pop_value=config.pop_value,
                correction=config.correction,  # type: ignore[arg-type]
                tis_low=config.tis_low,
                tis_high=config.tis_high,
                dual_clip=config.dual_clip,
                entropy=tokens.entropy,
                entropy_coef=config.entropy_coef,
                is_partial=True,
            )
        )


class DirectLoss(Algorithm):
    """The score-function loss under DIS's open interval, whatever the advantages are."""

    def loss(self, tokens: PartTokens) -> PartLoss:
        """See :func:`rolltape.trainers.dis.dis_policy_loss`; the gate moves with θ."""
        config, index = self.config, tokens.index
        return PartLoss(
            policy=dis_policy_loss(
                tokens.current,
                self.batch.rollout_log_probs[index],
                self.advantages[index],
                self.weights[index],
                eps_low=config.epsilon_low,
                eps_high=config.epsilon_high,
                entropy=tokens.entropy,
                entropy_coef=config.entropy_coef,
                is_partial=True,
            )
        )


class Dis(DirectLoss):
    """DIS over groups: the group's mean is the baseline (D5)."""

    def __init__(self, method: Method) -> None:
        super().__init__(method)
        self.member_advantages = self._group_advantages()
        self.advantages = self._to_tokens(self.member_advantages)

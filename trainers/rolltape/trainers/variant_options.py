"""Which options enter a single step on a recorded batch: others cannot change what it shows, so they are refused.

The batch is formed already, the optimizers and the run's critic are the run's own, and nothing follows the step. So
options of forming, of optimizers and of the run's course mean nothing here; and an optimizer's rate does where the step
has a further update that starts from the first one's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rolltape.schema.errors import ConfigError
from rolltape.trainers.config import TrainerConfig

_EVERY_METHOD: Final = (
    "aggregation",
    "entropy_coef",
    "updates_per_batch",
    "truncated",
    "train_summary",
    "train_rejected_summaries",
    "sentinels",
    "token_budget",
    "compute_dtype",
)
_TASK: Final = ("truncation_penalty",)
_GROUPS: Final = ("adv_norm", "stats")
_GATE: Final = {"icepop": ("icepop_beta", "pop_value"), "tis": ("tis_low", "tis_high"), "dis": (), "none": ()}
_CLIP: Final = ("epsilon_low", "epsilon_high")
_DISTILLATION: Final = ("opd_form", "opd_coef", "task_coef", "teacher_floor")
_FORM: Final = {
    "eq1": ("max_gap",),
    "score": ("max_gap", "score_low", "score_high"),
    "full": (),
    "top_k": ("top_k",),
}
_CRITIC: Final = (
    "gamma",
    "lambda_alpha",
    "critic_lambda",
    "critic_updates",
    "critic_warmup_steps",
    "advantage_values",
    "whiten",
    "value_norm",
    "bootstrap_truncated",
)
_COMPACTION: Final = ("compaction_ratio", "boundary_value", "critic_target")
_RATE: Final = ("lr", "warmup_steps", "decay_steps", "final_lr_fraction")
_OPTIMIZER: Final = ("beta1", "beta2", "adam_eps", "weight_decay")


def entering(config: TrainerConfig, *, has_critic: bool) -> frozenset[str]:
    """Fields of ``config`` that enter a step on a recorded batch; ``has_critic``: the run has one of its own."""
    found = {*_EVERY_METHOD}
    if config.aggregation == "const":
        found.add("const_length")
    if config.uses_rewards:
        found.update(_TASK)
    if config.uses_groups:
        found.update(_GROUPS)
    if config.updates_per_batch > 1:
        found.update(_RATE, ("max_grad_norm",))
    found.update(_of_loss(config))
    if config.uses_critic:
        found.update(_of_critic(config, has_critic=has_critic))
    return frozenset(found)


def refuse_misnamed(algorithms: Sequence[str], changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse an algorithm named twice, and options for none that is tried.

    Args:
        algorithms: that are tried.
        changes: options by algorithm; under "" those of all.

    Raises:
        ConfigError: names the algorithm or the field.
    """
    for number, algorithm in enumerate(algorithms):
        if algorithm in algorithms[:number]:
            raise ConfigError(
                f"algorithms: expected each once, got {algorithm!r} twice; try its other options one after another"
            )
    for algorithm, options in changes.items():
        if options and algorithm and algorithm not in algorithms:
            raise ConfigError(
                f"{algorithm}.{next(iter(options))}: expected an option of an algorithm that is tried "
                f"({', '.join(algorithms)}), got one of {algorithm!r}; try that as well, or leave the option out"
            )
        if "algorithm" in options:
            raise ConfigError(
                f"trainer.algorithm: expected it among the algorithms to try, got {options['algorithm']!r} as an option"
            )


def refuse_idle(
    recorded: TrainerConfig, variants: Mapping[str, TrainerConfig], changes: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuse options that enter none of the steps that they are meant for.

    Args:
        recorded: the run's configuration.
        variants: what each algorithm is tried with, the options in it.
        changes: options by algorithm; under "" those of all.

    Raises:
        ConfigError: names the field, and those that can be set.
    """
    enters = {name: entering(config, has_critic=recorded.uses_critic) for name, config in variants.items()}
    for algorithm, options in changes.items():
        tried: Sequence[str] = [algorithm] if algorithm else list(variants)
        allowed = frozenset().union(*(enters[name] for name in tried))
        for field in options:
            if field not in allowed:
                raise ConfigError(
                    f"trainer.{field}: expected an option that enters a step of {', '.join(tried)} on a recorded batch "
                    f"({', '.join(sorted(allowed))}), got one that cannot change it; it takes a run to try it"
                )


def _of_loss(config: TrainerConfig) -> Iterator[str]:
    has_more = config.updates_per_batch > 1  # in the first update the current weights are the old ones
    if config.is_dis or (has_more and (not config.is_distillation or config.opd_form == "eq1")):
        yield from _CLIP
    if config.algorithm == "grpo" or (config.is_distillation and config.opd_form == "eq1"):
        yield from ("correction", *_GATE[config.correction])
    if config.algorithm == "grpo" and has_more:
        yield "dual_clip"
    if config.is_distillation:
        yield from _DISTILLATION
        yield from _FORM[config.opd_form]
        if has_more and config.opd_form in {"eq1", "score"}:
            yield "opd_gap"


def _of_critic(config: TrainerConfig, *, has_critic: bool) -> Iterator[str]:
    yield from _CRITIC
    if config.algorithm == "compaction":
        yield from _COMPACTION
    if config.value_norm:
        yield "value_norm_rate"
    if config.critic_updates == 1 and config.advantage_values == "pre_update":
        return
    # The critic's first update is seen, in the value loss of the next or in the advantages.
    yield from ("critic_lr", "max_grad_norm")
    if config.critic_updates > 1:
        yield "value_clip"
    if not has_critic:
        yield from (*_OPTIMIZER, "train_critic", "freeze_critic")

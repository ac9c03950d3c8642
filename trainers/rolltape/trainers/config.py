"""The trainers' configuration. Names and defaults follow algorithms.md §1 to §4; importing it needs no torch.

A field whose default depends on the algorithm is filled in when a configuration is made, so a run's record holds what
was in force, not what was left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from rolltape.schema.errors import ConfigError
from rolltape.trainers.config_rules import check_ranges

Algorithm: TypeAlias = Literal["grpo", "dis", "opd", "mopd", "sao", "compaction"]
Mode: TypeAlias = Literal["seq_mean", "token_mean", "seq_sum", "const", "rollout_mean"]
Correction: TypeAlias = Literal["icepop", "tis", "dis", "none"]
OpdForm: TypeAlias = Literal["eq1", "score", "full", "top_k"]

_OF_ALGORITHM: Final[Any] = None
"""Stands for the algorithm's own default until ``__post_init__`` has put it in."""

_GATED: Final = ("icepop", "tis", "none")
_CORRECTIONS: Final = {"grpo": _GATED, "opd": _GATED, "mopd": _GATED, "dis": ("dis",), "sao": ("dis",)}
_RESOLVED: Final = (
    *("epsilon_low", "epsilon_high", "correction", "aggregation", "adv_norm", "max_gap"),
    "alarm_domain_kl_above",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How a policy learns.

    Every method. ``icepop_beta`` keeps ratios in [1/beta, beta]; ``stop_metric`` ends the run once the moving average
    (weight ``stop_ema`` on the past) of that step metric reaches ``stop_above``; ``entropy_coef`` is c of D33. The
    learning rate rises over ``warmup_steps`` and then falls in a line to ``final_lr_fraction`` of itself at
    ``decay_steps`` (0: constant). ``epsilon_low`` and ``epsilon_high`` are the clip of PPO, or DIS's open interval
    (1 - epsilon_low, 1 + epsilon_high), which no source states and so has no default (D7). ``correction`` icepop takes
    tokens of the version alone that the step starts from; tis clamps and dis gates the ratio to whatever version
    sampled. Asynchronous runs only: rollouts more than ``staleness_tau`` published versions old are dropped, and
    ``overdue_groups`` says what becomes of groups that are not complete ``group_timeout_s`` after they were first seen:
    they are dropped, or trained with what they have. Groups that lack a teacher's scores or route alone are held with
    drop, however long (an alarm tells of it), and with train while none of their members is scored (§4.9).

    What enters a batch. ``truncated`` keeps rollouts that were cut off by length, masks their tokens out of the loss,
    or takes their reward as 0; ``truncation_penalty`` is then subtracted from it. ``zero_std_groups`` drop leaves out
    groups whose rewards are all equal. ``sentinels`` are values that an engine writes where it has no log-prob, beside
    the known -9999: such tokens are untrusted and counted. ``optimizer_reset`` auto is on in asynchronous runs (D25).

    OPD and MOPD. ``opd_form`` eq1 puts the gap in GRPO's place of the advantage, score is the score function, full
    and top_k are divergences; ``opd_gap`` says from whose log-probs (D12); ``max_gap`` clips it; ``score_low`` and
    ``score_high`` bound the score form's ratio; ``teacher_floor`` raises a teacher's log-probs; ``task_coef`` and
    ``opd_coef`` weigh the task's advantage and the gap (§4.10).

    SAO and CompactionRL. ``lambda_alpha`` is α of λ = 1 - 1/(α l); ``critic_lambda`` makes the critic's targets.
    Of the critic's modules those learn in whose names a part of ``train_critic`` is (none: all; a mixture's router only
    where it is named itself; D27), and none of ``freeze_critic``. ``bootstrap_truncated`` values the end of a truncated
    rollout instead of taking it as 0. ``compaction_ratio`` dis is unpublished; ppo compares with the version that the
    step starts from, so it takes tokens of that one alone. ``boundary_value`` and ``critic_target`` are D17; global
    targets are the discounted reward, so ``critic_lambda`` must be 1 then and ``bootstrap_truncated`` moves advantages
    alone.

    Alarms are off where None; ``alarm_ema`` is the weight of the past in their moving averages. MOPD's on a domain that
    begins far from its teacher is at 0.1 nat per token: those of one origin begin near 0.04, others near 0.19 (§4.9).
    """

    algorithm: Algorithm = "grpo"
    max_steps: int = 300
    lr: float = 1e-3
    warmup_steps: int = 0
    decay_steps: int = 0
    final_lr_fraction: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates_per_batch: int = 1
    epsilon_low: float = _OF_ALGORITHM
    epsilon_high: float = _OF_ALGORITHM
    dual_clip: float | None = None
    icepop_beta: float = 2.0
    tis_low: float = 0.0
    tis_high: float = 2.0
    pop_value: Literal["ratio", "binary"] = "ratio"
    correction: Correction = _OF_ALGORITHM
    aggregation: Mode = _OF_ALGORITHM
    const_length: int = 0
    adv_norm: Literal["mean_std", "mean"] = _OF_ALGORITHM
    entropy_coef: float = 0.0
    staleness_tau: int = 0
    group_timeout_s: float = 300.0
    overdue_groups: Literal["drop", "train"] = "drop"
    pad_rule: Literal["gt_half", "ge_half"] = "gt_half"
    stats: Literal["padded", "valid_only"] = "padded"
    zero_std_groups: Literal["keep", "drop"] = "keep"
    truncated: Literal["keep", "mask", "zero_reward"] = "keep"
    truncation_penalty: float = 0.0
    sentinels: tuple[float, ...] = ()
    optimizer_reset: Literal["auto", "on", "off"] = "auto"
    opd_form: OpdForm = "eq1"
    opd_gap: Literal["current", "old"] = "current"
    max_gap: float | None = None
    task_coef: float = 0.0
    opd_coef: float = 1.0
    score_low: float | None = None
    score_high: float | None = None
    teacher_floor: float | None = None
    top_k: int = 64
    gamma: float = 1.0
    lambda_alpha: float = 1.5
    critic_lambda: float = 1.0
    critic_lr: float = 5e-6
    critic_updates: int = 2
    critic_warmup_steps: int = 10
    advantage_values: Literal["pre_update", "post_update"] = "pre_update"
    whiten: bool = False
    value_clip: float | None = None
    value_norm: bool = False
    value_norm_rate: float = 0.01
    train_critic: tuple[str, ...] = ("mlp", "head")
    freeze_critic: tuple[str, ...] = ("attn",)
    bootstrap_truncated: bool = False
    compaction_ratio: Literal["ppo", "dis"] = "ppo"
    train_summary: bool = True
    train_rejected_summaries: bool = False
    boundary_value: Literal["zero", "bootstrap"] = "zero"
    critic_target: Literal["global", "local"] = "global"
    token_budget: int = 4096
    gradient_checkpointing: bool = False
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int = 20
    probe_every: int = 50
    alarm_entropy_below: float | None = None
    alarm_trusted_below: float | None = None
    alarm_mismatch_above: float | None = None
    alarm_domain_kl_above: float | None = None
    alarm_ema: float = 0.9
    stop_metric: str = ""
    stop_above: float = 2.0
    stop_ema: float = 0.9
    num_threads: int = 1
    engine_timeout_s: float = 120.0
    archive_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        # First, because the defaults below are looked up by them.
        _one_of("algorithm", self.algorithm, get_args(Algorithm))
        _one_of("compaction_ratio", self.compaction_ratio, ("ppo", "dis"))
        for name, value in self._defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # frozen; what follows sees the filled-in value
        for name in ("train_critic", "freeze_critic", "sentinels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON and TOML have lists
        self._check_epsilon()
        _one_of(
            "correction", self.correction, _CORRECTIONS.get(self.algorithm, (self._defaults()["correction"],)), self
        )
        check_ranges(self)

    @property
    def is_dis(self) -> bool:
        """Whether the policy loss is DIS: no old log-probs, one ratio to whatever version sampled."""
        return self.correction == "dis"

    @property
    def is_distillation(self) -> bool:
        """Whether it learns from teachers."""
        return self.algorithm in {"opd", "mopd"}

    @property
    def uses_groups(self) -> bool:
        """Whether members are compared within their groups; other methods take single rollouts."""
        return self.algorithm in {"grpo", "dis"} or (self.is_distillation and self.task_coef > 0)

    @property
    def uses_ratio(self) -> bool:
        """Whether the loss compares the trainer's log-probs with the rollout's; divergences from a teacher do not."""
        return not (self.is_distillation and self.opd_form in {"full", "top_k"})

    @property
    def uses_rewards(self) -> bool:
        """Whether a reward changes what is learnt."""
        return not self.is_distillation or self.task_coef > 0

    @property
    def uses_token_rewards(self) -> bool:
        """Whether rewards of single tokens are learnt from: they, too, make an attempt a judged one."""
        return self.uses_critic

    @property
    def uses_critic(self) -> bool:
        """Whether it has a critic."""
        return self.algorithm in {"sao", "compaction"}

    @property
    def uses_teacher_scores(self) -> bool:
        """Whether a batch waits for scores on the tape; full distributions are scored when they are needed."""
        return self.is_distillation and self.opd_form != "full"

    @property
    def needs_one_version(self) -> bool:
        """Whether all tokens have to be of the version that the step starts from.

        IcePop's precondition; and PPO's where nothing corrects for the version that sampled, as in CompactionRL.
        """
        if self.algorithm == "compaction":
            return self.compaction_ratio == "ppo"
        return self.correction == "icepop" and (not self.is_distillation or self.opd_form == "eq1")

    def lr_at(self, step: int) -> float:
        """Learning rate of ``step`` (from 1): a function of the step alone, so a replay needs no scheduler state."""
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        if not self.decay_steps:
            return self.lr * warm
        left = 1.0 - min(1.0, step / self.decay_steps)
        return self.lr * warm * (self.final_lr_fraction + (1.0 - self.final_lr_fraction) * left)

    def with_algorithm(self, algorithm: Algorithm, **changes: Any) -> TrainerConfig:
        """The same for another algorithm: what has a default of its own there takes it, unless ``changes`` says else.

        Raises:
            ConfigError: the result makes no sense, as where DIS gets no interval.
        """
        fresh = dict.fromkeys(_RESOLVED, None)
        return replace(self, algorithm=algorithm, **{**fresh, **changes})

    def _defaults(self) -> dict[str, Any]:
        """The algorithm's own defaults; None: it has none."""
        name = self.algorithm
        by_token = name in {"dis", "sao", "compaction"}
        is_dis = name in {"dis", "sao"} or (name == "compaction" and self.compaction_ratio == "dis")
        low, high = (None, None) if is_dis else (0.2, 0.2 if name == "compaction" else 0.28)
        return {
            "epsilon_low": low,
            "epsilon_high": high,
            "correction": "dis" if is_dis else "none" if name == "compaction" else "icepop",
            "aggregation": "token_mean" if by_token else "seq_mean",
            "adv_norm": "mean" if name == "dis" else "mean_std",
            "max_gap": 5.0 if name == "mopd" else None,
            "alarm_domain_kl_above": 0.1 if name == "mopd" else None,
        }

    def _check_epsilon(self) -> None:
        for name in ("epsilon_low", "epsilon_high"):
            if getattr(self, name) is None:
                allowed = "0 <= epsilon_low < 1" if name == "epsilon_low" else "epsilon_high >= 0"
                raise ConfigError(
                    f"trainer.{name}: expected a value of its own ({allowed}) with DIS (algorithm {self.algorithm}), "
                    "got none; no source states one (D7), so there is no default"
                )


def of_older_release(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a recorded configuration under today's names: DIS was a correction of GRPO, with an interval apart."""
    new = dict(fields)
    old = {name: new.pop(name, None) for name in ("eps_low", "eps_high", "dis_low", "dis_high")}
    if all(value is None for value in old.values()):
        return new
    is_dis = new.get("correction") == "dis"
    if is_dis:
        new["algorithm"] = "dis"
    for end in ("low", "high"):
        value = old[f"dis_{end}" if is_dis else f"eps_{end}"]
        if value is not None:
            new.setdefault(f"epsilon_{end}", value)
    return new


def _one_of(name: str, value: object, choices: tuple[str, ...], config: TrainerConfig | None = None) -> None:
    if value not in choices:
        of = "" if config is None else f" with algorithm {config.algorithm}"
        hint = "; DIS is an algorithm: set trainer.algorithm" if name == "correction" and value == "dis" else ""
        raise ConfigError(f"trainer.{name}: expected one of {', '.join(choices)}{of}, got {value!r}{hint}")

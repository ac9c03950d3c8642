"""The peers, in a process of their own: ``python peer_process.py FOLDER``.

Reads pickled calls from standard input and answers each on standard output, until the input ends. Runs apart, because
the peers are installed without their dependencies: what they import but their loss mathematics never calls is replaced
by stand-ins, and no test may see a stand-in where a library looks for the real thing. A stand-in that is called raises.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

ABSENT: Final = {"codetiming", "datasets", "deepspeed", "omegaconf", "orjson", "peft", "ray", "tensordict"}

Answer = dict[str, Any]


class _AbsentType(type):
    """A class of an absent package: fit for annotations and as a base, and for nothing else."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentType(name, (), {})

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__name__} belongs to a package that is not installed: the comparison calls too much")


class _AbsentModule(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012  # the import system reads it from the module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentType(name, (), {})


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _without_init(name: str, folder: str) -> None:
    """Declare a package whose ``__init__`` shall not run: it imports far more than the module that is wanted."""
    module = types.ModuleType(name)
    module.__path__ = [str(Path(folder, *name.split(".")))]
    sys.modules[name] = module


class Peers:
    """What can be asked of them. Every method takes padded tensors ``[B, T]`` and returns tensors and numbers."""

    def __init__(self, folder: str) -> None:
        sys.path.append(folder)
        sys.meta_path.append(_AbsentFinder())
        for name in ("openrlhf", "openrlhf.models"):
            _without_init(name, folder)
        self._core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
        self._correction: Any = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
        self._actor: Any = importlib.import_module("verl.workers.config")
        self._trl: Any = importlib.import_module("trl.trainer.grpo_trainer")
        self._openrlhf: Any = importlib.import_module("openrlhf.models.loss")
        self._openrlhf_utils: Any = importlib.import_module("openrlhf.models.utils")

    def verl_weights(self, log_ratio: Tensor, mask: Tensor, *, threshold: str | float) -> Answer:
        """Token weights of the rollout correction: IcePop for ``"low_high"``, truncation for a number."""
        weights, metrics = self._correction.compute_rollout_correction_weights(
            log_ratio, mask, rollout_is="token", rollout_is_threshold=threshold
        )
        return {"weights": weights, "metrics": metrics}

    def verl_rejection(self, log_ratio: Tensor, mask: Tensor, *, option: str, threshold: str) -> Answer:
        """Mask that is left after rejection sampling."""
        left, _ = self._correction.compute_rollout_rejection_mask(log_ratio, mask, option, threshold)
        return {"mask": left}

    def verl_mismatch_metrics(self, old: Tensor, rollout: Tensor, mask: Tensor) -> Answer:
        """Distances between the trainer's and the engine's log-probs."""
        return dict(self._correction.compute_offpolicy_metrics(old, rollout, mask))

    def verl_ppo(
        self,
        current: Tensor,
        old: Tensor,
        advantage: Tensor,
        mask: Tensor,
        *,
        weights: Tensor | None,
        mode: str,
        eps_low: float,
        eps_high: float,
        dual_clip: float,
        length: int | None = None,
    ) -> Answer:
        """The clipped policy loss, with weights of the rollout correction."""
        config = self._config(eps_low, eps_high, dual_clip, length)
        loss, _ = self._core.compute_policy_loss_vanilla(old, current, advantage, mask, mode, config, weights)
        return {"loss": loss}

    def verl_score(
        self, current: Tensor, rollout: Tensor, advantage: Tensor, mask: Tensor, *, threshold: str | float, mode: str
    ) -> Answer:
        """The score-function loss of its bypass mode: weights from current against rollout, taken anew."""
        with torch.no_grad():
            weights = self.verl_weights(current - rollout, mask, threshold=threshold)["weights"]
        config = self._config(0.2, 0.2, 3.0, None)
        loss, _ = self._core.compute_policy_loss_reinforce(rollout, current, advantage, mask, mode, config, weights)
        return {"loss": loss, "weights": weights}

    def verl_grpo(self, rewards: Tensor, mask: Tensor, groups: Tensor, *, by_std: bool, vectorized: bool) -> Answer:
        """Group advantages; ``rewards`` are at tokens."""
        name = "compute_grpo_vectorized_outcome_advantage" if vectorized else "compute_grpo_outcome_advantage"
        function = getattr(self._core, name)
        advantages, _ = function(rewards, mask, groups.numpy(), norm_adv_by_std_in_grpo=by_std)
        return {"advantages": advantages}

    def verl_gae(self, rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Answer:
        """Advantages (whitened) and returns."""
        advantages, returns = self._core.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        return {"advantages": advantages, "returns": returns}

    def verl_value_loss(
        self, values: Tensor, returns: Tensor, old: Tensor, mask: Tensor, *, clip: float, mode: str
    ) -> Answer:
        """The clipped value loss."""
        loss, _ = self._core.compute_value_loss(values, returns, old, mask, clip, mode)
        return {"loss": loss}

    def verl_kl(self, log_prob: Tensor, reference: Tensor, *, kind: str) -> Answer:
        """A KL estimator at each token."""
        terms = self._core.kl_penalty(log_prob, reference, kind)
        return {"terms": terms, "loss": terms.sum()}

    def openrlhf_ppo(
        self,
        current: Tensor,
        old: Tensor,
        rollout: Tensor,
        advantage: Tensor,
        mask: Tensor,
        *,
        token_mean: bool,
        **options: Any,
    ) -> Answer:
        """``PolicyLoss``; options as it names them."""
        loss = self._openrlhf.PolicyLoss(token_level_loss=token_mean, **options)
        value, clipped, _, _, filtered = loss(current, old, advantage, mask, rollout)
        return {"loss": value, "clip_frac": clipped, "filtered": filtered}

    def openrlhf_value_loss(
        self, values: Tensor, returns: Tensor, old: Tensor, mask: Tensor, *, clip: float | None
    ) -> Answer:
        """``ValueLoss``."""
        return {"loss": self._openrlhf.ValueLoss(clip_eps=clip)(values, old, returns, mask)}

    def openrlhf_kl(self, log_prob: Tensor, reference: Tensor, *, kind: str) -> Answer:
        """A KL estimator at each token (in float32)."""
        terms = self._openrlhf_utils.compute_approx_kl(log_prob, reference, kl_estimator=kind)
        return {"terms": terms, "loss": terms.sum()}

    def trl_off_policy_mask(
        self, advantage: Tensor, current: Tensor, rollout: Tensor, mask: Tensor, *, threshold: float
    ) -> Answer:
        """Sequences ``[B, 1]`` that the mask keeps; ``advantage`` is ``[B, 1]``."""
        keep = self._trl.GRPOTrainer.get_off_policy_mask(advantage, current, rollout, mask, threshold)
        return {"keep": keep}

    def _config(self, eps_low: float, eps_high: float, dual_clip: float, length: int | None) -> Any:
        return self._actor.ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=eps_low,
            clip_ratio_high=eps_high,
            clip_ratio_c=dual_clip,
            loss_scale_factor=length,
            global_batch_info={} if length is None else {"loss_scale_factor": length},
        )


def _answer(function: Callable[..., Answer], arguments: Mapping[str, Any], gradients_of: Sequence[str]) -> Answer:
    given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
    for name in gradients_of:
        given[name].requires_grad_()
    answer = function(**given)
    if gradients_of:
        answer["gradients"] = torch.autograd.grad(answer["loss"], [given[name] for name in gradients_of])
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in answer.items()}


def main(folder: str) -> None:
    """Answer calls ``(name, arguments, names of arguments whose gradient is wanted)`` until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    peers = Peers(folder)
    while True:
        try:
            name, arguments, gradients_of = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Answer
        try:
            answer = _answer(getattr(peers, name), arguments, gradients_of)
        except Exception:  # noqa: BLE001  # whatever it is, the test that asked shall show it
            answer = {"error": traceback.format_exc()}
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])

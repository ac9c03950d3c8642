"""What an engine is: exact ids in, exact ids, log-probs and versions out.

Weights change only in the order of design §8: staged, committed on the tape, activated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, overload

import numpy as np
import numpy.typing as npt

from rolltape.schema.errors import ConfigError
from rolltape.schema.policy import PolicyVersion as PolicyVersion  # noqa: PLC0414 - users of engines take it from here

if TYPE_CHECKING:
    from rolltape.numerics.weights import Manifest
    from rolltape.store.location import Location

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort"]
"""A stop token, ``max_tokens``, or the engine broke off: what it sampled so far counts, and may be continued."""

PROCESSED: Final = "processed_logprobs"  # after temperature, top-k and top-p: the behaviour policy
RAW: Final = "raw_logprobs"  # the model's own distribution at temperature 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Sampling configuration of one call.

    Temperature 0 means the likeliest token (of equal ones, the lowest id); the log-probs are then the model's own.
    ``top_k`` 0 and ``top_p`` 1 mean no limit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"sampling.temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p: expected 0 < top_p <= 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k: expected 0 (no limit) or more, got {self.top_k}")
        if self.max_tokens < 1:
            raise ConfigError(f"sampling.max_tokens: expected 1 or more, got {self.max_tokens}")

    @property
    def logprobs_mode(self) -> str:
        """The distribution that the log-probs belong to, in vLLM's words."""
        return PROCESSED if self.temperature > 0 else RAW

    @property
    def limits_support(self) -> bool:
        """Whether tokens are cut off, so that the kept ones have to be recorded."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedWeights:
    """A version whose shards lie in the lake; published is not in effect."""

    version: PolicyVersion
    location: Location
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself, as ``engine_joined`` and ``action_sampled.engine`` record it."""

    name: str
    version: str
    dtype: str
    device: str
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One context to continue."""

    prompt_token_ids: Int32  # [P], P of 1 or more
    seed: int  # in [0, 2**63), see rolltape.rollout.seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRun:
    """``length`` tokens from ``start`` that one version sampled."""

    start: int
    length: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one request gave: ``T`` tokens, the stop token among them where there is one."""

    token_ids: Int32  # [T]
    log_probs: Float32  # [T], of the distribution that logprobs_mode declares
    version_runs: tuple[VersionRun, ...]  # cover [0, T) in order
    finish_reason: FinishReason
    prefix_length: int  # tokens of context that the engine used
    prefix_digest: str  # over those tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBatch(Sequence[Generation]):
    """What a batch of requests gave, as flat columns; also a sequence of :class:`Generation`.

    ``B`` requests, ``N`` tokens in all; request ``b`` owns tokens ``offsets[b]:offsets[b+1]`` and version runs
    ``run_offsets[b]:run_offsets[b+1]``.
    """

    token_ids: Int32  # [N]
    log_probs: Float32  # [N]
    offsets: Int32  # [B+1]
    finish_reasons: tuple[FinishReason, ...]  # [B]
    versions: tuple[PolicyVersion, ...]  # the versions that sampled, in order of activation
    run_offsets: Int32  # [B+1]
    run_starts: Int32  # [R], relative to the request's first token
    run_lengths: Int32  # [R]
    run_versions: Int32  # [R], index into versions
    prefix_lengths: Int32  # [B]
    prefix_digests: tuple[str, ...]  # [B]
    prefill_s: float
    decode_s: float
    support_token_ids: Int32 | None = None  # [K], kept support of each token, ascending; None: the whole vocabulary
    support_offsets: Int32 | None = None  # [N+1]

    def __len__(self) -> int:
        return len(self.finish_reasons)

    @overload
    def __getitem__(self, index: int) -> Generation: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Generation]: ...
    def __getitem__(self, index: int | slice) -> Generation | Sequence[Generation]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = range(len(self))[index]
        first, last = self.offsets[row], self.offsets[row + 1]
        runs = range(self.run_offsets[row], self.run_offsets[row + 1])
        return Generation(
            token_ids=self.token_ids[first:last],
            log_probs=self.log_probs[first:last],
            version_runs=tuple(
                VersionRun(
                    start=int(self.run_starts[run]),
                    length=int(self.run_lengths[run]),
                    version=self.versions[self.run_versions[run]],
                )
                for run in runs
            ),
            finish_reason=self.finish_reasons[row],
            prefix_length=int(self.prefix_lengths[row]),
            prefix_digest=self.prefix_digests[row],
        )

    def __iter__(self) -> Iterator[Generation]:
        return (self[row] for row in range(len(self)))


ActivationHook = Callable[[PolicyVersion, float], None]
"""Called inside the switch with the new version and the seconds it took; the switch counts once it returns."""


class Engine(Protocol):
    """Samples from one policy.

    The order that every engine keeps: :meth:`stage` verified bytes, :meth:`activate` them. The switch happens between
    two decode steps; no token of the new version leaves before the activation hook has returned, and where the hook
    fails the engine serves nothing more.
    """

    @property
    def engine_id(self) -> str:
        """Name of the engine on the tape."""
        ...

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself."""
        ...

    @property
    def active_version(self) -> PolicyVersion | None:
        """The version that the next token will carry; None: nothing served yet, or a switch failed."""
        ...

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingConfig) -> GenerationBatch:
        """Continue every request, as one batch of fixed composition.

        Raises:
            EngineError: no version is active, or the model gave numbers that are none.
        """
        ...

    def stage(self, published: PublishedWeights) -> None:
        """Load and verify a version; it does not serve yet. Staging it again is harmless.

        Raises:
            DigestMismatchError: the bytes are not the published ones; names the tensor.
            EngineError: the tensors do not fit the model, or the version was staged with another digest.
        """
        ...

    def activate(self, version: PolicyVersion) -> None:
        """Serve a staged version from the next decode step on; at once where nothing is being generated.

        Raises:
            EngineError: the version is not staged, or is older than the active one.
        """
        ...

"""Sampling randomness that depends on nothing but its place in the run (design §7).

Every random number of a rollout is a pure function of (run seed, step, group ordinal, member, turn, token): no state,
so a batch can be generated again after any crash, on any machine, and take the same decisions. The generator is
Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a counter-based one: the seed is
its key, the token's place its counter, and a whole batch is one array operation.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

UINT32 = npt.NDArray[np.uint32]
UINT64 = npt.NDArray[np.uint64]

_MULTIPLIER_0: Final = np.uint64(0xD2511F53)
_MULTIPLIER_1: Final = np.uint64(0xCD9E8D57)
_WEYL_0: Final = np.uint64(0x9E3779B9)
_WEYL_1: Final = np.uint64(0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_ROUNDS: Final = 10


def derived_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from named parts, by SHA-256: parts that differ anywhere give unrelated seeds.

    >>> derived_seed("sampling", 1, 2) == derived_seed("sampling", 1, 2) != derived_seed("sampling", 12)
    True
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def sampling_seed(run_seed: int, step: int, group_ordinal: int, member: int, turn: int = 0) -> int:
    """The seed of one call of the engine, as ``rollout_dispatched.sampling_seed`` records it (turn 0)."""
    return derived_seed("sampling", run_seed, step, group_ordinal, member, turn)


def call_seed(rollout_seed: int, turn: int, kind: str, call: int = 0) -> int:
    """The seed of a call within a rollout, from the seed of its first turn.

    Args:
        rollout_seed: :func:`sampling_seed` of the rollout; the first call of turn 0 uses it as it is.
        turn: from 0.
        kind: ``execution`` or ``summary``.
        call: further calls of the same kind in the turn, after an interruption or a rejected summary.
    """
    if (turn, kind, call) == (0, "execution", 0):
        return rollout_seed
    return derived_seed("call", rollout_seed, turn, kind, call)


def philox4x32(counter: UINT64, key: UINT64) -> UINT64:
    """Ten rounds of Philox 4x32.

    Args:
        counter: uint64 [4, ...], each entry below 2**32.
        key: uint64 [2, ...], likewise; trailing shapes broadcast against the counter's.

    Returns:
        uint64 [4, ...], four random 32-bit words for each counter.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3))


def uniforms(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, one for each (seed, position).

    Args:
        seeds: int64 [B], non-negative.
        positions: int64 [T], place of the token in its generation, from 0, below 2**32.

    Returns:
        float64 [B, T]; an entry depends on its own seed and position alone.
    """
    seed = np.asarray(seeds, dtype=np.int64).astype(np.uint64)[:, None]
    place = np.asarray(positions, dtype=np.int64).astype(np.uint64)[None, :]
    zero = np.zeros_like(place)
    words = philox4x32(np.stack([place, zero, zero, zero]), np.stack([seed & _LOW, seed >> _HALF]))
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


def shuffled(seed: int, size: int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(size)`` that depends on the seed alone, not on a NumPy version."""
    keys = uniforms([seed], np.arange(size))[0]
    return np.argsort(keys, kind="stable")


def problem_slots(run_seed: int, step: int, groups_per_step: int, num_problems: int) -> list[int]:
    """Which problems a step poses, by group ordinal.

    The run walks through the problems in passes; each pass is a permutation of its own, so every problem is posed
    once before any is posed again.

    Args:
        run_seed: the run's seed.
        step: training step, from 1.
        groups_per_step: groups of one step.
        num_problems: problems of the training split.

    Returns:
        Indexes into the training split, one for each group ordinal.
    """
    first = (step - 1) * groups_per_step
    orders: dict[int, npt.NDArray[np.int64]] = {}
    slots = []
    for place in range(first, first + groups_per_step):
        pass_index, within = divmod(place, num_problems)
        if pass_index not in orders:
            orders[pass_index] = shuffled(derived_seed("problems", run_seed, pass_index), num_problems)
        slots.append(int(orders[pass_index][within]))
    return slots

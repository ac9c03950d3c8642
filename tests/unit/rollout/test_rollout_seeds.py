"""Randomness that depends on its place alone."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rolltape.rollout.seeds import derived_seed, philox4x32, problem_slots, sampling_seed, shuffled, uniforms

ALL_ONES = 0xFFFFFFFF

# Known answers published with Random123 for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(words[:, 0].tolist()) == expected


def test_a_uniform_depends_on_its_own_seed_and_position_alone() -> None:
    batch = uniforms([3, 5, 2**62], np.arange(6))
    assert batch.shape == (3, 6)
    assert uniforms([5], [4])[0, 0] == batch[1, 4]
    assert uniforms([2**62], [0])[0, 0] == batch[2, 0]
    assert len(np.unique(batch)) == batch.size


def test_uniforms_are_uniform() -> None:
    numbers = uniforms(np.arange(200), np.arange(500)).ravel()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts / numbers.size - 0.05).max() < 0.003
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_seeds_differ_wherever_their_place_differs() -> None:
    places = [
        (run, step, group, member, turn)
        for run in (0, 1)
        for step in (1, 11)
        for group in (0, 1, 11)
        for member in (0, 1, 11)
        for turn in (0, 1)
    ]
    seeds = {sampling_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derived_seed("a", 1) != derived_seed("a", "1")
    assert derived_seed("a", 12) != derived_seed("a", 1, 2)


def test_seeds_are_the_same_in_another_process() -> None:
    code = "from rolltape.rollout.seeds import sampling_seed; print(sampling_seed(7, 3, 2, 1))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(output) == sampling_seed(7, 3, 2, 1)


def test_shuffled_is_a_permutation_that_depends_on_the_seed() -> None:
    assert sorted(shuffled(1, 100).tolist()) == list(range(100))
    assert shuffled(1, 100).tolist() != shuffled(2, 100).tolist()


def test_every_problem_is_posed_once_in_each_pass() -> None:
    slots = [slot for step in range(1, 11) for slot in problem_slots(3, step, 4, 20)]
    assert sorted(slots[:20]) == list(range(20))
    assert sorted(slots[20:]) == list(range(20))
    assert slots[:20] != slots[20:]


def test_a_step_may_pose_more_groups_than_there_are_problems() -> None:
    slots = problem_slots(0, 1, 7, 3)
    assert sorted(slots[:3]) == sorted(slots[3:6]) == [0, 1, 2]

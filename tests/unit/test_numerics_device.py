"""The device layer on a machine with a CPU alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rolltape.numerics import device as device_module
from rolltape.numerics.device import (
    autocast,
    describe_device,
    forked_rng,
    peak_memory_bytes,
    rng_state,
    rng_state_digest,
    select_device,
    set_deterministic,
    set_rng_state,
    synchronize,
)
from rolltape.schema.errors import ConfigError
from rolltape.trainers.advantages import group_advantages
from rolltape.trainers.staleness import trajectory_lags


@pytest.fixture
def deterministic() -> Iterator[None]:
    threads, setting = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(setting)


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("ROLLTAPE_DEVICE", "cpu")
    assert select_device() == torch.device("cpu")
    monkeypatch.setattr(device_module, "_find_accelerator", lambda: None)
    assert select_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="'tpu'"):
        select_device("tpu")


@pytest.mark.parametrize("name", [name for name in device_module._KNOWN if name != "cpu"])
def test_an_accelerator_that_is_not_there_is_refused(name: str) -> None:
    if hasattr(torch, name) and getattr(torch, name).is_available():
        assert select_device(name).type == name
        return
    with pytest.raises(ConfigError, match=name):
        select_device(name)


def test_description_names_what_bits_depend_on() -> None:
    info = describe_device()
    assert info.type == "cpu"
    assert info.cpu_capability == torch.backends.cpu.get_cpu_capability()
    assert info.num_threads == torch.get_num_threads()
    assert info.differences(info) == ()
    other = dataclasses.replace(info, num_threads=99, cpu_capability="other")
    assert info.differences(other) == ("cpu_capability", "num_threads")


@pytest.mark.usefixtures("deterministic")
def test_determinism_seeds_every_generator() -> None:
    drawn = []
    for _ in range(2):
        set_deterministic(1, 7)
        drawn.append((random.random(), float(np.random.random()), float(torch.rand(()))))  # noqa: NPY002
    assert drawn[0] == drawn[1]
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("deterministic")
def test_assembly_runs_on_deterministic_kernels() -> None:
    set_deterministic(1, 7)
    groups = torch.tensor([0, 1, 0, 1])
    assert group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), groups).shape == (4,)
    assert trajectory_lags(torch.tensor([3, 2]), torch.tensor([0, 0]), 1, reference=4).tolist() == [2]


def test_senseless_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads"):
        set_deterministic(0, 1)
    with pytest.raises(ConfigError, match="seed"):
        set_deterministic(1, -1)


def test_random_state_comes_back() -> None:
    torch.manual_seed(3)
    states, digest = rng_state(), rng_state_digest()
    first = torch.rand(4)
    assert rng_state_digest() != digest
    set_rng_state(states)
    assert rng_state_digest() == digest
    assert torch.equal(torch.rand(4), first)
    with pytest.raises(ConfigError, match="generators"):
        set_rng_state(states | {"other": b""})


def test_forked_generator_leaves_the_global_one_alone() -> None:
    digest = rng_state_digest()
    with forked_rng(5):
        first = torch.rand(3)
    with forked_rng(5):
        assert torch.equal(torch.rand(3), first)
    assert rng_state_digest() == digest


def test_cpu_has_no_queue_and_no_allocator() -> None:
    cpu = torch.device("cpu")
    synchronize(cpu)
    assert peak_memory_bytes(cpu) is None
    with autocast(cpu, None), autocast(cpu, torch.float32):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    with autocast(cpu, torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16

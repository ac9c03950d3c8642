"""Checkpoints: the full state comes back to the bit, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rolltape.numerics.models import build_model
from rolltape.numerics.weights import named_weights, weights_digest
from rolltape.schema.errors import DigestMismatchError, ReplayError
from rolltape.store.location import Location
from rolltape.trainers.checkpoint import Progress, load_checkpoint, save_checkpoint
from rolltape.trainers.config import TrainerConfig
from rolltape.trainers.learner import Learner, make_optimizer

CONFIG = TrainerConfig()


def stepped(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after one update, so that there are moments."""
    model = build_model("char-64x2", seed)
    optimizer = make_optimizer(model, CONFIG)
    update(model, optimizer)
    return model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step with gradients that depend on the weights alone."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = stepped(0)
    place = Location.parse(str(tmp_path))
    saved = save_checkpoint(place, "c/1", Learner(model, optimizer), Progress(step=7, version=7, stop_average=0.25))
    torch.manual_seed(1)
    update(model, optimizer)

    other, other_optimizer = build_model("char-64x2", 5), None
    other_optimizer = make_optimizer(other, CONFIG)
    progress = load_checkpoint(place, "c/1", saved.digest, Learner(other, other_optimizer))
    update(other, other_optimizer)
    assert progress == Progress(step=7, version=7, stop_average=0.25)
    assert weights_digest(named_weights(other)) == weights_digest(named_weights(model))


def test_saving_the_same_state_twice_gives_the_same_digest(tmp_path: Path) -> None:
    model, optimizer = stepped(0)
    place = Location.parse(str(tmp_path))
    first = save_checkpoint(place, "c/1", Learner(model, optimizer), Progress())
    assert save_checkpoint(place, "c/1", Learner(model, optimizer), Progress()).digest == first.digest


def test_damage_is_named(tmp_path: Path) -> None:
    model, optimizer = stepped(0)
    place = Location.parse(str(tmp_path))
    saved = save_checkpoint(place, "c/1", Learner(model, optimizer), Progress())
    file = tmp_path / "c" / "1" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DigestMismatchError, match=r"optimizer\.safetensors"):
        load_checkpoint(place, "c/1", saved.digest, Learner(model, optimizer))
    with pytest.raises(DigestMismatchError, match=r"state\.json"):
        load_checkpoint(place, "c/1", "0" * 64, Learner(model, optimizer))
    file.parent.joinpath("state.json").unlink()
    with pytest.raises(ReplayError, match="gone"):
        load_checkpoint(place, "c/1", saved.digest, Learner(model, optimizer))


def test_learning_rate_is_a_function_of_the_step() -> None:
    config = TrainerConfig(lr=2e-3, warmup_steps=10, decay_steps=100, final_lr_fraction=0.1)
    assert config.lr_at(5) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.95))
    assert config.lr_at(10) == pytest.approx(2e-3 * (0.1 + 0.9 * 0.9))
    assert config.lr_at(100) == config.lr_at(500) == pytest.approx(2e-4)
    assert TrainerConfig(lr=1e-3).lr_at(1) == 1e-3

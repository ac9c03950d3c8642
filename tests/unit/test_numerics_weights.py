"""Digests see every bit; shards come back as they were or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rolltape.numerics.models import build_model
from rolltape.numerics.weights import (
    Manifest,
    combine_digests,
    first_difference,
    load_shards,
    load_weights,
    named_gradients,
    named_weights,
    save_shards,
    tensor_digest,
    tensor_digests,
    weights_digest,
)
from rolltape.schema.errors import ConfigError, DigestMismatchError
from rolltape.store.location import Location


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(5, 7, generator=generator),
        "a.weight": torch.randn(3, generator=generator).bfloat16(),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
    }


def test_digest_is_of_bits_not_of_values() -> None:
    zero = torch.tensor([0.0, 1.0])
    assert tensor_digest(zero) != tensor_digest(torch.tensor([-0.0, 1.0]))
    nan = torch.tensor([float("nan")])
    assert tensor_digest(nan) == tensor_digest(nan.clone())
    flipped = zero.clone()
    flipped.view(torch.int32)[1] ^= 1
    assert tensor_digest(zero) != tensor_digest(flipped)


def test_digest_covers_shape_and_dtype() -> None:
    flat = torch.zeros(6)
    assert tensor_digest(flat) != tensor_digest(flat.reshape(2, 3))
    assert tensor_digest(flat.reshape(3, 2)) != tensor_digest(flat.reshape(2, 3))
    assert tensor_digest(flat) != tensor_digest(flat.view(torch.int32))
    assert tensor_digest(torch.zeros(1)) != tensor_digest(torch.tensor(0.0))


def test_digest_does_not_depend_on_memory_layout() -> None:
    matrix = torch.randn(4, 6)
    assert tensor_digest(matrix.T.contiguous().T) == tensor_digest(matrix)
    assert tensor_digest(matrix[:, ::2]) == tensor_digest(matrix[:, ::2].clone())


def test_digest_is_pinned() -> None:
    """The definition: digests on tapes rest on it."""
    expected = hashlib.sha256(b"float32 [2]\n" + struct.pack("<2f", 1.0, -2.0)).hexdigest()
    assert tensor_digest(torch.tensor([1.0, -2.0])) == "sha256:" + expected
    lines = f"a\nsha256:{expected}\n".encode()
    assert weights_digest({"a": torch.tensor([1.0, -2.0])}) == "sha256:" + hashlib.sha256(lines).hexdigest()


def test_weights_digest_covers_names_and_not_their_order() -> None:
    named = tensors()
    assert weights_digest(named) == weights_digest(dict(reversed(named.items())))
    renamed = {name.replace("b.", "c."): tensor for name, tensor in named.items()}
    assert weights_digest(named) != weights_digest(renamed)
    assert weights_digest(named) == combine_digests(tensor_digests(named))


def test_first_difference_is_named() -> None:
    named = tensors()
    expected = tensor_digests(named)
    named["b.weight"][2, 3] += 1.0
    assert first_difference(expected, tensor_digests(named)) == "b.weight"
    assert first_difference(expected, expected) is None
    del named["a.weight"]
    assert first_difference(expected, tensor_digests(named)) == "a.weight"


@pytest.mark.parametrize("shard_bytes", [1, 64, 1 << 30])
def test_shards_come_back_as_they_were(tmp_path: Path, shard_bytes: int) -> None:
    location = Location.parse(str(tmp_path / "weights"))
    named = tensors()
    manifest = save_shards(location, named, shard_bytes=shard_bytes)
    assert len(manifest.shards) == {1: 4, 64: 3}.get(shard_bytes, 1)
    assert manifest.weights_digest == weights_digest(named)
    assert manifest.num_bytes == sum(path.stat().st_size for path in (tmp_path / "weights").iterdir())
    restored = load_shards(location, Manifest.from_fields(manifest.to_fields()))
    assert tensor_digests(restored) == tensor_digests(named)


def test_publishing_again_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second = (Location.parse(str(tmp_path / name)) for name in ("first", "second"))
    assert save_shards(first, tensors()) == save_shards(second, dict(reversed(tensors().items())))
    name = "weights-00001-of-00001.safetensors"
    assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def saved(tmp_path: Path) -> tuple[Location, Manifest, Path]:
    location = Location.parse(str(tmp_path / "weights"))
    manifest = save_shards(location, tensors())
    return location, manifest, tmp_path / "weights" / manifest.shards[0].file


def test_a_flipped_bit_is_named_by_tensor(tmp_path: Path) -> None:
    location, manifest, path = saved(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(tensors()["b.weight"].numpy().tobytes())
    data[at + 9] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatchError, match=r"tensor b\.weight has digest sha256:.*expected sha256:"):
        load_shards(location, manifest)
    assert set(load_shards(location, manifest, verify=False)) == set(tensors())


def test_damage_outside_the_tensors_is_found_too(tmp_path: Path) -> None:
    location, manifest, path = saved(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"}}", b"} ", 1) if b"}} " not in data else data.replace(b"}} ", b"} }", 1))
    with pytest.raises(DigestMismatchError, match=r"the file has digest|cannot be read"):
        load_shards(location, manifest)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    location, manifest, path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DigestMismatchError, match="cannot be read"):
        load_shards(location, manifest)


def test_a_manifest_that_does_not_add_up_is_refused(tmp_path: Path) -> None:
    location, manifest, _ = saved(tmp_path)
    with pytest.raises(DigestMismatchError, match="do not add up"):
        load_shards(location, dataclasses.replace(manifest, weights_digest="sha256:0"))


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    location, manifest, _ = saved(tmp_path)
    extra = dataclasses.replace(manifest.tensors[0], name="other")
    with pytest.raises(DigestMismatchError, match="tensor other is missing"):
        load_shards(location, dataclasses.replace(manifest, tensors=(*manifest.tensors, extra)))


def test_nothing_to_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one tensor"):
        save_shards(Location.parse(str(tmp_path)), {})
    with pytest.raises(ConfigError, match="shard_bytes"):
        save_shards(Location.parse(str(tmp_path)), tensors(), shard_bytes=0)


def test_weights_are_loaded_in_place(tmp_path: Path) -> None:
    source, target = build_model("char-64x2", 1), build_model("char-64x2", 2)
    before = {name: parameter.data_ptr() for name, parameter in target.named_parameters()}
    assert weights_digest(named_weights(source)) != weights_digest(named_weights(target))
    location = Location.parse(str(tmp_path / "weights"))
    load_weights(target, load_shards(location, save_shards(location, named_weights(source))))
    assert weights_digest(named_weights(source)) == weights_digest(named_weights(target))
    assert before == {name: parameter.data_ptr() for name, parameter in target.named_parameters()}


def test_weights_of_another_model_are_refused_whole() -> None:
    model = build_model("char-64x2", 1)
    digest = weights_digest(named_weights(model))
    weights = {name: torch.zeros_like(tensor) for name, tensor in named_weights(model).items()}
    name = min(weights)
    for changed in (
        {key: value for key, value in weights.items() if key != name},
        weights | {"other": torch.zeros(1)},
        weights | {name: torch.zeros(1)},
        weights | {name: weights[name].double()},
    ):
        with pytest.raises(ConfigError, match="do not fit"):
            load_weights(model, changed)
    assert weights_digest(named_weights(model)) == digest


def test_gradients_by_name() -> None:
    model = build_model("char-64x2", 1)
    assert named_gradients(model) == {}
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert named_gradients(model).keys() == named_weights(model).keys()


def test_digest_of_the_small_model_is_cheap() -> None:
    """A step takes two of these, so they must not show; the bound leaves room for a busy machine."""
    named = named_weights(build_model("char-64x2", 1))
    spent = []
    for _ in range(10):
        start = time.process_time()
        weights_digest(named)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.005

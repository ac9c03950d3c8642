"""Digests: by bit pattern, the same for any spelling of the same tensor, different for any other bit."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.schema.digest import (
    ContentDigests,
    MediaRef,
    PrefixHasher,
    batch_digest,
    content_digests,
    prefix_digest,
    sha256_hex,
)
from rolltape.schema.errors import ValidationError

IDS = [1, 2, 70000]


def tensors(**changed: Any) -> ContentDigests:
    given: dict[str, Any] = {
        "token_ids": np.array(IDS, np.int32),
        "log_probs": np.array([-0.5, 0.0, -1.0], np.float32),
        "masks": np.array([[True, True, False], [False, False, True]]),
        "versions": np.array([1, 1, -1]),
        "rewards": np.array([0.5]),
    }
    return content_digests(**{**given, **changed})


def test_a_prefix_digest_is_sha256_over_little_endian_int32() -> None:
    assert prefix_digest(IDS) == "sha256:" + hashlib.sha256(struct.pack("<3i", *IDS)).hexdigest()
    assert prefix_digest([]) == "sha256:" + hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(
    "ids",
    [
        np.array(IDS),
        np.array(IDS, np.int32),
        np.array(IDS, ">i4"),
        np.array([1, 9, 2, 9, 70000], np.int32)[::2],
        pa.array(IDS, pa.int32()),
        pa.array([0, *IDS], pa.int32()).slice(1),
        tuple(IDS),
    ],
)
def test_any_spelling_of_the_ids_has_the_same_digest(ids: Any) -> None:
    assert prefix_digest(ids) == prefix_digest(IDS)


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], np.array([1.0]), np.array([True])])
def test_other_ids_are_refused_and_never_wrapped(ids: Any) -> None:
    with pytest.raises(ValidationError):
        prefix_digest(ids)


def test_a_hasher_grows_and_branches() -> None:
    hasher = PrefixHasher()
    hasher.update(IDS[:1])
    branch = hasher.copy()
    hasher.update(IDS[1:])
    branch.update([9])
    assert hasher.digest() == prefix_digest(IDS)
    assert branch.digest() == prefix_digest([1, 9])
    assert hasher.digest([]) == hasher.digest()


def test_media_count_after_the_ids() -> None:
    media = [MediaRef(0, 2, "aa"), MediaRef(2, 1, "bb")]
    digests = {
        prefix_digest(IDS),
        prefix_digest(IDS, media),
        prefix_digest(IDS, media[:1]),
        prefix_digest(IDS, media[::-1]),
    }
    assert len(digests) == 4
    hasher = PrefixHasher()
    hasher.update(IDS)
    assert hasher.digest(media) == prefix_digest(IDS, media)
    assert hasher.digest() == prefix_digest(IDS)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"token_ids": [1, 2, 70001]}, "token_ids"),
        ({"log_probs": np.array([-0.5, -0.0, -1.0], np.float32)}, "log_probs"),
        ({"log_probs": np.array([-0.5, np.nan, -1.0], np.float32)}, "log_probs"),
        ({"masks": np.array([[True, True, False], [False, False, False]])}, "masks"),
        ({"masks": np.array([True, True, False, False, False, True])}, "masks"),
        ({"versions": [1, 2, -1]}, "versions"),
        ({"rewards": [0.5 + 2**-53]}, "rewards"),
        ({"rewards": np.array([])}, "rewards"),
    ],
)
def test_one_bit_changes_its_tensor_and_the_whole(changed: dict[str, Any], name: str) -> None:
    one, other = tensors(), tensors(**changed)
    differing = [field for field in ContentDigests._fields if getattr(one, field) != getattr(other, field)]
    assert differing == ["content", name]


def test_two_nans_differ_by_their_payload() -> None:
    payloads = [np.array([bits], np.uint32).view(np.float32) for bits in (0x7FC00000, 0x7FC00001)]
    assert len({tensors(log_probs=payload).log_probs for payload in payloads}) == 2


def test_the_dtype_of_the_caller_does_not_matter() -> None:
    assert tensors(token_ids=IDS, versions=np.array([1, 1, -1], np.int32), rewards=[0.5]) == tensors()
    assert tensors(log_probs=np.array([-0.5, 0.0, -1.0])) == tensors()
    assert tensors(log_probs=np.array([-0.5, 9, 0.0, 9, -1.0], np.float32)[::2]) == tensors()


@pytest.mark.parametrize(
    "changed",
    [{"token_ids": [2**31]}, {"token_ids": [1.5]}, {"log_probs": [0.1]}, {"masks": [1, 0]}, {"versions": [0.5]}],
)
def test_nothing_is_converted_with_loss(changed: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(changed))):
        tensors(**changed)


def test_numbers_are_signed_and_content_is_the_batchs_input() -> None:
    digests = tensors()
    assert all(-(2**63) <= number < 2**63 for number in digests[1:])
    assert batch_digest([digests.content]) != batch_digest([digests.content, digests.content])
    assert batch_digest(["sha256:a", "sha256:b"]) != batch_digest(["sha256:b", "sha256:a"])


def test_digests_never_change() -> None:
    """They stand in `batch_formed`: a replay years later must find the same."""
    assert tensors().content == "sha256:528c784bb86dbea92e4f3832c6d62fa4c9f5fef515c6c83f10cc4cf9ff374d19"
    assert tensors().log_probs == -8182889443200135238
    assert batch_digest(["sha256:a"]) == "sha256:8e5cec30877aeb4755b7b01990a790c6b1847fb2e15692e43240bec9f9d48187"


def test_bytes_of_any_kind() -> None:
    expected = hashlib.sha256(b"abc").hexdigest()
    assert {sha256_hex(data) for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"), pa.py_buffer(b"abc"))} == {
        expected
    }

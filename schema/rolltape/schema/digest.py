"""Digests over tokens and tensors: by bit pattern, never by value, never over ids, positions or clocks.

``prefix_digest`` proves token in, token out (design §5.1). ``content_digests`` pins what a batch member was trained
from (design §7): one short digest for each tensor, so that a difference can be named, and one over all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rolltape.schema.errors import ValidationError

ALGORITHM: Final = "sha256"
_CONTENT_DOMAIN: Final = b"rolltape content 1"
_BATCH_DOMAIN: Final = b"rolltape batch 1"
_INT32: Final = np.iinfo(np.int32)

TokenIds: TypeAlias = npt.NDArray[np.integer] | Sequence[int] | pa.Array


class MediaRef(NamedTuple):
    """Media behind a range of context tokens, by the SHA-256 (hex) of its bytes."""

    start: int
    length: int
    sha256: str


class ContentDigests(NamedTuple):
    """Digests of one trajectory's tensors; the numbers are the first 8 bytes of a SHA-256, big-endian and signed."""

    content: str
    token_ids: int
    log_probs: int
    masks: int
    versions: int
    rewards: int


class PrefixHasher:
    """A prefix digest that grows with the context: each token is hashed once, however many turns look at it.

    >>> hasher = PrefixHasher()
    >>> hasher.update([1, 2])
    >>> hasher.digest() == prefix_digest([1, 2])
    True
    """

    __slots__ = ("_sha",)

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def update(self, ids: TokenIds) -> None:
        """Append token ids to the context.

        Raises:
            ValidationError: an id lies outside int32.
        """
        self._sha.update(_int32_bytes(ids))

    def digest(self, media: Iterable[MediaRef] = ()) -> str:
        """Digest of the context so far, and of the media behind it; more may follow."""
        refs = tuple(media)
        if not refs:
            return f"{ALGORITHM}:{self._sha.hexdigest()}"
        sha = self._sha.copy()
        for ref in refs:
            sha.update(f"media {ref.start} {ref.length} {ref.sha256}\n".encode())
        return f"{ALGORITHM}:{sha.hexdigest()}"

    def copy(self) -> PrefixHasher:
        """An independent hasher with the same context: for a branch."""
        twin = PrefixHasher()
        twin._sha = self._sha.copy()
        return twin


def prefix_digest(ids: TokenIds, media: Iterable[MediaRef] = ()) -> str:
    """``sha256:<hex>`` over the int32 little-endian ids of a context, then over its media references (design §5.1).

    Raises:
        ValidationError: an id lies outside int32.
    """
    hasher = PrefixHasher()
    hasher.update(ids)
    return hasher.digest(media)


def sha256_hex(data: bytes | bytearray | memoryview | pa.Buffer) -> str:
    """SHA-256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def content_digests(
    *,
    token_ids: npt.ArrayLike,
    log_probs: npt.ArrayLike,
    masks: npt.ArrayLike,
    versions: npt.ArrayLike,
    rewards: npt.ArrayLike,
) -> ContentDigests:
    """Digests of the tensors that one trajectory is trained from.

    Args:
        token_ids: int32 ids of all its segments, in order.
        log_probs: float32 rollout log-probs, ``[T]``; -0.0, NaN payloads and infinities count by their bits.
        masks: bool, ``[T]`` or several masks stacked as ``[k, T]``.
        versions: int64 policy version *numbers*, ``[T]``.
        rewards: float64 scalars; a missing reward is an empty array, not NaN.

    Raises:
        ValidationError: a tensor has a dtype that cannot be converted without loss.
    """
    digests = [
        _tensor_digest(token_ids, "<i4", "token_ids"),
        _tensor_digest(log_probs, "<f4", "log_probs"),
        _tensor_digest(masks, "|b1", "masks"),
        _tensor_digest(versions, "<i8", "versions"),
        _tensor_digest(rewards, "<f8", "rewards"),
    ]
    content = hashlib.sha256(_CONTENT_DOMAIN + b"".join(digests)).hexdigest()
    numbers = (int.from_bytes(digest[:8], "big", signed=True) for digest in digests)
    return ContentDigests(f"{ALGORITHM}:{content}", *numbers)


def batch_digest(content: Iterable[str]) -> str:
    """Digest over the members' content digests, in the order in which they are trained."""
    hasher = hashlib.sha256(_BATCH_DOMAIN)
    for digest in content:
        hasher.update(f"\n{digest}".encode())
    return f"{ALGORITHM}:{hasher.hexdigest()}"


def _tensor_digest(values: npt.ArrayLike, dtype: str, name: str) -> bytes:
    array = np.asarray(values)
    if array.dtype != dtype:
        if array.size and not np.can_cast(array.dtype, dtype, casting="safe" if dtype == "|b1" else "same_kind"):
            raise ValidationError(f"expected {name} as {np.dtype(dtype).name}, got {array.dtype.name}")
        array = _lossless(array, dtype, name)
    hasher = hashlib.sha256(f"{dtype}{list(array.shape)}".encode())
    hasher.update(_bytes_of(array))
    return hasher.digest()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The array's bytes, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _lossless(array: npt.NDArray[np.generic], dtype: str, name: str) -> npt.NDArray[np.generic]:
    with np.errstate(over="ignore"):  # a value that overflows is found by the comparison below
        converted = array.astype(dtype)
    same = (converted == array) | (np.isnan(converted) & np.isnan(array))
    if not np.all(same):
        where = int(np.flatnonzero(~same.ravel())[0])
        raise ValidationError(f"{name}: element {where} does not fit {np.dtype(dtype).name} without loss")
    return converted


def _int32_bytes(ids: TokenIds) -> bytes | memoryview:
    given: Any = ids
    array: npt.NDArray[Any] = given.to_numpy(zero_copy_only=False) if isinstance(given, pa.Array) else np.asarray(given)
    if array.size == 0:
        return b""
    if array.dtype != np.dtype("<i4"):
        if array.dtype.kind not in "iu":
            raise ValidationError(f"expected integer token ids, got {array.dtype.name}")
        if array.min() < _INT32.min or array.max() > _INT32.max:
            raise ValidationError(f"expected token ids within int32, got {array.min()} … {array.max()}")
        array = array.astype("<i4")
    return _bytes_of(array)

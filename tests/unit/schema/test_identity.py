"""Ids: their form, their order within a batch, and what derived ones depend on."""

from __future__ import annotations

import time
import uuid

import pytest

from rolltape.schema.identity import derived_id, uuid7, uuid7_many


def test_new_ids_are_version_7_of_now() -> None:
    before = time.time_ns() // 1_000_000
    minted = uuid.UUID(uuid7())
    assert minted.version == 7
    assert minted.variant == uuid.RFC_4122
    assert before <= minted.int >> 80 <= time.time_ns() // 1_000_000
    assert str(minted) == str(uuid.UUID(str(minted)))


def test_ids_of_one_batch_ascend_and_differ() -> None:
    ids = uuid7_many(5000)
    assert ids == sorted(set(ids))
    assert len(ids) == 5000
    assert uuid7_many(0) == []
    assert {uuid.UUID(text).variant for text in ids} == {uuid.RFC_4122}


def test_ids_of_later_batches_come_later() -> None:
    first = uuid7_many(10)
    time.sleep(0.001)
    assert max(first) < min(uuid7_many(10))


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="0 or more"):
        uuid7_many(-1)


def test_derived_ids_depend_on_every_part_its_type_and_its_place() -> None:
    parts: list[tuple[str | int | bytes, ...]] = [
        ("file", 1),
        ("file", 2),
        ("file", "1"),
        ("fil", "e", 1),
        (b"file", 1),
        ("file",),
        (),
        ("1", "file"),
        ("", ""),
    ]
    ids = [derived_id(*part) for part in parts]
    assert len(set(ids)) == len(parts)
    assert [derived_id(*part) for part in parts] == ids
    assert {uuid.UUID(text).version for text in ids} == {8}
    assert {uuid.UUID(text).variant for text in ids} == {uuid.RFC_4122}


def test_derived_ids_never_change() -> None:
    """They stand in lakes: importing a file again must give the same ones."""
    assert derived_id("sha256:00", 3, "action") == "ed7cacca-582e-8329-938c-18aa98e17546"


@pytest.mark.parametrize("part", [True, 1.5, None])
def test_other_parts_are_refused(part: object) -> None:
    with pytest.raises(TypeError, match="expected str, int or bytes"):
        derived_id(part)  # type: ignore[arg-type]

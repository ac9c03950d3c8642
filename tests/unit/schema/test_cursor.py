"""Cursors: vectors of positions, written and read."""

from __future__ import annotations

import pytest

from rolltape.schema.cursor import Cursor, Partition
from rolltape.schema.errors import CursorError

ROLLOUT = Partition("rollout", 0)
TRAINING = Partition("training", 2)


def test_an_absent_partition_is_read_from_its_start() -> None:
    cursor = Cursor({ROLLOUT: 12})
    assert (cursor[ROLLOUT], cursor[TRAINING]) == (12, 0)
    assert cursor.covers(ROLLOUT, 11)
    assert not cursor.covers(ROLLOUT, 12)
    assert not cursor.covers(TRAINING, 0)


def test_a_cursor_only_advances() -> None:
    cursor = Cursor({ROLLOUT: 12})
    assert cursor.advanced(ROLLOUT, 20)[ROLLOUT] == 20
    assert cursor.advanced(ROLLOUT, 3)[ROLLOUT] == 12
    assert cursor.advanced(TRAINING, 1)[ROLLOUT] == 12
    assert cursor[TRAINING] == 0


def test_the_written_forms_come_back() -> None:
    cursor = Cursor({TRAINING: 55, ROLLOUT: 1234})
    assert str(cursor) == "rollout/0:1234,training/2:55"
    assert Cursor.parse(str(cursor)) == cursor
    assert Cursor.parse(" rollout/0:1234 , training/2:55,") == cursor
    assert Cursor.from_rows(cursor.to_rows()) == cursor
    assert Cursor.parse("") == Cursor.from_rows(None) == Cursor()
    assert len({cursor, Cursor.parse(str(cursor)), Cursor()}) == 2
    assert list(cursor) == [ROLLOUT, TRAINING]


@pytest.mark.parametrize("text", ["rollout", "rollout/0", "rollout:1", "rollout/x:1", "rollout/0:y", "rollout/0:-1"])
def test_other_text_is_no_cursor(text: str) -> None:
    with pytest.raises(CursorError, match="expected"):
        Cursor.parse(text)

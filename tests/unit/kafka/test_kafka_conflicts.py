"""One event id with two contents in two partitions: whichever is read first, both are kept.

An attempt of which a rollout event has two contents is not trained; of a reward the row counts, and of two rows none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pyarrow as pa
import pytest
from tests.attempts import AttemptWriter, row
from tests.conftest import Tape

from rolltape.ingest.archive import Archive
from rolltape.ingest.memory import MemoryTarget
from rolltape.schema.codec import Record, decode, make_record
from rolltape.schema.fold import fold

HERE, THERE = 0, 1
ONE, OTHER = [5, 6, 7], [5, 6, 8]


def attempt(tokens: list[int], producer_id: str, partition: int, reward: float = 1.0) -> list[Record]:
    """A whole attempt, of which every event has the same id whoever made it, with the same content but for the two."""
    tape = Tape()
    writer = AttemptWriter(tape, "t")
    writer.start(producer_id=producer_id)
    writer.act(tokens, producer_id=producer_id)
    writer.end(producer_id=producer_id)
    writer.reward(reward, producer_id=producer_id)
    return [make_record(batch, partition=partition) for batches in tape.batches.values() for batch in batches]


def archived(*parts: Sequence[Record]) -> MemoryTarget:
    """Each part is archived by an archive of its own; all of them looked at the target before any committed."""
    target = MemoryTarget()
    archives = [Archive(target, archiver_id="sink") for _ in parts]
    for archive, records in zip(archives, parts, strict=True):
        offsets = {HERE: itertools.count(), THERE: itertools.count()}
        for record in records:
            archive.offer(record, offset=next(offsets[record.partition]))
        archive.commit()
    return target


def tables(target: MemoryTarget) -> dict[str, pa.Table]:
    found: dict[str, list[pa.Table]] = {}
    for delivery in itertools.chain.from_iterable(target.commits):
        found.setdefault(delivery.kind, []).append(delivery.table)
    return {kind: pa.concat_tables(parts) for kind, parts in found.items()}


def contents(target: MemoryTarget) -> list[list[int]]:
    """Tokens of the action in every content that is kept: as a row, or as the bytes of a dead letter."""
    kept = tables(target)
    found = kept["action_sampled"]["token_ids"].to_pylist()
    for letter in kept["dead_letter"]["dead_letter"].to_pylist() if "dead_letter" in kept else []:
        assert letter["reason"] == "conflict"
        found += decode(letter["payload"]).column("token_ids").to_pylist()
    return sorted(found)


def reasons(target: MemoryTarget) -> list[str]:
    found: list[str] = row(fold(tables(target)), "t")["untrainable_reasons"]
    return found


HERES, THERES = attempt(ONE, "p", HERE), attempt(OTHER, "q", THERE)


def test_without_another_content_the_attempt_is_trained() -> None:
    alone = archived(HERES)
    assert (contents(alone), reasons(alone)) == ([ONE], [])
    twice = archived([*HERES, *attempt(ONE, "q", THERE)])
    assert (contents(twice), reasons(twice)) == ([ONE], [])


@pytest.mark.parametrize("order", [HERES + THERES, THERES + HERES], ids=["here first", "there first"])
def test_what_is_read_first_is_the_row_and_the_other_its_dead_letter(order: list[Record]) -> None:
    target = archived(order)
    assert tables(target)["action_sampled"].num_rows == 1
    assert contents(target) == [ONE, OTHER]
    assert reasons(target) == ["dropped"]


def test_two_sinks_that_do_not_see_each_other_keep_two_rows_and_the_fold_refuses_both() -> None:
    target = archived(HERES, THERES)
    assert contents(target) == [ONE, OTHER]
    assert reasons(target) == ["event_conflict"]


def test_of_two_contents_of_a_reward_the_row_counts_and_of_two_rows_none() -> None:
    good, bad = HERES, attempt(ONE, "q", THERE, reward=0.0)
    for order, counts in ((good + bad, 1.0), (bad + good, 0.0)):
        target = archived(order)
        found = row(fold(tables(target)), "t")
        assert (found["reward"], found["untrainable_reasons"]) == (counts, [])
        (letter,) = tables(target)["dead_letter"]["dead_letter"].to_pylist()
        (refused,) = decode(letter["payload"]).to_pylist()
        assert (letter["reason"], refused["reward_assigned"]["scalar"]) == ("conflict", 1.0 - counts)
    assert reasons(archived(good, bad)) == ["event_conflict"]

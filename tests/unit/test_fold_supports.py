"""Kept supports follow their tokens into segments; one that is not whole is told from one that is."""

from __future__ import annotations

from typing import Any

import pytest
from tests.attempts import SAMPLING, AttemptWriter, shuffled
from tests.conftest import Tape

from rolltape.schema import fold as fold_module
from rolltape.schema.fold import SUPPORT_SCHEMA, Fold, content_digests_of, fold

LIMITED = {**SAMPLING, "top_p": 0.8}


def kept(*supports: list[int]) -> dict[str, Any]:
    """Columns of an action whose tokens were sampled from ``supports``."""
    offsets = [0]
    for support in supports:
        offsets.append(offsets[-1] + len(support))
    return {
        "sampling": [LIMITED],
        "support_token_ids": [[token for support in supports for token in support]],
        "support_offsets": [offsets],
    }


def tell(tape: Tape) -> None:
    """A plain attempt, one with two limited actions around others, and one of two segments."""
    plain = AttemptWriter(tape, "a")
    plain.start([1])
    plain.act([5])
    plain.end()
    mixed = AttemptWriter(tape, "b")
    mixed.start([1, 2])
    mixed.act([5, 6], **kept([5, 9], [6]))
    mixed.observe([30])
    mixed.act([7])
    mixed.act([8], **kept([2, 8, 9]))
    mixed.end()
    cut = AttemptWriter(tape, "c")
    cut.start([1])
    cut.act([5], **kept([4, 5]))
    cut.rewrite([1, 1])
    cut.act([6, 7], **kept([6, 7], [7]))
    cut.end()


EXPECTED = [
    {"segment": 1, "is_whole": True, "counts": [2, 1, 0, 0, 3], "token_ids": [5, 9, 6, 2, 8, 9]},
    {"segment": 2, "is_whole": True, "counts": [2], "token_ids": [4, 5]},
    {"segment": 3, "is_whole": True, "counts": [2, 1], "token_ids": [6, 7, 7]},
]


def supports_of(folded: Fold) -> list[dict[str, Any]]:
    assert folded.supports.schema == SUPPORT_SCHEMA
    rows: list[dict[str, Any]] = folded.supports.to_pylist()
    return rows


def test_supports_lie_at_their_tokens(tape: Tape) -> None:
    tell(tape)
    assert supports_of(fold(tape.tables())) == EXPECTED


def test_supports_do_not_depend_on_the_order_or_the_chunks_of_events(tape: Tape) -> None:
    tell(tape)
    for seed in range(3):
        assert supports_of(fold(shuffled(tape.tables(), seed, copies=1 + seed % 2))) == EXPECTED
    sliced = {kind: table.combine_chunks() for kind, table in tape.tables().items()}
    actions = sliced["action_sampled"]
    cut = supports_of(fold({**sliced, "action_sampled": actions.slice(2)}))
    assert cut == [{"segment": 1, "is_whole": True, "counts": [0, 0, 3], "token_ids": [2, 8, 9]}, *EXPECTED[1:]]


def test_supports_of_shards_are_numbered_as_one_fold(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    tell(tape)
    monkeypatch.setattr(fold_module, "_MAX_VALUES", 4)
    assert supports_of(fold(tape.tables())) == EXPECTED


def test_nothing_is_there_where_nothing_was_limited(tape: Tape) -> None:
    for name, sampling in (("a", SAMPLING), ("b", {**LIMITED, "logprobs_mode": "raw_logprobs"})):
        writer = AttemptWriter(tape, name)
        writer.start()
        writer.act([5], **{**kept([5, 6]), "sampling": [sampling]})
        writer.end()
    assert supports_of(fold(tape.tables())) == []
    assert supports_of(fold({})) == []


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([5, 6, 7], [0, 2]),  # of one token only
        ([5, 6, 7], [0, 3, 3]),  # a sampled token that nothing was kept for
        ([5, 6, 7], [1, 2, 3]),  # not from the start
        ([5, 6, 7], [0, 1, 2]),  # not to the end
        ([5, 6, 7], [0, 4, 3]),  # falling
        ([5, 5, 6], [0, 2, 3]),  # a token twice
        ([5, None, 6], [0, 2, 3]),
        ([5, 6, 6], [0, None, 3]),
    ],
)
def test_a_support_that_cannot_be_replayed_is_not_whole(
    tape: Tape, ids: list[int | None], offsets: list[int | None]
) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([9], **kept([9]))
    writer.act([5, 6], sampling=[LIMITED], support_token_ids=[ids], support_offsets=[offsets])
    writer.end()
    [row] = supports_of(fold(tape.tables()))
    assert row == {"segment": 0, "is_whole": False, "counts": None, "token_ids": None}


def test_a_support_is_part_of_what_is_trained(tape: Tape) -> None:
    """Other kept ids are other content, named as log-probs; whoever has none keeps the digest that it had."""
    digests = []
    for ids in ([5, 9], [5, 8]):
        other = Tape()
        for name, columns in (("a", {}), ("b", kept(ids))):
            writer = AttemptWriter(other, name)
            writer.start()
            writer.act([5], **columns)
            writer.end()
        digests.append(content_digests_of(fold(other.tables())).to_pylist())
    (plain, first), (_, second) = digests
    assert digests[0][0] == digests[1][0]
    assert plain["log_probs"] != first["log_probs"] != second["log_probs"]
    assert first["content"] != second["content"]
    assert first["token_ids"] == second["token_ids"]

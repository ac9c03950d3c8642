"""Token in, token out: the context that the engine used is the one that the tape holds, or the difference is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.attempts import AttemptWriter, row, segments
from tests.conftest import Tape

from rolltape.schema.digest import MediaRef, prefix_digest
from rolltape.schema.fold import fold
from rolltape.schema.fold_proof import first_difference

DATA = Path(__file__).parents[1] / "data"


def two_turns(tape: Tape, **second: Any) -> dict[str, Any]:
    """[1, 2] → 10, 11 → observation 30 → 12; ``second`` says how the second action saw it."""
    writer = AttemptWriter(tape, "t")
    writer.start([1, 2])
    writer.act([10, 11])
    writer.observe([30])
    writer.act([12], **second)
    writer.end()
    writer.reward()
    return row(fold(tape.tables()), "t")


def test_faithful_contexts_are_proved(tape: Tape) -> None:
    found = two_turns(tape)
    assert (found["tito_ok"], found["tito_first_difference"], found["prefix_source"]) == (True, None, "engine")
    assert found["untrainable_reasons"] == []


def test_a_different_id_of_the_same_length_is_a_mismatch_with_its_index(tape: Tape) -> None:
    found = two_turns(tape, seen=[1, 2, 10, 99, 30], keep_ids=True)
    assert (found["tito_ok"], found["tito_first_difference"]) == (False, 3)
    assert found["untrainable_reasons"] == ["prefix_mismatch"]


@pytest.mark.parametrize(
    ("seen", "index"),
    [([1, 2, 10], 3), ([1, 2, 10, 11, 30, 31], 5), ([9, 2, 10, 11, 30], 0), ([], 0)],
    ids=["shorter", "longer", "first", "empty"],
)
def test_the_first_difference_of_contexts_of_other_lengths(tape: Tape, seen: list[int], index: int) -> None:
    found = two_turns(tape, seen=seen, keep_ids=True)
    assert (found["tito_ok"], found["tito_first_difference"]) == (False, index)


def test_without_the_engines_ids_the_index_is_unknown_but_the_mismatch_is_not(tape: Tape) -> None:
    found = two_turns(tape, seen=[1, 2, 10, 99, 30])
    assert (found["tito_ok"], found["tito_first_difference"]) == (False, None)
    assert found["untrainable_reasons"] == ["prefix_mismatch"]


def test_equal_length_is_no_proof_and_another_length_is_a_mismatch(tape: Tape) -> None:
    length_only = two_turns(tape, prefix_digest=None)
    assert length_only["untrainable_reasons"] == ["prefix_unknown"]
    assert length_only["tito_ok"] is None
    assert two_turns(Tape(), prefix_length=4)["untrainable_reasons"] == ["prefix_mismatch"]


def test_the_engines_ids_prove_without_a_digest(tape: Tape) -> None:
    assert two_turns(tape, prefix_digest=None, keep_ids=True)["tito_ok"] is True
    other = two_turns(Tape(), prefix_digest=None, seen=[1, 2, 10, 11, 31], keep_ids=True)
    assert (other["tito_ok"], other["tito_first_difference"]) == (False, 4)


@pytest.mark.parametrize("source", ["unknown", None, "guessed"])
def test_an_unknown_source_is_queryable_and_not_trainable(tape: Tape, source: str | None) -> None:
    found = two_turns(tape, prefix_source=source)
    assert (found["tito_ok"], found["prefix_source"]) == (None, "unknown")
    assert found["untrainable_reasons"] == ["prefix_unknown"]


def test_a_digest_of_an_unknown_algorithm_proves_nothing(tape: Tape) -> None:
    found = two_turns(tape, prefix_digest="blake3:00")
    assert found["untrainable_reasons"] == ["prefix_unknown"]


def test_a_submitted_context_is_proved_and_counted_apart(tape: Tape) -> None:
    found = two_turns(tape, prefix_source="submitted")
    assert (found["tito_ok"], found["prefix_source"], found["untrainable_reasons"]) == (True, "submitted", [])


def test_a_mismatch_and_an_unknown_are_both_named(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([5], seen=[2], keep_ids=True)
    writer.act([6], prefix_source="unknown")
    writer.end()
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert (found["tito_ok"], found["tito_first_difference"], found["prefix_source"]) == (False, 0, "unknown")
    assert found["untrainable_reasons"] == ["prefix_mismatch", "prefix_unknown"]


def test_the_index_of_the_earliest_action_that_differs(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([5])
    writer.act([6], seen=[1, 9], keep_ids=True)
    writer.act([7], seen=[9, 5, 6], keep_ids=True)
    writer.end()
    assert row(fold(tape.tables()), "t")["tito_first_difference"] == 1


def test_the_end_token_that_the_engine_dropped(tape: Tape) -> None:
    """Case D2: the engine continued without the newline that the tape says it was given."""
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20, 151645])
    writer.observe([198, 151644], source="template")
    writer.act([40], seen=[1, 20, 151645, 151644], keep_ids=True)
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    found = row(folded, "t")
    assert (found["tito_first_difference"], found["untrainable_reasons"]) == (3, ["prefix_mismatch"])
    [segment] = segments(folded, "t")
    assert segment["response_token_ids"] == [20, 151645, 198, 151644, 40]


def test_retokenised_history_of_a_real_model(tape: Tape) -> None:
    """Case D1: 7,819 ids that were seen, rendered again as 7,837 others with the same text; first at 4647."""
    drift = json.loads((DATA / "nemorl" / "merged_tokens_drift.json").read_text())
    seen, rendered = drift["seen_token_ids"], drift["output_prompt_token_ids"]
    assert (len(seen), len(rendered)) == (7819, 7837)
    writer = AttemptWriter(tape, "t")
    writer.start(seen[:3088])
    writer.act(seen[3088:])
    writer.act([94224], seen=rendered, keep_ids=True)
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    found = row(folded, "t")
    assert found["tito_first_difference"] == 4647
    assert found["untrainable_reasons"] == ["prefix_mismatch"]
    [segment] = segments(folded, "t")
    assert segment["prompt_token_ids"] + segment["response_token_ids"] == [*seen, 94224]


def test_a_recorded_rewrite_explains_the_same_drift(tape: Tape) -> None:
    """Case D1, the other side: the rewrite is on the tape, so it is a new, trainable segment."""
    drift = json.loads((DATA / "nemorl" / "merged_tokens_drift.json").read_text())
    writer = AttemptWriter(tape, "t")
    writer.start(drift["seen_token_ids"][:3088])
    writer.act(drift["seen_token_ids"][3088:])
    writer.rewrite(drift["output_prompt_token_ids"], reason="template")
    writer.act([94224])
    writer.end()
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert (found["tito_ok"], found["num_segments"], found["untrainable_reasons"]) == (True, 2, [])


def test_media_behind_the_context_are_part_of_the_proof(tape: Tape) -> None:
    media = [{"start": 0, "length": 1, "sha256": "ab"}]
    good = prefix_digest([1, 2], [MediaRef(0, 1, "ab")])
    for name, digest, reasons in (
        ("same", good, []),
        ("other media", prefix_digest([1, 2], [MediaRef(0, 1, "cd")]), ["prefix_mismatch"]),
        ("no media", prefix_digest([1, 2]), ["prefix_mismatch"]),
    ):
        writer = AttemptWriter(tape, name)
        writer.start([1, 2])
        writer.act([5], media=[media], prefix_digest=digest)
        writer.end()
        writer.reward()
        assert row(fold(tape.tables()), name)["untrainable_reasons"] == reasons


def test_a_context_that_the_tape_does_not_know_proves_nothing(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start(None)
    writer.context = [1, 2]
    writer.act([5])
    writer.end()
    writer.reward()
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["no_token_ids", "prefix_unknown"]


@pytest.mark.parametrize(
    ("tape_ids", "engine_ids", "index"),
    [([1, 2], [1, 2], -1), ([], [], -1), ([1], [], 0), ([], [1], 0), ([1, 2, 3], [1, 2], 2), ([3, 2], [1, 2], 0)],
)
def test_first_difference(tape_ids: list[int], engine_ids: list[int], index: int) -> None:
    assert first_difference(np.array(tape_ids, np.int32), np.array(engine_ids, np.int32)) == index


def test_a_rewrite_whose_ids_are_unknown_forbids_training(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([5])
    writer.add("context_rewritten", reason="compaction", context_token_ids=None)
    writer.act([6])
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    assert row(folded, "t")["untrainable_reasons"] == ["no_token_ids", "prefix_unknown"]
    assert [segment["prompt_token_ids"] for segment in segments(folded, "t")] == [[1], None]


def test_an_observation_known_only_as_text_forbids_training(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([5])
    writer.observe([], token_ids=None, text="42")
    writer.act([6], seen=[1, 5, 30])
    writer.end()
    writer.reward()
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["no_token_ids", "prefix_mismatch"]

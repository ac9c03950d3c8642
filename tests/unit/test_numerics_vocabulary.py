"""Whether a teacher means the same text by the same ids: rows of padding may differ, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from rolltape.numerics.char_tokenizer import CharTokenizer
from rolltape.numerics.vocabulary import Vocabulary, check_same_ids
from rolltape.schema.errors import ConfigError

LETTERS = CharTokenizer("letters", "abcd")


@pytest.mark.parametrize("num_rows", [7, 8, 128])
def test_rows_of_padding_may_differ(num_rows: int) -> None:
    """Four letters and three special ids are seven; a model's output layer may have more rows (151,936 or 152,064)."""
    check_same_ids(Vocabulary.of(LETTERS, 16), Vocabulary.of(LETTERS, num_rows), "teacher t")


@pytest.mark.parametrize(
    ("teacher", "expected"),
    [
        (Vocabulary.of(LETTERS, 6), "teacher t: expected an output row for each of 7 ids of tokenizer letters, got 6"),
        (Vocabulary.of(CharTokenizer("more", "abcde")), r"expected the student's tokenizer letters \(num_ids 7\), got"),
        (Vocabulary.of(CharTokenizer("other", "abdc")), r"teacher t: expected .*letters.*, got other"),
        (
            dataclasses.replace(Vocabulary.of(LETTERS), template_digest="another"),
            "expected the student's tokenizer letters .template_digest .*another",
        ),
    ],
)
def test_other_ids_or_another_template_refuse_the_teacher(teacher: Vocabulary, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_same_ids(Vocabulary.of(LETTERS, 16), teacher, "teacher t")

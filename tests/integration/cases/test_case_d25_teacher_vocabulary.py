"""Case D25: a teacher of another vocabulary is refused; one whose output layer is only padded further is not.

Reported elsewhere: a student's ids are sent to a teacher with another tokenizer and scored as other text; and 151,936
rows against 152,064 are refused although the difference is padding. Here two byte-level vocabularies of equal size, so
that no count tells them apart.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.segment_rows import segment_rows
from tokenizers import Tokenizer as TokenizersTokenizer

from rolltape.numerics.models import build_model, build_tokenizer, model_parts
from rolltape.numerics.scoring import ModelScorer
from rolltape.numerics.vocabulary import Vocabulary, check_same_ids
from rolltape.rollout.teacher_scores import Segments, score
from rolltape.schema.digest import sha256_hex
from rolltape.schema.errors import ConfigError

DATA = Path(__file__).parents[2] / "data" / "tokenizer"


class Ranks:
    """A vocabulary with the behaviour of byte-pair encoding: the pair of lowest rank is merged first."""

    name = "qwen"
    revision = "1"
    pad_id = eos_id = 0

    def __init__(self, path: Path) -> None:
        self.file_digest = "sha256:" + sha256_hex(path.read_bytes())
        self.chat_template_digest = "sha256:none"
        rows = [line.split() for line in path.read_text().splitlines()]
        self._ranks = {base64.b64decode(token): int(rank) for token, rank in rows}
        self._tokens = {rank: token for token, rank in self._ranks.items()}
        self.vocab_size = len(rows)

    def encode(self, text: str) -> list[int]:
        parts = [bytes([value]) for value in text.encode()]
        while len(parts) > 1:
            ranks = [self._ranks.get(a + b, self.vocab_size) for a, b in pairwise(parts)]
            if min(ranks) == self.vocab_size:
                break
            at = ranks.index(min(ranks))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ranks[part] for part in parts]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._tokens[token_id] for token_id in ids).decode("utf-8", "backslashreplace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


class File(Ranks):
    """A tokenizer of the ``tokenizers`` library."""

    name = "torchtitan"

    def __init__(self, path: Path) -> None:
        self.file_digest = "sha256:" + sha256_hex(path.read_bytes())
        self.chat_template_digest = "sha256:none"
        self._file = TokenizersTokenizer.from_file(str(path))
        self.vocab_size = self._file.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._file.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._file.decode(list(ids)))


@pytest.fixture(scope="module")
def qwen() -> Ranks:
    return Ranks(DATA / "qwen_first_2020.tiktoken")


def test_another_vocabulary_of_equal_size_is_refused_by_its_digest(qwen: Ranks) -> None:
    torchtitan = File(DATA / "torchtitan_tokenizer.json")
    student, teacher = Vocabulary.of(qwen), Vocabulary.of(torchtitan)
    assert student.num_ids == teacher.num_ids == 2020
    with pytest.raises(ConfigError, match="expected the student's tokenizer qwen") as refusal:
        check_same_ids(student, teacher, "teacher t of domain 'code'")
    for named in ("teacher t of domain 'code'", student.behaviour_digest, teacher.behaviour_digest):
        assert named in str(refusal.value)


def test_rows_of_padding_may_differ_and_ids_may_not(qwen: Ranks) -> None:
    student = Vocabulary.of(qwen, 2048)
    check_same_ids(student, Vocabulary.of(qwen, 2176), "teacher")
    check_same_ids(student, Vocabulary.of(qwen), "teacher")
    with pytest.raises(ConfigError, match="an output row for each of 2020 ids"):
        check_same_ids(student, Vocabulary.of(qwen, 2019), "teacher")
    with pytest.raises(ConfigError, match=r"num_ids 2020.*2021"):
        check_same_ids(student, dataclasses.replace(student, num_ids=2021), "teacher")


def test_other_files_are_one_vocabulary_only_where_every_id_means_the_same(qwen: Ranks) -> None:
    student = Vocabulary.of(qwen)
    check_same_ids(student, dataclasses.replace(student, file_digest="sha256:another"), "teacher")
    other = dataclasses.replace(student, file_digest="sha256:another", ids_digest="sha256:other")
    with pytest.raises(ConfigError, match="mean the same text"):
        check_same_ids(student, other, "teacher")
    with pytest.raises(ConfigError, match="template_digest"):
        check_same_ids(student, dataclasses.replace(student, template_digest="sha256:think"), "teacher")


def test_a_padded_teacher_scores_the_same_ids_and_never_names_a_row_of_padding() -> None:
    """The padding has its share of the softmax, as in the padded model itself; the ids keep their order."""
    model = build_model("char-64x2", 3)
    num_ids = build_tokenizer("char-64x2").vocab_size
    plain = ModelScorer(model, temperature=1.0, token_budget=256)
    segments = Segments.of(segment_rows(contexts=[[1, 5]], responses=[[4, 7, 2]]))
    expected = score(segments, plain, top_k=num_ids, num_ids=num_ids)
    with torch.no_grad():
        head = model.get_output_embeddings()  # type: ignore[operator]
        rows = torch.cat([head.weight, head.weight.new_full((8, head.weight.shape[1]), 0.0)])
        head.weight = torch.nn.Parameter(rows)
    padded = ModelScorer(model, temperature=1.0, token_budget=256)
    assert model_parts(model).output_weight.shape[0] == num_ids + 8
    found = score(segments, padded, top_k=num_ids, num_ids=num_ids)
    assert found.top_ids is not None
    assert expected.top_ids is not None
    assert (found.top_ids == expected.top_ids).all()
    assert int(found.top_ids.max()) < num_ids
    assert found.tail_mass is not None
    assert (found.tail_mass > 0).all()
    share = torch.log1p(-torch.from_numpy(found.tail_mass))
    torch.testing.assert_close(
        torch.from_numpy(found.log_probs), torch.from_numpy(expected.log_probs) + share, atol=1e-5, rtol=0
    )

"""Whether two models mean the same text by the same ids: asked before a teacher scores a student's tokens.

A model's output layer may have more rows than its tokenizer has ids (151,936 of one release, 152,064 of another: rows
of padding that no text ever uses). Such rows may differ; the ids that mean something may not.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolltape.numerics.char_tokenizer import Tokenizer, behaviour_digest
from rolltape.schema.digest import sha256_hex
from rolltape.schema.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a model's ids mean."""

    name: str
    """Of the tokenizer, for messages."""
    behaviour_digest: str
    """What the tokenizer makes of the probe texts."""
    file_digest: str
    """Its file's."""
    ids_digest: str
    """Over the text of each id."""
    num_ids: int
    """Ids that mean something: those of the tokenizer."""
    num_rows: int
    """Of the output layer: ``num_ids`` and rows of padding."""
    template_digest: str
    """Chat template: what turns a problem into ids."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, num_rows: int | None = None) -> Vocabulary:
        """Describe a tokenizer, and a model of ``num_rows`` output rows (default: as many as it has ids)."""
        num_ids = tokenizer.vocab_size
        texts = "\x1e".join(tokenizer.decode([token_id]) for token_id in range(num_ids))
        return cls(
            name=tokenizer.name,
            behaviour_digest=behaviour_digest(tokenizer),
            file_digest=tokenizer.file_digest,
            ids_digest="sha256:" + sha256_hex(texts.encode()),
            num_ids=num_ids,
            num_rows=num_ids if num_rows is None else num_rows,
            template_digest=tokenizer.chat_template_digest,
        )


def check_same_ids(student: Vocabulary, teacher: Vocabulary, who: str) -> None:
    """Refuse a teacher whose ids, or whose template, are not the student's. Rows of padding may differ.

    Raises:
        ConfigError: names what differs; ``who`` is the teacher.
    """
    if teacher.num_rows < teacher.num_ids:
        raise ConfigError(
            f"{who}: expected an output row for each of {teacher.num_ids} ids of tokenizer {teacher.name}, got "
            f"{teacher.num_rows} rows"
        )
    for name in ("num_ids", "behaviour_digest", "template_digest"):
        expected, found = getattr(student, name), getattr(teacher, name)
        if expected != found:
            raise ConfigError(
                f"{who}: expected the student's tokenizer {student.name} ({name} {expected}), got {teacher.name} "
                f"({found}): the student's ids would be scored as other text; name a teacher of the same tokenizer"
            )
    if student.file_digest != teacher.file_digest and student.ids_digest != teacher.ids_digest:
        raise ConfigError(
            f"{who}: expected ids that mean the same text as those of tokenizer {student.name} (digest "
            f"{student.ids_digest}), got {teacher.name} ({teacher.ids_digest}); name a teacher of the same tokenizer"
        )

"""A tokenizer whose ids are characters: for the small models that are made here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from rolltape.schema.digest import sha256_hex
from rolltape.schema.errors import ConfigError

NUM_SPECIAL: Final = 3
"""Ids 0, 1 and 2 are padding, begin and end; characters follow in the order of the alphabet."""


class Tokenizer(Protocol):
    """What environments' text and models' ids meet in. Only the agent loop and the models' side call it."""

    @property
    def name(self) -> str:
        """Name, as the event ``run_started`` carries it."""
        ...

    @property
    def revision(self) -> str:
        """Version of the vocabulary and rules."""
        ...

    @property
    def file_digest(self) -> str:
        """``sha256:<hex>`` over the vocabulary file."""
        ...

    @property
    def chat_template_digest(self) -> str:
        """``sha256:<hex>`` over the chat template's text."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are in ``[0, vocab_size)``."""
        ...

    @property
    def pad_id(self) -> int:
        """Fills the end of shorter rows."""
        ...

    @property
    def eos_id(self) -> int:
        """Ends a reply; sampled by the model and trained like any other token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone: nothing is put before or after."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text for reading, without special tokens. Never encoded again."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation (``role``, ``content``) through the chat template, open for the assistant's reply."""
        ...


PROBE_TEXTS: Final = ("0123456789", "123>", "9 8 7 = 7 8 9", "Hello, world!\n", "äöü 你好 🎛", "  x\t\ty  ", "")
"""Texts whose ids identify a tokenizer's behaviour. Never change an entry: digests on tapes rest on it."""


def behaviour_digest(tokenizer: Tokenizer) -> str:
    """``sha256:<hex>`` over what the tokenizer does with :data:`PROBE_TEXTS`: two files may differ and behave alike."""
    return "sha256:" + sha256_hex(repr([_probe(tokenizer, text) for text in PROBE_TEXTS]).encode())


def _probe(tokenizer: Tokenizer, text: str) -> list[int] | str:
    try:
        return list(tokenizer.encode(text))
    except ValueError:
        return "refused"


class CharTokenizer:
    """One id per character of a fixed alphabet; text outside it is refused, never replaced."""

    def __init__(self, name: str, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ConfigError(f"alphabet: expected distinct characters, at least one, got {alphabet!r}")
        self._name = name
        self._alphabet = alphabet
        self._id_of = {character: index + NUM_SPECIAL for index, character in enumerate(alphabet)}

    @property
    def name(self) -> str:
        """Name of the model that it belongs to."""
        return self._name

    @property
    def revision(self) -> str:
        """Version of the rules; the alphabet has its digest."""
        return "1"

    @property
    def file_digest(self) -> str:
        """``sha256:<hex>`` over the alphabet."""
        return "sha256:" + sha256_hex(self._alphabet.encode())

    @property
    def chat_template_digest(self) -> str:
        """``sha256:<hex>`` over the rule in words."""
        return "sha256:" + sha256_hex(b"contents joined by nothing, begin token first")

    @property
    def vocab_size(self) -> int:
        """Special ids and characters."""
        return NUM_SPECIAL + len(self._alphabet)

    @property
    def pad_id(self) -> int:
        """Id 0."""
        return 0

    @property
    def bos_id(self) -> int:
        """Id 1, the first of every row."""
        return 1

    @property
    def eos_id(self) -> int:
        """Id 2."""
        return 2

    def encode(self, text: str) -> list[int]:
        """Ids of the characters.

        Raises:
            ConfigError: a character is outside the alphabet; names it and its place.
        """
        try:
            return [self._id_of[character] for character in text]
        except KeyError as error:
            at = text.index(error.args[0])
            raise ConfigError(
                f"tokenizer {self._name}: character {error.args[0]!r} at {at} is not in the alphabet {self._alphabet!r}"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Characters of the ids; special ids and ids outside the vocabulary give nothing."""
        alphabet = self._alphabet
        return "".join(alphabet[i - NUM_SPECIAL] for i in ids if 0 <= i - NUM_SPECIAL < len(alphabet))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Begin token, then all contents one after another (roles have no tokens here)."""
        return [self.bos_id, *self.encode("".join(message["content"] for message in messages))]

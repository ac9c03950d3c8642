"""Text to ids: a message that extends a conversation has the ids that the template gives the whole of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from rolltape.numerics.char_tokenizer import CharTokenizer, Tokenizer
from rolltape.numerics.models import build_tokenizer
from rolltape.rollout.environment import Message, Problem
from rolltape.rollout.rendering import Renderer

OPEN: Final = 1
CLOSE: Final = 2
CHARACTERS: Final = CharTokenizer("chat", "abcdefghijklmnopqrstuvwxyz \n.?:0123456789")


class ChatTokenizer:
    """Characters, and a template of the ChatML kind that puts a system message where there is none."""

    name = "chat"
    revision = "1"
    file_digest = chat_template_digest = "sha256:0"
    vocab_size = CHARACTERS.vocab_size
    pad_id = 0
    eos_id = CLOSE

    def encode(self, text: str) -> list[int]:
        return CHARACTERS.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return CHARACTERS.decode(ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": "be good."}, *messages]
        ids = []
        for message in messages:
            ids += [OPEN, *self.encode(f"{message['role']}\n{message['content']}"), CLOSE, *self.encode("\n")]
        return [*ids, OPEN, *self.encode("assistant\n")]


@pytest.fixture(params=["fake", pytest.param("smollm2", marks=pytest.mark.model)])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return build_tokenizer("smollm2-135m") if request.param == "smollm2" else ChatTokenizer()


def chat(*messages: tuple[str, str]) -> Problem:
    made = tuple(Message(role=role, content=content) for role, content in messages)
    return Problem(problem_id=f"p/{len(messages)}/{messages[0][1]}", split="train", answer="", messages=made)


def ids(tokenizer: Tokenizer, *messages: tuple[str, str]) -> list[int]:
    return tokenizer.encode_chat([{"role": role, "content": content} for role, content in messages])


def reply(tokenizer: Tokenizer, text: str, *, ends: bool = True) -> npt.NDArray[np.int32]:
    return np.array([*tokenizer.encode(text), *([tokenizer.eos_id] if ends else [])], dtype=np.int32)


SYSTEM, QUESTION = ("system", "you are s."), ("user", "what is 2?")


@pytest.mark.parametrize("messages", [(SYSTEM, QUESTION), (QUESTION,)])
@pytest.mark.parametrize("ends", [True, False])
def test_an_observation_extends_the_conversation(
    tokenizer: Tokenizer, messages: tuple[tuple[str, str], ...], *, ends: bool
) -> None:
    """The newline between two turns is there (cases.md D2), and the end of a reply that was cut is put, once."""
    renderer = Renderer(tokenizer)
    prompt, _ = renderer.prompt(chat(*messages))
    action = reply(tokenizer, "call 3", ends=ends)
    seen = renderer.observation("it is 42\nok", int(action[-1]), is_chat=True)
    whole = ids(tokenizer, *messages, ("assistant", "call 3"), ("user", "it is 42\nok"))
    assert np.concatenate([prompt, action, seen]).tolist() == whole


def test_a_second_observation_extends_it_again(tokenizer: Tokenizer) -> None:
    renderer = Renderer(tokenizer)
    parts = [renderer.prompt(chat(SYSTEM, QUESTION))[0]]
    for text, seen in (("call 3", "42"), ("call 4", "43")):
        parts.append(reply(tokenizer, text))
        parts.append(renderer.observation(seen, int(parts[-1][-1]), is_chat=True))
    turns = (("assistant", "call 3"), ("user", "42"), ("assistant", "call 4"), ("user", "43"))
    assert np.concatenate(parts).tolist() == ids(tokenizer, SYSTEM, QUESTION, *turns)


@pytest.mark.parametrize("includes_user", [True, False])
def test_a_summary_stands_in_a_message_of_its_own(tokenizer: Tokenizer, *, includes_user: bool) -> None:
    before, after = Renderer(tokenizer).resume_frame(
        chat(SYSTEM, QUESTION), system="", before="summary:\n", after="\ngo on.", includes_user=includes_user
    )
    summary = np.array(tokenizer.encode("did 3 things"), dtype=np.int32)
    kept = (SYSTEM, QUESTION) if includes_user else (SYSTEM,)
    whole = ids(tokenizer, *kept, ("user", "summary:\ndid 3 things\ngo on."))
    assert np.concatenate([before, summary, after]).tolist() == whole


def test_raw_text_is_encoded_as_it_is() -> None:
    tokenizer = build_tokenizer("char-64x2")
    renderer = Renderer(tokenizer)
    problem = Problem(problem_id="p", split="train", answer="", prompt="12=34")
    prompt, text = renderer.prompt(problem)
    assert (prompt.tolist(), text) == (tokenizer.encode("12=34"), "12=34")
    assert renderer.observation("7>", tokenizer.eos_id, is_chat=False).tolist() == tokenizer.encode("7>")
    before, after = renderer.resume_frame(problem, system="12=", before=" ", after=">", includes_user=False)
    assert (before.tolist(), after.tolist()) == (tokenizer.encode("12= "), tokenizer.encode(">"))
    before, _ = renderer.resume_frame(problem, system="12=", before=" ", after=">", includes_user=True)
    assert before.tolist() == tokenizer.encode("12=34 ")

"""Where text becomes ids: prompts, observations and the frames around summaries, each rendered once (design §5.1).

Raw prompts are encoded as they are, and so is every later text. For chat models the template's own ids around a message
are read off its renderings, so that a new message extends a conversation without rendering it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from rolltape.numerics.char_tokenizer import Tokenizer
from rolltape.rollout.engine import Int32
from rolltape.rollout.environment import Problem

MAX_CACHED_PROMPTS: Final = 100_000
_PROBES: Final = ("a", "b")


class Renderer:
    """Renders with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._prompts: dict[str, tuple[Int32, str]] = {}

    def prompt(self, problem: Problem) -> tuple[Int32, str]:
        """Context ids (int32 [P]) of a problem, and its text for reading."""
        found = self._prompts.get(problem.problem_id)
        if found is None:
            if len(self._prompts) >= MAX_CACHED_PROMPTS:
                self._prompts.clear()
            found = self._prompts[problem.problem_id] = self._prompt(problem)
        return found

    def observation(self, text: str, last_id: int, *, is_chat: bool) -> Int32:
        """Ids that follow an action: the text, for chat models as a user's message with the template's glue.

        Args:
            text: what the policy sees.
            last_id: the last id of the context. Where it already is the end that the template puts after a reply, that
                end is not put twice.
            is_chat: whether the prompt came through the chat template.
        """
        if not is_chat:
            return self.encode(text)
        before, after = self._between
        if len(before) and int(before[0]) == last_id:
            before = before[1:]
        return np.concatenate([before, self.encode(text), after])

    def resume_frame(
        self, problem: Problem, *, system: str, before: str, after: str, includes_user: bool
    ) -> tuple[Int32, Int32]:
        """Ids before and after a summary in the context that it opens.

        Args:
            problem: the one that is being worked on.
            system: beginning of a raw prompt that stays; chat problems keep their system messages.
            before: text before the summary.
            after: text after it.
            includes_user: keep the whole prompt.
        """
        if not problem.messages:
            kept = (problem.prompt or "") if includes_user else system
            return np.concatenate([self.encode(kept), self.encode(before)]), self.encode(after)
        kept_messages = [
            dataclasses.asdict(message) for message in problem.messages if includes_user or message.role == "system"
        ]
        opening, closing = self._around("user", kept_messages)
        return np.concatenate([opening, self.encode(before)]), np.concatenate([self.encode(after), closing])

    def encode(self, text: str) -> Int32:
        """Ids of a text alone, int32."""
        return np.array(self._tokenizer.encode(text), dtype=np.int32)

    def _prompt(self, problem: Problem) -> tuple[Int32, str]:
        if problem.messages:
            messages = [dataclasses.asdict(message) for message in problem.messages]
            text = "\n\n".join(message.content for message in problem.messages)
            return np.array(self._tokenizer.encode_chat(messages), dtype=np.int32), text
        text = problem.prompt or ""
        return self.encode(text), text

    @cached_property
    def _between(self) -> tuple[Int32, Int32]:
        """Template ids from a reply's end to the next user message, and from that to the next reply."""
        question = {"role": "user", "content": "a"}
        reply_opening, _ = self._around("assistant", [question])
        reply = len(reply_opening) + len(self.encode("a"))
        opening, closing = self._around("user", [question, {"role": "assistant", "content": "a"}])
        return opening[reply:], closing

    def _around(self, role: str, messages: Sequence[Mapping[str, str]]) -> tuple[Int32, Int32]:
        """What the template puts before and after the content of one more message."""
        one, other = (
            np.array(self._tokenizer.encode_chat([*messages, {"role": role, "content": content}]), dtype=np.int32)
            for content in _PROBES
        )
        [place] = np.flatnonzero(one != other)
        return one[:place], one[place + 1 :]

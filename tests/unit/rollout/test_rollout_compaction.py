"""Summaries in the place of history, by a script: contexts to the token, segments, provenance, and the numbers."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from tests.agents import Bench, ScriptedEnvironment, check_provenance, hidden, shown

from rolltape.rollout.agent_config import AgentConfig, CompactionConfig
from rolltape.rollout.agent_context import Context, Span, Step
from rolltape.rollout.agent_environment import Observation, Reply
from rolltape.rollout.compaction import DISCARD_ALL, KEEP_RECENT, needs_summary, shortened
from rolltape.schema.errors import ConfigError
from rolltape.schema.fold import Fold

OK = Reply(observation=Observation(text="ok"))
DONE = Reply(done=True)
LINES = {"a": [OK], "b": [OK], "c": [OK], "d": [OK], "e": [DONE]}


def compaction(**changes: Any) -> CompactionConfig:
    return CompactionConfig(**{"max_compactions": 3, "threshold": 8, "max_summary_tokens": 4, **changes})


def bench_of(script: dict[str, str], **changes: Any) -> Bench:
    """Budget 20: a context of 13 tokens or more asks for a summary; turns are ``a|ok``, 4 tokens each."""
    config = {"context_budget": 20, "compaction": compaction(**changes.pop("compaction", {})), **changes}
    environment = ScriptedEnvironment(["s:q"], LINES, system="s:")
    return Bench(environment, script, max_tokens=3, **config)


def kinds(bench: Bench) -> list[str]:
    return [row["reason"] if row["kind"] == "context_rewritten" else row["kind"] for row in bench.events()]


def rewrites(bench: Bench) -> list[dict[str, Any]]:
    return [row for row in bench.events() if row["kind"] == "context_rewritten"]


def summaries(bench: Bench) -> list[dict[str, Any]]:
    return [row for row in bench.events() if row.get("action_kind") == "summary"]


def segments(folded: Fold) -> list[tuple[str, str, str]]:
    return [
        (row["segment_kind"], shown(row["prompt_token_ids"]), shown(row["response_token_ids"]))
        for row in folded.segments.to_pylist()
    ]


def check_whole(bench: Bench, folded: Fold) -> None:
    """The fold agrees with what was recorded: trainable, proved, every sampled token once."""
    [trajectory] = folded.trajectories.to_pylist()
    assert trajectory["untrainable_reasons"] == []
    assert trajectory["tito_ok"]
    sampled = [row for row in bench.events() if row["kind"] == "action_sampled"]
    assert [row["segment_index"] for row in bench.events() if row["segment_index"] is not None] == sorted(
        row["segment_index"] for row in bench.events() if row["segment_index"] is not None
    )
    of_segments = [
        [token for token, is_action in zip(row["response_token_ids"], row["response_mask"], strict=True) if is_action]
        for row in folded.segments.to_pylist()
    ]
    by_index: dict[int, list[int]] = {}
    for row in sampled:
        by_index.setdefault(row["segment_index"], []).extend(row["token_ids"])
    assert by_index == dict(enumerate(of_segments)), "segments of the envelope are those of the fold"
    check_provenance(bench)


@pytest.mark.parametrize(("used", "asks"), [(55_296, False), (55_297, True)])
def test_the_numbers_of_the_paper(used: int, asks: bool) -> None:
    assert needs_summary(used, budget=65_536, threshold=10_240) is asks


ONE = {
    "s:q": "a|",
    "s:qa|ok": "b|",
    "s:qa|okb|ok": "c|",
    # 15 tokens used, 5 of 20 left: fewer than 8
    "s:qa|okb|okc|ok#": "x|",
}


class TestOneSummary:
    # system, <, x, >, and the last two turns would be 13 tokens: a summary again; with one turn it is 9
    script: ClassVar = {**ONE, "s:<x>c|ok": "e|"}

    def test_the_events(self) -> None:
        bench = bench_of(self.script)
        folded = bench.run()
        assert kinds(bench) == [
            "rollout_started",
            *["action_sampled", "observation_received"] * 3,
            "summary_call",
            "action_sampled",
            "compaction",
            "action_sampled",
            "rollout_ended",
        ]
        call, compacted = rewrites(bench)
        assert shown(call["context_token_ids"]) == "s:qa|okb|okc|ok#"
        assert shown(compacted["context_token_ids"]) == "s:<x>c|ok"
        for row in (call, compacted):
            numbers = (row["context_budget"], row["context_used"], row["context_threshold"])
            assert numbers == (20, 15, 8)
            assert row["turn_index"] == 3
        [summary] = summaries(bench)
        assert (compacted["summary_event_id"], compacted["rejected_event_ids"]) == (summary["event_id"], None)
        assert call["summary_event_id"] is None
        assert summary["sampling"]["max_tokens"] == 4
        check_whole(bench, folded)

    def test_the_segments(self) -> None:
        folded = bench_of(self.script).run()
        assert segments(folded) == [
            ("execution", "s:q", "a|okb|okc|ok"),
            ("summary", "s:qa|okb|okc|ok#", "x|"),
            ("execution", "s:<x>c|ok", "e|"),
        ]
        assert folded.segments["is_accepted"].to_pylist() == [None, True, None]
        assert folded.segments["response_mask"].to_pylist()[1:] == [[True, True], [True, True]]

    def test_the_stop_token_of_the_summary_is_trained_and_not_copied(self) -> None:
        bench = bench_of(self.script)
        bench.run()
        copied = rewrites(bench)[1]["provenance"]
        starts = {row["event_id"]: row for row in bench.events()}
        assert [(starts[span["event_id"]]["kind"], span["start"], span["length"]) for span in copied] == [
            ("rollout_started", 0, 2),
            ("action_sampled", 3, 1),
            ("action_sampled", 5, 2),
            ("observation_received", 7, 2),
        ]


def test_recent_turns_give_way_until_the_context_fits() -> None:
    """Where two turns would ask for a summary again, one is kept; where even that is too long, none."""
    roomy = bench_of({**ONE, "s:<x>b|okc|ok": "e|"}, context_budget=21, compaction={"threshold": 8})
    # 15 of 21 leave 6: fewer than 8
    check_whole(roomy, roomy.run())
    none = bench_of({**ONE, "s:qa|okb|okc|ok#": "xyz|", "s:<xyz>c|ok": "e|"}, context_budget=20)
    check_whole(none, none.run())
    longest = bench_of(
        {**ONE, "s:qa|okb|okc|ok#": "uvwxyz", "s:<uvwxyz>": "e|"},
        context_budget=23,
        compaction={"threshold": 13, "max_summary_tokens": 6},
    )
    # asked at 11 tokens already
    longest.script = {"s:q": "a|", "s:qa|ok": "b|", "s:qa|okb|ok#": "uvwxyz", "s:<uvwxyz>": "e|"}
    folded = longest.run()
    assert segments(folded)[-1] == ("execution", "s:<uvwxyz>", "e|")
    check_whole(longest, folded)


def test_one_turn_is_kept_at_most_where_one_is_asked_for() -> None:
    bench = bench_of({**ONE, "s:<x>c|ok": "e|"}, context_budget=21, compaction={"keep_recent": 1, "threshold": 8})
    assert segments(bench.run())[-1][1] == "s:<x>c|ok"
    bench = bench_of({**ONE, "s:<x>": "e|"}, context_budget=21, compaction={"keep_recent": 0, "threshold": 8})
    assert segments(bench.run())[-1][1] == "s:<x>"


def test_not_even_the_summary_fits() -> None:
    script = {"s:q": "a|", "s:qa|ok": "b|", "s:qa|okb|ok#": "uvwxyz"}
    bench = bench_of(script, context_budget=20, compaction={"threshold": 12, "max_summary_tokens": 6})
    # 2 + 1 + 6 + 1 = 10 tokens leave 10 of 20, fewer than 12
    folded = bench.run()
    [trajectory] = folded.trajectories.to_pylist()
    assert (trajectory["status"], trajectory["cause"]) == ("truncated", "context_overflow")
    assert [row["segment_kind"] for row in folded.segments.to_pylist()] == ["execution", "summary"]
    assert folded.segments["is_accepted"].to_pylist() == [None, False], "no context was made of it"
    assert trajectory["untrainable_reasons"] == []


def test_no_room_to_ask_for_a_summary() -> None:
    long = Reply(observation=Observation(text="123456789"))
    environment = ScriptedEnvironment(["s:q"], {"a": [long]}, system="s:")
    bench = Bench(environment, {"s:q": "a|"}, max_tokens=3, context_budget=18, compaction=compaction())
    folded = bench.run()
    [trajectory] = folded.trajectories.to_pylist()
    assert (trajectory["status"], trajectory["cause"]) == ("truncated", "context_overflow")
    assert folded.segments.num_rows == 1
    assert kinds(bench)[-2:] == ["observation_received", "rollout_ended"]


def many(num_compactions: int, **changes: Any) -> Bench:
    """Turns of 4 tokens for ever; a summary keeps one turn: asked for after three turns, then after each second one."""
    script = {"s:q": "a|", "s:qa|ok": "b|", "s:qa|okb|ok": "c|"}
    context = "s:qa|okb|okc|ok"
    for number in range(num_compactions):
        letter = "xyz"[number]
        script[f"{context}#"] = f"{letter}|"
        context = f"s:<{letter}>c|ok"
        script[context] = "c|"
        context += "c|ok"
    script[context] = "e|"
    return bench_of(script, compaction={"keep_recent": 1, "max_compactions": num_compactions}, **changes)


@pytest.mark.parametrize("num_compactions", [1, 2, 3])
def test_several_summaries(num_compactions: int) -> None:
    bench = many(num_compactions)
    folded = bench.run()
    check_whole(bench, folded)
    assert folded.segments["segment_kind"].to_pylist() == ["execution", *["summary", "execution"] * num_compactions]
    assert folded.segments["is_accepted"].to_pylist() == [None, *[True, None] * num_compactions]
    assert folded.trajectories["num_segments"].to_pylist() == [2 * num_compactions + 1]
    # a turn that was copied twice is still the event that sampled it
    last = rewrites(bench)[-1]
    kept = [row for row in bench.events() if row["kind"] == "action_sampled" and row["text"] == "c"]
    assert kept[-2]["event_id"] in [span["event_id"] for span in last["provenance"]]


def test_no_more_summaries_than_allowed() -> None:
    bench = many(1)
    bench.script = {**bench.script, "s:<x>c|okc|ok": "c|", "s:<x>c|okc|okc|ok": "c|"}
    folded = bench.run()
    [trajectory] = folded.trajectories.to_pylist()
    # 13, then 17 of 20 tokens: the next turn has its 3; at 21 it has not
    assert (trajectory["status"], trajectory["cause"]) == ("truncated", "context_overflow")
    assert folded.segments["segment_kind"].to_pylist() == ["execution", "summary", "execution"]
    assert trajectory["untrainable_reasons"] == []


class TestSummariesThatAreNoGood:
    script: ClassVar = {**ONE, "s:<x>c|ok": "e|"}

    def answers(self, bench: Bench, *answers: str) -> None:
        """What the policy says each time it is asked for a summary."""
        left = list(answers)
        bench.script = Asked(
            {**self.script, **{f"s:<{a.rstrip('|')}>c|ok": "e|" for a in answers}, "s:<>b|okc|ok": "e|"}, left
        )

    def test_an_empty_one_is_asked_for_again(self) -> None:
        bench = bench_of(self.script, compaction={"summary_attempts": 3})
        self.answers(bench, "|", "wxyz", "x|")
        folded = bench.run()
        check_whole(bench, folded)
        assert segments(folded) == [
            ("execution", "s:q", "a|okb|okc|ok"),
            ("summary", "s:qa|okb|okc|ok#", "|"),
            ("summary", "s:qa|okb|okc|ok#", "wxyz"),
            ("summary", "s:qa|okb|okc|ok#", "x|"),
            ("execution", "s:<x>c|ok", "e|"),
        ]
        assert folded.segments["is_accepted"].to_pylist() == [None, False, False, True, None]
        tries = summaries(bench)
        [compacted] = [row for row in rewrites(bench) if row["reason"] == "compaction"]
        assert compacted["rejected_event_ids"] == [row["event_id"] for row in tries[:2]]
        assert compacted["summary_event_id"] == tries[2]["event_id"]
        assert len({row["sampling"]["seed"] for row in tries}) == 3

    @pytest.mark.parametrize("last", ["|", "wxyz"])
    def test_the_last_try_counts(self, last: str) -> None:
        bench = bench_of(self.script)
        self.answers(bench, last)
        folded = bench.run()
        check_whole(bench, folded)
        assert folded.segments["is_accepted"].to_pylist() == [None, True, None]
        [summary] = summaries(bench)
        assert summary["truncated"] is (last == "wxyz")

    def test_one_that_the_engine_broke_off(self) -> None:
        breaks = iter([True])
        bench = bench_of(
            self.script,
            interrupts=lambda request, place: (
                request.prompt_token_ids[-1] == hidden("#")[0] and place == 1 and next(breaks, False)
            ),
        )
        folded = bench.run()
        check_whole(bench, folded)
        assert [row[2] for row in segments(folded)] == ["a|okb|okc|ok", "x", "x|", "e|"]
        assert folded.segments["is_accepted"].to_pylist() == [None, False, True, None]

    def test_an_engine_that_never_gets_on(self) -> None:
        bench = bench_of(self.script, interrupts=lambda request, _: request.prompt_token_ids[-1] == hidden("#")[0])
        [trajectory] = bench.run().trajectories.to_pylist()
        assert (trajectory["status"], trajectory["cause"]) == ("aborted", "interrupted")


class Asked(dict[str, str]):
    """A script with another answer at each summary call; an answer is asked for token by token, from the first."""

    def __init__(self, script: dict[str, str], answers: list[str]) -> None:
        super().__init__(script)
        self._answers = answers
        self._said = 0

    def __getitem__(self, context: str) -> str:
        if not context.endswith("#"):
            return super().__getitem__(context)
        answer = self._answers[0]
        self._said += 1
        if self._said == len(answer):
            self._answers, self._said = self._answers[1:], 0
        return answer


def test_the_whole_prompt_is_kept_where_configured() -> None:
    bench = bench_of({**ONE, "s:q<x>": "e|"}, compaction={"resume_includes_user": True, "keep_recent": 0})
    folded = bench.run()
    assert segments(folded)[-1] == ("execution", "s:q<x>", "e|")
    check_whole(bench, folded)


def test_rollouts_of_a_batch_are_summarised_together() -> None:
    environment = ScriptedEnvironment(["s:q", "s:r"], {**LINES, "f": [DONE]}, system="s:")
    script = {**ONE, "s:<x>c|ok": "e|", "s:r": "a|", "s:ra|ok": "f|"}
    bench = Bench(environment, script, max_tokens=3, context_budget=20, compaction=compaction())
    folded = bench.run()
    assert folded.trajectories["untrainable_reasons"].to_pylist() == [[], []]
    counts = {row["problem_id"]: row["num_segments"] for row in folded.trajectories.to_pylist()}
    assert counts == {"scripted/s:q": 3, "scripted/s:r": 1}


class TestConfiguration:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_compactions": -1}, "agent.compaction.max_compactions: expected 0 or more, got -1"),
            ({"keep_recent": -2}, "agent.compaction.keep_recent: expected 0 or more, got -2"),
            ({"summary_attempts": 0}, "agent.compaction.summary_attempts: expected 1 or more, got 0"),
            ({"threshold": 0}, "agent.compaction.threshold: expected 1 or more where max_compactions is 3, got 0"),
            ({"max_summary_tokens": 0}, "agent.compaction.max_summary_tokens: expected 1 or more"),
        ],
    )
    def test_compaction(self, changes: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            compaction(**changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"max_turns": 0}, "agent.max_turns: expected 1 or more, got 0"),
            ({"context_budget": -1}, "agent.context_budget: expected 0 or more, got -1"),
            ({"discard_above": 5}, "agent.discard_above: expected keep_recent_observations of 1 or more"),
            ({"compaction": compaction(), "keep_recent_observations": 2}, "agent.keep_recent_observations: expected 0"),
        ],
    )
    def test_budgets(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            AgentConfig(**changes)

    @pytest.mark.parametrize(("threshold", "is_allowed"), [(5, False), (6, True), (19, True), (20, False)])
    def test_a_threshold_that_leaves_no_room_for_a_summary(self, threshold: int, is_allowed: bool) -> None:
        if is_allowed:
            bench_of({}, compaction={"threshold": threshold})
            return
        with pytest.raises(ConfigError, match=r"agent\.compaction.threshold: expected at least 6 "):
            bench_of({}, compaction={"threshold": threshold})

    def test_a_turn_has_to_fit_into_the_threshold(self) -> None:
        with pytest.raises(ConfigError, match=r"agent\.compaction.threshold: expected at least 9 "):
            Bench(ScriptedEnvironment(["q"], LINES), {}, max_tokens=9, context_budget=20, compaction=compaction())

    def test_more_than_the_model_takes(self) -> None:
        with pytest.raises(ConfigError, match=r"agent\.context_budget: expected at most 64"):
            bench_of({}, context_budget=65)

    def test_a_turn_longer_than_the_budget(self) -> None:
        with pytest.raises(ConfigError, match=r"sampling\.max_tokens: expected less than the context budget of 20"):
            Bench(ScriptedEnvironment(["q"], LINES), {}, max_tokens=20, context_budget=20)


# Folded observations and discarded turns (algorithms.md §4.19).


def span(length: int) -> Span:
    return Span(np.zeros(length, np.int32))


def rounds(num_rounds: int) -> Context:
    """A question of 1,000 tokens, then rounds of 600 and an observation of 5,000."""
    return Context((span(1000),), [Step((span(600),), span(5000)) for _ in range(num_rounds)])


@pytest.mark.parametrize(("num_rounds", "total"), [(5, 29_000), (6, 29_608), (10, 32_040), (11, 32_648), (12, 33_256)])
def test_tokens_after_folding(num_rounds: int, total: int) -> None:
    assert len(rounds(num_rounds).folded(5, lambda _step: span(8))) == total


@pytest.mark.parametrize(("above", "first"), [(32_768, 12), (32_000, 10)])
def test_when_all_turns_are_discarded(above: int, first: int) -> None:
    def reason(num_rounds: int) -> str | None:
        found = shortened(rounds(num_rounds), keep=5, discard_above=above, placeholder=lambda _step: span(8))
        return found and found[1]

    assert [reason(number) for number in (4, 5, 6)] == [None, None, KEEP_RECENT]
    assert next(number for number in range(20) if reason(number) == DISCARD_ALL) == first
    assert next(number for number in range(20) if len(rounds(number)) > above) == 6, "without folding"


def test_a_context_without_turns_has_none_to_discard() -> None:
    assert shortened(rounds(0), keep=5, discard_above=10, placeholder=lambda _step: span(8)) is None


def test_a_rollout_whose_observations_are_folded() -> None:
    script = {"q": "a|", "qa|ok": "b|", "qa|[]b|ok": "c|", "qa|[]b|[]c|ok": "e|"}
    bench = Bench(ScriptedEnvironment(["q"], LINES), script, max_tokens=3, keep_recent_observations=1)
    folded = bench.run()
    check_whole(bench, folded)
    assert [row["reason"] for row in rewrites(bench)] == [KEEP_RECENT] * 2
    assert segments(folded) == [
        ("execution", "q", "a|okb|ok"),
        ("execution", "qa|[]b|ok", "c|ok"),
        ("execution", "qa|[]b|[]c|ok", "e|"),
    ]


def test_a_rollout_whose_turns_are_discarded() -> None:
    script = {"q": "a|", "qa|ok": "b|", "qa|[]b|ok": "c|"}
    lines = {**LINES, "a": [OK, DONE]}
    bench = Bench(ScriptedEnvironment(["q"], lines), script, max_tokens=3, keep_recent_observations=1, discard_above=9)
    folded = bench.run()
    check_whole(bench, folded)
    # 1 + 4 + 4 + 4 = 13 tokens after the third turn; the placeholder is as long as what it replaces here
    assert [row["reason"] for row in rewrites(bench)] == [KEEP_RECENT, DISCARD_ALL]
    assert [row["context_used"] for row in rewrites(bench)] == [9, 13]
    assert segments(folded)[-1] == ("execution", "q", "a|")

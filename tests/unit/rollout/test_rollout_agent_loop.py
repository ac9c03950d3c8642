"""Rollouts of several turns by a script: the exact events, and what the fold makes of them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from tests.agents import VERSIONS, Bench, ScriptedEnvironment, component, hidden, shown

from rolltape.rollout.agent_environment import Observation, Reply
from rolltape.rollout.seeds import call_seed
from rolltape.schema.errors import ConfigError

CONTINUE = Reply(observation=Observation(text="ok"))
DONE = Reply(done=True)


def tool(text: str, **changes: Any) -> Reply:
    return Reply(observation=Observation(text=text, source="tool", tool_name="get", **changes))


def actions(bench: Bench, problem: str | None = None) -> list[dict[str, Any]]:
    return [row for row in bench.events(problem) if row["kind"] == "action_sampled"]


def test_every_event_of_a_rollout_with_a_tool_call() -> None:
    environment = ScriptedEnvironment(["q="], {"?a": [tool("7;")], "7": [DONE]})
    bench = Bench(environment, {"q=": "?a|", "q=?a|7;": "7|"})
    folded = bench.run()

    start, call, seen, answer, end = bench.events()
    assert [row["kind"] for row in (start, call, seen, answer, end)] == [
        "rollout_started",
        "action_sampled",
        "observation_received",
        "action_sampled",
        "rollout_ended",
    ]
    assert (start["stage"], start["harness"], start["environment"], start["environment_version"]) == (
        "agentic",
        "rolltape.rollout.agent",
        "scripted",
        "7",
    )
    assert shown(start["prompt_token_ids"]) == "q="
    assert (shown(call["token_ids"]), call["text"], call["turn_index"], call["segment_index"]) == ("?a|", "?a", 0, 0)
    assert call["tool_calls"] == [{"id": None, "name": "get", "arguments": "a"}]
    assert call["action_kind"] == "execution"
    assert call["sampling"]["seed"] == 100
    assert (shown(seen["token_ids"]), seen["source"], seen["tool_name"], seen["status"], seen["turn_index"]) == (
        "7;",
        "tool",
        "get",
        "ok",
        0,
    )
    assert (shown(answer["token_ids"]), answer["turn_index"], answer["tool_calls"]) == ("7|", 1, None)
    assert answer["sampling"]["seed"] == call_seed(100, 1, "execution")
    assert answer["prefix_length"] == len("q=?a|7;")
    assert (end["status"], end["cause"]) == ("completed", "done")
    assert (end["num_action_tokens"], end["num_observation_tokens"], end["last_event_index"]) == (5, 2, 4)

    [trajectory] = folded.trajectories.to_pylist()
    assert trajectory["untrainable_reasons"] == []
    assert (trajectory["reward"], trajectory["reward_state"], trajectory["tito_ok"]) == (1.0, "earned", True)
    [segment] = folded.segments.to_pylist()
    assert shown(segment["response_token_ids"]) == "?a|7;7|"
    assert segment["response_mask"] == [True] * 3 + [False] * 2 + [True] * 2
    assert segment["observation_mask"] == [False] * 3 + [True] * 2 + [False] * 2
    assert environment.episodes[0].heard == [("?a", True), ("7", True)]
    assert environment.episodes[0].closed == 1


def test_rollouts_of_a_batch_take_their_turns_together() -> None:
    lines = {"a": [CONTINUE], "b": [DONE], "c": [CONTINUE, DONE]}
    environment = ScriptedEnvironment(["p", "q", "r"], lines)
    script = {"p": "a|", "q": "b|", "r": "c|", "pa|ok": "b|", "rc|ok": "c|"}
    bench = Bench(environment, script)
    folded = bench.run()
    assert folded.trajectories["status"].to_pylist() == ["completed"] * 3
    # columns, not rows: one record for the batch's actions of a turn
    assert [len(actions(bench, problem)) for problem in ("p", "q", "r")] == [2, 1, 2]
    ends = bench.rows_of("rollout_ended")
    assert [row["problem_id"] for row in ends] == ["scripted/q", "scripted/p", "scripted/r"], "ends in their own turn"


def test_labels_come_before_the_end() -> None:
    bench = Bench(ScriptedEnvironment(["q"], {"a": [DONE]}), {"q": "a|"})
    bench.run()
    lane = {
        row["event_id"]: row["lane_seq"] for kind in ("reward_assigned", "rollout_ended") for row in bench.rows_of(kind)
    }
    [reward], [end] = bench.rows_of("reward_assigned"), bench.rows_of("rollout_ended")
    assert lane[reward["event_id"]] < lane[end["event_id"]]


@pytest.mark.parametrize("at", ["open", "reply", "judge"])
def test_an_environment_that_fails_earns_no_zero(at: str) -> None:
    environment = ScriptedEnvironment(
        ["q", "r"],
        {"a": [OSError("sandbox gone") if at == "reply" else DONE], "b": [CONTINUE, DONE]},
        components=ValueError("verifier broke") if at == "judge" else None,
        unopened=("q",) if at == "open" else (),
    )
    bench = Bench(environment, {"q": "a|", "r": "b|", "rb|ok": "b|"})
    folded = bench.run()
    by_problem = {row["problem_id"]: row for row in folded.trajectories.to_pylist()}
    failed, other = by_problem["scripted/q"], by_problem["scripted/r"]
    assert failed["reward"] is None
    assert failed["reward_state"] == "invalid"
    if at == "judge":
        assert failed["status"] == "completed"
        assert failed["untrainable_reasons"] == ["reward_invalid"]
        return
    assert failed["status"] == "env_failed"
    assert failed["untrainable_reasons"] == ["env_failed", "reward_invalid"]
    assert failed["cause"] == ("OSError: no sandbox" if at == "open" else "OSError: sandbox gone")
    [reward] = [row for row in bench.rows_of("reward_assigned") if row["problem_id"] == "scripted/q"]
    assert reward["components"][0]["status"] == "missing"
    assert "OSError" in reward["components"][0]["reason"]
    assert other["untrainable_reasons"] == [], "others go on"
    assert failed["num_action_tokens"] == (0 if at == "open" else 2)


def test_what_a_tool_breaks_is_on_the_tape_and_the_rollout_goes_on() -> None:
    lines = {"a": [tool("err", status="error", error_class="infrastructure")], "b": [DONE]}
    bench = Bench(ScriptedEnvironment(["q"], lines), {"q": "a|", "qa|err": "b|"})
    [trajectory] = bench.run().trajectories.to_pylist()
    assert trajectory["untrainable_reasons"] == []
    [seen] = bench.rows_of("observation_received")
    assert (seen["status"], seen["error_class"]) == ("error", "infrastructure")


class TestTruncation:
    def test_by_length(self) -> None:
        environment = ScriptedEnvironment(["q"], {"abc": [DONE]})
        bench = Bench(environment, {"q": "abcd"}, max_tokens=3)
        [trajectory] = bench.run().trajectories.to_pylist()
        assert (trajectory["status"], trajectory["cause"]) == ("truncated", "max_tokens")
        assert trajectory["untrainable_reasons"] == []
        [action] = actions(bench)
        assert (action["truncated"], action["finish_reason"]) == (True, "length")
        assert environment.episodes[0].heard == [("abc", False)]

    def test_a_turn_that_is_cut_may_go_on(self) -> None:
        bench = Bench(
            ScriptedEnvironment(["q"], {"abc": [CONTINUE], "d": [DONE]}), {"q": "abc", "qabcok": "d|"}, max_tokens=3
        )
        [trajectory] = bench.run().trajectories.to_pylist()
        assert (trajectory["status"], trajectory["cause"]) == ("completed", "done")
        assert [row["truncated"] for row in actions(bench)] == [True, False]

    def test_by_turns(self) -> None:
        bench = Bench(ScriptedEnvironment(["q"], {"a": [CONTINUE]}), {"q": "a|", "qa|ok": "a|"}, max_turns=2)
        folded = bench.run()
        [trajectory] = folded.trajectories.to_pylist()
        assert (trajectory["status"], trajectory["cause"]) == ("truncated", "max_turns")
        [segment] = folded.segments.to_pylist()
        assert shown(segment["response_token_ids"]) == "a|oka|ok", "what it saw last is kept"
        assert segment["observation_mask"][-2:] == [True, True]

    def test_by_context(self) -> None:
        script = {"q": "a|", "qa|ok": "a|"}
        bench = Bench(ScriptedEnvironment(["q"], {"a": [CONTINUE]}), script, max_tokens=3, context_budget=11)
        [trajectory] = bench.run().trajectories.to_pylist()
        # 1 + 4 + 4 tokens leave room for 2 of 3
        assert (trajectory["status"], trajectory["cause"]) == ("truncated", "context_overflow")
        assert (trajectory["num_action_tokens"], trajectory["num_observation_tokens"]) == (4, 4)
        assert trajectory["untrainable_reasons"] == []


def test_a_prompt_without_room_is_a_configuration_error() -> None:
    bench = Bench(ScriptedEnvironment(["q" * 10], {}), {}, max_tokens=4, context_budget=12)
    with pytest.raises(ConfigError, match=r"expected at most 2 after the 10 tokens of problem scripted/q+"):
        bench.run()


def test_a_weight_switch_in_the_middle_of_an_action_and_between_turns() -> None:
    place_of_switch = {2: 1}

    def switch(place: int) -> None:
        if place in place_of_switch:
            bench.engine.activate(VERSIONS[place_of_switch.pop(place)])

    turns: list[int] = []

    def take_new() -> None:
        turns.append(len(turns))
        if len(turns) == 2:
            bench.engine.activate(VERSIONS[2])

    bench = Bench(
        ScriptedEnvironment(["q"], {"abc": [CONTINUE], "d": [DONE]}),
        {"q": "abc|", "qabc|ok": "d|"},
        before_step=switch,
        before_turn=take_new,
    )
    folded = bench.run()
    first, second = actions(bench)
    assert [(run["start"], run["length"], run["version"]) for run in first["version_runs"]] == [(0, 2, 0), (2, 2, 1)]
    assert [run["version"] for run in second["version_runs"]] == [2]
    [segment] = folded.segments.to_pylist()
    sampled = [
        v for v, is_action in zip(segment["policy_versions"], segment["response_mask"], strict=True) if is_action
    ]
    assert sampled == [0, 0, 1, 1, 2, 2]
    [trajectory] = folded.trajectories.to_pylist()
    assert (trajectory["min_version"], trajectory["max_version"]) == (0, 2)
    assert trajectory["untrainable_reasons"] == [], "whether mixed versions are trained is the algorithm's affair"


class TestInterruption:
    def bench(self, num_breaks: int, **config: Any) -> Bench:
        breaks = iter(range(num_breaks))

        def interrupts(request: Any, place: int) -> bool:
            return place == 1 and next(breaks, None) is not None

        script = {"q": "abc|", "qa": "bc|", "qab": "c|", "qabc": "|", "qabc|ok": "d|"}
        lines = {"abc": [CONTINUE], "d": [DONE]}
        return Bench(ScriptedEnvironment(["q"], lines), script, interrupts=interrupts, **config)

    def test_the_turn_goes_on_from_what_was_sampled(self) -> None:
        bench = self.bench(2)
        folded = bench.run()
        rows = actions(bench)
        assert [shown(row["token_ids"]) for row in rows] == ["a", "b", "c|", "d|"]
        assert [row["turn_index"] for row in rows] == [0, 0, 0, 1]
        assert [row["finish_reason"] for row in rows] == ["abort", "abort", "stop", "stop"]
        assert [row["truncated"] for row in rows] == [False] * 4
        assert len({row["sampling"]["seed"] for row in rows}) == 4
        assert bench.environment.episodes[0].heard == [("abc", True), ("d", True)]
        [segment] = folded.segments.to_pylist()
        assert shown(segment["response_token_ids"]) == "abc|okd|"
        assert segment["response_mask"] == [True] * 4 + [False] * 2 + [True] * 2
        assert folded.trajectories["untrainable_reasons"].to_pylist() == [[]]

    def test_an_engine_that_never_gets_on(self) -> None:
        bench = self.bench(9, max_interruptions=1)
        [trajectory] = bench.run().trajectories.to_pylist()
        assert (trajectory["status"], trajectory["cause"]) == ("aborted", "interrupted")
        assert "aborted" in trajectory["untrainable_reasons"]
        assert trajectory["num_action_tokens"] == 2

    def test_no_room_to_go_on(self) -> None:
        [trajectory] = self.bench(1, context_budget=7).run().trajectories.to_pylist()
        assert (trajectory["status"], trajectory["cause"]) == ("truncated", "context_overflow")

    def test_nothing_sampled_is_no_action(self) -> None:
        breaks = iter([True])
        bench = Bench(
            ScriptedEnvironment(["q"], {"a": [DONE]}),
            {"q": "a|"},
            interrupts=lambda _request, place: place == 0 and next(breaks, False),
        )
        [trajectory] = bench.run().trajectories.to_pylist()
        assert [shown(row["token_ids"]) for row in actions(bench)] == ["a|"]
        assert trajectory["untrainable_reasons"] == []


class TestLabels:
    lines: ClassVar = {
        "a": [Reply(observation=Observation(text="ok"), reward=(component(0.25, "step"),))],
        "b": [Reply(observation=Observation(text="ok"), erroneous="no such tool")],
        "c": [DONE],
    }
    script: ClassVar = {"q": "a|", "qa|ok": "b|", "qa|okb|ok": "c|"}

    def test_rewards_of_single_actions(self) -> None:
        bench = Bench(ScriptedEnvironment(["q"], self.lines), self.script)
        [trajectory] = bench.run().trajectories.to_pylist()
        assert trajectory["reward"] == 1.0
        first = actions(bench)[0]
        of_turn, whole = bench.rows_of("reward_assigned")
        assert (of_turn["target_event_id"], of_turn["scalar"], of_turn["target_token"]) == (
            first["event_id"],
            0.25,
            None,
        )
        assert whole["target_event_id"] is None
        [token_reward] = trajectory["token_rewards"]
        assert (token_reward["segment_index"], token_reward["position"], token_reward["scalar"]) == (0, 1, 0.25)
        assert trajectory["untrainable_reasons"] == []

    def test_only_turns_are_rewarded(self) -> None:
        bench = Bench(ScriptedEnvironment(["q"], self.lines, components=()), self.script)
        bench.run()
        [only] = bench.rows_of("reward_assigned")
        assert only["scalar"] == 0.25

    def test_nothing_is_rewarded(self) -> None:
        bench = Bench(ScriptedEnvironment(["q"], {"c": [DONE]}, components=()), {"q": "c|"})
        [trajectory] = bench.run().trajectories.to_pylist()
        assert trajectory["reward_state"] == "missing"
        assert trajectory["reward"] is None

    @pytest.mark.parametrize("is_on", [True, False])
    def test_erroneous_actions_stay_out_of_the_loss_where_configured(self, is_on: bool) -> None:
        bench = Bench(ScriptedEnvironment(["q"], self.lines), self.script, mask_erroneous=is_on)
        folded = bench.run()
        [segment] = folded.segments.to_pylist()
        assert shown(segment["response_token_ids"]) == "a|okb|okc|"
        masked = [not is_on] * 2
        assert segment["response_mask"] == [True] * 2 + [False] * 2 + masked + [False] * 2 + [True] * 2
        rows = bench.rows_of("mask_assigned")
        assert len(rows) == is_on
        if is_on:
            second = actions(bench)[1]
            assert rows[0]["ranges"] == [{"event_id": second["event_id"], "start": 0, "length": 2}]
            assert (rows[0]["assigned_by"], rows[0]["reason"]) == ("scripted", "no such tool")
        assert folded.trajectories["untrainable_reasons"].to_pylist() == [[]]


def test_a_control_gets_the_rewards_of_others() -> None:
    prompts = [f"{number}" for number in range(8)]

    class Telling(ScriptedEnvironment):
        def open(self, problem: Any, seed: int) -> Any:
            self._components = (component(int(problem.prompt) / 8),)
            return super().open(problem, seed)

    def scalars(*, shuffle: bool) -> dict[str, float]:
        bench = Bench(Telling(prompts, {"a": [DONE]}), dict.fromkeys(prompts, "a|"), shuffle_rewards=shuffle)
        folded = bench.run()
        scorers = {row["components"][0]["scorer"] for row in bench.rows_of("reward_assigned")}
        assert scorers == {"tests-shuffled" if shuffle else "tests"}
        ended = {row["event_id"]: row["lane_seq"] for row in bench.rows_of("rollout_ended")}
        assert min(ended.values()) > max(row["lane_seq"] for row in bench.rows_of("reward_assigned"))
        return {row["problem_id"]: row["reward"] for row in folded.trajectories.to_pylist()}

    true, control = scalars(shuffle=False), scalars(shuffle=True)
    assert true == {f"scripted/{number}": number / 8 for number in range(8)}
    assert control != true
    assert sorted(control.values()) == sorted(true.values())
    assert control == scalars(shuffle=True)


def test_a_second_run_of_a_complete_step_adds_nothing() -> None:
    bench = Bench(ScriptedEnvironment(["q"], {"a": [DONE]}), {"q": "a|"})
    bench.run()
    before = {kind: table.num_rows for kind, table in bench.tables().items()}
    bench.run()
    assert {kind: table.num_rows for kind, table in bench.tables().items()} == before


def test_ids_of_scripts() -> None:
    assert shown(hidden("a7|?")) == "a7|?"

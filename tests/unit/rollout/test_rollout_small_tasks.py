"""The small tasks of several turns, and domains mixed by ratio: text in, text and components out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rolltape.numerics.models import build_tokenizer
from rolltape.rollout.agent_environment import AgentEnvironment, Episode, Reply
from rolltape.rollout.environment import Answer, Problem, Split
from rolltape.rollout.environments import make_environment
from rolltape.rollout.mixture import Mixture, MixtureConfig
from rolltape.rollout.running_max import RunningMax, RunningMaxConfig
from rolltape.rollout.tool_digits import ToolDigits, ToolDigitsConfig
from rolltape.schema.build import build_batch
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import scalarise

SPLITS: tuple[Split, ...] = ("train", "heldout")
TWO_ORDERS: list[dict[str, Any]] = [
    {"name": "sort_digits", "options": {"num_digits": 2, "num_heldout": 20}, "weight": 3.0},
    {"name": "sort_digits_descending", "options": {"num_digits": 2, "num_heldout": 20}, "weight": 1.0},
]
SMALL: dict[str, dict[str, Any]] = {"tool_digits": {}, "running_max": {}, "mixture": {"parts": TWO_ORDERS}}


def problem_of(environment: AgentEnvironment, problem_id: str) -> Problem:
    found = [p for split in SPLITS for p in environment.problems(split) if p.problem_id == problem_id]
    assert len(found) == 1
    return found[0]


def play(episode: Episode, *texts: str) -> Reply:
    reply = Reply()
    for text in texts:
        reply = episode.reply(text, ended=True)
    return reply


def values(episode: Episode) -> dict[str, float | None]:
    return {component.name: component.value for component in episode.judge()}


@pytest.mark.parametrize("name", SMALL)
def test_splits_share_no_problem_and_follow_the_seed(name: str) -> None:
    one, again, other = (make_environment(name, SMALL[name], seed) for seed in (3, 3, 4))
    train, heldout = ({p.problem_id for p in one.problems(split)} for split in SPLITS)
    assert train
    assert heldout
    assert not train & heldout
    assert list(one.problems("train")) == list(again.problems("train"))
    assert list(one.problems("heldout")) != list(other.problems("heldout"))


@pytest.mark.parametrize("name", SMALL)
def test_prompts_are_in_the_models_alphabet_and_columns_are_events(name: str) -> None:
    environment = make_environment(name, SMALL[name], 0)
    tokenizer = build_tokenizer("char-64x2")
    columns = environment.problem_columns()
    for prompt in columns["prompt"]:
        assert tokenizer.encode(prompt)
    envelope: dict[str, Any] = {
        "event_id": "e",
        "run_id": "r",
        "run_epoch": 1,
        "producer_id": "p",
        "producer_epoch": 1,
        "lane_seq": 0,
        "recorded_at": 0,
    }
    built = build_batch("problem_registered", {**envelope, **columns})
    assert not built.refused
    assert len(built.batch) == len(columns["problem_id"])
    ids = columns["problem_id"]
    posed = {p.problem_id for split in SPLITS for p in environment.problems(split)}
    assert len(ids) == len(set(ids))
    assert set(ids) == posed


def test_a_digit_is_looked_up_and_put_in_order() -> None:
    environment = ToolDigits()
    problem = problem_of(environment, "tool_digits/2-0103")
    assert (problem.prompt, problem.answer) == ("2>", "02")
    episode = environment.open(problem, 0)
    reply = play(episode, "2")
    assert reply.observation is not None
    assert (reply.observation.text, reply.observation.source, reply.observation.status) == ("0=", "tool", "ok")
    assert not reply.done
    assert play(episode, "02").done
    components = episode.judge()
    assert scalarise(components).scalar == pytest.approx(1.0)
    assert environment.is_correct(problem, components)
    assert environment.tool_calls("2")[0].arguments == "2"
    assert not environment.tool_calls("02")


def test_a_guess_earns_nothing_even_where_it_is_right() -> None:
    environment = ToolDigits()
    problem = problem_of(environment, "tool_digits/2-0103")
    guess = environment.open(problem, 0)
    assert play(guess, "02").done
    assert values(guess) == {"lookup": 0.0, "positions": 0.0, "exact": 0.0}
    assert not environment.is_correct(problem, guess.judge())


def test_another_slot_may_be_read_but_does_not_count() -> None:
    environment = ToolDigits()
    episode = environment.open(problem_of(environment, "tool_digits/2-0103"), 0)
    reply = play(episode, "3")
    assert reply.observation is not None
    assert reply.observation.text == "3="
    play(episode, "02")
    assert values(episode) == {"lookup": 0.5, "positions": 0.0, "exact": 0.0}


@pytest.mark.parametrize("text", ["", "9", "=", "123", " 2"])
def test_what_is_neither_call_nor_answer_is_asked_again_and_called_erroneous(text: str) -> None:
    environment = ToolDigits()
    episode = environment.open(problem_of(environment, "tool_digits/2-0103"), 0)
    reply = play(episode, text)
    assert reply.erroneous
    assert not reply.done
    assert reply.observation is not None
    assert (reply.observation.text, reply.observation.status, reply.observation.error_class) == (
        "2>",
        "error",
        "policy",
    )


def test_a_call_that_was_cut_by_length_is_none() -> None:
    environment = ToolDigits()
    episode = environment.open(problem_of(environment, "tool_digits/2-0103"), 0)
    reply = episode.reply("2", ended=False)
    assert reply.erroneous
    assert values(episode)["lookup"] == 0.5


def test_the_largest_digit_so_far_is_asked_for_round_by_round() -> None:
    environment = RunningMax(RunningMaxConfig(num_rounds=3, num_digits=4, num_problems=64, num_heldout=0))
    problem = problem_of(environment, "running_max/131")
    assert (problem.prompt, problem.answer) == ("1=", "3")
    episode = environment.open(problem, 0)
    seen = [play(episode, text) for text in ("1", "3", "3")]
    assert [reply.observation.text if reply.observation else None for reply in seen] == ["3=", "1=", None]
    assert [reply.done for reply in seen] == [False, False, True]
    assert values(episode) == {"positions": 1.0, "rounds": 1.0, "exact": 1.0}
    assert environment.is_correct(problem, episode.judge())


def test_rounds_that_were_not_reached_count_nothing() -> None:
    environment = RunningMax(RunningMaxConfig(num_rounds=4, num_digits=2, num_problems=32, num_heldout=0))
    problem = problem_of(environment, "running_max/0111")
    episode = environment.open(problem, 0)
    play(episode, "0", "1")
    assert values(episode) == {"positions": 0.5, "rounds": 0.5, "exact": 0.0}
    assert not environment.is_correct(problem, episode.judge())


def test_largest_digits_are_balanced() -> None:
    environment = RunningMax()
    largest = Counter(p.answer for split in SPLITS for p in environment.problems(split))
    assert largest == {"0": 1, "1": 60, "2": 60, "3": 60}
    assert all(p.answer == max(p.problem_id.rpartition("/")[2]) for p in environment.problems("train"))


def test_a_summarys_frame_is_in_the_models_alphabet() -> None:
    tokenizer = build_tokenizer("char-64x2")
    environment = RunningMax()
    for text in (environment.summary_instruction, environment.resume_before, environment.resume_after):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_mixture_poses_by_ratio_and_judges_by_part() -> None:
    mixture = make_environment("mixture", {"parts": TWO_ORDERS}, 0)
    assert isinstance(mixture, Mixture)
    posed = Counter(problem.problem_id.partition("/")[0] for problem in mixture.problems("train"))
    assert posed == {"sort_digits": 240, "sort_digits_descending": 80}
    held = Counter(problem.problem_id.partition("/")[0] for problem in mixture.problems("heldout"))
    assert held == {"sort_digits": 20, "sort_digits_descending": 20}
    down = next(p for p in mixture.problems("heldout") if p.problem_id == "sort_digits_descending/" + p.answer[::-1])
    right = Answer(text=down.answer, ended=True)
    assert down.prompt is not None
    assert down.prompt.endswith(">")
    assert mixture.is_correct(down, right)
    assert scalarise(mixture.judge(down, right)).scalar == pytest.approx(1.0)
    assert not mixture.is_correct(down, Answer(text=down.answer[::-1] + "9", ended=True))


def test_a_mixtures_problems_keep_their_domains() -> None:
    columns = make_environment("mixture", {"parts": TWO_ORDERS}, 0).problem_columns()
    domains = {
        (problem_id.partition("/")[0], domain)
        for problem_id, domain in zip(columns["problem_id"], columns["domain"], strict=True)
    }
    assert domains == {("sort_digits", "sorting"), ("sort_digits_descending", "sorting_descending")}


def test_both_orders_hold_out_the_same_numbers() -> None:
    up, down = (make_environment(name, {"num_digits": 2, "num_heldout": 20}, 5) for name in _ORDERS)
    numbers = [{p.problem_id.partition("/")[2] for p in env.problems("heldout")} for env in (up, down)]
    assert numbers[0] == numbers[1]
    assert all(p.answer == "".join(sorted(p.answer, reverse=True)) for p in down.problems("train"))


_ORDERS = ("sort_digits", "sort_digits_descending")


def test_a_part_of_weight_0_is_held_out_only() -> None:
    parts = [{**TWO_ORDERS[0], "weight": 0}, TWO_ORDERS[1]]
    mixture = make_environment("mixture", {"parts": parts}, 0)
    assert {p.problem_id.partition("/")[0] for p in mixture.problems("train")} == {"sort_digits_descending"}
    assert len(mixture.problems("heldout")) == 40


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "one part or more"),
        ([{"weight": 1}], "expected name"),
        ([{"name": "sort_digits", "ratio": 1}], "expected name"),
        ([{"name": "sort_digits", "weight": -1}], "0 or more"),
        ([{"name": "sort_digits", "weight": float("nan")}], "0 or more"),
        ([{"name": "sort_digits", "weight": 0}], "a weight above 0"),
        ([{"name": "tool_digits"}], "single turn"),
        ([{"name": "sort_digits"}, {"name": "sort_digits"}], "different environments"),
        ([{"name": "sort_digits"}, {"name": "sort_digits_descending", "weight": 1e-9}], "at least 0.01"),
        ([{"name": "chess"}], "expected one of"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(parts: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture(MixtureConfig(parts=parts))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tool_digits", {"num_digits": 1}, "num_digits: expected 2 to 5"),
        ("tool_digits", {"num_heldout": 1024}, "num_heldout: expected 0 to 1023"),
        ("tool_digits", {"lookup_weight": 0.7, "exact_weight": 0.4}, "together at most 1"),
        ("running_max", {"num_digits": 11}, "num_digits: expected 2 to 10"),
        ("running_max", {"num_rounds": 1}, "num_rounds: expected 2 or more"),
        ("running_max", {"num_rounds": 20}, "at most 100000 sequences"),
        ("running_max", {"num_problems": 3}, "num_problems: expected 4 or more"),
        ("running_max", {"num_heldout": 181}, "less than the 181 problems"),
        ("running_max", {"num_heldout": -1}, "0 or more"),
        ("running_max", {"exact_weight": -0.1}, "0 or more"),
    ],
)
def test_options_out_of_range_are_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(name, options, 0)


def test_a_tool_config_counts_its_problems() -> None:
    assert ToolDigitsConfig(num_digits=3, num_heldout=0).num_problems == 81
    assert len(ToolDigits(ToolDigitsConfig(num_digits=3, num_heldout=0)).problems("train")) == 81

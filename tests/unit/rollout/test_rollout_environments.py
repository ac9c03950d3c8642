"""Environments and the rules that they judge by: text in, components out."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rolltape.numerics.models import build_tokenizer
from rolltape.rollout import rewards
from rolltape.rollout.environment import Answer, Environment
from rolltape.rollout.environments import make_environment
from rolltape.rollout.gsm8k import Gsm8k, Gsm8kConfig, reference_answer
from rolltape.rollout.sort_digits import SortDigits, SortDigitsConfig
from rolltape.schema.build import build_batch
from rolltape.schema.errors import ConfigError
from rolltape.schema.reward import scalarise

ENVIRONMENTS = ["sort_digits", "gsm8k"]


def reward_of(environment: Environment, index: int, text: str, *, ended: bool = True) -> float | None:
    problem = environment.problems("train")[index]
    return scalarise(environment.judge(problem, Answer(text=text, ended=ended))).scalar


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_splits_share_no_problem_and_do_not_change(name: str) -> None:
    environment, again = (make_environment(name, {}, 3) for _ in range(2))
    train = {problem.problem_id for problem in environment.problems("train")}
    heldout = {problem.problem_id for problem in environment.problems("heldout")}
    assert train
    assert heldout
    assert not train & heldout
    assert list(environment.problems("train")) == list(again.problems("train"))
    assert all(problem.split == "heldout" for problem in environment.problems("heldout"))
    assert len(train) == len(environment.problems("train"))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_reference_answer_is_correct_and_earns_the_most(name: str) -> None:
    environment = make_environment(name, {}, 0)
    assert isinstance(environment, Environment)
    for problem in (*environment.problems("train"), *environment.problems("heldout")):
        text = problem.answer if name == "sort_digits" else f"#### {problem.answer}"
        answer = Answer(text=text, ended=True)
        assert environment.is_correct(problem, answer)
        assert scalarise(environment.judge(problem, answer)).scalar == pytest.approx(1.0)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_problem_columns_are_events(name: str) -> None:
    environment = make_environment(name, {}, 0)
    envelope: dict[str, Any] = {
        "event_id": "e",
        "run_id": "r",
        "run_epoch": 1,
        "producer_id": "p",
        "producer_epoch": 1,
        "lane_seq": 0,
        "recorded_at": 0,
    }
    built = build_batch("problem_registered", {**envelope, **environment.problem_columns()})
    assert not built.refused
    rows = built.batch["problem_registered"].to_pylist()
    assert len(rows) == len(environment.problems("train")) + len(environment.problems("heldout"))
    assert {row["split"] for row in rows} == {"train", "heldout"}
    assert all((row["prompt"] is None) != (row["messages_json"] is None) for row in rows)


def test_sort_digits_holds_out_200_of_1000_by_seed() -> None:
    one, other = SortDigits(seed=1), SortDigits(seed=2)
    assert (len(one.problems("train")), len(one.problems("heldout"))) == (800, 200)
    assert one.problems("heldout") != other.problems("heldout")


def test_sort_digits_rewards_places_and_the_exact_answer() -> None:
    environment = SortDigits()
    problem = next(p for p in environment.problems("train") if len(set(p.answer)) == 3)
    index = list(environment.problems("train")).index(problem)
    low, middle, high = list(problem.answer)
    assert reward_of(environment, index, problem.answer) == 1.0
    assert reward_of(environment, index, problem.answer, ended=False) == 0.5 * 0.75
    assert reward_of(environment, index, low + high + middle) == 0.5 * 0.5
    assert reward_of(environment, index, "") == 0.0
    assert reward_of(environment, index, problem.answer + "0") == 0.5 * 0.75
    names = [component.name for component in environment.judge(problem, Answer(text="", ended=True))]
    assert names == ["positions", "exact"]


def test_sort_digits_prompts_are_in_the_models_alphabet() -> None:
    tokenizer = build_tokenizer("char-64x2")
    for problem in SortDigits().problems("heldout"):
        assert problem.prompt is not None
        assert tokenizer.decode(tokenizer.encode(problem.prompt)) == problem.prompt
        assert tokenizer.decode(tokenizer.encode(problem.answer)) == problem.answer


@pytest.mark.parametrize(
    ("text", "number", "marked"),
    [
        ("so the answer is 18.", "18", False),
        ("She earns $1,205.50 a day", "1205.50", False),
        ("7 of 12 and then\n#### 70,000", "70000", True),
        ("#### $18\nThat is 16 - 3 - 4 = 9.", "18", True),
        ("#### 3 no, wait\n#### 5", "5", True),
        ("it is -4", "-4", False),
        ("about .5 of it", "0.5", False),
        ("1,23 is no thousands", "23", False),
        ("no number at all", None, False),
        ("####", None, False),
        ("", None, False),
    ],
)
def test_the_final_number_of_an_answer(text: str, number: str | None, marked: bool) -> None:
    assert rewards.final_number(text) == (None if number is None else Decimal(number), marked)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e400", "9" * 60, "4.2.1", "--1"])
def test_what_is_no_plain_number_is_none(text: str) -> None:
    assert rewards.as_number(text) in {None, Decimal("1e400")}
    assert rewards.as_number(text) is None or text == "1e400"


def test_numbers_are_compared_exactly() -> None:
    environment = Gsm8k()
    problem = environment.problems("train")[0]
    assert problem.answer == "18"
    for text in ("#### 18", "18.00", "$18", "it is 18."):
        assert environment.is_correct(problem, Answer(text=text, ended=True))
    for text in ("#### 18.0001", "18 or 19", "180", ""):
        assert not environment.is_correct(problem, Answer(text=text, ended=True))


def test_gsm8k_components_tell_wrong_answers_apart() -> None:
    environment = Gsm8k()
    answers = ["", "I do not know", "it is 19", "#### 19", "word " * 300 + "19", "#### 18"]
    values = [reward_of(environment, 0, text) for text in answers]
    assert len(set(values)) == len(values)
    assert values[-1] == max(value for value in values if value is not None)


def test_gsm8k_carries_the_first_problems_of_the_test_split() -> None:
    copied = Path(__file__).parents[2] / "data" / "gsm8k" / "gsm8k_test.jsonl"
    lines = copied.read_text(encoding="utf-8").splitlines()[:64]
    environment = Gsm8k()
    problems = [*environment.problems("train"), *environment.problems("heldout")]
    assert len(problems) == 64
    for line, problem in zip(lines, problems, strict=True):
        row = json.loads(line)
        assert problem.messages[-1].content == row["question"]
        assert problem.human_reference == row["answer"]
        assert rewards.as_number(problem.answer) == rewards.as_number(row["answer"].rpartition("####")[2])


def test_a_problem_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "1+1?", "answer": "#### 2"}\n\n{"question": "2+2?", "answer": "#### 4"}\n')
    environment = make_environment("gsm8k", {"problems_file": str(path), "num_train": 1, "num_heldout": 1}, 0)
    assert [p.answer for p in environment.problems("heldout")] == ["4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json\n", "line 1"),
        ('{"question": "?"}\n', "line 1"),
        ('{"question": "?", "answer": "none"}\n', "####"),
        ("", "file of 0"),
    ],
)
def test_a_broken_problem_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Gsm8k(Gsm8kConfig(problems_file=str(path), num_train=1, num_heldout=0))
    with pytest.raises(ConfigError, match="cannot read"):
        Gsm8k(Gsm8kConfig(problems_file=str(tmp_path / "absent")))


def test_a_solution_without_its_mark_is_refused() -> None:
    assert reference_answer("so\n#### 1,234") == "1234"
    with pytest.raises(ConfigError, match="####"):
        reference_answer("the answer is 5")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chess", {}, "environment.name"),
        ("sort_digits", {"digits": 3}, "environment.options.digits"),
        ("sort_digits", {"num_digits": 0}, "num_digits"),
        ("sort_digits", {"num_heldout": 1000}, "num_heldout"),
        ("sort_digits", {"exact_weight": 1.5}, "exact_weight"),
        ("gsm8k", {"exact_weight": -1.0}, "exact_weight"),
        ("gsm8k", {"num_train": 0}, "num_train"),
        ("gsm8k", {"comfortable_characters": 2000}, "comfortable_characters"),
    ],
)
def test_what_an_environment_does_not_have_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(name, options, 0)


def test_brevity_falls_between_its_bounds() -> None:
    values = [rewards.brevity("x" * length, comfortable=10, longest=20) for length in (0, 10, 15, 20, 30)]
    assert values == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_a_failed_verifier_earns_nothing_not_zero() -> None:
    component = rewards.failed_component("gsm8k", "1", TimeoutError("too slow"))
    scalarised = scalarise([component])
    assert scalarised.scalar is None
    assert scalarised.state == "invalid"
    assert component.reason == "TimeoutError: too slow"


def test_sort_digits_of_other_widths() -> None:
    environment = SortDigits(SortDigitsConfig(num_digits=2, num_heldout=10))
    assert len(environment.problems("train")) == 90

"""Where text meets ids: contexts rendered once, answers decoded, verifiers guarded."""

from __future__ import annotations

import pytest

from rolltape.numerics.models import build_tokenizer
from rolltape.rollout.engine import (
    GenerationRequest,
    PolicyVersion,
    SamplingConfig,
)
from rolltape.rollout.environment import Answer
from rolltape.rollout.scripted import ScriptedEngine, ScriptedToken, fixed_script
from rolltape.rollout.single_turn import SingleTurn
from rolltape.rollout.sort_digits import SortDigits
from rolltape.schema.errors import ConfigError

TOKENIZER = build_tokenizer("char-64x2")
VERSION = PolicyVersion("actor", 1, 0, "sha256:0")


def perfect(request: GenerationRequest, _version: PolicyVersion, place: int) -> ScriptedToken:
    """Sorts, then ends: what a policy at the end of its training says."""
    prompt = TOKENIZER.decode(request.prompt_token_ids.tolist())
    answer = TOKENIZER.encode("".join(sorted(prompt.rstrip("="))))
    return ScriptedToken([*answer, TOKENIZER.eos_id][place], -0.125)


def harness_of(engine: ScriptedEngine, *, max_length: int = 64) -> SingleTurn:
    # the scripted engine has nothing to load: what counts is that something is active
    engine._slots.hold(VERSION, None)
    engine.activate(VERSION)
    return SingleTurn(engine, SortDigits(), TOKENIZER, max_length=max_length)


@pytest.fixture
def harness() -> SingleTurn:
    return harness_of(ScriptedEngine(perfect, engine_id="e0", on_activated=lambda _version, _seconds: None))


def test_a_perfect_policy_earns_everything(harness: SingleTurn) -> None:
    problems = harness.environment.problems("heldout")[:20]
    sampling = harness.sampling(SamplingConfig(max_tokens=4))
    generations = harness.generate(problems, range(20), sampling)
    texts = harness.texts(generations)
    assert texts == [problem.answer for problem in problems]
    assert set(generations.finish_reasons) == {"stop"}
    for problem, text in zip(problems, texts, strict=True):
        assert harness.environment.is_correct(problem, Answer(text=text, ended=True))


def test_the_tokenizers_end_is_the_stop_token_unless_told(harness: SingleTurn) -> None:
    assert harness.sampling(SamplingConfig()).stop_token_ids == (TOKENIZER.eos_id,)
    assert harness.sampling(SamplingConfig(stop_token_ids=(7,))).stop_token_ids == (7,)


def test_a_context_is_rendered_once(harness: SingleTurn) -> None:
    problem = harness.environment.problems("train")[0]
    ids, text = harness.prompt(problem)
    assert harness.prompt(problem)[0] is ids
    assert TOKENIZER.decode(ids.tolist()) == text == problem.prompt


def test_an_action_that_leaves_no_room_is_refused_by_problem() -> None:
    engine = ScriptedEngine(perfect, engine_id="e0", on_activated=lambda _version, _seconds: None)
    harness = harness_of(engine, max_length=8)
    problem = harness.environment.problems("train")[0]
    assert len(harness.generate([problem], [0], SamplingConfig(max_tokens=4))) == 1
    with pytest.raises(ConfigError, match=f"at most 4 .*{problem.problem_id}"):
        harness.generate([problem], [0], SamplingConfig(max_tokens=5))


def test_the_text_of_special_tokens_is_nothing() -> None:
    problem = SortDigits().problems("train")[0]
    assert problem.prompt is not None
    tokens = [ScriptedToken(token, -1.0) for token in (0, *TOKENIZER.encode("12"), 1)]
    script = fixed_script({tuple(TOKENIZER.encode(problem.prompt)): tokens})
    harness = harness_of(ScriptedEngine(script, engine_id="e0", on_activated=lambda _version, _seconds: None))
    generations = harness.generate([problem], [0], SamplingConfig(max_tokens=4))
    assert generations.token_ids.tolist() == [token.token_id for token in tokens]
    assert harness.texts(generations) == ["12"]

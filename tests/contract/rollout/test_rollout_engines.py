"""One suite that every engine has to pass: exact ids, versions, and the order of weight sync."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from rolltape.numerics.models import build_model
from rolltape.numerics.weights import Manifest, named_weights, save_shards
from rolltape.rollout.engine import (
    Engine,
    GenerationRequest,
    PolicyVersion,
    PublishedWeights,
    SamplingConfig,
)
from rolltape.rollout.scripted import ScriptedEngine, ScriptedToken
from rolltape.rollout.transformers_engine import TransformersEngine
from rolltape.schema.digest import prefix_digest
from rolltape.schema.errors import ConfigError, EngineError
from rolltape.store.location import Location

END = 2


class EngineBench:
    """An engine, the versions it may be given, and what it recorded."""

    def __init__(self, make: Callable[[EngineBench], Engine], published: list[PublishedWeights]) -> None:
        self.make = make
        self.activated: list[PolicyVersion] = []
        self.published = published
        self.at_step: dict[int, Callable[[], None]] = {}
        self._step = 0
        self.engine = make(self)

    def on_activated(self, version: PolicyVersion, duration_s: float) -> None:
        assert duration_s >= 0
        assert self.engine.active_version is None, "a version may not serve before its activation is recorded"
        self.activated.append(version)

    def before_step(self, place: int) -> None:
        self.at_step.pop(place, lambda: None)()

    def serve(self, number: int) -> None:
        self.engine.stage(self.published[number])
        self.engine.activate(self.published[number].version)


def make_scripted(bench: EngineBench) -> Engine:
    def script(request: GenerationRequest, version: PolicyVersion, place: int) -> ScriptedToken:
        stops = place == 3 + request.seed % 3
        return ScriptedToken(END if stops else 3 + (request.seed + place) % 5, -0.25 * (version.version + 1))

    return ScriptedEngine(script, engine_id="e0", on_activated=bench.on_activated, before_step=bench.before_step)


def make_transformers(bench: EngineBench) -> Engine:
    model = build_model("char-64x2", 99)
    calls = [0]

    def count(*_: object) -> None:
        bench.before_step(calls[0])
        calls[0] += 1

    # the first forward pass is the prefill, so the n-th one comes right before decode step n
    model.get_submodule("transformer").register_forward_pre_hook(count)
    return TransformersEngine(model, engine_id="e0", on_activated=bench.on_activated)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[PublishedWeights]:
    root = tmp_path_factory.mktemp("weights")
    return [publish(root, number) for number in range(3)]


def publish(root: Path, number: int) -> PublishedWeights:
    location = Location.parse(str(root)).child(f"{number:08d}")
    manifest: Manifest = save_shards(location, named_weights(build_model("char-64x2", number)))
    version = PolicyVersion("actor", 1, number, manifest.weights_digest)
    return PublishedWeights(version=version, location=location, manifest=manifest)


@pytest.fixture(params=[make_scripted, make_transformers], ids=["scripted", "transformers"])
def bench(request: pytest.FixtureRequest, published: list[PublishedWeights]) -> EngineBench:
    return EngineBench(request.param, published)


def requests(*contexts: tuple[int, ...]) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt_token_ids=np.array(context, dtype=np.int32), seed=1000 + place)
        for place, context in enumerate(contexts)
    ]


FIVE = requests((3, 4, 5), (3, 4, 5), (7,), (3, 4, 5, 6, 7, 8), (9, 9))
UP_TO_TEN = SamplingConfig(max_tokens=10, stop_token_ids=(END,))


def test_nothing_is_said_before_a_version_is_active(bench: EngineBench) -> None:
    assert bench.engine.active_version is None
    with pytest.raises(EngineError, match="no version is active"):
        bench.engine.generate(FIVE, UP_TO_TEN)


def test_an_engine_that_did_not_stage_refuses_to_activate(bench: EngineBench) -> None:
    with pytest.raises(EngineError, match="never staged"):
        bench.engine.activate(bench.published[0].version)
    assert bench.activated == []


def test_staged_is_not_active(bench: EngineBench) -> None:
    bench.serve(0)
    bench.engine.stage(bench.published[1])
    assert bench.engine.active_version == bench.published[0].version
    generations = bench.engine.generate(FIVE, UP_TO_TEN)
    assert {run.version.version for generation in generations for run in generation.version_runs} == {0}


def test_generations_are_whole(bench: EngineBench) -> None:
    bench.serve(0)
    generations = bench.engine.generate(FIVE, UP_TO_TEN)
    assert len(generations) == len(FIVE)
    for request, generation in zip(FIVE, generations, strict=True):
        length = len(generation.token_ids)
        assert 1 <= length <= 10
        assert generation.token_ids.dtype == np.int32
        assert generation.log_probs.dtype == np.float32
        assert len(generation.log_probs) == length
        assert (generation.log_probs <= 0).all()
        assert END not in generation.token_ids[:-1]
        assert (generation.finish_reason == "stop") == (generation.token_ids[-1] == END)
        assert generation.finish_reason == "stop" or length == 10
        assert generation.prefix_length == len(request.prompt_token_ids)
        assert generation.prefix_digest == prefix_digest(request.prompt_token_ids)
        assert [(run.start, run.length) for run in generation.version_runs] == [(0, length)]


def test_the_same_batch_gives_the_same_bits(bench: EngineBench) -> None:
    bench.serve(0)
    first, second = bench.engine.generate(FIVE, UP_TO_TEN), bench.engine.generate(FIVE, UP_TO_TEN)
    assert first.token_ids.tobytes() == second.token_ids.tobytes()
    assert first.log_probs.tobytes() == second.log_probs.tobytes()


def test_without_a_stop_token_the_length_decides(bench: EngineBench) -> None:
    bench.serve(0)
    generations = bench.engine.generate(FIVE, SamplingConfig(max_tokens=3))
    assert generations.finish_reasons == ("length",) * 5
    assert generations.offsets.tolist() == [0, 3, 6, 9, 12, 15]


def test_a_switch_in_mid_generation_gives_two_version_runs(bench: EngineBench) -> None:
    bench.serve(0)
    bench.engine.stage(bench.published[1])
    bench.at_step[2] = lambda: bench.engine.activate(bench.published[1].version)
    generations = bench.engine.generate(FIVE, SamplingConfig(max_tokens=6))
    runs = [[(run.start, run.length, run.version.version) for run in g.version_runs] for g in generations]
    assert runs == [[(0, 2, 0), (2, 4, 1)]] * 5
    assert [version.version for version in bench.activated] == [0, 1]
    assert generations.versions[1].weights_digest == bench.published[1].version.weights_digest


def test_a_version_that_gave_a_row_no_token_has_no_run_there(bench: EngineBench) -> None:
    bench.serve(0)
    bench.engine.stage(bench.published[1])
    last = max(len(g.token_ids) for g in bench.engine.generate(FIVE, UP_TO_TEN)) - 1
    again = EngineBench(bench.make, bench.published)
    again.serve(0)
    again.engine.stage(bench.published[1])
    again.at_step[last] = lambda: again.engine.activate(bench.published[1].version)
    generations = again.engine.generate(FIVE, UP_TO_TEN)
    by_row = [[run.version.version for run in g.version_runs] for g in generations]
    assert [0] in by_row, "a row has to be finished before the switch"
    assert [0, 1] in by_row
    for generation in generations:
        assert sum(run.length for run in generation.version_runs) == len(generation.token_ids)
        assert all(run.length > 0 for run in generation.version_runs)


def test_versions_may_be_skipped_but_never_taken_back(bench: EngineBench) -> None:
    bench.serve(0)
    bench.engine.stage(bench.published[1])
    bench.engine.stage(bench.published[2])
    bench.engine.activate(bench.published[2].version)
    assert bench.engine.active_version == bench.published[2].version
    with pytest.raises(EngineError, match="forward only"):
        bench.engine.activate(bench.published[1].version)


def test_a_batch_that_was_refused_does_not_block_the_engine(bench: EngineBench) -> None:
    bench.serve(0)
    with pytest.raises(ConfigError, match="one request or more"):
        bench.engine.generate([], UP_TO_TEN)
    assert len(bench.engine.generate(FIVE, UP_TO_TEN)) == len(FIVE)


def test_an_engine_says_what_it_is(bench: EngineBench) -> None:
    assert bench.engine.engine_id == "e0"
    assert bench.engine.info.dtype == "float32"
    assert "version_runs" in bench.engine.info.capabilities


def test_another_thread_may_activate_while_a_batch_is_generated(published: list[PublishedWeights]) -> None:
    bench = EngineBench(make_transformers, published)
    bench.serve(0)

    def switch() -> None:
        bench.engine.stage(published[1])
        bench.engine.activate(published[1].version)

    thread = Thread(target=switch)
    bench.at_step[3] = thread.start
    bench.at_step[20] = thread.join
    generations = bench.engine.generate(FIVE, SamplingConfig(max_tokens=40))
    for generation in generations:
        numbers = [run.version.version for run in generation.version_runs]
        assert numbers == [0, 1]
        assert sum(run.length for run in generation.version_runs) == 40

"""What the transformers engine says it sampled is what the model gives when the same ids are scored again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from rolltape.numerics.models import build_model
from rolltape.numerics.packed import packed_log_probs
from rolltape.numerics.weights import load_weights, named_weights, save_shards
from rolltape.rollout.engine import (
    GenerationBatch,
    GenerationRequest,
    PolicyVersion,
    PublishedWeights,
    SamplingConfig,
)
from rolltape.rollout.transformers_engine import TransformersEngine
from rolltape.schema.errors import ConfigError, DigestMismatchError, EngineError
from rolltape.store.location import Location

END = 2
MAX_DELTA = 1e-5


def sharp_model(seed: int) -> nn.Module:
    """A random model whose distributions are far from uniform, so that a shifted or stale log-prob shows."""
    model = build_model("char-64x2", seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
    return model


def publish(root: Path, number: int, model: nn.Module) -> PublishedWeights:
    location = Location.parse(str(root)).child(str(number))
    manifest = save_shards(location, named_weights(model))
    version = PolicyVersion("actor", 1, number, manifest.weights_digest)
    return PublishedWeights(version=version, location=location, manifest=manifest)


def make_engine(published: PublishedWeights) -> TransformersEngine:
    engine = TransformersEngine(build_model("char-64x2", 7), engine_id="e0", on_activated=lambda _v, _s: None)
    engine.stage(published)
    engine.activate(published.version)
    return engine


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[PublishedWeights]:
    root = tmp_path_factory.mktemp("weights")
    return [publish(root, number, sharp_model(number)) for number in range(2)]


@pytest.fixture
def engine(versions: list[PublishedWeights]) -> TransformersEngine:
    return make_engine(versions[0])


def requests(contexts: Sequence[Sequence[int]], first_seed: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt_token_ids=np.array(context, dtype=np.int32), seed=first_seed + place)
        for place, context in enumerate(contexts)
    ]


def rescored(
    asked: Sequence[GenerationRequest], generations: GenerationBatch, seed: int, temperature: float = 1.0
) -> npt.NDArray[np.float32]:
    """Log-probs of the generated ids under ``sharp_model(seed)``, as a trainer computes them."""
    rows = [np.concatenate([r.prompt_token_ids, g.token_ids]) for r, g in zip(asked, generations, strict=True)]
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    with torch.no_grad():
        scored = packed_log_probs(
            sharp_model(seed),
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(bounds),
            token_budget=4096,
            temperature=temperature,
            with_entropy=False,
        )
    values = scored.log_probs.numpy()
    starts = [bounds[i] + len(r.prompt_token_ids) for i, r in enumerate(asked)]
    return np.concatenate([values[start : bounds[i + 1]] for i, start in enumerate(starts)])


SAME_LENGTH = [[3, 4, 5, 6], [6, 5, 4, 3], [3, 3, 3, 3]] * 4
MIXED_LENGTHS = [[3], [4, 5, 6, 7, 8, 9, 10, 11], [5, 6], [5, 6], [12, 3, 4]] * 3


@pytest.mark.parametrize("contexts", [SAME_LENGTH, MIXED_LENGTHS], ids=["same length", "padded on the left"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_sampled_log_probs_are_those_of_the_ids_scored_again(
    engine: TransformersEngine, contexts: list[list[int]], temperature: float
) -> None:
    asked = requests(contexts)
    generations = engine.generate(asked, SamplingConfig(temperature=temperature, max_tokens=24, stop_token_ids=(END,)))
    assert len({len(g.token_ids) for g in generations}) > 1, "rows have to finish at different places"
    again = rescored(asked, generations, 0, temperature)
    assert np.abs(again - generations.log_probs).max() < MAX_DELTA
    # the control: the same numbers against the next token's differ, so the comparison can fail
    assert np.abs(again[1:] - generations.log_probs[:-1]).max() > 0.1


def test_log_probs_at_temperature_zero_are_the_models_own(engine: TransformersEngine) -> None:
    asked = requests(MIXED_LENGTHS)
    generations = engine.generate(asked, SamplingConfig(temperature=0.0, max_tokens=8))
    assert np.abs(rescored(asked, generations, 0) - generations.log_probs).max() < MAX_DELTA


def test_equal_contexts_with_equal_seeds_say_the_same_and_with_others_do_not(engine: TransformersEngine) -> None:
    asked = [*requests([[3, 4]] * 4, first_seed=5), *requests([[3, 4]] * 4, first_seed=5)]
    answers = [g.token_ids.tolist() for g in engine.generate(asked, SamplingConfig(max_tokens=12))]
    assert answers[:4] == answers[4:]
    assert len({tuple(answer) for answer in answers}) == 4


def test_a_new_process_gives_the_same_bits(versions: list[PublishedWeights]) -> None:
    first, second = make_engine(versions[0]), make_engine(versions[0])
    sampling = SamplingConfig(max_tokens=24, stop_token_ids=(END,))
    one, other = (e.generate(requests(MIXED_LENGTHS), sampling) for e in (first, second))
    assert one.token_ids.tobytes() == other.token_ids.tobytes()
    assert one.log_probs.tobytes() == other.log_probs.tobytes()


@pytest.mark.parametrize("contexts", [SAME_LENGTH, MIXED_LENGTHS], ids=["same length", "padded on the left"])
@pytest.mark.parametrize("place", [0, 1, 5])
def test_each_token_has_the_log_prob_of_the_version_that_sampled_it(
    versions: list[PublishedWeights], contexts: list[list[int]], place: int
) -> None:
    calls = [0]
    model = build_model("char-64x2", 7)
    engine = TransformersEngine(model, engine_id="e0", on_activated=lambda _v, _s: None)

    def switch_before_step(*_: object) -> None:
        if calls[0] == place:
            engine.activate(versions[1].version)
        calls[0] += 1

    for published in versions:
        engine.stage(published)
    engine.activate(versions[0].version)
    model.get_submodule("transformer").register_forward_pre_hook(switch_before_step)
    asked = requests(contexts)
    generations = engine.generate(asked, SamplingConfig(max_tokens=12, stop_token_ids=(END,)))
    by_version = [rescored(asked, generations, 0), rescored(asked, generations, 1)]
    numbers = np.concatenate(
        [
            np.repeat([r.version.version for r in g.version_runs], [r.length for r in g.version_runs])
            for g in generations
        ]
    )
    places = np.concatenate([np.arange(len(g.token_ids)) for g in generations])
    assert (numbers == (places >= place)).all()
    own = np.where(numbers == 1, by_version[1], by_version[0])
    other = np.where(numbers == 1, by_version[0], by_version[1])
    assert np.abs(own - generations.log_probs).max() < MAX_DELTA
    assert np.abs(other - generations.log_probs).max() > 0.1


def test_the_kept_support_of_each_token_is_reported_and_normalises_its_log_prob(engine: TransformersEngine) -> None:
    asked = requests(MIXED_LENGTHS)
    sampling = SamplingConfig(temperature=0.8, top_p=0.9, top_k=6, max_tokens=10, stop_token_ids=(END,))
    generations = engine.generate(asked, sampling)
    assert generations.support_token_ids is not None
    assert generations.support_offsets is not None
    assert len(generations.support_offsets) == len(generations.token_ids) + 1
    model, token = sharp_model(0), 0
    for request, generation in zip(asked, generations, strict=True):
        for place, token_id in enumerate(generation.token_ids.tolist()):
            context = np.concatenate([request.prompt_token_ids, generation.token_ids[:place]])
            with torch.no_grad():
                logits = model(torch.from_numpy(context.astype(np.int64))[None]).logits[0, -1] / 0.8
            kept = generations.support_token_ids[
                generations.support_offsets[token] : generations.support_offsets[token + 1]
            ]
            assert token_id in kept
            assert len(kept) <= 6
            expected = logits[token_id] - torch.logsumexp(logits[kept.astype(np.int64)], 0)
            assert float(expected) == pytest.approx(float(generation.log_probs[place]), abs=MAX_DELTA)
            token += 1


def test_weights_of_another_model_are_refused_when_staged(tmp_path: Path, versions: list[PublishedWeights]) -> None:
    engine = make_engine(versions[0])
    weights = dict(named_weights(sharp_model(3)))
    name = max(weights, key=lambda key: weights[key].numel())
    location = Location.parse(str(tmp_path))
    manifest = save_shards(location, {**weights, name: weights[name][:-1].contiguous()})
    version = PolicyVersion("actor", 1, 1, manifest.weights_digest)
    with pytest.raises(EngineError, match=name):
        engine.stage(PublishedWeights(version=version, location=location, manifest=manifest))
    with pytest.raises(EngineError, match="never staged"):
        engine.activate(version)


def test_a_changed_byte_is_refused_when_staged(tmp_path: Path, versions: list[PublishedWeights]) -> None:
    published = publish(tmp_path, 1, sharp_model(3))
    file = next(tmp_path.rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    engine = make_engine(versions[0])
    with pytest.raises(DigestMismatchError):
        engine.stage(published)
    with pytest.raises(EngineError, match="never staged"):
        engine.activate(published.version)
    assert engine.active_version == versions[0].version


def test_weights_that_are_no_numbers_stop_the_engine(tmp_path: Path, versions: list[PublishedWeights]) -> None:
    model = sharp_model(0)
    weights = {name: torch.full_like(tensor, torch.nan) for name, tensor in named_weights(model).items()}
    load_weights(model, weights)
    engine = make_engine(versions[0])
    broken = publish(tmp_path, 5, model)
    engine.stage(broken)
    engine.activate(broken.version)
    with pytest.raises(EngineError, match="not; the weights or the model are broken"):
        engine.generate(requests(SAME_LENGTH), SamplingConfig(max_tokens=2))


def test_an_empty_context_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(ConfigError, match="one token or more"):
        engine.generate(requests([[]]), SamplingConfig())
    assert engine.generate(requests([[3]]), SamplingConfig(max_tokens=1)).offsets.tolist() == [0, 1]

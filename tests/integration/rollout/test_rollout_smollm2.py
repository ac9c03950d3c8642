"""The real model on real problems: exact ids, and log-probs that scoring gives again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rolltape.numerics.models import build_model, build_tokenizer
from rolltape.numerics.packed import packed_log_probs
from rolltape.numerics.weights import named_weights, save_shards
from rolltape.rollout.engine import PolicyVersion, PublishedWeights, SamplingConfig
from rolltape.rollout.environment import Answer
from rolltape.rollout.gsm8k import Gsm8k
from rolltape.rollout.seeds import sampling_seed
from rolltape.rollout.single_turn import SingleTurn
from rolltape.rollout.transformers_engine import TransformersEngine
from rolltape.schema.digest import prefix_digest
from rolltape.schema.reward import scalarise
from rolltape.store.location import Location

SIZE = 2


@pytest.mark.model
def test_smollm2_samples_what_scoring_gives_again(tmp_path: Path) -> None:
    model, tokenizer = build_model("smollm2-135m", 0), build_tokenizer("smollm2-135m")
    location = Location.parse(str(tmp_path))
    manifest = save_shards(location, named_weights(model), shard_bytes=200 << 20)
    assert len(manifest.shards) > 1
    version = PolicyVersion("actor", 1, 0, manifest.weights_digest)
    engine = TransformersEngine(model, engine_id="e0", on_activated=lambda _version, _seconds: None)
    engine.stage(PublishedWeights(version=version, location=location, manifest=manifest))
    engine.activate(version)

    environment = Gsm8k()
    harness = SingleTurn(engine, environment, tokenizer, max_length=8192)
    problems = [problem for problem in environment.problems("train")[:2] for _ in range(SIZE)]
    seeds = [sampling_seed(0, 1, row // SIZE, row % SIZE) for row in range(len(problems))]
    sampling = harness.sampling(SamplingConfig(max_tokens=16))
    assert sampling.stop_token_ids == (tokenizer.eos_id,)
    generations = harness.generate(problems, seeds, sampling)

    prompts = [harness.prompt(problem)[0] for problem in problems]
    assert len({len(prompt) for prompt in prompts}) == 2, "contexts of different lengths are padded on the left"
    rows = [np.concatenate([p, g.token_ids]) for p, g in zip(prompts, generations, strict=True)]
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    with torch.no_grad():
        scored = packed_log_probs(
            model,
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(bounds),
            token_budget=1024,
            temperature=1.0,
            with_entropy=False,
        ).log_probs.numpy()
    again = np.concatenate([scored[bounds[i] + len(p) : bounds[i + 1]] for i, p in enumerate(prompts)])
    assert np.abs(again - generations.log_probs).max() < 1e-4
    assert np.abs(again[1:] - generations.log_probs[:-1]).max() > 0.1, "the control, shifted by one token"

    texts = harness.texts(generations)
    for problem, prompt, generation, text in zip(problems, prompts, generations, texts, strict=True):
        assert generation.prefix_digest == prefix_digest(prompt)
        components = environment.judge(problem, Answer(text=text, ended=generation.finish_reason == "stop"))
        assert scalarise(components).state == "earned"
    assert len(set(texts)) > 1, "other seeds, other answers"

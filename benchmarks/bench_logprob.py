"""Log-probs of sampled tokens from hidden states: ``python benchmarks/bench_logprob.py``.

1,024 tokens of hidden size 576, float32, one thread: in blocks, as the trainer does it, and naively (``log_softmax`` of
all logits, then ``gather``). Memory is the peak of the process's resident memory over what it was with the inputs alone
(the weight's gradient is made by the step and counts); every measurement is in a process of its own that has run the
code once on a small input. ``memory_over_naive`` and ``time_over_naive`` are against the naive form of the same case.
"""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rolltape.numerics.logprob import linear_log_probs

NUM_TOKENS: Final = 1_024
HIDDEN_SIZE: Final = 576
ROUNDS: Final = 3

Scores = tuple[Tensor, Tensor | None]
Form = Callable[[Tensor, Tensor, Tensor, bool], Scores]


class Case(NamedTuple):
    """What is scored."""

    name: str
    vocab_size: int
    with_gradients: bool
    with_entropy: bool


CASES: Final = (
    Case("forward and backward", 49_152, with_gradients=True, with_entropy=False),
    Case("forward and backward, with entropy", 49_152, with_gradients=True, with_entropy=True),
    Case("scoring only", 151_936, with_gradients=False, with_entropy=False),
    Case("scoring only, with entropy", 151_936, with_gradients=False, with_entropy=True),
)


def in_blocks(hidden: Tensor, weight: Tensor, ids: Tensor, with_entropy: bool) -> Scores:
    """As the trainer does it."""
    return linear_log_probs(hidden, weight, ids, with_entropy=with_entropy)


def naive(hidden: Tensor, weight: Tensor, ids: Tensor, with_entropy: bool) -> Scores:
    """All logits at once."""
    log_softmax = torch.log_softmax(hidden @ weight.T, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(1) if with_entropy else None
    return log_softmax.gather(1, ids[:, None]).squeeze(1), entropy


FORMS: Final[dict[str, Form]] = {"naive": naive, "in blocks": in_blocks}


def act(form: Form, case: Case, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """One step; leaves nothing behind."""
    hidden, weight, ids = inputs
    with torch.set_grad_enabled(case.with_gradients):
        log_probs, entropy = form(hidden, weight, ids, case.with_entropy)
        if case.with_gradients:
            total = log_probs.sum() if entropy is None else log_probs.sum() + 0.01 * entropy.sum()
            torch.autograd.grad(total, [hidden, weight])


def draw(num_tokens: int, vocab_size: int, *, requires_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, output matrix and ids, of the scale of a trained model."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator)
    weight = torch.randn(vocab_size, HIDDEN_SIZE, generator=generator).mul_(0.04)
    ids = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    return hidden.requires_grad_(requires_grad), weight.requires_grad_(requires_grad), ids


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` (the peak) of this process, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def measure(name: str, case: Case, answer: Connection) -> None:
    """Peak bytes and the best of some rounds' seconds."""
    torch.set_num_threads(1)
    act(FORMS[name], case, draw(4, 97, requires_grad=case.with_gradients))
    inputs = draw(NUM_TOKENS, case.vocab_size, requires_grad=case.with_gradients)
    # The peak is forgotten: from here on it is this step's.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    act(FORMS[name], case, inputs)
    peak = resident("VmHWM") - before
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        act(FORMS[name], case, inputs)
        seconds.append(time.perf_counter() - began)
    answer.send((peak, min(seconds)))


def measured(name: str, case: Case) -> tuple[int, float]:
    """:func:`measure` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(name, case, theirs))
    process.start()
    theirs.close()
    try:
        found: tuple[int, float] = ours.recv()
    except EOFError:
        process.join()
        raise SystemExit(process.exitcode or 1) from None
    process.join()
    return found


def main() -> None:
    """Every case in both forms."""
    for case in CASES:
        (naive_bytes, naive_s), (num_bytes, seconds) = (measured(name, case) for name in FORMS)
        figures = {
            "memory_over_naive": num_bytes / naive_bytes,
            "peak_mb": num_bytes / 1e6,
            "naive_peak_mb": naive_bytes / 1e6,
            "time_over_naive": seconds / naive_s,
            "seconds": seconds,
        }
        rounded = {key: round(value, 3) for key, value in figures.items()}
        print(json.dumps({"case": case.name, "vocab_size": case.vocab_size, **rounded}), flush=True)


if __name__ == "__main__":
    main()

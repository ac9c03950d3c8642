"""Several ranks of one process group on this machine, each a process that waits for work."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

PATIENCE = timedelta(minutes=3)
"""How long a rank waits for another that does not come."""


class Ranks:
    """``num_ranks`` processes joined over gloo; a context manager.

    A function that is run must be importable by name (a test module's top level will do); its arguments and what it
    returns are pickled.
    """

    def __init__(self, num_ranks: int, store: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(*arguments)`` on every rank at once; what each returned, by rank.

        Raises:
            RuntimeError: a rank failed; carries its traceback.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        failures = [f"rank {rank}:\n{answer}" for rank, (done, answer) in enumerate(answers) if not done]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [answer for _, answer in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection) -> None:
    # One machine: its host name need not resolve to anything.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=PATIENCE)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(*arguments))
        except Exception:  # noqa: BLE001  # whatever it is, the test that asked shall show it
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    dist.destroy_process_group()

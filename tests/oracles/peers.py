"""Other projects' losses, asked over a pipe (see ``peer_process.py``)."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Self

FOLDER: Final = Path(sys.prefix) / "oracles"
"""Where ``make oracles`` puts them: no test ever has it on its own path."""


class Peers:
    """verl, TRL and OpenRLHF behind the methods of ``peer_process.Peers``; a context manager."""

    def __init__(self, folder: Path = FOLDER) -> None:
        if not (folder / "verl").is_dir():
            raise FileNotFoundError(f"expected verl, trl and openrlhf in {folder}, got none: run make oracles")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("peer_process.py")), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def ask(self, function: str, /, *, gradients_of: tuple[str, ...] = (), **arguments: Any) -> dict[str, Any]:
        """Answer of one of the methods, with ``gradients`` of its ``loss`` for the arguments named.

        Raises:
            RuntimeError: the peer failed; carries its traceback.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((function, arguments, gradients_of), self._process.stdin)
            self._process.stdin.flush()
            answer: dict[str, Any] = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            self._said.seek(0)
            raise RuntimeError(f"the peers' process ended:\n{self._said.read().decode()}") from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Its input ends, and so does it.
        self._process.communicate(timeout=60)
        self._said.close()

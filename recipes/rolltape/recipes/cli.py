"""The command line. ``--help`` imports no command; a command imports only what it runs."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import time
from typing import Final

from rolltape.schema.errors import RolltapeError

COMMANDS: Final = {
    "demo": "learn, ask, replay: the whole loop on this machine, checked at the end",
    "train": "start or resume a run from a recipe file",
    "recipes": "train every recipe beside a control, and write down what they learned",
    "import": "bring recorded rollouts of other systems onto the tape",
    "sql": "ask anything of a lake in SQL",
    "show": "one trajectory, token for token",
    "tail": "follow events as they are committed",
    "replay": "run a recorded step again and compare every bit",
    "verify": "check the numeric contracts of a tape",
    "compact": "merge small files, write a checkpoint, clean the log",
    "topics": "check the topics of a Kafka log, and make those that are missing",
    "committer": "run the committer of a lake (the writer of the embedded log)",
    "sink": "archive a Kafka log in a lake, exactly once (the writer of a Kafka log's lake)",
    "trainer": "run the trainer process of a run",
    "worker": "run one rollout worker of a run",
    "teacher": "run the scoring service of a run that has teachers",
}

PARENT_VARIABLE: Final = "ROLLTAPE_PARENT"
"""Process id of the supervisor that started this program, and without which it has nothing to do."""

_ORPHAN_S: Final = 10.0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 refused or failed, 2 wrong usage."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = _parser(arguments[0] if arguments else None)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    _end_with_parent()
    try:
        return int(importlib.import_module(f"rolltape.recipes.commands.{_module(options.command)}").run(options))
    except RolltapeError as error:
        if os.environ.get("ROLLTAPE_DEBUG"):
            raise
        print(f"rolltape {options.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`); that is no failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _end_with_parent() -> None:
    """End where the supervisor was killed: nobody would start this again, and a new supervisor's would be refused."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        # Who waits for others to end in order may wait in vain: they have lost the supervisor, too.
        time.sleep(_ORPHAN_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="rolltape-parent", daemon=True).start()


def _module(command: str) -> str:
    return "import_" if command == "import" else command


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rolltape",
        description="Record every rollout, query it in SQL, train from it, replay it to the bit.",
        epilog="Output is JSON lines when piped and tables on a terminal. `rolltape COMMAND --help` says more.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        child = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            importlib.import_module(f"rolltape.recipes.commands.{_module(name)}").add_arguments(child)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The benchmarks: ``python -m benchmarks [name …]``, one after the other; a JSON line a figure.

All run by default but the one that needs an S3 server and the one that takes an hour. What stands behind a single name
goes to that benchmark: ``python -m benchmarks kafka producer --rounds 9``.
"""

from __future__ import annotations

import itertools
import pathlib
import subprocess
import sys

NAMES = ("store", "ingest", "fold", "assembly", "logprob", "s3", "kafka")
BY_NAME = ("s3", "kafka_soak")


def main(words: list[str]) -> int:
    """Run the benchmarks named (those of ``NAMES`` by default), each in a process of its own; 0 if all ran."""
    names = list(itertools.takewhile(lambda word: word in NAMES + BY_NAME, words))
    options = words[len(names) :]
    if options and len(names) != 1:
        print(f"expected some of {', '.join(NAMES + BY_NAME)}, or one and its options, got {words}", file=sys.stderr)
        return 2
    status = 0
    for name in names or NAMES:
        print(f"# bench_{name}", flush=True)
        file = pathlib.Path(__file__).with_name(f"bench_{name}.py")
        status |= subprocess.run([sys.executable, str(file), *options], check=False).returncode
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Every benchmark, one after the other: ``python -m benchmarks [name …]``; a JSON line a figure."""

from __future__ import annotations

import pathlib
import subprocess
import sys

NAMES = ("store", "ingest", "fold", "assembly", "logprob")


def main(names: list[str]) -> int:
    """Run the benchmarks named (all by default), each in a process of its own; 0 if all ran."""
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        print(f"expected some of {', '.join(NAMES)}, got {unknown[0]!r}", file=sys.stderr)
        return 2
    status = 0
    for name in names or NAMES:
        print(f"# bench_{name}", flush=True)
        file = pathlib.Path(__file__).with_name(f"bench_{name}.py")
        status |= subprocess.run([sys.executable, str(file)], check=False).returncode
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

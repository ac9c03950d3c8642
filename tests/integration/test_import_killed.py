"""An import that is killed and run again is whole, with every event once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rolltape.ingest.importers import import_file
from rolltape.ingest.log import open_log
from rolltape.schema.kinds import KINDS
from rolltape.store.lake import Lake
from rolltape.store.location import Location

SOLUTIONS = Path(__file__).parents[1] / "data" / "gsm8k" / "gsm8k_model_solutions.jsonl"
NUM_EVENTS = 1 + 1319 + 4 * 5276
IMPORT = """
import sys
from rolltape.ingest.importers import import_file
from rolltape.ingest.log import open_log
with open_log(sys.argv[1]) as log:
    import_file(log, sys.argv[2])
"""


@pytest.mark.parametrize("window", ["data_file_written", "after_commit"])
def test_a_killed_import_completes(window: str, tmp_path: Path) -> None:
    url, mark = str(tmp_path / "lake"), tmp_path / "mark"
    Lake.create(Location.parse(url))
    killed = subprocess.run(
        [sys.executable, "-c", IMPORT, url, str(SOLUTIONS)],
        env={**os.environ, "ROLLTAPE_CRASH": f"{window}:1:{mark}"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert mark.exists()
    with open_log(url) as log:
        report = import_file(log, str(SOLUTIONS))
        again = import_file(log, str(SOLUTIONS))
    assert report.num_events == NUM_EVENTS
    assert again.num_new == 0
    lake = Lake.open(Location.parse(url), read_only=True)
    ids = [event_id for kind in KINDS for event_id in lake.read(kind, columns=["event_id"])["event_id"].to_pylist()]
    assert len(ids) == len(set(ids)) == NUM_EVENTS

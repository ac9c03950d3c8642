"""Case D20: no commit names a missing file; a loser re-reads and tries again; a vacuumed version says so by name.

Reported elsewhere: a full vacuum deletes a file whose commit is about to land; of two overwrites one removes
the other's file; an error is raised although the deletion happened.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rolltape.ingest import Recorder, open_log
from rolltape.schema.errors import VacuumedError
from rolltape.store.lake import Lake
from rolltape.store.maintenance import compact, vacuum

NUM_ROWS = 12


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake of twelve commits, one small data file each."""
    lake = Lake.create(tmp_path / "lake")
    for number in range(NUM_ROWS):
        record(tmp_path, number)
    return lake


def record(folder: Path, number: int) -> None:
    """One more event, committed."""
    with open_log(str(folder / "lake")) as log, Recorder(log, producer_id="p", run_id="r") as recorder:
        recorder.record("reward_assigned", trajectory_id=f"t{number}", attempt=0, state="earned", scalar=float(number))
        recorder.flush("logged")


def names(lake: Lake) -> list[str]:
    return sorted(str(row) for row in lake.read("reward_assigned")["trajectory_id"].to_pylist())


def expected(num_rows: int) -> list[str]:
    return sorted(f"t{number}" for number in range(num_rows))


def test_case_d20_a_file_written_before_a_vacuum_and_committed_after_it_is_there(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vacuumed: list[str] = []
    write = Lake.write_files

    def then_vacuum(writer: Lake, tables: Any) -> Any:
        files = write(writer, tables)
        if not vacuumed:
            for new in files:
                os.utime(writer.table.child(new.file.path).local_path(), (1, 1))
            vacuumed.extend(vacuum(Lake.open(lake.location), safe_age_s=0))
        return files

    monkeypatch.setattr(Lake, "write_files", then_vacuum)
    record(tmp_path, NUM_ROWS)
    assert vacuumed
    again = Lake.open(lake.location)
    assert all(again.table.child(file.path).exists() for file in again.snapshot().files)
    assert names(again) == expected(NUM_ROWS + 1)


def test_case_d20_of_two_rewrites_from_one_version_the_loser_re_reads_and_nothing_doubles(lake: Lake) -> None:
    start = threading.Barrier(2)
    errors: list[BaseException] = []

    def rewrite() -> None:
        own = Lake.open(lake.location)
        own.snapshot()
        start.wait()
        try:
            compact(own)
        except Exception as error:  # noqa: BLE001  # whichever loses, its error is looked at below
            errors.append(error)

    threads = [threading.Thread(target=rewrite) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) <= 1
    compact(Lake.open(lake.location))
    again = Lake.open(lake.location)
    assert names(again) == expected(NUM_ROWS)
    assert all(again.table.child(file.path).exists() for file in again.snapshot().files)


def test_case_d20_reading_a_vacuumed_version_says_so_by_name(lake: Lake) -> None:
    old = lake.snapshot()
    compact(lake)
    gone = vacuum(lake, safe_age_s=-1)
    assert set(gone) >= {file.path for file in old.files if file.kind == "reward_assigned"}
    with pytest.raises(VacuumedError, match=r"vacuumed"):
        lake.read("reward_assigned", snapshot=old)
    assert names(lake) == expected(NUM_ROWS)

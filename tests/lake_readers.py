"""Other readers of a lake's Delta table: Delta Kernel, delta-rs and Polars, each asked for the same sums.

As a program it judges a real lake, as it is and once more (a copy beside it) after compaction, a checkpoint and cleaned
logs: ``python tests/lake_readers.py LAKE``, a path or a URL. Delta Kernel is found through
``ROLLTAPE_DELTA_KERNEL_HOME``; of a lake in an object store it reads a copy on this machine's disk, since its S3 client
is not at hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable
from typing import NamedTuple

import deltalake
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rolltape.schema.kinds import KINDS
from rolltape.schema.render import arrow_schema
from rolltape.store import Lake
from rolltape.store.location import Location
from rolltape.store.maintenance import checkpoint, clean_logs, compact

_NOT_TABLE = ("spool", "weights", "checkpoints", "blobs")

KERNEL_HOME = os.environ.get("ROLLTAPE_DELTA_KERNEL_HOME")


class Seen(NamedTuple):
    """What a reader saw; None where it has no way to tell."""

    counts: dict[str, int]
    sum_of_ids: int
    sum_of_bits: int
    hash_of_bits: str | None
    transactions: dict[str, int] | None


def bits_of(lists: pa.ChunkedArray) -> np.ndarray:
    """Bit patterns of all elements, null elements as all ones, uint32."""
    flat = pa.concat_arrays([chunk.flatten() for chunk in lists.chunks])
    bits: np.ndarray = pc.fill_null(flat, 0.0).to_numpy(zero_copy_only=False).astype(np.float32).view(np.uint32).copy()
    bits[flat.is_null().to_numpy(zero_copy_only=False)] = 0xFFFFFFFF
    return bits


def summary(tables: Iterable[pa.Table], transactions: dict[str, int] | None) -> Seen:
    table = pa.concat_tables([t.select(["event_id", "kind", "token_ids", "rollout_log_probs"]) for t in tables])
    table = table.sort_by("event_id")
    bits = bits_of(table["rollout_log_probs"])
    ids = pa.concat_arrays([chunk.flatten() for chunk in table["token_ids"].chunks])
    counts = {row["values"]: row["counts"] for row in table["kind"].value_counts().to_pylist()}
    return Seen(
        counts=dict(sorted(counts.items())),
        sum_of_ids=int(ids.to_numpy().sum(dtype=np.int64)),
        sum_of_bits=int(bits[bits != 0xFFFFFFFF].sum(dtype=np.uint64)),
        hash_of_bits=hashlib.sha256(bits.tobytes()).hexdigest(),
        transactions=transactions,
    )


def by_rolltape(place: Location, apps: list[str]) -> Seen:
    lake = Lake.open(place, read_only=True)
    tables = []
    for kind in KINDS:
        rows = lake.read(kind)
        for name in ("token_ids", "rollout_log_probs"):
            if name not in rows.column_names:
                type_ = arrow_schema("action_sampled").field(name).type
                rows = rows.append_column(name, pa.nulls(rows.num_rows, type_))
        tables.append(rows.select(["event_id", "kind", "token_ids", "rollout_log_probs"]))
    marks = lake.snapshot().transactions
    return summary(tables, {app: marks[app] for app in apps})


def by_delta_rs(place: Location, apps: list[str]) -> Seen:
    handle = deltalake.DeltaTable(place.child("events").url, storage_options=place.storage_options)
    marks = {app: handle.transaction_version(app) for app in apps}
    return summary([handle.to_pyarrow_table()], {app: -1 if mark is None else mark for app, mark in marks.items()})


def by_polars(place: Location, apps: list[str]) -> Seen:
    frame = pl.scan_delta(place.child("events").url, storage_options=place.storage_options or None).collect()
    arrow = frame.select("event_id", "kind", "token_ids", "rollout_log_probs").to_arrow()
    schema = pa.schema(
        [
            ("event_id", pa.string()),
            ("kind", pa.string()),
            ("token_ids", pa.list_(pa.int32())),
            ("rollout_log_probs", pa.list_(pa.float32())),
        ]
    )
    return summary([arrow.cast(schema)], None)


def by_delta_kernel(place: Location, apps: list[str]) -> Seen:
    if not place.is_local:
        with tempfile.TemporaryDirectory() as folder:
            place.copy_to(Location.parse(folder), without=_NOT_TABLE)
            return by_delta_kernel(Location.parse(folder), apps)
    assert KERNEL_HOME is not None
    home = pathlib.Path(KERNEL_HOME)
    command = ["java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", f"{home}/libs/*"]
    command += [str(home / "DeltaRead.java"), str(place.local_path() / "events"), "--group-by", "kind"]
    command += ["--sum", "token_ids", "--sum", "rollout_log_probs"]
    command += [word for app in apps for word in ("--txn", app)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return Seen(
        counts=said["counts"],
        sum_of_ids=int(said["sum token_ids"]["total"]),
        sum_of_bits=int(said["sum rollout_log_probs"]["total"]),
        hash_of_bits=None,
        transactions=said["txn"],
    )


READERS: dict[str, Callable[[Location, list[str]], Seen]] = {"delta-rs": by_delta_rs, "polars": by_polars}
if KERNEL_HOME:
    READERS["delta-kernel"] = by_delta_kernel


def assert_agree(path: pathlib.Path | Location, apps: list[str]) -> Seen:
    place = Location.parse(path)
    expected = by_rolltape(place, apps)
    for name, reader in READERS.items():
        seen = reader(place, apps)
        known = {field: value for field, value in seen._asdict().items() if value is not None}
        assert expected._asdict() | known == expected._asdict(), name
    return expected


def main(lake_path: str) -> int:
    """Judge one lake."""
    place = Location.parse(lake_path)
    apps = sorted(Lake.open(place, read_only=True).snapshot().transactions)
    # Kernel is asked for each transaction by name, and lanes are many: some of them stand for all.
    asked = [app for app in apps if app.startswith("log/")] + [app for app in apps if app.startswith("lane/")][:8]
    as_it_is = assert_agree(place, asked)
    copy = place.parent().child(f"{place.name}-read-{uuid.uuid4().hex[:8]}")
    try:
        place.copy_to(copy, without=_NOT_TABLE)
        lake = Lake.open(copy)
        compact(lake)
        checkpoint(lake)
        cleaned = clean_logs(lake, safe_age_s=0)
        kept = assert_agree(copy, asked)
    finally:
        copy.delete()
    if kept != as_it_is:
        raise AssertionError(f"maintenance changed what readers see: {as_it_is} became {kept}")
    facts = {"readers": ["rolltape", *READERS], "log_files_cleaned": cleaned, **as_it_is._asdict()}
    print(json.dumps({"message": "all readers agree, before and after maintenance", **facts}))
    if "delta-kernel" not in READERS:
        print("NOT RUN: Delta Kernel; set ROLLTAPE_DELTA_KERNEL_HOME", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

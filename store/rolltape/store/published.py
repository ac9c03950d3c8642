"""Weights that a run has published, as its tape tells: for teachers, and for runs that begin where another ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rolltape.schema.errors import ConfigError, NotPublishedError
from rolltape.schema.runline import RunLine
from rolltape.store.lake import Lake
from rolltape.store.location import Location

FINAL: Final = "final"
"""The version that came of the step whose metrics say ``final``."""

_Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One version of a run's policy, and what the run says of model and tokenizer."""

    run_id: str
    version: int
    location: Location
    """Folder of its shards."""
    fields: Mapping[str, Any]
    """The columns of its ``weights_published``; the manifest is made of them."""
    model_name: str
    origin_digest: str | None
    """Weights that the run began with: runs of one origin have equal ones. None where version 0 is not known."""

    @property
    def weights_digest(self) -> str:
        """Digest over all weights of the version."""
        return str(self.fields["weights_digest"])


def find_published(lake: Lake, run_id: str, version: str = FINAL, *, policy_id: str = "actor") -> PublishedModel:
    """The version of a run that is called ``version``: a number, or ``"final"``.

    Versions that were aborted, or of steps that a resumed run abandoned, do not count; where two epochs have one of the
    same number, the newer epoch's does.

    Raises:
        NotPublishedError: the lake has no such run, or the run has not published the version (yet).
        ConfigError: ``version`` is neither a number nor ``"final"``, or it is not published in full.
    """
    if version != FINAL and not version.isdecimal():
        raise ConfigError(f"version: expected a number or {FINAL!r}, got {version!r}")
    started = lake.read("run_started", run_id=run_id)
    line = RunLine.from_events(started, lake.read("run_resumed", run_id=run_id), run_id)
    if not line.epochs:
        known = sorted(set(lake.read("run_started", columns=["run_id"])["run_id"].to_pylist()))
        raise NotPublishedError(
            f"expected run {run_id!r} in {lake.location.url}, it has {', '.join(known) or 'no run'}"
        )
    rows = _live_versions(lake, run_id, line, policy_id)
    number = _final_version(lake, run_id, line) if version == FINAL else int(version)
    keys = [key for key in rows if key[1] == number]
    if not keys:
        numbers = sorted(key[1] for key in rows)
        found = f"versions {numbers[0]} to {numbers[-1]}" if numbers else "none"
        raise NotPublishedError(
            f"expected version {version!r} of {policy_id} of run {run_id!r} in {lake.location.url}, it has {found}; "
            "wait for the run to publish it, or name another"
        )
    row = rows[max(keys)]
    if row["payload"] != "full":
        raise ConfigError(f"version {version} of run {run_id!r}: expected a full payload, got {row['payload']!r}")
    first = rows.get(min(rows))
    return PublishedModel(
        run_id=run_id,
        version=row["version"],
        location=lake.location.child(*row["path"].split("/")),
        fields=row,
        model_name=started["run_started"][0].as_py()["model_name"],
        origin_digest=first["weights_digest"] if first is not None and first["version"] == 0 else None,
    )


def _live_versions(lake: Lake, run_id: str, line: RunLine, policy_id: str) -> dict[_Key, dict[str, Any]]:
    aborted = {
        (row["policy_run_epoch"], row["version"])
        for row in _rows(lake, run_id, "weights_aborted")
        if row["policy_id"] == policy_id
    }
    return {
        (row["policy_run_epoch"], row["version"]): row
        for row in _rows(lake, run_id, "weights_published")
        if row["policy_id"] == policy_id
        and (row["policy_run_epoch"], row["version"]) not in aborted
        and line.is_live_step(row["policy_run_epoch"], row["step"] or 0)
    }


def _final_version(lake: Lake, run_id: str, line: RunLine) -> int | None:
    """Version that the run's last step gave; None where it is not known to have ended."""
    return next(
        (
            row["version_out"]
            for row in _rows(lake, run_id, "train_step_completed")
            if line.is_live_step(row["run_epoch"], row["step"])
            and any(metric["name"] == FINAL and metric["value"] == 1.0 for metric in row["metrics"] or ())
        ),
        None,
    )


def _rows(lake: Lake, run_id: str, kind: str) -> list[dict[str, Any]]:
    """Rows of a control-sized kind, each with its run epoch."""
    table = lake.read(kind, run_id=run_id)
    if not table.num_rows:
        return []
    epochs = table["run_epoch"].to_pylist()
    return [{**row, "run_epoch": epoch} for row, epoch in zip(table[kind].to_pylist(), epochs, strict=True)]

"""Every command over a lake in an object store, reached by the environment alone: the loop, with the bits of a disk."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from tests.servers.s3_server import Bucket

from rolltape.recipes import demo
from rolltape.recipes.cli import main
from rolltape.recipes.runs import config_of
from rolltape.store import Lake

RECIPE = """
run_id = "small"
seed = 5
[rollout]
groups_per_step = 2
group_size = 4
evaluate_heldout = false
[environment.options]
num_heldout = 4
[trainer]
max_steps = 2
checkpoint_every = 2
"""

_BITS = "select step, batch_digest, weights_digest, loss, grad_norm from train_step_completed order by step"


@pytest.fixture
def rows(capfd: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Run a command in this process; the JSON lines that it printed."""

    def run(*arguments: str, status: int = 0) -> list[dict[str, Any]]:
        capfd.readouterr()
        assert main(list(arguments)) == status
        return [json.loads(line) for line in capfd.readouterr().out.splitlines()]

    return run


def test_every_command_works_as_on_a_disk(
    s3_environment: Bucket, tmp_path: pathlib.Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    recipe, url, disk = tmp_path / "recipe.toml", f"{s3_environment.url}/lake", str(tmp_path / "lake")
    recipe.write_text(RECIPE)
    for lake in (url, disk):
        rows("train", str(recipe), "--lake", lake)
    bits = rows("sql", "--lake", url, _BITS)
    assert bits == rows("sql", "--lake", disk, _BITS)
    assert [row["step"] for row in bits] == [1, 2]
    (balance,) = rows("sql", "--lake", url, "select trained, balance from conservation")
    assert balance == {"trained": 16, "balance": 0}

    (first,) = rows("sql", "--lake", url, "select cursor_after from batches where step = 1")
    cursor = ",".join(f"{p['topic']}/{p['partition']}:{p['offset']}" for p in first["cursor_after"])
    query = "select count(*) as n from trajectories"
    assert rows("sql", "--lake", url, "--as-of", cursor, query) == [{"n": 8}]
    (found,) = rows("sql", "--lake", url, "select trajectory_id from trajectories limit 1")
    assert rows("show", "--lake", url, found["trajectory_id"], "--tokens")[0]["tito_ok"] is True
    tail = ("tail", "--lake", url, "--from", "start", "--kind", "train_step_completed", "--seconds", "2")
    assert [row["kind"] for row in rows(*tail)] == ["train_step_completed"] * 2

    rows("verify", "--lake", url)
    assert rows("compact", "--lake", url, "--clean-log")
    rows("verify", "--lake", url)
    assert rows("sql", "--lake", url, _BITS) == bits

    # What the demonstration asks and claims at its end: fresh processes replay a step, and refuse a copy with one bit
    # changed.
    tape, checks = Lake.open(url, read_only=True), demo.Checks()
    config = config_of(tape, "small")
    demo.check_versions(tape, checks)
    demo.check_proof(tape, checks)
    demo.ask(tape)
    step = demo.check_replay(tape, config, checks, late=False)
    demo.check_tampering(tape, config, step, checks)
    assert step == 1, "the step without a checkpoint of its own"
    assert checks.ok, checks.rows
    (refused,) = [row["found"] for row in checks.rows if "flipped" in row["claim"]]
    assert refused in json.dumps(rows("verify", "--lake", f"{url}-tampered", status=1))


def test_importing_twice_adds_nothing(
    s3_environment: Bucket, tmp_path: pathlib.Path, rows: Callable[..., list[dict[str, Any]]]
) -> None:
    file = tmp_path / "gsm8k.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\\n#### 2"}\n')
    url = f"{s3_environment.url}/imported"
    rows("import", "--lake", url, str(file))
    once = rows("sql", "--lake", url, "select kind, count(*) as n from events group by 1 order by 1")
    rows("import", "--lake", url, str(file))
    assert rows("sql", "--lake", url, "select kind, count(*) as n from events group by 1 order by 1") == once
    assert {"kind": "problem_registered", "n": 1} in once

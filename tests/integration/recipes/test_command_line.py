"""The command line over a real run: every command, as a person in a pipe meets it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECIPE = """
run_id = "small"
seed = 5
[rollout]
groups_per_step = 2
group_size = 4
num_workers = 2
[environment.options]
num_heldout = 20
[trainer]
max_steps = 4
checkpoint_every = 3
probe_every = 2
"""


def rolltape(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line in its own process and check its exit status."""
    command = [sys.executable, "-m", "rolltape.recipes.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def rows(*arguments: str) -> list[dict[str, Any]]:
    """JSON lines that a command prints."""
    return [json.loads(line) for line in rolltape(*arguments).stdout.splitlines()]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The lake of one small run of two workers."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "recipe.toml").write_text(RECIPE)
    done = rolltape("train", str(folder / "recipe.toml"), "--lake", str(folder / "lake"))
    assert json.loads(done.stdout.splitlines()[-1])["message"] == "run small ended"
    return str(folder / "lake")


def test_sql_answers_in_json_lines(lake: str) -> None:
    steps = rows("sql", "--lake", lake, "select step, version_in, version_out, skipped from steps order by step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert rows("sql", "--lake", lake, "select count(*) as n from trajectories where purpose = 'train'") == [{"n": 32}]
    (balance,) = rows("sql", "--lake", lake, "select trained, evaluated, balance from conservation")
    assert balance == {"trained": 32, "evaluated": 20, "balance": 0}


def test_sql_refuses_everything_but_one_select(lake: str) -> None:
    for query in (
        "copy (select 1) to 'x.csv'",
        "select 1; select 2",
        "attach 'x.db'",
        "select * from read_csv('/etc/passwd')",
    ):
        done = rolltape("sql", "--lake", lake, query, status=1)
        assert "SqlRefusedError" in done.stderr, done.stderr


def test_sql_as_of_a_cursor_shows_what_was_known_then(lake: str) -> None:
    (first,) = rows("sql", "--lake", lake, "select cursor_after from batches where step = 1")
    cursor = ",".join(f"{p['topic']}/{p['partition']}:{p['offset']}" for p in first["cursor_after"])
    query = "select count(*) as n from trajectories where purpose = 'train'"
    assert rows("sql", "--lake", lake, "--as-of", cursor, query) == [{"n": 8}]


def test_show_finds_a_trajectory_by_the_beginning_of_its_id(lake: str) -> None:
    query = "select trajectory_id, num_action_tokens as n from trajectories where purpose = 'train' limit 1"
    (found,) = rows("sql", "--lake", lake, query)
    shown = rows("show", "--lake", lake, found["trajectory_id"], "--tokens")
    assert shown[0]["trajectory_id"] == found["trajectory_id"]
    assert shown[0]["tito_ok"] is True
    tokens = [row for row in shown if "token_id" in row]
    assert len(tokens) == found["n"]
    assert "found 0" in rolltape("show", "--lake", lake, "ffffffff", status=1).stderr
    assert "hexadecimal" in rolltape("show", "--lake", lake, "x' or 1=1", status=1).stderr


def test_tail_prints_events_of_a_kind_in_order(lake: str) -> None:
    found = rows(
        "tail", "--lake", lake, "--from", "start", "--topic", "training", "--kind", "train_step_completed", "--wide",
        "--seconds", "3",
    )  # fmt: skip
    assert [row["train_step_completed"]["step"] for row in found] == [1, 2, 3, 4]


def test_replay_is_equal_to_the_bit_and_names_the_missing(lake: str) -> None:
    found = [row for row in rows("replay", "--lake", lake, "--step", "3") if "what" in row]
    assert {row["what"] for row in found} == {"batch_digest", "loss_bits", "gradient_digest", "weights_digest"}
    assert all(row["equal"] for row in found)
    assert "steps 1 to 4" in rolltape("replay", "--lake", lake, "--step", "9", status=1).stderr


def test_replay_refuses_a_tampered_tape_by_trajectory_and_tensor(lake: str, tmp_path: Path) -> None:
    from rolltape.recipes.tamper import flip_one_log_prob_bit
    from rolltape.store.lake import Lake
    from rolltape.store.location import Location

    source, target = Lake.open(Location.parse(lake)), Location.parse(str(tmp_path / "copy"))
    copy, trajectory = flip_one_log_prob_bit(source, "small", 2, target)
    done = rolltape("replay", "--lake", copy.location.url, "--step", "2", status=1)
    assert trajectory in done.stderr
    assert "rollout_log_probs" in done.stderr
    verified = rolltape("verify", "--lake", copy.location.url, status=1)
    assert trajectory in verified.stdout


def test_verify_holds_before_and_after_compaction(lake: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "lake")
    shutil.copytree(lake, copy)
    rolltape("verify", "--lake", copy)
    (report,) = rows("compact", "--lake", copy, "--clean-log")
    assert report
    rolltape("verify", "--lake", copy)
    rolltape("replay", "--lake", copy, "--step", "2")


def test_training_again_with_another_configuration_is_refused(lake: str, tmp_path: Path) -> None:
    recipe = tmp_path / "other.toml"
    recipe.write_text(RECIPE.replace("seed = 5", "seed = 6"))
    done = rolltape("train", str(recipe), "--lake", lake, status=1)
    assert "another configuration" in done.stderr


def test_a_finished_run_trains_no_further(lake: str, tmp_path: Path) -> None:
    recipe = tmp_path / "same.toml"
    recipe.write_text(RECIPE)
    copy = str(tmp_path / "lake")
    shutil.copytree(lake, copy)
    rolltape("train", str(recipe), "--lake", copy)
    (count,) = rows("sql", "--lake", copy, "select count(*) as n from train_step_completed")
    assert count == {"n": 4}
    (balance,) = rows("sql", "--lake", copy, "select balance from conservation")
    assert balance == {"balance": 0}


@pytest.mark.parametrize("value", ['"hunter2-planted"', '{ from_env = "PLANTED_KEY" }'])
def test_a_planted_secret_is_found_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PLANTED_KEY", "hunter2-planted")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE + f"[environment.options.judge]\napi_key = {value}\n")
    done = rolltape("train", str(recipe), "--lake", str(tmp_path / "lake"), status=1)
    assert "environment.options" in done.stderr
    assert "hunter2-planted" not in done.stdout + done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != recipe]
    assert not [path for path in written if b"hunter2-planted" in path.read_bytes()]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    assert "LakeNotFoundError" in rolltape("sql", "--lake", str(tmp_path / "none"), "select 1", status=1).stderr
    rolltape("nonsense", status=2)

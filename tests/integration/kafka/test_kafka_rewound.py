"""A trainer that comes back to other bits than it left, over a broker: its version is published anew, engines go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
from tests.servers.fixtures import Broker
from tests.training_runs import NUM_STEPS, TrainingRun, small_config

from rolltape.ingest.kafka.client import connect
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.versions import newest_versions

FIRST_WRONG: Final = 4

# Read by the interpreter of whoever has the folder of this file on its path: its steps learn twice as much as they say
# from this one on, and nobody who runs them again gets the same weights.
SITE_CUSTOMIZE: Final = f"""
import torch

_step, _taken = torch.optim.AdamW.step, []

def step(self, *arguments, **options):
    _taken.append(1)
    for _ in range(2 if len(_taken) >= {FIRST_WRONG} else 1):
        found = _step(self, *arguments, **options)
    return found

torch.optim.AdamW.step = step
"""


_TRAINED_OF_THE_ABANDONED_LINE: Final = f"""
    with sampled as (select trajectory_id, attempt, unnest(version_runs) as run from action_sampled)
    select distinct step, run.run_epoch, run.version
    from batch_members join sampled using (trajectory_id, attempt)
    where is_completed and run.run_epoch = 1 and run.version >= {FIRST_WRONG}
"""


@pytest.mark.parametrize("asynchronous", [False, True], ids=["lock_step", "asynchronous"])
def test_a_rewound_trainer_publishes_its_version_anew(
    kafka_broker: Broker, topic_prefix: str, tmp_path: Path, asynchronous: bool
) -> None:
    """It stands before steps whose weights the engines serve already: they get those of its step as a newer version."""
    log_url = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
    search = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    strange = {"trainer": {"PYTHONPATH": search}}
    # One checkpoint, before the first step: all of them are run again.
    config = small_config(asynchronous=asynchronous, checkpoint_every=100)
    with TrainingRun(tmp_path, log_url, config=config, environment=strange) as run:
        run.start().wait_for_step(FIRST_WRONG + 1)
        run.children["trainer"].environment = {}
        assert run.kill("trainer")
        run.wait()
        assert not run.problems()
        assert _rows(run, "select run_epoch, continues_from_step, reason from run_resumed") == [
            {"run_epoch": 2, "continues_from_step": FIRST_WRONG - 1, "reason": "divergence"}
        ]
        published = _rows(
            run,
            "select policy_run_epoch as epoch, version, weights_digest as digest from weights_published "
            f"where version = {FIRST_WRONG - 1} order by 1",
        )
        assert [row["epoch"] for row in published] == [1, 2], "the version was not published anew"
        assert published[0]["digest"] == published[1]["digest"]
        _engines_go_forward_only(run)
        assert not _rows(run, _TRAINED_OF_THE_ABANDONED_LINE), "trained of weights that the run left behind"
    newest = newest_versions(connect(KafkaConfig.from_url(log_url)))
    keys = {_key(delivery.table[delivery.kind][0].as_py()) for delivery in newest}
    assert keys == {(2, NUM_STEPS)}, "the compacted topic holds the newest version and none of the abandoned line"


def _engines_go_forward_only(run: TrainingRun) -> None:
    rows = _rows(
        run,
        "select engine_id, policy_run_epoch, version from weights_activated order by engine_id, log_offset",
    )
    for engine in {row["engine_id"] for row in rows}:
        keys = [_key(row) for row in rows if row["engine_id"] == engine]
        assert keys == sorted(set(keys)), f"{engine} went backwards"
        assert (2, FIRST_WRONG - 1) in keys, f"{engine} never served the version that the trainer went back to"


def _key(row: dict[str, int]) -> tuple[int, int]:
    return row["policy_run_epoch"], row["version"]


def _rows(run: TrainingRun, query: str) -> list[dict[str, int]]:
    rows: list[dict[str, int]] = run.lake.sql(query).arrow().to_pylist()
    return rows

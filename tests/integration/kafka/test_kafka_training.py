"""Training through a broker: lock step gives the embedded log's bits, asynchronous runs lose and repeat nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.servers.apache_kafka import KafkaCluster
from tests.servers.fixtures import Broker
from tests.servers.noida_db import NoidaDb
from tests.training_runs import LEAD, NUM_STEPS, TrainingRun

from rolltape.recipes.twin import StepBits, first_difference


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, StepBits]:
    """What the embedded log gives, undisturbed."""
    with TrainingRun(tmp_path_factory.mktemp("embedded")) as run:
        run.start().wait()
        assert not run.problems()
        return run.bits()


@pytest.fixture
def log_url(kafka_broker: Broker, topic_prefix: str) -> str:
    """Topics of this test's own."""
    return f"kafka://{kafka_broker.bootstrap}/{topic_prefix}"


def sink_of(broker: Broker) -> tuple[str, ...]:
    """The sink, where it may be killed: noida-db goes on counting a dead one as a member of its group."""
    return () if isinstance(broker, NoidaDb) else ("sink",)


def test_lock_step_through_a_broker_gives_the_bits_of_the_embedded_log(
    embedded: dict[int, StepBits], log_url: str, tmp_path: Path, kafka_broker: Broker
) -> None:
    """Batches, losses, gradients, weights and every metric of every step, over many partitions, killed on the way."""
    victims = ("trainer", "worker-0", *sink_of(kafka_broker))
    with TrainingRun(tmp_path, log_url) as run:
        run.start().wait_for_step(2)
        for name in victims:
            run.kill(name)
        run.wait()
        assert run.kills.total() == len(victims)
        assert not run.problems()
        assert run.bits().keys() == embedded.keys()
        assert first_difference(run.bits(), embedded) is None
        partitions = run.lake.sql("select count(distinct log_partition) from action_sampled").arrow()
        assert partitions.column(0)[0].as_py() > 1, "the rollouts of this run came over one partition"


def test_a_run_is_the_same_whatever_becomes_of_its_sink(
    embedded: dict[int, StepBits], apache_kafka: KafkaCluster, topic_prefix: str, tmp_path: Path
) -> None:
    """It dies between its data files and their commit, and again after a commit of which it heard no answer."""
    before, after = (
        {"ROLLTAPE_CRASH": f"{name}:1:{tmp_path / name}"} for name in ("data_file_written", "after_commit")
    )
    url = f"kafka://{apache_kafka.bootstrap}/{topic_prefix}"
    # A window whose mark is there is passed unharmed: the sink dies when it is taken away.
    (tmp_path / "data_file_written").touch()
    with TrainingRun(tmp_path, url, environment={"sink": before}) as run:
        run.start().wait_for_step(2)
        run.children["sink"].environment = after
        (tmp_path / "data_file_written").unlink()
        run.wait()
        assert all((tmp_path / name).exists() for name in ("data_file_written", "after_commit"))
        assert run.supervisor.restarts.keys() == {"sink"}, "others than the sink died"
        assert not run.problems()
        assert run.bits().keys() == embedded.keys()
        assert first_difference(run.bits(), embedded) is None


def test_an_asynchronous_run_through_a_broker_survives_kills(
    log_url: str, tmp_path: Path, kafka_broker: Broker
) -> None:
    with TrainingRun(tmp_path, log_url, asynchronous=True) as run:
        run.start().wait_for_step(2)
        for name in ("trainer", "worker-1", *sink_of(kafka_broker)):
            run.kill(name)
        run.wait_for_step(5)
        run.kill("trainer")
        run.wait()
        assert run.kills["trainer"] >= 1
        assert not run.problems()
        steps = run.lake.sql("select step, metrics from train_step_completed order by step").arrow().to_pylist()
        lags = [m["value"] for row in steps for m in row["metrics"] if m["name"] == "trajectory_lag_max"]
        assert len(lags) == NUM_STEPS
        assert max(lags) <= LEAD + 2
        assert max(lags) > 0, "nobody ran ahead"

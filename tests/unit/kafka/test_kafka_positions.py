"""Whether log and lake belong together: each mismatch is an error of its own, and each way out leads on."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pytest

from rolltape.ingest.committer import Committer
from rolltape.ingest.kafka.client import TopicInfo
from rolltape.ingest.kafka.positions import (
    LogIdentity,
    adopt,
    base_app_id,
    check_topics,
    generation_app_id,
    log_bases,
    parse_partition,
    skip_lost,
)
from rolltape.ingest.lanes import log_app_id
from rolltape.schema.cursor import Partition
from rolltape.schema.errors import (
    CommitterFencedError,
    ConfigError,
    LakeAheadError,
    LogMismatchError,
    OffsetLostError,
    OtherClusterError,
    TopicRecreatedError,
)
from rolltape.store.lake import Lake

OTHER, PLACE = Partition("rollout", 0), Partition("rollout", 1)
BEGINS = {OTHER: 0, PLACE: 0}
URL = "kafka://broker:9092/runs"
FED = {generation_app_id("cluster-a", "rollout", "topic-1"): 1, log_app_id(PLACE): 99}


def identity(cluster_id: str = "cluster-a", topic_id: str = "topic-1") -> LogIdentity:
    info = TopicInfo("rollout", topic_id, 2, 1, MappingProxyType({}))
    return LogIdentity(URL, cluster_id, {"rollout": info})


def lake_with(folder: Path, transactions: dict[str, int]) -> Lake:
    lake = Lake.create(folder / "lake")
    if transactions:
        lake.append({}, transactions)
    return lake


def test_an_empty_lake_takes_any_log() -> None:
    assert check_topics(identity(), {}, ["rollout"]) == {"kafka/cluster-a/rollout/topic-1": 1}
    assert identity().start({}, PLACE, 0, 10) == 0


def test_a_lake_goes_on_after_its_last_archived_offset() -> None:
    assert identity().generation(FED, "rollout") == ("kafka/cluster-a/rollout/topic-1", 1)
    assert identity().start(FED, PLACE, 40, 120) == 100
    assert identity().start(FED, PLACE, 100, 100) == 100


def test_another_cluster_is_named_with_what_is_archived() -> None:
    with pytest.raises(OtherClusterError) as caught:
        identity("cluster-b").generation(FED, "rollout")
    text = str(caught.value)
    assert "expected cluster cluster-a" in text
    assert "got cluster-b at kafka://broker:9092/runs" in text
    assert "rollout/1 up to 99" in text
    assert "--adopt rollout" in text


def test_a_topic_that_was_created_anew_is_named() -> None:
    with pytest.raises(TopicRecreatedError, match=r"expected the topic topic-1.*topic-2.*rollout/1 up to 99.*--adopt"):
        identity(topic_id="topic-2").generation(FED, "rollout")


def test_retention_that_passed_the_lake_names_the_lost_offsets() -> None:
    with pytest.raises(OffsetLostError, match=r"rollout/1.*100.*50 offsets \(100 to 149\).*--skip-lost rollout/1"):
        identity().start(FED, PLACE, 150, 200)


def test_a_log_that_lost_its_head_before_anything_was_archived_is_an_error_too() -> None:
    with pytest.raises(OffsetLostError, match=r"7 offsets \(0 to 6\)"):
        identity().start({}, PLACE, 7, 9)


def test_a_lake_ahead_of_the_log_names_both_ends() -> None:
    with pytest.raises(LakeAheadError, match=r"reach offset 99.*end at 60.*lost its last 40 offsets.*--adopt rollout"):
        identity().start(FED, PLACE, 0, 60)


def test_a_lake_that_a_committer_fed_takes_no_kafka_log_and_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(LogMismatchError, match=r"fed from Kafka.*embedded log's committer.*name another lake"):
        check_topics(identity(), {"log/rollout/0": 3}, ["rollout"])
    with pytest.raises(LogMismatchError, match=r"Kafka topics are archived.*rolltape sink"):
        Committer(lake_with(tmp_path, FED))


# Ways out.


def test_an_adopted_topic_goes_on_behind_what_the_lake_holds(tmp_path: Path) -> None:
    lake, anew = lake_with(tmp_path, FED), identity(topic_id="topic-2")
    assert adopt(lake, anew, "rollout", BEGINS, {OTHER: 0, PLACE: 5}) == 2
    transactions = lake.snapshot().transactions
    assert anew.generation(transactions, "rollout") == ("kafka/cluster-a/rollout/topic-2", 2)
    assert log_bases(transactions, anew.topic_ids) == {PLACE: 100}
    assert anew.start(transactions, PLACE, 0, 5) == 0
    # Read on, the lake's own offset of the log's offset 4 is 104.
    lake.append({}, {log_app_id(PLACE): 104})
    assert anew.start(lake.snapshot().transactions, PLACE, 0, 9) == 5
    # The topic before it is history: who brings it back must say so.
    with pytest.raises(TopicRecreatedError):
        identity().generation(lake.snapshot().transactions, "rollout")


def test_adopting_what_is_known_changes_nothing(tmp_path: Path) -> None:
    lake = lake_with(tmp_path, FED)
    version = lake.snapshot().version
    assert adopt(lake, identity(), "rollout", BEGINS, {OTHER: 0, PLACE: 200}) == 1
    assert lake.snapshot().version == version


@pytest.mark.parametrize("begin", [0, 20])
def test_a_log_that_lost_its_end_is_read_again_and_goes_on_behind_the_lake(tmp_path: Path, begin: int) -> None:
    lake = lake_with(tmp_path, FED)
    assert adopt(lake, identity(), "rollout", {OTHER: 0, PLACE: begin}, {OTHER: 0, PLACE: 60}) == 2
    transactions = lake.snapshot().transactions
    assert transactions[base_app_id(PLACE, "topic-1")] == 100 - begin
    assert identity().start(transactions, PLACE, begin, 60) == begin
    lake.append({}, {log_app_id(PLACE): 60 + 100 - begin})
    assert identity().start(lake.snapshot().transactions, PLACE, begin, 61) == 61


def test_a_partition_that_grew_again_is_read_again_and_no_other_of_its_topic(tmp_path: Path) -> None:
    lake = lake_with(tmp_path, {**FED, log_app_id(OTHER): 9})
    ends = {OTHER: 30, PLACE: 130}
    assert adopt(lake, identity(), "rollout", {OTHER: 0, PLACE: 20}, ends, {PLACE}) == 2
    transactions = lake.snapshot().transactions
    assert identity().start(transactions, PLACE, 20, 130) == 20
    assert identity().start(transactions, OTHER, 0, 30) == 10
    assert identity().base(transactions, PLACE) == 80
    assert identity().position(transactions, PLACE) == 20


def test_another_cluster_is_adopted_too(tmp_path: Path) -> None:
    lake, other = lake_with(tmp_path, FED), identity("cluster-b", "topic-9")
    assert adopt(lake, other, "rollout", BEGINS, {OTHER: 3, PLACE: 3}) == 2
    assert other.start(lake.snapshot().transactions, PLACE, 0, 3) == 0


def test_lost_offsets_are_passed_and_counted(tmp_path: Path) -> None:
    lake = lake_with(tmp_path, FED)
    assert skip_lost(lake, identity(), PLACE, {PLACE: 150}) == 50
    assert identity().start(lake.snapshot().transactions, PLACE, 150, 200) == 150
    assert skip_lost(lake, identity(), PLACE, {PLACE: 150}) == 0


def test_lost_offsets_are_passed_in_a_lake_that_has_nothing_yet(tmp_path: Path) -> None:
    lake = lake_with(tmp_path, {})
    assert skip_lost(lake, identity(), PLACE, {PLACE: 7}) == 7
    assert identity().generation(lake.snapshot().transactions, "rollout")[1] == 1
    assert lake.snapshot().transactions["kafka/cluster-a/rollout/topic-1"] == 1
    assert identity().start(lake.snapshot().transactions, PLACE, 7, 9) == 7


def test_a_sink_that_archived_meanwhile_fences_the_way_out(tmp_path: Path) -> None:
    lake = lake_with(tmp_path, FED)
    other = Lake.open(lake.location)

    class Late(Lake):
        """Commits of another sink come between look and commit."""

        def append(self, tables: dict[str, pa.Table], *arguments: object) -> object:  # type: ignore[override]
            other.append({}, {log_app_id(PLACE): 160})
            return super().append(tables, *arguments)  # type: ignore[arg-type]

    late = Late(lake.location, lake.snapshot())
    with pytest.raises(CommitterFencedError):
        skip_lost(late, identity(), PLACE, {PLACE: 150})
    assert lake.snapshot().transactions[log_app_id(PLACE)] == 160


def test_names_that_are_none_of_the_logs_are_refused(tmp_path: Path) -> None:
    lake = lake_with(tmp_path, FED)
    with pytest.raises(ConfigError, match="expected a topic of rollout, got 'rolout'"):
        adopt(lake, identity(), "rolout", {}, {})
    with pytest.raises(ConfigError, match="expected a partition such as rollout/0"):
        skip_lost(lake, identity(), Partition("rollout", 7), {})
    for text in ("rollout", "rollout/", "/3", "rollout/x"):
        with pytest.raises(ConfigError, match="expected a partition as in rollout/0"):
            parse_partition(text)

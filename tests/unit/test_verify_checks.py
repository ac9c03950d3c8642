"""Each check of a verification finds what it is for, names where, and stays silent on a sound tape."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rolltape.schema.cursor import Cursor
from rolltape.schema.digest import batch_digest
from rolltape.schema.fold import content_digests_of, fold
from rolltape.store.sources import TableSource
from rolltape.store.verify import CHECKS, run_checks
from rolltape.store.verify_context import Context
from rolltape.store.verify_report import CONTRACTS, CheckResult

VERSION: dict[str, Any] = {"policy_id": "actor", "policy_run_epoch": 1}


def check(tape: Any, name: str, since: Cursor | None = None, transactions: dict[str, int] | None = None) -> CheckResult:
    context = Context(TableSource(tape.tables()), since=since, transactions=transactions)
    return next(c for c in CHECKS if c.name == name).result(context)


def weights(tape: Any, version: int, *, digest: str | None = None) -> None:
    """Version in the right order: published, staged, committed, activated by engine e0."""
    columns = {**VERSION, "version": version, "weights_digest": digest or f"w{version}"}
    tape.add("weights_published", step=version, payload="full", **columns)
    (staged,) = tape.add("weights_staged", engine_id="e0", **columns)
    tape.add("weights_committed", required_engines=[["e0"]], staged_event_ids=[[staged]], **columns)
    tape.add("weights_activated", engine_id="e0", **columns)


def pin(tape: Any, ids: list[str], *, batch_id: str = "b1", step: int = 1, **more: Any) -> None:
    """``batch_formed`` and its step, as a trainer writes them."""
    folded = fold(tape.tables())
    digests = {row["trajectory_id"]: row for row in content_digests_of(folded).to_pylist()}
    found = {row["trajectory_id"]: row for row in folded.trajectories.to_pylist()}
    members = [
        {
            "trajectory_id": name,
            "attempt": found[name]["attempt"],
            "last_event_index": found[name]["last_event_index"],
            "reward_event_ids": found[name]["reward_event_ids"],
            "mask_event_ids": found[name]["mask_event_ids"],
            "is_padding": False,
            "content_digest": digests[name]["content"],
            **{
                f"{tensor}_digest": digests[name][tensor]
                for tensor in ("token_ids", "log_probs", "masks", "versions", "rewards")
            },
        }
        for name in ids
    ]
    digest = batch_digest(member["content_digest"] for member in members)
    tape.add(
        "batch_formed",
        **{
            "batch_id": batch_id, "trainer_id": "trainer", "algorithm": "grpo", "step": step, "members": [members],
            "batch_digest": digest, "staleness_version": 0, **more,
        },
    )  # fmt: skip
    tape.add("train_step_completed", trainer_id="trainer", step=step, batch_id=batch_id, skipped=False)


def sound(tape: Any) -> None:
    """A small run in which everything is as it should be."""
    tape.add("run_started", purpose="train", vocab_size=10)
    tape.add("engine_joined", engine_id="e0", incarnation="1")
    weights(tape, 0)
    for name in ("a", "b"):
        tape.rollout(name)
    pin(tape, ["a", "b"])


def test_a_sound_tape(tape: Any) -> None:
    sound(tape)
    results = run_checks(Context(TableSource(tape.tables())))
    assert [result.findings for result in results if not result.ok] == []
    by_name = {result.check: result for result in results}
    assert by_name["prefix_proof"].num_checked == 2
    assert by_name["content_digests"].counts["equal"] == 2
    assert by_name["log_probs"].counts["trusted_share"] == 1.0
    assert by_name["token_versions"].num_checked == 6
    assert by_name["weight_sync"].counts["activated"] == 1
    assert by_name["conservation"].counts["trained"] == 2
    assert by_name["event_ids"].num_checked == sum(table.num_rows for table in tape.tables().values())
    assert {result.contract for result in results} == set(CONTRACTS)


def test_an_empty_tape(tape: Any) -> None:
    assert all(result.ok for result in run_checks(Context(TableSource(tape.tables()))))


# Tokens


def test_prefix_mismatch_names_the_first_differing_index(tape: Any) -> None:
    tape.rollout("sound")
    tape.add("rollout_started", trajectory_id="t", attempt=0, event_index=0, prompt_token_ids=[[1, 2, 3, 4]])
    tape.add(
        "action_sampled", trajectory_id="t", attempt=0, event_index=1, token_ids=[[5]], rollout_log_probs=[[-0.5]],
        prefix_length=4, prefix_digest="sha256:0", prefix_source="engine", prefix_token_ids=[[1, 2, 9, 4]],
    )  # fmt: skip
    result = check(tape, "prefix_proof")
    assert (result.num_checked, result.num_broken) == (2, 1)
    (finding,) = result.findings
    assert (finding.trajectory_id, finding.attempt, finding.index) == ("t", 0, 2)
    assert "index 2" in finding.message


def test_unknown_prefixes_are_counted_not_broken(tape: Any) -> None:
    tape.add("rollout_started", trajectory_id="t", attempt=0, event_index=0, prompt_token_ids=[[1]])
    tape.add("action_sampled", trajectory_id="t", attempt=0, event_index=1, token_ids=[[5]], prefix_source="unknown")
    result = check(tape, "prefix_proof")
    assert result.ok
    assert result.counts["unknown_prefix"] == 1


def test_lengths(tape: Any) -> None:
    tape.rollout("t", tokens=tuple(range(207)), log_probs=(-0.5,) * 208)
    (finding,) = check(tape, "lengths").findings
    assert (finding.trajectory_id, finding.tensor, finding.index) == ("t", "rollout_log_probs", 207)


def test_vocabulary(tape: Any) -> None:
    tape.add("run_started", purpose="train", vocab_size=10)
    tape.rollout("in", tokens=(0, 9))
    tape.rollout("above", tokens=(3, 10))
    tape.rollout("below", tokens=(-1, 3))
    tape.rollout("prompt", prompt=(11,))
    result = check(tape, "vocabulary")
    assert {(f.trajectory_id, f.tensor) for f in result.findings} == {
        ("above", "token_ids"), ("below", "token_ids"), ("prompt", "prompt_token_ids"),
    }  # fmt: skip
    assert result.num_checked == 2 + 2 + 2 + 3 + 2 + 2 + 2 + 1


def test_missing_event_indexes(tape: Any) -> None:
    tape.rollout("t", ended=False)
    tape.add("rollout_ended", trajectory_id="t", attempt=0, event_index=4, status="completed", last_event_index=4)
    (finding,) = check(tape, "completeness").findings
    assert (finding.trajectory_id, finding.index) == ("t", 2)
    assert "[2, 3]" in finding.message


def test_check_sums(tape: Any) -> None:
    tape.rollout("t", ended=False)
    tape.add(
        "rollout_ended", trajectory_id="t", attempt=0, event_index=2, status="completed", num_action_tokens=4,
        num_observation_tokens=0, last_event_index=2,
    )  # fmt: skip
    (finding,) = check(tape, "completeness").findings
    assert "expected 4 action" in finding.message
    assert "found 3" in finding.message


def flipped(tape: Any, kind: str, trajectory_id: str, column: str, bit: int) -> None:
    """Flip one bit of the first value of a list column of one trajectory's event."""
    for place, batch in enumerate(tape.batches[kind]):
        if batch["trajectory_id"][0].as_py() != trajectory_id:
            continue
        lists = batch[column]
        buffer = bytearray(lists.values.buffers()[1].to_pybytes())
        buffer[bit // 8] ^= 1 << (bit % 8)
        values = pa.Array.from_buffers(lists.values.type, len(lists.values), [None, pa.py_buffer(buffer)])
        changed = pa.ListArray.from_arrays(lists.offsets, values, type=lists.type)
        columns = [changed if name == column else batch[name] for name in batch.schema.names]
        tape.batches[kind][place] = pa.RecordBatch.from_arrays(columns, schema=batch.schema)


@pytest.mark.parametrize(("column", "tensor"), [("rollout_log_probs", "rollout_log_probs"), ("token_ids", "token_ids")])
@pytest.mark.parametrize("bit", [0, 31])
def test_a_flipped_bit_is_named_by_trajectory_and_tensor(tape: Any, column: str, tensor: str, bit: int) -> None:
    sound(tape)
    flipped(tape, "action_sampled", "b", column, bit)
    result = check(tape, "content_digests")
    assert [(f.trajectory_id, f.attempt, f.tensor) for f in result.findings] == [("b", 0, tensor)]
    assert result.counts["equal"] == 1


def test_a_late_reward_does_not_change_what_was_pinned(tape: Any) -> None:
    sound(tape)
    tape.add("reward_assigned", trajectory_id="a", attempt=0, state="earned", scalar=7.0)
    tape.add("attempt_abandoned", trajectory_id="b", attempt=0, reason="superseded")
    tape.rollout("b", attempt=1)
    assert check(tape, "content_digests").ok


def test_a_changed_reward_is_named(tape: Any) -> None:
    sound(tape)
    (old,) = [b for b in tape.batches["reward_assigned"] if b["trajectory_id"][0].as_py() == "a"]
    tape.batches["reward_assigned"].remove(old)
    tape.add(
        "reward_assigned", trajectory_id="a", attempt=0, state="earned", scalar=0.5,
        event_id=old["event_id"][0].as_py(),
    )  # fmt: skip
    assert [(f.trajectory_id, f.tensor) for f in check(tape, "content_digests").findings] == [("a", "reward")]


def test_a_member_that_is_gone(tape: Any) -> None:
    sound(tape)
    for kind in ("rollout_started", "action_sampled", "rollout_ended", "rollout_dispatched"):
        tape.batches[kind] = [b for b in tape.batches[kind] if b["trajectory_id"][0].as_py() != "a"]
    (finding,) = check(tape, "content_digests").findings
    assert finding.trajectory_id == "a"
    assert "gone" in finding.message


def test_a_batch_digest_that_is_not_its_members(tape: Any) -> None:
    sound(tape)
    pin(tape, ["a"], batch_id="b2", step=2, batch_digest="sha256:0")
    (finding,) = check(tape, "content_digests").findings
    assert (finding.tensor, "b2" in finding.message) == ("batch_digest", True)


def test_one_trajectory_in_two_batches_with_other_pins(tape: Any) -> None:
    sound(tape)
    (first,) = [
        b["event_id"][0].as_py() for b in tape.batches["reward_assigned"] if b["trajectory_id"][0].as_py() == "a"
    ]
    tape.add("reward_assigned", trajectory_id="a", attempt=0, state="earned", scalar=0.0, supersedes=[[first]])
    pin(tape, ["a"], batch_id="again", step=2)
    result = check(tape, "content_digests")
    assert (result.num_checked, result.ok) == (3, True)
    assert not check(tape, "conservation").ok  # trained twice is another check's finding


# Probability


def test_untrusted_tokens_are_counted_by_cause(tape: Any) -> None:
    tape.rollout("t", tokens=tuple(range(8)), log_probs=(-0.5, 0.0, None, math.nan, -math.inf, -9999.0, 0.5, -100.0))
    result = check(tape, "log_probs")
    assert result.ok
    assert result.num_checked == 8
    expected = {
        "trusted_tokens": 3, "absent": 1, "nan": 1, "infinite": 1, "positive": 1, "sentinels": 1, "exactly_zero": 1,
        "untrusted_tokens": 5, "trusted_share": 0.375,
    }  # fmt: skip
    assert dict(result.counts) == expected


@pytest.mark.parametrize("mode", ["raw_logprobs", None])
def test_a_batch_of_mixed_or_undeclared_distributions(tape: Any, mode: str | None) -> None:
    tape.rollout("a")
    tape.add("rollout_started", trajectory_id="b", attempt=0, event_index=0, prompt_token_ids=[[1]])
    tape.add(
        "action_sampled", trajectory_id="b", attempt=0, event_index=1, token_ids=[[5]], rollout_log_probs=[[-0.5]],
        sampling=[{"temperature": 1.0, "logprobs_mode": mode}],
    )  # fmt: skip
    tape.add("rollout_ended", trajectory_id="b", attempt=0, event_index=2, status="completed", last_event_index=2)
    assert check(tape, "modes").ok
    pin(tape, ["a", "b"])
    (finding,) = check(tape, "modes").findings
    assert "b1" in finding.message


@pytest.mark.parametrize(
    ("largest", "control", "ok"), [(1e-5, 0.5, True), (0.5, 0.5, False), (None, 0.5, False), (1e-5, None, True)]
)
def test_probes(tape: Any, largest: float | None, control: float | None, ok: bool) -> None:
    tape.add(
        "mismatch_probed", num_tokens=10, mean_abs_delta=1e-6, max_abs_delta=largest, control_max_abs_delta=control
    )
    result = check(tape, "mismatch")
    assert (result.ok, result.num_checked, result.counts["probes"]) == (ok, 10, 1)


def test_trained_values_cover_the_tokens(tape: Any) -> None:
    good: dict[str, Any] = {
        "group_id": "g", "batch_id": "b", "step": 1, "num_tokens": [[2, 1]], "old_log_probs": [[0.0] * 3],
        "advantages": [[0.0] * 3], "trusted": [[True, False, True]],
    }  # fmt: skip
    tape.add("tokens_trained", **good)
    assert check(tape, "trained_lengths").ok
    assert check(tape, "mismatch").counts["gate_trusted_tokens"] == 2
    tape.add("tokens_trained", **{**good, "advantages": [[0.0] * 2]})
    assert "2 advantages" in check(tape, "trained_lengths").findings[0].message


def test_teacher_scores(tape: Any) -> None:
    tape.add("run_started", purpose="train", tokenizer=[{"behaviour_digest": "t1"}])
    score: dict[str, Any] = {
        "trajectory_id": "t", "attempt": 0, "teacher_id": "x", "weights_digest": "w", "tokenizer_digest": "t1",
        "scored_token_ids": [[1, 2]], "log_probs": [[-0.5, -0.5]], "temperature": 1.0,
    }  # fmt: skip
    tape.add("teacher_scored", **score)
    assert check(tape, "teachers").ok
    tape.add("teacher_scored", **{**score, "log_probs": [[None, -0.5, -0.5]]})
    tape.add("teacher_scored", **{**score, "tokenizer_digest": "t2"})
    tape.add("teacher_scored", **{**score, "temperature": 0.0})
    assert check(tape, "teachers").num_broken == 3


# Versions


def used(tape: Any, version: int = 0, digest: str | None = None) -> None:
    tape.add("engine_joined", engine_id="e0")
    tape.rollout("t", version=version)
    if digest is not None:
        weights(tape, version, digest=digest)


def test_tokens_of_a_version_that_was_never_published(tape: Any) -> None:
    used(tape, 3)
    weights(tape, 0)
    (finding,) = check(tape, "token_versions").findings
    assert (finding.trajectory_id, "never was" in finding.message) == ("t", True)


def test_tokens_of_other_weights_than_the_published(tape: Any) -> None:
    used(tape, 0, digest="other")
    assert "published weights other" in check(tape, "token_versions").findings[0].message


def test_tokens_of_an_aborted_version(tape: Any) -> None:
    used(tape, 0, digest="w0")
    assert check(tape, "token_versions").ok
    tape.add("weights_aborted", version=0, reason="x", **VERSION)
    assert "aborted" in check(tape, "token_versions").findings[0].message


def test_tokens_of_an_engine_that_never_activated(tape: Any) -> None:
    weights(tape, 0)
    for engine in ("e0", "e1"):
        tape.add("engine_joined", engine_id=engine)
    tape.rollout("good")
    tape.rollout("bad", engine_id="e1")
    (finding,) = check(tape, "token_versions").findings
    assert (finding.trajectory_id, "e1" in finding.message) == ("bad", True)


def test_tokens_of_an_uncommitted_version(tape: Any) -> None:
    tape.add("weights_published", version=0, weights_digest="w0", payload="full", **VERSION)
    tape.rollout("t")
    assert "committed" in check(tape, "token_versions").findings[0].message


def test_versions_do_not_go_back(tape: Any) -> None:
    tape.rollout("t", version=2, ended=False)
    runs = [{"start": 0, "length": 1, "policy_id": "actor", "run_epoch": 1, "version": v} for v in (2, 1)]
    runs[1]["start"] = 1
    tape.add("action_sampled", trajectory_id="t", attempt=0, event_index=2, token_ids=[[1, 2]], version_runs=[runs])
    (finding,) = check(tape, "forward_only").findings
    assert (finding.trajectory_id, finding.index) == ("t", 1)


def test_caches_of_a_newer_version(tape: Any) -> None:
    runs = [{"start": 0, "length": 1, "policy_id": "actor", "run_epoch": 1, "version": 1}]
    for kv_version, index in ((1, 0), (2, 1)):
        tape.add(
            "action_sampled", trajectory_id="t", attempt=0, event_index=index, token_ids=[[1]], version_runs=[runs],
            kv_version=kv_version,
        )  # fmt: skip
    result = check(tape, "kv_provenance")
    assert (result.num_broken, result.counts["kept_caches"]) == (1, 2)


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (("staged",), "published before anything else"),
        (("published", "activated"), "commit before any activation"),
        (("published", "committed"), "staged it before the commit"),
        (("published", "staged", "committed", "activated", "aborted"), "serve an aborted version"),
        (("published", "committed", "activated"), "stage before they activate"),
    ],
)
def test_weight_sync_out_of_order(tape: Any, moves: tuple[str, ...], message: str) -> None:
    own: dict[str, dict[str, Any]] = {
        "published": {"payload": "full"},
        "staged": {"engine_id": "e0"},
        "committed": {"required_engines": [["e0"]]},
        "activated": {"engine_id": "e0"},
        "aborted": {"reason": "x"},
    }
    for move in moves:
        tape.add(f"weights_{move}", version=1, weights_digest="w1", **VERSION, **own[move])
    result = check(tape, "weight_sync")
    assert any(message in finding.message for finding in result.findings)


def test_weight_sync_with_two_digests_unknown_staged_events_and_an_engine_going_back(tape: Any) -> None:
    weights(tape, 1)
    tape.add("weights_staged", version=1, weights_digest="else", engine_id="e1", **VERSION)
    weights(tape, 0)
    tape.add("weights_committed", version=0, weights_digest="w0", staged_event_ids=[["ghost"]], **VERSION)
    messages = " | ".join(finding.message for finding in check(tape, "weight_sync").findings)
    assert "expected one weights digest" in messages
    assert "ghost" in messages
    assert "version 0 after 1" in messages


def test_tokens_newer_than_their_batch(tape: Any) -> None:
    tape.rollout("t", version=4)
    pin(tape, ["t"], staleness_version=3)
    (finding,) = check(tape, "staleness").findings
    assert (finding.trajectory_id, finding.tensor) == ("t", "policy_versions")


# Index, quantization, lifecycle


def test_index_agreement(tape: Any) -> None:
    runs = [{"start": 0, "length": 1, "policy_id": "actor", "run_epoch": 1, "version": 1, "weights_digest": "w"}]
    for place, digest in enumerate(("x", "x", "y")):
        tape.add(
            "action_sampled", trajectory_id=f"t{place}", attempt=0, event_index=0, token_ids=[[1]],
            version_runs=[runs], prefix_digest="p",
            index_digests=[[{"layer": 3, "mode": "full", "tie_rule": "low", "digest": digest}]],
        )  # fmt: skip
    result = check(tape, "index_agreement")
    assert (result.num_checked, result.num_broken) == (3, 1)
    assert "layer 3" in result.findings[0].message


def test_quantization_schemes(tape: Any) -> None:
    tape.add(
        "weights_published", version=1, payload="full", quantization=[[{"module": "mlp", "scheme": "int4"}]], **VERSION
    )
    runs = [{"start": 0, "length": 1, "policy_id": "actor", "run_epoch": 1, "version": 1}]
    for scheme in ("int4", "fp8"):
        tape.add(
            "action_sampled", trajectory_id=scheme, attempt=0, event_index=0, token_ids=[[1]], version_runs=[runs],
            engine=[{"id": scheme, "weight_quantization": scheme}],
        )  # fmt: skip
    result = check(tape, "declared_schemes")
    assert (result.num_checked, result.num_broken) == (2, 1)
    assert "fp8" in result.findings[0].message


def test_an_object_used_after_it_was_freed(tape: Any) -> None:
    for state in ("created", "moved", "freed", "created", "freed", "reused"):
        tape.add("memory_sampled", entries=[[{"name": "kv", "process": "p0", "state": state, "num_bytes": 1}]])
    result = check(tape, "ledger")
    assert (result.num_checked, result.num_broken) == (6, 1)
    assert "reused after freed" in result.findings[0].message


# Log


def test_lane_numbers_twice_and_beyond_the_mark(tape: Any) -> None:
    tape.rollout("a")
    tape.add("rollout_started", trajectory_id="b", attempt=0, event_index=0, lane_seq=3)
    result = check(tape, "lanes", transactions={"lane/p/1/rollout/0": 3})
    assert "come twice, the first is 3" in result.findings[0].message
    assert "up to its mark 3, got 4" in result.findings[1].message
    assert result.num_broken == 2


def test_dead_letters_account_for_lane_numbers(tape: Any) -> None:
    tape.rollout("a")
    source = {"source_producer_id": "p", "source_producer_epoch": 1, "source_topic": "rollout", "source_partition": 0}
    tape.add(
        "dead_letter", reason="x", producer_id="committer", log_topic="rollout", log_offset=5, lane_seq=0,
        first_lane_seq=5, last_lane_seq=9, **source,
    )  # fmt: skip
    tape.add("rollout_started", trajectory_id="b", attempt=0, event_index=0, lane_seq=10)
    result = check(tape, "lanes")
    assert result.ok
    assert result.counts["recognised_repeats"] == 0
    tape.add("rollout_started", trajectory_id="c", attempt=0, event_index=0, lane_seq=12)
    assert check(tape, "lanes").counts["recognised_repeats"] == 1


def test_offsets_with_a_gap(tape: Any) -> None:
    tape.rollout("a")
    tape.add("rollout_started", trajectory_id="b", attempt=0, event_index=0, log_offset=8)
    result = check(tape, "offsets", transactions={"log/rollout/0": 9, "log/weights/0": 4})
    messages = [finding.message for finding in result.findings]
    assert "5 to 7 are missing" in messages[0]
    assert "offset 9, as the table states, got 8" in messages[1]
    assert "weights/0" in messages[2]


def test_offsets_of_brokers_may_have_holes(tape: Any) -> None:
    tape.rollout("a")
    tape.add("rollout_started", trajectory_id="b", attempt=0, event_index=0, log_offset=8)
    result = check(tape, "offsets", transactions={"kafka/cluster/rollout/topic": 1, "log/rollout/0": 9})
    assert result.ok
    assert result.counts == {"partitions": 1, "without_rows": 3}


def test_a_missing_first_record(tape: Any) -> None:
    tape.add("rollout_started", trajectory_id="b", attempt=0, event_index=0, log_offset=1)
    assert "0 to 0 are missing" in check(tape, "offsets").findings[0].message


def test_an_event_twice_and_two_events_under_one_id(tape: Any) -> None:
    tape.add("rollout_started", num_rows=2, trajectory_id="t", attempt=0, event_index=[0, 0], event_id=["x", "x"])
    tape.add("rollout_started", num_rows=2, trajectory_id="u", attempt=0, event_index=[0, 1], event_id=["y", "y"])
    tape.add("run_started", purpose="train", event_id="z")
    tape.add("engine_joined", engine_id="e", event_id="z")
    found = {finding.event_id: finding.message for finding in check(tape, "event_ids").findings}
    assert "the same event again" in found["x"]
    assert "other content" in found["y"]
    assert "other content" in found["z"]
    assert "control/0:0, control/0:1" in found["z"]


def test_events_in_the_wrong_topic(tape: Any) -> None:
    tape.add("run_started", purpose="train", log_topic="rollout")
    tape.add("dead_letter", reason="x", log_topic="rollout")
    (finding,) = check(tape, "placement").findings
    assert "expected topic control, got rollout" in finding.message


def test_conservation(tape: Any) -> None:
    sound(tape)
    pin(tape, ["a"], batch_id="b2", step=2)
    (finding,) = check(tape, "conservation").findings
    assert (finding.trajectory_id, "2 × trained" in finding.message) == ("a", True)


def test_conservation_at_a_recorded_cursor(tape: Any) -> None:
    """The batch was formed before its member was on the tape; at the end nothing of that shows."""
    tape.rollout("a")
    early: dict[str, Any] = {"cursor_after": [[{"topic": "rollout", "partition": 0, "offset": 0}]]}
    late: dict[str, Any] = {
        "cursor_after": [[{"topic": t, "partition": 0, "offset": 99} for t in ("rollout", "training")]]
    }
    broken: dict[str, Any] = {
        "cursor_after": [
            [{"topic": "rollout", "partition": 0, "offset": 0}, {"topic": "training", "partition": 0, "offset": 2}]
        ]
    }
    pin(tape, ["a"], **late)
    assert check(tape, "conservation").counts["recorded_cursors"] == 1
    pin(tape, [], batch_id="b2", step=2, **early)
    assert check(tape, "conservation").ok
    pin(tape, [], batch_id="b3", step=3, **broken)
    (finding,) = check(tape, "conservation").findings
    assert "at rollout/0:0,training/0:2: expected one fate of 0 begun, got 1 × trained" in finding.message


# Incrementally


def test_since_a_cursor_only_what_is_new_is_checked(tape: Any) -> None:
    tape.rollout("old", tokens=(99,), log_probs=(-0.5, -0.5))
    since = Cursor.parse("rollout/0:5")
    tape.rollout("new", tokens=(1, 2), log_probs=(-0.5,))
    assert {finding.trajectory_id for finding in check(tape, "lengths").findings} == {"old", "new"}
    assert [finding.trajectory_id for finding in check(tape, "lengths", since).findings] == ["new"]
    assert check(tape, "log_probs", since).num_checked == 2
    assert check(tape, "event_ids", since).num_checked == 10


def test_an_old_trajectory_with_a_new_event_is_new(tape: Any) -> None:
    tape.rollout("t", reward=None)
    since = Cursor.parse("rollout/0:4")
    assert check(tape, "prefix_proof", since).num_checked == 0
    tape.add("reward_assigned", trajectory_id="t", attempt=0, state="earned", scalar=1.0)
    assert check(tape, "prefix_proof", since).num_checked == 1


def test_findings_are_bounded_but_all_are_counted(tape: Any) -> None:
    columns: dict[str, Any] = {
        "trajectory_id": [f"t{i}" for i in range(150)], "attempt": 0, "event_index": 0, "token_ids": [[1]] * 150,
        "rollout_log_probs": [[-0.5, -0.5]] * 150,
    }  # fmt: skip
    tape.add("action_sampled", 150, **columns)
    result = check(tape, "lengths")
    assert (result.num_broken, len(result.findings)) == (150, 100)


def test_bits_are_compared_not_values() -> None:
    assert np.float32(-0.0) == np.float32(0.0)  # why digests, not comparisons, judge log-probs

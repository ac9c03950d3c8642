"""Segments: rewritten contexts, summaries, partial and injected tokens, one owner for each sampled token."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.attempts import SAMPLING, AttemptWriter, row, segments, version_runs
from tests.conftest import Tape

from rolltape.schema.fold import Fold, fold


def trained(segment: dict[str, Any]) -> list[int]:
    """Ids under the response mask."""
    pairs = zip(segment["response_token_ids"], segment["response_mask"], strict=True)
    return [token for token, mask in pairs if mask]


def contexts(folded: Fold, name: str = "t") -> list[list[int]]:
    return [segment["prompt_token_ids"] for segment in segments(folded, name)]


def test_turns_and_template_tokens(tape: Tape) -> None:
    """Case D2: the newline after a stop token is context with mask 0, and the proof covers it."""
    writer = AttemptWriter(tape, "t")
    writer.start([10, 11])
    writer.act([20, 151645], version=1)
    writer.observe([198, 151644], source="template")
    writer.observe([30, 31])
    writer.act([40], version=2)
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    found = row(folded, "t")
    assert found["untrainable_reasons"] == []
    assert (found["num_action_tokens"], found["num_observation_tokens"]) == (3, 4)
    assert (found["min_version"], found["max_version"]) == (1, 2)
    [segment] = segments(folded, "t")
    assert segment["response_token_ids"] == [20, 151645, 198, 151644, 30, 31, 40]
    assert segment["response_mask"] == [True, True, False, False, False, False, True]
    assert segment["observation_mask"] == [False, False, True, True, True, True, False]
    assert segment["rollout_log_probs"] == [-0.5, -0.5, None, None, None, None, -0.5]
    assert segment["policy_versions"] == [1, 1, -1, -1, -1, -1, 2]


def test_a_rewritten_context_starts_the_next_segment(tape: Tape) -> None:
    """Case D3: a template drops earlier thinking; never a negative delta, both segments keep the rollout."""
    writer = AttemptWriter(tape, "t")
    writer.start(range(40))
    writer.act([100, 101, 102])
    writer.rewrite([*range(40), 102, 7], reason="template")
    writer.act([103])
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    assert row(folded, "t")["untrainable_reasons"] == []
    assert row(folded, "t")["tito_ok"] is True
    first, second = segments(folded, "t")
    assert (first["segment_index"], second["segment_index"]) == (0, 1)
    assert first["trajectory_id"] == second["trajectory_id"] == "t"
    assert first["response_token_ids"] == [100, 101, 102]
    assert second["prompt_token_ids"] == [*range(40), 102, 7]
    assert trained(first) == [100, 101, 102]
    assert trained(second) == [103]


def test_copied_tokens_are_context_and_train_once(tape: Tape) -> None:
    """Case D28: three segments share a sampled prefix of five tokens."""
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    prefix = [50, 51, 52, 53, 54]
    action = writer.act(prefix)
    for token in (60, 61):
        copied = [{"start": 1, "length": 5, "event_id": action, "source_start": 0}]
        writer.rewrite([1, *prefix], reason="rewind", provenance=[copied])
        writer.act([token])
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    assert row(folded, "t")["num_segments"] == 3
    assert row(folded, "t")["num_action_tokens"] == 7
    assert [trained(segment) for segment in segments(folded, "t")] == [prefix, [60], [61]]


def test_compaction_makes_execution_summary_execution(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20, 21])
    writer.observe([30])
    before = list(writer.context)
    writer.rewrite([*before, 900], reason="summary_call")
    summary = writer.act([80, 81], action_kind="summary")
    writer.rewrite([1, 80, 81], reason="compaction", summary_event_id=summary)
    writer.act([22])
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    assert row(folded, "t")["untrainable_reasons"] == []
    found = segments(folded, "t")
    assert [s["segment_kind"] for s in found] == ["execution", "summary", "execution"]
    assert [s["is_accepted"] for s in found] == [None, True, None]
    assert contexts(folded) == [[1], [1, 20, 21, 30, 900], [1, 80, 81]]
    assert [trained(s) for s in found] == [[20, 21], [80, 81], [22]]


def test_rejected_summaries_have_segments_of_their_own(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    call = [1, 20, 900]
    writer.rewrite(call, reason="summary_call")
    rejected = writer.act([70], action_kind="summary")
    writer.rewrite(call, reason="summary_call")
    accepted = writer.act([80], action_kind="summary")
    writer.rewrite([1, 80], summary_event_id=accepted, rejected_event_ids=[[rejected]])
    writer.act([21])
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    found = segments(folded, "t")
    assert [s["is_accepted"] for s in found] == [None, False, True, None]
    assert [s["segment_kind"] for s in found] == ["execution", "summary", "summary", "execution"]
    assert [trained(s) for s in found] == [[20], [70], [80], [21]]


def test_summaries_without_a_recorded_call_extend_and_repeat(tape: Tape) -> None:
    """Older recorders wrote no rewrite for the call: the instruction is an observation, a second try starts over."""
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    writer.observe([900], source="template")
    call = list(writer.context)
    writer.act([70], action_kind="summary")
    writer.context = list(call)
    writer.act([80], action_kind="summary")
    writer.act([81], action_kind="execution")
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    assert contexts(folded) == [[1], [1, 20, 900], [1, 20, 900], [1, 20, 900, 80]]
    assert [trained(s) for s in segments(folded, "t")] == [[20], [70], [80], [81]]
    assert row(folded, "t")["tito_ok"] is True


def test_an_empty_final_segment_is_not_shown(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    writer.rewrite([1, 9], reason="discard_all")
    writer.end("truncated", cause="context_overflow")
    writer.reward()
    folded = fold(tape.tables())
    assert row(folded, "t")["num_segments"] == 1
    assert contexts(folded) == [[1]]
    assert row(folded, "t")["untrainable_reasons"] == []


def test_an_empty_segment_between_others_leaves_no_gap_in_the_numbers(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([20])
    writer.rewrite([1, 9], reason="discard_all")
    writer.rewrite([1, 8], reason="discard_all")
    writer.act([21])
    writer.end()
    folded = fold(tape.tables())
    assert contexts(folded) == [[1], [1, 8]]
    assert [s["segment_index"] for s in segments(folded, "t")] == [0, 1]


def test_partial_actions_join_and_share_their_proof(tape: Tape) -> None:
    """A generation flushed at a weight switch: the engine reports its context once, or the same one again."""
    writer = AttemptWriter(tape, "t")
    writer.start([1, 2])
    head = writer.act([5, 6], version=7)
    unreported: dict[str, Any] = {"prefix_digest": None, "prefix_source": None, "prefix_length": None}
    middle = writer.act([7], version=8, continues_event_id=head, **unreported)
    writer.act([8], version=8, seen=[1, 2], continues_event_id=middle)
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    found = row(folded, "t")
    # The middle reported nothing, the last the context of the whole generation: both rest on the head's proof.
    assert found["untrainable_reasons"] == []
    assert found["tito_ok"] is True
    [segment] = segments(folded, "t")
    assert segment["response_token_ids"] == [5, 6, 7, 8]
    assert segment["policy_versions"] == [7, 7, 8, 8]
    assert trained(segment) == [5, 6, 7, 8]


def test_a_partial_action_that_continues_something_else_is_unproved(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    head = writer.act([5])
    writer.observe([9])
    writer.act([6], continues_event_id=head, prefix_digest=None, prefix_source=None, prefix_length=None)
    writer.end()
    writer.reward()
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["prefix_unknown"]


def test_a_retry_keeps_the_partial_tokens(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([5, 6], turn_index=0, finish_reason=None)
    writer.act([7], turn_index=0, finish_reason="stop")
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    assert row(folded, "t")["untrainable_reasons"] == []
    [segment] = segments(folded, "t")
    assert segment["response_token_ids"] == [5, 6, 7]


def test_injected_tokens_are_in_neither_mask(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    origin = [
        {"start": 0, "length": 2, "origin": "sampled"},
        {"start": 2, "length": 1, "origin": "injected"},
        {"start": 3, "length": 1, "origin": "sampled"},
    ]
    writer.act([5, 6, 7, 8], log_probs=[-1.0, -2.0, -3.0, -4.0], origin_runs=[origin])
    writer.end()
    writer.reward()
    folded = fold(tape.tables())
    found = row(folded, "t")
    assert (found["num_action_tokens"], found["num_observation_tokens"]) == (3, 0)
    assert found["untrainable_reasons"] == []
    [segment] = segments(folded, "t")
    assert segment["response_mask"] == [True, True, False, True]
    assert segment["observation_mask"] == [False, False, False, False]
    assert segment["rollout_log_probs"] == [-1.0, -2.0, None, -4.0]
    assert segment["policy_versions"] == [0, 0, -1, 0]
    buffer = folded.segments["rollout_log_probs"].chunk(0).values.buffers()[1]
    assert np.frombuffer(buffer, np.float32, 4).tolist() == [-1.0, -2.0, 0.0, -4.0]


def test_injected_tokens_need_neither_log_probs_nor_versions(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([5])
    writer.act(
        [6, 7],
        origin_runs=[[{"start": 0, "length": 2, "origin": "injected"}]],
        rollout_log_probs=None,
        version_runs=None,
        sampling=None,
    )
    writer.end()
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert found["untrainable_reasons"] == []
    assert (found["num_action_tokens"], found["num_untrusted_tokens"]) == (1, 0)


def test_tokens_whose_declared_origin_is_silent_are_not_trained(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.act([5, 6, 7], origin_runs=[[{"start": 0, "length": 2, "origin": "sampled"}]])
    writer.end()
    [segment] = segments(fold(tape.tables()), "t")
    assert segment["response_mask"] == [True, True, False]


def test_the_sampling_configuration_is_that_of_the_first_action(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start([1])
    writer.observe([9])
    writer.act([5], sampling=[{**SAMPLING, "seed": 11}])
    writer.act([6], sampling=[{**SAMPLING, "seed": 12}])
    writer.rewrite([1], reason="discard_all")
    writer.observe([9])
    writer.end()
    first, second = segments(fold(tape.tables()), "t")
    assert first["sampling_config"]["seed"] == 11
    assert second["sampling_config"] is None


def test_a_branch_is_a_trajectory_of_its_own(tape: Tape) -> None:
    root = AttemptWriter(tape, "root")
    root.start([1])
    forked_from = root.act([5, 6])
    root.end()
    root.reward()
    branch = AttemptWriter(tape, "branch", root_rollout_id="root", parent_event_id=forked_from)
    branch.start([1, 5, 6, 9], forked_from_event_id=forked_from)
    branch.act([7])
    branch.end()
    branch.reward()
    folded = fold(tape.tables())
    assert row(folded, "branch")["root_rollout_id"] == "root"
    assert row(folded, "branch")["forked_from_event_id"] == forked_from
    assert row(folded, "root")["root_rollout_id"] == "root"
    assert row(folded, "branch")["untrainable_reasons"] == []
    assert trained(segments(folded, "root")[0]) == [5, 6]
    assert trained(segments(folded, "branch")[0]) == [7]


def test_versions_of_sliced_runs(tape: Tape) -> None:
    """Case D23: slices of the tape show their own rows, not their neighbours'."""
    for name, version in (("a", 1), ("b", 2), ("c", 3)):
        writer = AttemptWriter(tape, name)
        writer.start([version])
        writer.act([version] * version, version_runs=[version_runs((0, version, version))])
        writer.end()
    events = tape.tables()
    sliced = {kind: table.combine_chunks().slice(1) for kind, table in events.items()}
    folded = fold(sliced)
    assert folded.segments["response_token_ids"].to_pylist() == [[2, 2], [3, 3, 3]]
    assert folded.segments["prompt_token_ids"].to_pylist() == [[2], [3]]
    assert folded.segments["policy_versions"].to_pylist() == [[2, 2], [3, 3, 3]]
    assert folded.trajectories["tito_ok"].to_pylist() == [True, True]

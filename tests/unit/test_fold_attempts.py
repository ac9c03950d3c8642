"""Gaps, dead letters and attempts: what keeps a trajectory open, what closes it, who owns its tokens."""

from __future__ import annotations

import pytest
from tests.attempts import AttemptWriter, row, segments, whole
from tests.conftest import Tape

from rolltape.schema.fold import Fold, fold
from rolltape.schema.fold_timeline import MAX_LISTED_GAPS


def trained(folded: Fold, attempt: int = 0, name: str = "t") -> list[int]:
    """Ids under the response masks of one attempt."""
    return [
        token
        for segment in segments(folded, name, attempt)
        for token, mask in zip(segment["response_token_ids"], segment["response_mask"], strict=True)
        if mask
    ]


def test_without_an_end_it_is_open(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["missing_event_indexes"], found["last_event_index"]) == ("open", [], 1)
    assert found["untrainable_reasons"] == ["open", "reward_missing"]


def test_a_gap_keeps_it_open_and_is_listed(tape: Tape) -> None:
    """Case D19: sequence 4, 5, 6, 1, 2 with 3 missing; the same as in order."""
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    writer.observe([6])
    missing = writer.skip()
    writer.act([7])
    writer.end()
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert found["state"] == "open"
    assert found["missing_event_indexes"] == [missing]
    assert (found["num_events"], found["last_event_index"]) == (5, 5)
    # What comes after the gap is shown, but its context cannot be proved: it is unknown, not different.
    assert found["untrainable_reasons"] == ["open", "prefix_unknown"]
    assert (found["tito_ok"], found["tito_first_difference"]) == (None, None)
    assert trained(fold(tape.tables())) == [5, 7]


def test_an_open_attempt_is_not_blamed_for_its_check_sums(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    missing = writer.skip()
    writer.end(num_action_tokens=3)
    writer.reward()
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["open"]
    writer.dead_letter(missing)
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == ["dropped"]


def test_the_late_event_closes_it(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    writer.index += 1
    writer.context.append(9)
    writer.num_observation_tokens += 1
    writer.act([7])
    writer.end()
    writer.reward()
    assert row(fold(tape.tables()), "t")["state"] == "open"
    writer.add("observation_received", event_index=2, token_ids=[[9]], source="tool")
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["missing_event_indexes"], found["untrainable_reasons"]) == ("ended", [], [])


def test_a_gap_before_a_rewrite_does_not_shadow_the_new_segment(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    writer.skip()
    writer.rewrite([1, 9])
    writer.act([7])
    writer.end()
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert found["tito_ok"] is True
    assert found["untrainable_reasons"] == ["open"]


def test_a_missing_start_is_a_gap_at_index_0(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.context = [1, 2]
    writer.skip()
    writer.act([5])
    writer.end()
    writer.reward()
    found = row(fold(tape.tables()), "t")
    assert found["missing_event_indexes"] == [0]
    assert found["untrainable_reasons"] == ["open", "prefix_unknown"]
    [segment] = segments(fold(tape.tables()), "t")
    assert segment["prompt_token_ids"] is None


def test_an_end_that_names_a_later_index_keeps_it_open(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.end(last_event_index=4)
    assert row(fold(tape.tables()), "t")["missing_event_indexes"] == [2, 3, 4]


def test_a_gap_as_wide_as_an_int32_lists_a_bounded_number(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.end(last_event_index=2**31 - 1)
    found = row(fold(tape.tables()), "t")
    assert found["state"] == "open"
    assert found["missing_event_indexes"] == list(range(2, 2 + MAX_LISTED_GAPS))


def test_a_dispatch_alone_is_an_open_attempt_without_segments(tape: Tape) -> None:
    tape.add(
        "rollout_dispatched",
        trajectory_id="t",
        attempt=0,
        problem_id="p",
        group_id="g",
        purpose="train",
        training_step=4,
        group_ordinal=1,
        member=2,
        group_size=8,
        worker_id="w3",
        run_epoch=2,
    )
    folded = fold(tape.tables())
    found = row(folded, "t")
    assert (found["state"], found["num_events"], found["num_segments"]) == ("open", 0, 0)
    assert (found["worker_id"], found["run_epoch"], found["problem_id"]) == ("w3", 2, "p")
    assert found["last_event_index"] is None
    assert segments(folded, "t") == []


def test_a_dead_letter_counts_as_present_and_drops(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    lost = writer.skip()
    writer.act([7])
    writer.end()
    writer.reward()
    writer.dead_letter(lost)
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["missing_event_indexes"]) == ("dropped", [])
    assert "dropped" in found["untrainable_reasons"]
    assert "open" not in found["untrainable_reasons"]


def test_a_dead_lettered_end_closes_it_as_dropped(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    writer.dead_letter(2)
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["last_event_index"], found["status"]) == ("dropped", 2, None)


def test_a_dead_letter_of_a_range_with_a_gap_behind_it(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.dead_letter(1, 3)
    writer.index = 6
    writer.end()
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["missing_event_indexes"]) == ("dropped", [4, 5])


def test_a_dead_letter_alone_makes_a_row(tape: Tape) -> None:
    AttemptWriter(tape, "t", run_id="unknown to it").dead_letter(0, 5)
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["run_id"], found["num_events"]) == ("dropped", "unknown to it", 0)


def test_a_dead_letter_finds_its_trajectory_whatever_run_its_writer_knew(tape: Tape) -> None:
    writer = whole(tape, "t")
    AttemptWriter(tape, "t", run_id="committer").dead_letter(3)
    folded = fold(tape.tables())
    assert folded.trajectories.num_rows == 1
    assert row(folded, "t")["state"] == "dropped"
    assert writer.index == 3


def test_a_dead_letter_without_a_range_or_trajectory_closes_nothing(tape: Tape) -> None:
    whole(tape, "t")
    tape.add("dead_letter", reason="truncated_payload")
    tape.add("dead_letter", reason="bad_value", trajectory_id="t", attempt=0)
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == []


def test_a_redriven_dead_letter_opens_it_again_and_its_replacement_ends_it(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    letter = writer.dead_letter(1)
    writer.index = 2
    writer.end(num_action_tokens=1)
    writer.reward()
    assert row(fold(tape.tables()), "t")["state"] == "dropped"
    tape.add("dead_letter_redriven", dead_letter_event_id=letter, repair="drop_trailing_stop_log_prob")
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["missing_event_indexes"]) == ("open", [1])
    writer.act([5], event_index=1)
    assert row(fold(tape.tables()), "t")["untrainable_reasons"] == []


def test_one_of_two_dead_letters_redriven_is_not_enough(tape: Tape) -> None:
    writer = whole(tape, "t")
    first = writer.dead_letter(3)
    writer.dead_letter(4)
    tape.add("dead_letter_redriven", dead_letter_event_id=first)
    assert row(fold(tape.tables()), "t")["state"] == "dropped"


@pytest.mark.parametrize("ended", [True, False])
def test_abandoned_wins_over_any_end(tape: Tape, ended: bool) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start()
    writer.act([5])
    if ended:
        writer.end()
        writer.reward()
    writer.add("attempt_abandoned", indexed=False, reason="worker_lost")
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["is_current"]) == ("abandoned", False)
    assert "abandoned" in found["untrainable_reasons"]
    assert "open" not in found["untrainable_reasons"]
    assert "superseded" not in found["untrainable_reasons"]


def test_abandoned_wins_over_dropped(tape: Tape) -> None:
    writer = whole(tape, "t")
    writer.dead_letter(3)
    writer.add("attempt_abandoned", indexed=False, reason="cancelled")
    found = row(fold(tape.tables()), "t")
    assert (found["state"], found["untrainable_reasons"]) == ("abandoned", ["abandoned", "dropped"])


def test_the_newest_attempt_that_stands_is_current(tape: Tape) -> None:
    for attempt in range(3):
        writer = AttemptWriter(tape, "t", attempt)
        writer.start()
        writer.act([5 + attempt])
        writer.end()
        writer.reward()
    AttemptWriter(tape, "t", 2).add("attempt_abandoned", indexed=False, reason="lease_expired")
    folded = fold(tape.tables())
    assert [row(folded, "t", attempt)["is_current"] for attempt in range(3)] == [False, True, False]
    assert row(folded, "t", 0)["untrainable_reasons"] == ["superseded"]
    assert row(folded, "t", 1)["untrainable_reasons"] == []
    assert row(folded, "t", 2)["untrainable_reasons"] == ["abandoned"]
    assert [segment["is_current"] for attempt in range(3) for segment in segments(folded, "t", attempt)] == [
        False,
        True,
        False,
    ]


def resumed(tape: Tape, *, from_event_index: int = 3, abandon: bool = True) -> AttemptWriter:
    """Attempt 0: start, act [5], observe [6], act [7], observe [8]; attempt 1 goes on from one of its events."""
    old = AttemptWriter(tape, "t", 0)
    old.start([1])
    old.act([5])
    old.observe([6])
    old.act([7])
    old.observe([8])
    if abandon:
        old.add("attempt_abandoned", indexed=False, reason="worker_lost")
    new = AttemptWriter(tape, "t", 1)
    new.resume(0, from_event_index, [1, 5, 6, 7, 8][: from_event_index + 1])
    return new


def test_a_resumed_attempt_takes_over_and_orphans_the_rest(tape: Tape) -> None:
    new = resumed(tape, from_event_index=2)
    new.act([9])
    new.end()
    new.reward()
    folded = fold(tape.tables())
    found = row(folded, "t", 1)
    assert found["untrainable_reasons"] == []
    assert (found["is_current"], found["state"]) == (True, "ended")
    assert (found["num_events"], found["num_action_tokens"], found["num_observation_tokens"]) == (3, 2, 1)
    [segment] = segments(folded, "t", 1)
    assert segment["prompt_token_ids"] == [1]
    assert segment["response_token_ids"] == [5, 6, 9]
    assert segment["response_mask"] == [True, False, True]
    # The old attempt still shows all it recorded, but owns only what was not taken over.
    [old] = segments(folded, "t", 0)
    assert old["response_token_ids"] == [5, 6, 7, 8]
    assert old["response_mask"] == [False, False, True, False]
    assert old["rollout_log_probs"] == [-0.5, None, -0.5, None]


def test_resuming_a_resumed_attempt(tape: Tape) -> None:
    middle = resumed(tape, from_event_index=2)
    middle.act([9])
    middle.act([10])
    newest = AttemptWriter(tape, "t", 2)
    newest.resume(1, 1, middle.context[:4])
    newest.act([11])
    newest.end()
    newest.reward()
    folded = fold(tape.tables())
    assert row(folded, "t", 2)["untrainable_reasons"] == []
    assert [trained(folded, attempt) for attempt in range(3)] == [[7], [10], [5, 9, 11]]


def test_an_abandoned_heir_gives_back_what_it_took(tape: Tape) -> None:
    new = resumed(tape, from_event_index=2, abandon=False)
    new.act([9])
    new.add("attempt_abandoned", indexed=False, reason="worker_lost")
    folded = fold(tape.tables())
    assert row(folded, "t", 0)["is_current"]
    assert [trained(folded, attempt) for attempt in range(2)] == [[5, 7], [9]]


def test_two_heirs_of_one_attempt_the_newest_owns(tape: Tape) -> None:
    for attempt in (1, 2):
        if attempt == 1:
            new = resumed(tape, from_event_index=3)
        else:
            new = AttemptWriter(tape, "t", 2)
            new.resume(0, 1, [1, 5])
        new.act([20 + attempt])
        new.end()
        new.reward()
    folded = fold(tape.tables())
    assert [trained(folded, attempt) for attempt in range(3)] == [[], [7, 21], [5, 22]]


def test_a_gap_in_what_is_taken_over_keeps_the_heir_open(tape: Tape) -> None:
    old = AttemptWriter(tape, "t", 0)
    old.start([1])
    old.skip()
    old.act([7])
    new = AttemptWriter(tape, "t", 1)
    new.resume(0, 2, [1, 5, 7])
    new.act([9])
    new.end()
    new.reward()
    found = row(fold(tape.tables()), "t", 1)
    assert (found["state"], found["missing_event_indexes"]) == ("open", [])
    assert found["untrainable_reasons"] == ["open", "prefix_unknown"]


def test_what_is_taken_over_may_end_in_a_gap(tape: Tape) -> None:
    """The last event that is taken over is missing: what follows it is unknown, for the heir and for its heir."""
    old = AttemptWriter(tape, "t", 0)
    old.start([1])
    old.act([5])
    middle = AttemptWriter(tape, "t", 1)
    middle.resume(0, 2, [1, 5, 6])
    middle.act([9])
    newest = AttemptWriter(tape, "t", 2)
    newest.resume(1, 1, [1, 5, 6, 9])
    newest.act([10])
    newest.end()
    newest.reward()
    folded = fold(tape.tables())
    for attempt in (1, 2):
        found = row(folded, "t", attempt)
        assert (found["state"], found["tito_ok"], found["tito_first_difference"]) == ("open", None, None)
    old.observe([6])
    folded = fold(tape.tables())
    assert row(folded, "t", 2)["untrainable_reasons"] == []
    assert trained(folded, 2) == [5, 9, 10]


def test_a_dead_letter_in_what_is_taken_over_drops_the_heir(tape: Tape) -> None:
    old = AttemptWriter(tape, "t", 0)
    old.start([1])
    old.dead_letter(1)
    old.dead_letter(5)
    new = AttemptWriter(tape, "t", 1)
    new.resume(0, 1, [1])
    new.act([9])
    new.end()
    new.reward()
    assert row(fold(tape.tables()), "t", 1)["state"] == "dropped"
    clean = AttemptWriter(tape, "t", 2)
    clean.resume(0, 0, [1])
    clean.act([9])
    clean.end()
    clean.reward()
    assert row(fold(tape.tables()), "t", 2)["untrainable_reasons"] == []


@pytest.mark.parametrize("from_attempt", [3, 1, 2], ids=["unknown", "itself", "later"])
def test_resuming_what_the_tape_does_not_know_keeps_it_open(tape: Tape, from_attempt: int) -> None:
    AttemptWriter(tape, "t", 2).start([1])
    new = AttemptWriter(tape, "t", 1)
    new.resume(from_attempt, 0, [1])
    new.act([9])
    new.end()
    found = row(fold(tape.tables()), "t", 1)
    assert found["state"] == "open"


def test_a_resumed_attempt_that_also_records_a_start_keeps_the_old_context(tape: Tape) -> None:
    old = AttemptWriter(tape, "t", 0)
    old.start([1])
    old.act([5])
    new = AttemptWriter(tape, "t", 1)
    new.start([1])
    new.resume(0, 1, [1, 5])
    new.act([6])
    new.end()
    new.reward()
    folded = fold(tape.tables())
    assert row(folded, "t", 1)["untrainable_reasons"] == []
    [segment] = segments(folded, "t", 1)
    assert segment["response_token_ids"] == [5, 6]


@pytest.mark.parametrize(("event_id", "kept"), [("zzz", [5, 6, 7]), ("000", [9])])
def test_two_events_at_one_place_are_a_conflict(tape: Tape, event_id: str, kept: list[int]) -> None:
    writer = whole(tape, "t")
    writer.add("action_sampled", event_index=1, token_ids=[[9]], rollout_log_probs=[[-1.0]], event_id=event_id)
    folded = fold(tape.tables())
    assert "event_conflict" in row(folded, "t")["untrainable_reasons"]
    assert trained(folded) == kept
    assert row(folded, "t")["num_events"] == 3


def test_an_event_without_an_index_is_a_conflict(tape: Tape) -> None:
    writer = whole(tape, "t")
    writer.tape.add("observation_received", trajectory_id="t", attempt=0, token_ids=[[9]])
    assert "event_conflict" in row(fold(tape.tables()), "t")["untrainable_reasons"]


def test_log_offsets_of_the_events(tape: Tape) -> None:
    tape.add("task_ratios_set")
    whole(tape, "t")
    found = row(fold(tape.tables()), "t")
    assert (found["log_offset_first"], found["log_offset_last"]) == (1, 4)


def test_unstamped_events_have_no_offset(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t", log_offset=None)
    writer.start()
    found = row(fold(tape.tables()), "t")
    assert (found["log_offset_first"], found["log_offset_last"]) == (None, None)


def test_the_epoch_of_an_undispatched_attempt_is_that_of_its_start(tape: Tape) -> None:
    writer = AttemptWriter(tape, "t")
    writer.start(run_epoch=3)
    writer.end(run_epoch=4)
    assert row(fold(tape.tables()), "t")["run_epoch"] == 3


def test_purpose_and_tokenizer_of_the_run_epoch(tape: Tape) -> None:
    tape.add("run_started", purpose="import", tokenizer=[{"revision": "r1"}])
    tape.add(
        "run_resumed",
        purpose="train",
        tokenizer=[{"revision": "r2"}],
        run_epoch=2,
        continues_from_step=1,
    )
    for epoch in (1, 2, 3):
        writer = AttemptWriter(tape, f"t{epoch}", run_epoch=epoch)
        writer.start()
    foreign = AttemptWriter(tape, "foreign", run_id="another")
    foreign.start()
    folded = fold(tape.tables())
    purposes = [row(folded, name)["purpose"] for name in ("t1", "t2", "t3", "foreign")]
    assert purposes == ["import", "train", "train", None]
    revisions = [segments(folded, name)[0]["tokenizer_revision"] for name in ("t1", "t2", "t3", "foreign")]
    assert revisions == ["r1", "r2", "r2", None]


def test_of_two_dispatches_the_smaller_event_id_tells(tape: Tape) -> None:
    for event_id, worker in (("b", "w1"), ("a", "w0"), ("c", "w2")):
        tape.add(
            "rollout_dispatched",
            trajectory_id="t",
            attempt=0,
            problem_id="p",
            event_id=event_id,
            worker_id=worker,
            purpose="evaluate",
        )
    found = row(fold(tape.tables()), "t")
    assert (found["worker_id"], found["purpose"]) == ("w0", "evaluate")


def test_any_event_tells_what_the_dispatch_left_out(tape: Tape) -> None:
    dispatched = AttemptWriter(tape, "dispatched", group_id=None)
    dispatched.add("rollout_dispatched", indexed=False, problem_id="p", purpose="train", training_step=3)
    dispatched.start(group_id="g1")
    imported = AttemptWriter(tape, "imported", group_id=None)
    imported.reward(group_id="g2", problem_id="q")
    folded = fold(tape.tables())
    assert [row(folded, name)["group_id"] for name in ("dispatched", "imported")] == ["g1", "g2"]
    assert [row(folded, name)["problem_id"] for name in ("dispatched", "imported")] == ["p", "q"]
    assert [row(folded, name)["training_step"] for name in ("dispatched", "imported")] == [3, None]
    assert row(folded, "imported")["run_epoch"] == 1

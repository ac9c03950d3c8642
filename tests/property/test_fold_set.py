"""The fold is a function of the set of events: no order, no file, no copy, no neighbour shows in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.attempts import AttemptWriter, shuffled, version_runs
from tests.conftest import Tape

from rolltape.schema.fold import FOLDED_COLUMNS, Fold, content_digests_of, fold

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

STEPS = (
    "act",
    "act",
    "act",
    "observe",
    "observe",
    "summary_call",
    "compact",
    "rewrite",
    "partial",
    "inject",
    "skip",
    "dead_letter",
    "redrive",
    "drift",
    "unproved",
    "no_log_probs",
    "two_versions",
    "mask",
    "reward",
    "supersede",
    "token_reward",
    "twin",
)


class Story:
    """Draws a tape: attempts with everything that can happen to them, in any mixture."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.tape = Tape()
        self.token = 100
        self.letters: list[str] = []

    def fresh(self, at_most: int = 3) -> list[int]:
        """New token ids, unique on this tape."""
        count = self.draw(st.integers(0, at_most))
        self.token += count
        return list(range(self.token - count, self.token))

    def attempt(self, name: str, attempt: int, older: AttemptWriter | None) -> AttemptWriter:
        writer = AttemptWriter(self.tape, name, attempt)
        if self.draw(st.booleans()):
            dispatch = {"problem_id": "p", "purpose": "train", "training_step": 1, "member": attempt}
            writer.add("rollout_dispatched", indexed=False, **dispatch)
        if older is not None and self.draw(st.booleans()):
            writer.resume(attempt - 1, self.draw(st.integers(0, older.index + 1)), older.context)
        else:
            writer.start(self.fresh())
        actions: list[tuple[str, int]] = []
        rewards: list[str] = []
        for step in self.draw(st.lists(st.sampled_from(STEPS), max_size=8)):
            self.step(writer, step, actions, rewards)
        if self.draw(st.booleans()):
            writer.end(self.draw(st.sampled_from(["completed", "truncated", "env_failed"])))
        if self.draw(st.integers(0, 4)) == 0:
            writer.add("attempt_abandoned", indexed=False, reason="worker_lost")
        return writer

    def step(self, writer: AttemptWriter, step: str, actions: list[tuple[str, int]], rewards: list[str]) -> None:
        tokens = self.fresh()
        last = actions[-1][0] if actions else None
        act: dict[str, Any] | None = None
        match step:
            case "act":
                act = {"version": self.draw(st.integers(0, 2))}
            case "observe":
                writer.observe(tokens)
            case "summary_call":
                writer.rewrite([*writer.context, 7], reason="summary_call")
                act = {"action_kind": "summary"}
            case "compact":
                writer.rewrite(self.fresh(), summary_event_id=last)
            case "rewrite":
                writer.rewrite(writer.context[::2], reason="keep_recent_k")
            case "partial":
                act = {"continues_event_id": last, "prefix_digest": None, "prefix_source": None}
            case "inject":
                run = {"start": 0, "length": self.draw(st.integers(0, 3)), "origin": "sampled"}
                act = {"origin_runs": [[run]]}
            case "skip":
                writer.skip()
            case "dead_letter":
                self.letters.append(writer.dead_letter(writer.skip()))
            case "redrive" if self.letters:
                self.tape.add("dead_letter_redriven", dead_letter_event_id=self.letters[-1])
            case "drift":
                act = {"seen": [*writer.context, 3], "keep_ids": self.draw(st.booleans())}
            case "unproved":
                act = {"prefix_source": "unknown"}
            case "no_log_probs":
                act = {"rollout_log_probs": None}
            case "two_versions":
                act = {"version_runs": [version_runs((0, 1, 1), (1, 9, 2))]}
            case "mask" if last:
                writer.add("mask_assigned", indexed=False, ranges=[[{"event_id": last, "start": 0, "length": 1}]])
            case "reward":
                rewards.append(writer.reward(float(len(rewards))))
            case "supersede" if rewards:
                rewards.append(writer.reward(0.5, supersedes=[rewards[:-1]]))
            case "token_reward" if last:
                writer.reward(0.5, target_event_id=last)
            case "twin" if writer.index:
                writer.add("observation_received", event_index=writer.index - 1, token_ids=[tokens])
        if act is not None:
            actions.append((writer.act(tokens, **act), len(tokens)))


@st.composite
def tapes(draw: st.DrawFn) -> dict[str, pa.Table]:
    """Events of one to three trajectories with one to three attempts each."""
    story = Story(draw)
    for name in ("t0", "t1", "t2")[: draw(st.integers(1, 3))]:
        older = None
        for attempt in range(draw(st.integers(1, 3))):
            older = story.attempt(name, attempt, older)
    return story.tape.tables()


def same(one: Fold, other: Fold) -> bool:
    return bool(one.trajectories.equals(other.trajectories) and one.segments.equals(other.segments))


@SETTINGS
@given(tapes(), st.integers(0, 2**31), st.integers(1, 3))
def test_order_chunks_and_copies_do_not_matter(events: dict[str, pa.Table], seed: int, copies: int) -> None:
    expected = fold(events)
    expected.trajectories.validate(full=True)
    expected.segments.validate(full=True)
    assert same(fold(shuffled(events, seed, copies)), expected)


@SETTINGS
@given(tapes(), st.integers(0, 2**31))
def test_unstamped_events_fold_alike(events: dict[str, pa.Table], seed: int) -> None:
    """Before the log stamped them, copies are told apart by their content."""
    bare = {}
    for kind, table in events.items():
        column = table.schema.get_field_index("log_offset")
        bare[kind] = table.set_column(column, "log_offset", pa.nulls(table.num_rows, pa.int64()))
    assert same(fold(shuffled(bare, seed, copies=2)), fold(bare))


@SETTINGS
@given(tapes())
def test_a_read_of_the_folded_columns_is_enough(events: dict[str, pa.Table]) -> None:
    pruned = {kind: _pruned(kind, table) for kind, table in events.items()}
    assert same(fold(pruned), fold(events))


def _pruned(kind: str, table: pa.Table) -> pa.Table:
    """The columns and struct fields that the fold names; all of them where an event comes twice."""
    if kind not in FOLDED_COLUMNS or len(pc.unique(table["event_id"])) < table.num_rows:
        return table
    names = [name for name in FOLDED_COLUMNS[kind] if "." not in name]
    fields = [name.partition(".")[2] for name in FOLDED_COLUMNS[kind] if "." in name]
    pruned = table.select(names)
    if not fields:
        return pruned
    struct = table[kind].combine_chunks()
    kept = pa.StructArray.from_arrays([pc.struct_field(struct, name) for name in fields], fields)
    return pruned.append_column(kind, kept)


@SETTINGS
@given(tapes())
def test_a_part_of_the_tape_agrees_with_all_of_it(events: dict[str, pa.Table]) -> None:
    everything = fold(events)
    for name in ("t0", "t1", "t2"):
        part = {
            kind: table if kind == "dead_letter_redriven" else table.filter(pc.equal(table["trajectory_id"], name))
            for kind, table in events.items()
        }
        alone = fold(part)
        for whole, found in ((everything.trajectories, alone.trajectories), (everything.segments, alone.segments)):
            assert found.equals(whole.filter(pc.equal(whole["trajectory_id"], name)))


@SETTINGS
@given(tapes())
def test_lists_of_one_segment_have_one_length_and_masks_exclude_each_other(events: dict[str, pa.Table]) -> None:
    folded = fold(events)
    totals: Counter[tuple[str, int]] = Counter()
    for segment in folded.segments.to_pylist():
        length = len(segment["response_token_ids"])
        names = ("rollout_log_probs", "response_mask", "observation_mask", "policy_versions")
        assert [len(segment[name]) for name in names] == [length] * 4
        for mask, seen, log_prob, version in zip(
            *(segment[name] for name in (*names[1:3], names[0], names[3])), strict=True
        ):
            assert not (mask and seen)
            assert not seen or (log_prob is None and version == -1)
        totals[segment["trajectory_id"], segment["attempt"]] += length
    for found in folded.trajectories.to_pylist():
        key = (found["trajectory_id"], found["attempt"])
        assert found["num_action_tokens"] + found["num_observation_tokens"] <= totals[key]
        assert found["untrainable_reasons"] == sorted(set(found["untrainable_reasons"]))


@SETTINGS
@given(tapes())
def test_every_sampled_token_is_owned_exactly_once(events: dict[str, pa.Table]) -> None:
    """Invariant 2: the writer's token ids are unique, so each may stand under one response mask at most, and must
    stand under one unless it is masked, injected, or lost its place to a twin."""
    folded = fold(events)
    owners: Counter[int] = Counter()
    shown: set[int] = set()
    for segment in folded.segments.to_pylist():
        for token, mask, observed in zip(
            segment["response_token_ids"], segment["response_mask"], segment["observation_mask"], strict=True
        ):
            owners[token] += mask
            if not observed:
                shown.add(token)
    assert max(owners.values(), default=0) <= 1
    actions = events.get("action_sampled")
    if actions is None:
        return
    exempt: set[int] = set()
    masked = set()
    for mask in events["mask_assigned"]["mask_assigned"].to_pylist() if "mask_assigned" in events else []:
        masked |= {span["event_id"] for span in mask["ranges"]}
    conflicting = {
        (found["trajectory_id"], found["attempt"])
        for found in folded.trajectories.to_pylist()
        if "event_conflict" in found["untrainable_reasons"]
    }
    sampled: set[int] = set()
    for action in actions.to_pylist():
        sampled |= set(action["token_ids"])
        declared = bool(action["action_sampled"]["origin_runs"])
        place = (action["trajectory_id"], action["attempt"])
        if declared or action["event_id"] in masked or place in conflicting:
            exempt |= set(action["token_ids"])
    missing = {token for token in sampled - exempt if owners[token] != 1}
    assert not missing


@SETTINGS
@given(tapes(), st.integers(0, 2**31))
def test_content_digests_do_not_depend_on_order(events: dict[str, pa.Table], seed: int) -> None:
    assert content_digests_of(fold(shuffled(events, seed))).equals(content_digests_of(fold(events)))

"""Scores as flat columns: which ids are scored, top-k payloads, the control's permutation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.segment_rows import segment_rows

from rolltape.numerics.char_tokenizer import CharTokenizer
from rolltape.numerics.scoring import Distributions, ScorerIdentity
from rolltape.numerics.vocabulary import Vocabulary
from rolltape.rollout.teacher_models import Teacher
from rolltape.rollout.teacher_scores import Scores, Segments, score, scored_columns, shuffle_order
from rolltape.schema.build import build_batch
from rolltape.schema.digest import prefix_digest
from rolltape.schema.errors import ConfigError
from rolltape.schema.validate import validate

VOCAB = 8


class Positional:
    """Says -(row + place / 100) of each id; distributions peak at ``place % VOCAB`` with ties between the others."""

    identity = ScorerIdentity(
        weights_digest="sha256:w", engine="none", dtype="float32", logprobs_mode="processed_logprobs", temperature=0.5
    )

    def score(
        self, token_ids: torch.Tensor, cu_seqlens: torch.Tensor, *, scored: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert scored is not None
        rows = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), torch.diff(cu_seqlens))
        places = torch.arange(len(token_ids)) - cu_seqlens[:-1][rows]
        return torch.where(scored, -(rows + places / 100).float(), 0.0)

    def distributions(
        self, token_ids: torch.Tensor, cu_seqlens: torch.Tensor, *, scored: torch.Tensor | None = None
    ) -> Iterator[Distributions]:
        assert scored is not None
        places = torch.nonzero(scored).squeeze(1)
        for begin in range(0, len(places), 2):
            part = places.flip(0)[begin : begin + 2]  # in no order that anybody may rely on
            logits = torch.zeros(len(part), VOCAB)
            logits[torch.arange(len(part)), part % VOCAB] = 2.0
            yield Distributions(part, torch.log_softmax(logits, -1))


def test_responses_are_scored_and_contexts_are_not() -> None:
    segments = Segments.of(segment_rows(contexts=[[1, 5], [1], [1, 6, 7]], responses=[[3, 4], [5, 6, 7], [3]]))
    ids, bounds, is_response = segments.packed()
    assert ids.tolist() == [1, 5, 3, 4, 1, 5, 6, 7, 1, 6, 7, 3]
    assert bounds.tolist() == [0, 4, 8, 12]
    assert np.flatnonzero(is_response).tolist() == [2, 3, 5, 6, 7, 11]
    found = score(segments, Positional())
    np.testing.assert_allclose(found.log_probs, [-0.02, -0.03, -1.01, -1.02, -1.03, -2.03], rtol=1e-6)


def test_an_id_without_a_context_has_no_score() -> None:
    """0.0 would say that the teacher was sure of it."""
    segments = Segments.of(segment_rows(contexts=[[], [1]], responses=[[3, 4], [5]]))
    for top_k in (None, 3):
        found = score(segments, Positional(), top_k=top_k, num_ids=VOCAB)
        assert np.isnan(found.log_probs).tolist() == [True, False, False]


def test_slices_of_a_table_are_read_from_their_own_offsets() -> None:
    table = segment_rows(contexts=[[1, 5], [1], [1, 6, 7]], responses=[[3, 4], [5, 6, 7], [3]]).slice(1, 2)
    segments = Segments.of(table)
    assert segments.contexts.tolist() == [1, 1, 6, 7]
    assert segments.responses.tolist() == [5, 6, 7, 3]
    assert segments.is_observation.tolist() == [False] * 4


def test_top_k_ids_fall_by_log_prob_then_rise_by_id() -> None:
    segments = Segments.of(segment_rows(contexts=[[1], [1, 2]], responses=[[4, 0], [3]]))
    found = score(segments, Positional(), top_k=3, num_ids=VOCAB)
    peak, rest = np.exp(2.0) / (np.exp(2.0) + 7), 1 / (np.exp(2.0) + 7)
    assert found.top_ids is not None
    assert found.top_log_probs is not None
    assert found.tail_mass is not None
    assert found.top_ids.tolist() == [[1, 0, 2], [2, 0, 1], [5, 0, 1]]
    np.testing.assert_allclose(np.exp(found.top_log_probs), [[peak, rest, rest]] * 3, rtol=1e-5)
    np.testing.assert_allclose(found.tail_mass, [1 - peak - 2 * rest] * 3, rtol=1e-5)
    np.testing.assert_allclose(np.exp(found.log_probs), [rest, rest, rest], rtol=1e-5)
    with pytest.raises(ConfigError, match="k: expected 1 to 8"):
        score(segments, Positional(), top_k=9, num_ids=VOCAB)


def test_ids_of_padding_are_no_candidates() -> None:
    segments = Segments.of(segment_rows(contexts=[[1]], responses=[[1]]))
    found = score(segments, Positional(), top_k=1, num_ids=1)
    assert found.top_ids is not None
    assert found.top_ids.tolist() == [[0]]


def test_parts_are_joined_in_order() -> None:
    table = segment_rows(contexts=[[1, 5], [1]], responses=[[3, 4], [5, 6, 7]])
    parts = [score(Segments.of(table.slice(row, 1)), Positional(), top_k=2, num_ids=VOCAB) for row in (0, 1)]
    joined = Scores.joined(parts)
    assert joined.top_k == 2
    np.testing.assert_array_equal(joined.log_probs, [*parts[0].log_probs, *parts[1].log_probs])
    assert joined.top_ids is not None
    assert joined.top_ids.shape == (5, 2)


def test_shuffling_moves_sampled_tokens_among_their_domain_and_nothing_else() -> None:
    segments = Segments.of(
        segment_rows(
            contexts=[[1]] * 6, responses=[[3] * 4] * 6, observed=[[1, 2], [], [0], [], [], []], group_id=["a"] * 6
        )
    )
    domains = ["up", "up", "up", "down", "down", None]
    order = shuffle_order(segments, domains, 7, "step 1")
    assert sorted(order.tolist()) == list(range(24))
    still = [1, 2, 8]
    assert order[still].tolist() == still
    of_token = np.repeat([0, 0, 0, 1, 1, 2], 4)
    assert (of_token[order] == of_token).all()
    assert (order != np.arange(24)).sum() > 10
    assert (order == shuffle_order(segments, domains, 7, "step 1")).all()
    assert (order != shuffle_order(segments, domains, 7, "step 2")).any()
    scores = score(segments, Positional(), top_k=2, num_ids=VOCAB)
    moved = scores.permuted(order)
    np.testing.assert_array_equal(moved.log_probs, scores.log_probs[order])
    assert moved.top_ids is not None
    assert scores.top_ids is not None
    np.testing.assert_array_equal(moved.top_ids, scores.top_ids[order])


@pytest.mark.parametrize("top_k", [None, 2])
def test_columns_make_events_that_keep_their_spec(top_k: int | None) -> None:
    tokenizer = CharTokenizer("c", "01234")
    teacher = Teacher(scorer=Positional(), vocabulary=Vocabulary.of(tokenizer), max_length=64)
    segments = Segments.of(segment_rows(contexts=[[1, 5], [1], [1, 5]], responses=[[3, 4], [5, 6, 7], [3]]))
    scores = score(segments, teacher.scorer, top_k=top_k, num_ids=VOCAB)
    columns = scored_columns(segments, scores, teacher, "t", run_id="run")
    stamps = {"run_id": "run", "run_epoch": 1, "producer_id": "p", "producer_epoch": 1, "lane_seq": [0, 1, 2]}
    built = build_batch("teacher_scored", {**columns, **stamps, "recorded_at": [0, 0, 0]}, 3)
    assert not built.refused
    assert not list(validate(built.batch))
    rows = built.batch.to_pylist()
    bodies = [row["teacher_scored"] for row in rows]
    assert [body["start_position"] for body in bodies] == [2, 1, 2]
    assert [body["scored_token_ids"] for body in bodies] == [[3, 4], [5, 6, 7], [3]]
    assert [body["prefix_digest"] for body in bodies] == [
        prefix_digest([1, 5]),
        prefix_digest([1]),
        prefix_digest([1, 5]),
    ]
    assert {body["tokenizer_digest"] for body in bodies} == {teacher.vocabulary.behaviour_digest}
    assert {body["template_digest"] for body in bodies} == {tokenizer.chat_template_digest}
    assert {(body["temperature"], body["logprobs_mode"], body["weights_digest"]) for body in bodies} == {
        (0.5, "processed_logprobs", "sha256:w")
    }
    assert [len(body["top_k_token_ids"] or ()) for body in bodies] == [(top_k or 0) * n for n in (2, 3, 1)]
    ids = [row["event_id"] for row in rows]
    assert len(set(ids)) == 3
    again = scored_columns(segments, scores, teacher, "t", run_id="run")
    assert again["event_id"].to_pylist() == ids
    other = scored_columns(segments, scores, teacher, "t-shuffled", run_id="run")
    assert not set(other["event_id"].to_pylist()) & set(ids)

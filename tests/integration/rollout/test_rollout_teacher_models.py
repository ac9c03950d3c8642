"""Teachers out of a lake's published weights: by version, verified, refused where their ids are not the student's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.teacher_lakes import EndedRun

from rolltape.numerics import models
from rolltape.numerics.models import ModelSpec, build_model, build_tokenizer, model_parts
from rolltape.numerics.scoring import ModelScorer
from rolltape.numerics.vocabulary import Vocabulary
from rolltape.numerics.weights import named_weights, weights_digest
from rolltape.rollout.teacher_models import Teacher, TeacherRoute, check_routes, load_teacher
from rolltape.schema.errors import ConfigError, DigestMismatchError, LakeNotFoundError, NotPublishedError
from rolltape.store.published import find_published

STUDENT = Vocabulary.of(build_tokenizer("char-64x2"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[EndedRun]:
    made = EndedRun(tmp_path / "lake", "stage-1")
    made.publish(0, 1)
    made.publish(1, 2)
    made.publish(2, 3)
    made.flush()
    yield made
    made.close()


def route(of: EndedRun, version: str = "final", **changes: str) -> TeacherRoute:
    return TeacherRoute(**{"domain": "d", "lake": of.url, "run": of.run_id, "version": version, **changes})


def load(of: EndedRun, version: str = "final", **changes: str) -> Teacher:
    return load_teacher(route(of, version, **changes), STUDENT, temperature=0.8, token_budget=256)


def test_a_version_by_its_number(run: EndedRun) -> None:
    teacher = load(run, "1")
    model = build_model("char-64x2", 2)
    expected = ModelScorer(model, temperature=0.8, token_budget=256)
    assert teacher.weights_digest == weights_digest(named_weights(model)) == expected.identity.weights_digest
    assert teacher.scorer.identity == expected.identity
    ids, bounds = torch.tensor([1, 5, 7, 9, 1, 3]), torch.tensor([0, 4, 6])
    assert torch.equal(teacher.scorer.score(ids, bounds), expected.score(ids, bounds))
    (full,) = teacher.scorer.distributions(ids, bounds)
    own = full.log_probs.gather(1, ids[full.flat_index][:, None]).squeeze(1)
    torch.testing.assert_close(own, teacher.scorer.score(ids, bounds)[full.flat_index], atol=1e-6, rtol=0)
    assert teacher.model is not None
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    assert teacher.origin_digest == weights_digest(named_weights(build_model("char-64x2", 1)))
    assert load(run, "1", origin="sft-7").origin_digest == "sft-7"


def test_the_final_version_is_that_of_the_last_step(run: EndedRun) -> None:
    run.complete(1, final=False)
    run.flush()
    with pytest.raises(NotPublishedError, match=r"expected version 'final' .*it has versions 0 to 2"):
        load(run)
    run.complete(2, version_out=2)
    run.flush()
    assert load(run).weights_digest == weights_digest(named_weights(build_model("char-64x2", 3)))


def test_versions_that_do_not_count(run: EndedRun) -> None:
    """An aborted one, one of an abandoned step, one of another policy; the newer of two epochs'."""
    run.publish(7, 9, policy_id="critic", role="critic")
    run.recorder.record("weights_aborted", policy_id="actor", policy_run_epoch=1, version=1, reason="engine")
    run.recorder.set_run_epoch(2)
    run.recorder.record("run_resumed", purpose="train", continues_from_step=1, reason="rewind")
    newer = run.publish(2, 5)
    run.flush()
    for version in ("1", "7"):
        with pytest.raises(NotPublishedError, match=f"version '{version}'"):
            find_published(run.lake, run.run_id, version)
    assert load(run, "2").weights_digest == newer


def test_what_is_not_there(run: EndedRun, tmp_path: Path) -> None:
    with pytest.raises(NotPublishedError, match=r"expected run 'other' .*it has stage-1"):
        load(run, "1", run="other")
    with pytest.raises(LakeNotFoundError):
        load(run, "1", lake=str(tmp_path / "nowhere"))
    run.publish(3, 4, payload="delta")
    run.flush()
    with pytest.raises(ConfigError, match="expected a full payload"):
        load(run, "3")


def test_damaged_shards_are_refused(run: EndedRun) -> None:
    found = find_published(run.lake, run.run_id, "1")
    path = Path(found.location.path) / found.fields["shards"][0]["file"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestMismatchError, match=r"tensor .* has digest"):
        load(run, "1")


def test_a_teacher_of_other_ids_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModelSpec(name="char-other", family="char", alphabet="=> 9876543210")
    monkeypatch.setattr(models, "MODELS", {**models.MODELS, other.name: other})
    run = EndedRun(tmp_path / "lake", "other", model=other)
    run.publish(0, 1, shards=[{"file": "gone.safetensors", "num_bytes": 1, "sha256": "x"}])
    run.close()
    with pytest.raises(ConfigError, match=r"teacher other@0 of domain 'd': expected the student's tokenizer char-64x2"):
        load(run, "0")


def test_weights_that_change_in_place_are_found(run: EndedRun) -> None:
    teacher = load(run, "1")
    teacher.verify()
    assert teacher.model is not None
    with torch.no_grad():
        model_parts(teacher.model).output_weight[3, 3] = np.nan
    with pytest.raises(DigestMismatchError, match=r"expected tensor lm_head\.weight with digest"):
        teacher.verify()


@pytest.mark.parametrize("name", ["domain", "lake", "run"])
def test_routes_name_their_source(run: EndedRun, name: str) -> None:
    with pytest.raises(ConfigError, match=f"routes.{name}: expected a name"):
        route(run, **{name: ""})


def test_routes_that_contradict(run: EndedRun) -> None:
    with pytest.raises(ConfigError, match="expected a number or 'final', got 'newest'"):
        route(run, "newest")
    with pytest.raises(ConfigError, match="one teacher for domain 'd'"):
        check_routes([route(run, "1"), route(run, "2")])
    first, second = route(run, "1", teacher_id="t"), route(run, "2", teacher_id="t", domain="e")
    with pytest.raises(ConfigError, match="one source for teacher 't'"):
        check_routes([first, second])
    check_routes([first, dataclasses.replace(first, domain="e")])

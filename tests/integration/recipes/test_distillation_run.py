"""Distillation as `rolltape train` runs it: two teachers side by side, killed on the way, over either log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.servers.fixtures import Broker
from tests.teacher_lakes import ended_run
from tests.training_runs import TrainingRun, small_config

from rolltape.recipes.config import EnvironmentSection, RunConfig
from rolltape.recipes.runs import trainer_job
from rolltape.recipes.teachers import RouteSection, TeachersSection, scorers_of
from rolltape.recipes.twin import StepBits, first_difference
from rolltape.trainers.replay import replay_step

STEPS = 4
PARTS = [
    {"name": name, "options": {"num_digits": 2, "num_heldout": 20}}
    for name in ("sort_digits", "sort_digits_descending")
]
DOMAINS = {"sorting": ("up", 31), "sorting_descending": ("down", 32)}

Lakes = dict[str, str]


@pytest.fixture(scope="module")
def lakes(tmp_path_factory: pytest.TempPathFactory) -> Lakes:
    """A teacher's lake for each domain."""
    folder = tmp_path_factory.mktemp("teachers")
    return {domain: ended_run(folder / name, name, seed, sharpness=20.0) for domain, (name, seed) in DOMAINS.items()}


def distillation(lakes: Lakes, *, teachers: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    """4 x 4 rollouts a step of two domains, each with its own teacher."""
    base = small_config(num_steps=STEPS)
    routes = tuple(RouteSection(domain=domain, lake=url, run=DOMAINS[domain][0]) for domain, url in lakes.items())
    return replace(
        base,
        environment=EnvironmentSection(name="mixture", options={"parts": PARTS}),
        rollout=replace(base.rollout, max_tokens=3),
        trainer=replace(base.trainer.with_algorithm("mopd"), **{"lr": 1e-3, "alarm_domain_kl_above": 0.04, **trainer}),
        teachers=TeachersSection(routes=routes, **(teachers or {})),
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, lakes: Lakes) -> dict[int, StepBits]:
    """What an undisturbed run over the embedded log computes."""
    with TrainingRun(tmp_path_factory.mktemp("calm"), config=distillation(lakes)) as run:
        run.start().wait()
        assert not run.problems()
        return run.bits()


def test_a_run_whose_processes_are_killed_computes_the_same(
    calm: dict[int, StepBits], lakes: Lakes, tmp_path: Path
) -> None:
    with TrainingRun(tmp_path, config=distillation(lakes)) as run:
        run.start().wait_for_step(1)
        for name in ("teacher", "trainer"):
            run.kill(name)
        run.wait_for_step(3)
        run.kill("teacher")
        run.wait()
        assert not run.problems()
        assert first_difference(run.bits(), calm) is None
        assert run.bits().keys() == calm.keys()
        _check_tape(run)


def _check_tape(run: TrainingRun) -> None:
    """Every trained rollout was scored once, by its domain's teacher, and the batches name those scores."""
    (found,) = (
        run.lake.sql(
            """
            with used as (
                select unnest(m.teacher_event_ids) as event_id
                from (select unnest(members) as m from batch_formed)
            )
            select count(*) as num, count(distinct s.event_id) as num_scores,
                count(*) filter (where s.event_id is null) as lost,
                count(*) filter (where (s.teacher_id = 'up@final') <> (p.domain = 'sorting')) as misrouted,
                count(distinct p.domain) as num_domains
            from used u left join teacher_scored s using (event_id) left join problems p using (problem_id)
            """
        )
        .arrow()
        .to_pylist()
    )
    num = STEPS * 16
    assert found == {"num": num, "num_scores": num, "lost": 0, "misrouted": 0, "num_domains": 2}
    alarms = run.lake.sql("select alarm, count(*)::int as num from alarm_raised group by 1").arrow().to_pylist()
    assert alarms == [{"alarm": "domain_kl", "num": 2}], "both teachers are far from a random student; told once each"


def test_a_run_through_a_broker_computes_the_same(
    calm: dict[int, StepBits], lakes: Lakes, kafka_broker: Broker, topic_prefix: str, tmp_path: Path
) -> None:
    log_url = f"kafka://{kafka_broker.bootstrap}/{topic_prefix}"
    with TrainingRun(tmp_path, log_url, config=distillation(lakes)) as run:
        run.start().wait_for_step(2)
        run.kill("teacher")
        run.wait()
        assert not run.problems()
        assert first_difference(run.bits(), calm) is None
        _check_tape(run)


@pytest.mark.parametrize("form", ["full", "top_k"])
def test_whole_distributions(form: str, lakes: Lakes, tmp_path: Path) -> None:
    """From the teacher's weights (full), or the payload on the tape; replayed to the bit from the same places."""
    config = distillation(lakes, opd_form=form, top_k=8, checkpoint_every=2)
    with TrainingRun(tmp_path, config=config) as run:
        run.start().wait()
        assert not run.problems()
        scorers = scorers_of(config, run.lake)
        assert (scorers is not None) == (form == "full")
        if scorers is not None:
            assert set(scorers) == {"up@final", "down@final"}
        report = replay_step(run.lake, trainer_job(config), STEPS, scorers=scorers)
        assert report.equal
        kept = run.lake.sql("select distinct top_k from teacher_scored").arrow().column(0).to_pylist()
        assert kept == [None if form == "full" else 8]


def test_a_control_with_shuffled_scores_says_so(lakes: Lakes, tmp_path: Path) -> None:
    config = distillation(lakes, teachers={"shuffle_scores": True})
    with TrainingRun(tmp_path, config=config) as run:
        run.start().wait()
        assert not run.problems()
        names = run.lake.sql("select distinct teacher_id from teacher_scored order by 1").arrow().column(0).to_pylist()
        assert names == ["down@final-shuffled", "up@final-shuffled"]
        assert '"shuffle_scores": true' in run.lake.read("run_started")["run_started"][0].as_py()["config_json"]

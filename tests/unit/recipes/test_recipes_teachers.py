"""Teachers in a recipe file: what is read, what is refused by name, what the service is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolltape.recipes.config import RunConfig
from rolltape.recipes.supervisor import children_of
from rolltape.recipes.teachers import teacher_config
from rolltape.schema.errors import ConfigError

RECIPE = """
run_id = "student"
seed = 3

[rollout]
temperature = 0.8
groups_per_step = 6

[trainer]
algorithm = "mopd"

[teachers]
token_budget = 512

[[teachers.routes]]
domain = "up"
lake = "lakes/up"
run = "stage-1"

[[teachers.routes]]
domain = "down"
lake = "lakes/down"
run = "stage-2"
version = "40"
teacher_id = "specialist"
origin = "sft"
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE)
    return RunConfig.from_toml(file)


def test_routes_of_a_recipe_file(config: RunConfig) -> None:
    first, second = config.teachers.routes
    assert (first.domain, first.lake, first.run, first.version) == ("up", "lakes/up", "stage-1", "final")
    assert (second.version, second.teacher_id, second.origin) == ("40", "specialist", "sft")
    assert RunConfig.from_json(config.to_json()) == config


def test_what_the_service_is_told(config: RunConfig) -> None:
    told = teacher_config(config, "lakes/student", log_url="kafka://k/t")
    assert (told.lake, told.log, told.run_id, told.seed) == ("lakes/student", "kafka://k/t", "student", 3)
    assert (told.temperature, told.groups_per_step, told.token_budget, told.top_k) == (0.8, 6, 512, 0)
    assert [(route.domain, route.name) for route in told.routes] == [("up", "stage-1@final"), ("down", "specialist")]
    assert told.producer_id == "student.teachers"


def test_the_payload_has_what_the_trainer_reads(config: RunConfig) -> None:
    form = replace(config, trainer=replace(config.trainer, opd_form="top_k", top_k=8))
    assert teacher_config(form, "lake").top_k == 8
    more = replace(form, teachers=replace(form.teachers, top_k=12))
    assert teacher_config(more, "lake").top_k == 12
    with pytest.raises(ConfigError, match=r"teachers\.top_k: expected at least trainer\.top_k \(8\)"):
        replace(form, teachers=replace(form.teachers, top_k=4))


ROUTE = {"domain": "d", "lake": "l", "run": "r"}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"trainer": {"algorithm": "opd"}}, r"teachers\.routes: expected a teacher for each domain"),
        ({"teachers": {"routes": [ROUTE, {**ROUTE, "run": "s"}]}}, "one teacher for domain 'd'"),
        ({"teachers": {"routes": [{**ROUTE, "versoin": "1"}]}}, r"unknown field teachers\.routes\[0\]\.versoin"),
        ({"teachers": {"routes": [{**ROUTE, "version": 1}]}}, r"teachers\.routes\[0\]\.version: expected str"),
        ({"teachers": {"routes": [{"domain": "d", "lake": "l"}]}}, r"teachers\.routes\[0\]\.run: expected a value"),
        ({"teachers": {"routes": ["d"]}}, r"teachers\.routes\[0\]: expected a table"),
        ({"teachers": {"top_k": -1}}, r"teachers\.top_k: expected 0 or more"),
        ({"teachers": {"token_budget": 0}}, r"teachers\.token_budget: expected 1 or more"),
        ({"teachers": {"group_wait_s": 0.0}}, r"teachers\.group_wait_s: expected more than 0"),
        (
            {
                "trainer": {"algorithm": "opd", "opd_form": "full"},
                "teachers": {"routes": [ROUTE], "shuffle_scores": True},
            },
            r"teachers\.shuffle_scores: expected false",
        ),
    ],
)
def test_refused_by_name(data: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RunConfig.from_dict(data)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"routes": ()}, r"teachers\.routes: expected at least one"),
        ({"temperature": 0.0}, r"teachers\.temperature"),
        ({"num_threads": 0}, r"teachers\.num_threads"),
        ({"retry_s": 0.0}, r"teachers\.retry_s"),
    ],
)
def test_orders_that_make_no_sense(config: RunConfig, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(teacher_config(config, "lake"), **changes)


def test_the_service_is_started_where_there_are_teachers(tmp_path: Path) -> None:
    for teachers in (False, True):
        _, workers = children_of("lake", "run", 1, tmp_path, teachers=teachers)
        found = {child.name: child.arguments for child in workers}
        assert ("teacher" in found) == teachers
    assert found["teacher"] == ["teacher", "--lake", "lake", "--run", "run"]

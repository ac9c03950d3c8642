"""What `rolltape recipes` compares and writes; the runs themselves are in tests/integration/recipes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rolltape.recipes import catalogue, two_teachers_opd
from rolltape.recipes.catalogue import RECIPES, Recipe, control_of, recipes_of, shortened
from rolltape.recipes.commands import recipes as command
from rolltape.recipes.config import InitialSection, RunConfig
from rolltape.recipes.figures import CURVE_POINTS, Figures, before_and_after, curve_of
from rolltape.recipes.report import report
from rolltape.recipes.runs import trainer_job
from rolltape.recipes.trials import CONTROLS, RECIPE, Trial, beats_its_control
from rolltape.schema.errors import ConfigError
from rolltape.trainers.job import InitialWeights

LAKES = Path("lakes")
LONGEST_RECIPE = 150


def figures(seed: int, after: float | Mapping[str, float]) -> Figures:
    by_domain = after if isinstance(after, Mapping) else {"sorting": after}
    return Figures(
        run_id="r",
        seed=seed,
        before=dict.fromkeys(by_domain, 0.0),
        after=by_domain,
        num_steps=100 + seed,
        seconds=60.0 + seed,
        trusted_share=0.5,
        curve=(0.0, 0.49 + 0.02 * seed, 1.0),
    )


def trials(recipe: Recipe, after: Mapping[str, list[float]]) -> list[Trial]:
    return [
        Trial(recipe=recipe, label=label, figures=figures(seed, value))
        for label, values in after.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_every_run_of_the_catalogue_is_a_configuration_that_a_file_can_hold(name: str) -> None:
    recipe = RECIPES[name]
    makes = [recipe.config, *recipe.builds_on.values(), *recipe.contrasts.values()]
    configs = [make(3, LAKES) for make in makes]
    assert [config.seed for config in configs] == [3] * len(configs)
    assert len({config.run_id for config in configs}) == len(configs)
    for config in configs:
        assert RunConfig.from_json(config.to_json()) == config
        assert config.rollout.evaluate_initial
        assert config.rollout.evaluate_heldout


def test_a_run_that_published_nothing_but_its_first_weights_ends_as_it_began() -> None:
    """As SAO's does where `--max-steps` ends it within the warm-up of its critic: version 0 is evaluated once."""
    first = {"domain": "sorting", "is_first": True, "num_answers": 4, "num_right": 1}
    last = {"domain": "sorting", "is_first": False, "num_answers": 4, "num_right": 3}
    assert before_and_after([first]) == ({"sorting": 0.25}, {"sorting": 0.25})
    assert before_and_after([last, first]) == ({"sorting": 0.25}, {"sorting": 0.75})


def test_a_learning_curve_is_means_of_equal_stretches() -> None:
    steps = [float(step // 10) for step in range(10 * CURVE_POINTS)]
    assert curve_of(steps) == tuple(float(point) for point in range(CURVE_POINTS))
    assert curve_of([None, 0.5, 0.25, None]) == (0.5, 0.25)
    assert curve_of([None]) == curve_of([]) == ()


def test_the_catalogue_has_every_method() -> None:
    methods = {recipe.config(0, LAKES).trainer.algorithm for recipe in RECIPES.values()}
    assert methods == {"grpo", "dis", "mopd", "sao", "compaction"}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_short(name: str) -> None:
    text = (Path(catalogue.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_RECIPE


@pytest.mark.parametrize("name", RECIPES)
def test_a_control_differs_in_what_it_is_told_and_in_nothing_else_that_learns(name: str) -> None:
    config = RECIPES[name].config(0, LAKES)
    control = control_of(config, num_steps=7)
    assert control.trainer.max_steps == 7
    assert control.run_id != config.run_id
    told = (control.rollout.shuffle_rewards, control.teachers.shuffle_scores)
    assert told == ((False, True) if name == "two_teachers_opd" else (True, False))
    assert (control.seed, control.environment, control.agent, control.model) == (
        config.seed,
        config.environment,
        config.agent,
        config.model,
    )
    assert control.trainer.lr_at(5) == config.trainer.lr_at(5)


def test_a_shortened_run_keeps_its_name() -> None:
    config = RECIPES["sort_digits_sao"].config(0, LAKES)
    assert shortened(config, 2).trainer.max_steps == 2
    assert shortened(config, 2).run_id == config.run_id
    assert shortened(config, 0) == config
    assert shortened(config, 10_000) == config


def test_the_student_begins_as_the_first_teacher_and_has_both() -> None:
    config = two_teachers_opd.config(lakes="here")
    runs = [two_teachers_opd.teacher(name).run_id for name in (two_teachers_opd.FIRST, two_teachers_opd.SECOND)]
    assert config.model.initial is not None
    assert (config.model.initial.lake, config.model.initial.run) == (f"here/{runs[0]}", runs[0])
    assert [(route.domain, route.lake) for route in config.teachers.routes] == [
        ("sorting", f"here/{runs[0]}"),
        ("sorting_descending", f"here/{runs[1]}"),
    ]
    alone = two_teachers_opd.second_skill_alone(lakes="here")
    assert alone.model.initial == config.model.initial
    assert not alone.teachers.routes


def test_a_recipe_has_to_beat_its_control_on_every_seed() -> None:
    recipe = RECIPES["sort_digits_sao"]
    control = CONTROLS[False]
    assert beats_its_control(trials(recipe, {RECIPE: [0.9, 0.8], control: [0.1, 0.7]}), recipe)
    assert not beats_its_control(trials(recipe, {RECIPE: [0.9, 0.7], control: [0.1, 0.7]}), recipe)


def test_a_seed_without_a_control_is_refused() -> None:
    recipe = RECIPES["sort_digits_sao"]
    with pytest.raises(ConfigError, match="a control for every seed"):
        beats_its_control(trials(recipe, {RECIPE: [0.9, 0.8], CONTROLS[False]: [0.1]}), recipe)
    with pytest.raises(ConfigError, match="a control for every seed"):
        beats_its_control([], recipe)


def test_the_report_has_a_line_for_each_recipe_and_each_run_with_every_seed() -> None:
    sao, opd = RECIPES["sort_digits_sao"], RECIPES["two_teachers_opd"]
    two = {"sorting": 1.0, "sorting_descending": 0.5}
    found = [
        *trials(sao, {RECIPE: [0.9, 0.7], CONTROLS[False]: [0.1, 0.8]}),
        *[Trial(recipe=opd, label=RECIPE, figures=figures(seed, two)) for seed in (0, 1)],
        *[Trial(recipe=opd, label=CONTROLS[True], figures=figures(seed, dict.fromkeys(two, 0.0))) for seed in (0, 1)],
    ]
    lines = report(found, [0, 1]).splitlines()
    assert (
        "| [sort_digits_sao](#sort_digits_sao) | SAO | 0.00 | 0.80 (0.90, 0.70) | 0.45 (0.10, 0.80) | 100 | 60 | "
        in (next(line for line in lines if line.startswith("| [sort_digits_sao]")))
    )
    assert next(line for line in lines if line.startswith("| [sort_digits_sao]")).endswith("| **no** |")
    assert next(line for line in lines if line.startswith("| [two_teachers_opd]")).endswith("| on every seed |")
    assert "| the recipe | sorting | 0.00 (0.00, 0.00) | 1.00 (1.00, 1.00) | ▁▅█ | 100 | 60 | 0.5000 |" in lines
    assert "|  | sorting_descending | 0.00 (0.00, 0.00) | 0.50 (0.50, 0.50) |  |  |  |  |" in lines


def test_recipes_are_chosen_by_name_in_the_catalogues_order() -> None:
    assert [recipe.name for recipe in recipes_of([])] == list(RECIPES)
    assert [recipe.name for recipe in recipes_of(["two_teachers_opd", "sort_digits"])] == [
        "sort_digits",
        "two_teachers_opd",
    ]
    with pytest.raises(ConfigError, match="got 'chess'"):
        recipes_of(["sort_digits", "chess"])


@pytest.mark.parametrize("text", ["", "0,0", "0,00", "a", "-1", "1.5", "0,,1"])
def test_seeds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        command.seeds_of(text)


@pytest.mark.parametrize(
    ("name", "environment"), [("sort_digits_up", "sort_digits"), ("sort_digits_down", "sort_digits_descending")]
)
def test_the_teachers_example_files_are_the_recipes_teachers(name: str, environment: str) -> None:
    path = Path(__file__).parents[3] / "recipes" / "examples" / f"{name}.toml"
    assert RunConfig.from_toml(path) == two_teachers_opd.teacher(environment)


def test_weights_to_begin_with_are_named_in_a_run_and_reach_its_trainer() -> None:
    config = RunConfig.from_dict({"model": {"initial": {"lake": "l", "run": "r", "version": "3"}}})
    assert config.model.initial == InitialSection(lake="l", run="r", version="3")
    assert trainer_job(config).initial == InitialWeights(lake_url="l", run_id="r", version="3")
    assert RunConfig.from_json(config.to_json()) == config
    assert trainer_job(RunConfig()).initial is None
    with pytest.raises(ConfigError, match=r"model.initial"):
        RunConfig.from_dict({"model": {"initial": "r"}})

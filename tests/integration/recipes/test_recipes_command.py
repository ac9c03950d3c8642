"""`rolltape recipes` through real processes, with runs of two steps: what is read back, and what is not made again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rolltape.recipes import sort_digits, trials
from rolltape.recipes.catalogue import Recipe
from rolltape.recipes.cli import main
from rolltape.recipes.config import RunConfig
from rolltape.recipes.trials import CONTROLS, RECIPE, Trial, run_trials
from rolltape.store.lake import Lake
from rolltape.store.location import Location

NUM_STEPS = 2
NUM_HELDOUT = 5


def tiny(seed: int, _lakes: Path) -> RunConfig:
    config = sort_digits.config(seed=seed, max_steps=NUM_STEPS)
    options = {"num_digits": 2, "num_symbols": 4, "num_heldout": NUM_HELDOUT}
    return replace(
        config,
        environment=replace(config.environment, options=options),
        rollout=replace(config.rollout, groups_per_step=4, group_size=4, max_tokens=3, evaluate_initial=True),
    )


TINY = Recipe(name="tiny", method="GRPO", task="Two steps.", config=tiny)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[Trial]:
    return run_trials([TINY], [5], folder)


def lake_of(folder: Path, run_id: str) -> Lake:
    return Lake.open(Location.parse(str(folder / "tiny" / "5" / run_id)), read_only=True)


def test_a_recipe_and_its_control_are_trained_and_read_from_their_tapes(found: list[Trial], folder: Path) -> None:
    assert [trial.label for trial in found] == [RECIPE, CONTROLS[False]]
    for trial in found:
        figures = trial.figures
        assert (figures.seed, figures.num_steps) == (5, NUM_STEPS)
        assert figures.before.keys() == figures.after.keys() == {"sorting"}
        took = lake_of(folder, figures.run_id).sql(
            "SELECT epoch(max(recorded_at)) - epoch(min(recorded_at)) FROM events"
        )
        assert 0 < figures.seconds <= took.arrow().column(0)[0].as_py() + 0.1
        assert figures.trusted_share is not None
        assert 0.9 < figures.trusted_share <= 1
        recorded = lake_of(folder, figures.run_id).read("evaluation_completed")["evaluation_completed"].to_pylist()
        exact = [{m["name"]: m["value"] for m in row["metrics"]}["exact_match"] for row in recorded]
        assert len(exact) == 2
        assert [figures.before["sorting"], figures.after["sorting"]] == exact
        assert {row["num_problems"] for row in recorded} == {NUM_HELDOUT}


def test_a_controls_rewards_are_marked_on_the_tape_and_its_evaluations_are_not(
    found: list[Trial], folder: Path
) -> None:
    query = """
        SELECT DISTINCT t.purpose, component.scorer AS scorer
        FROM (SELECT trajectory_id, unnest(components) AS component FROM rewards) r
        JOIN trajectories t USING (trajectory_id) ORDER BY ALL
    """
    scorers = [
        [tuple(row.values()) for row in lake_of(folder, trial.figures.run_id).sql(query).arrow().to_pylist()]
        for trial in found
    ]
    assert scorers == [
        [("evaluate", "sort_digits"), ("train", "sort_digits")],
        [("evaluate", "sort_digits"), ("train", "sort_digits-shuffled")],
    ]


def test_what_is_complete_is_only_read(found: list[Trial], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_args: object, **_options: object) -> None:
        raise AssertionError("a complete run was started again")

    monkeypatch.setattr(trials, "run_to_end", never)
    assert run_trials([TINY], [5], folder) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chess"], "got 'chess'"),
        (["--seeds", "0,0"], "--seeds"),
        (["--max-steps", "-1"], "--max-steps"),
        (["sort_digits_sao", "--write", "out.md"], "--write: expected all recipes"),
        (["--max-steps", "2", "--write", "out.md"], "--write: expected all recipes"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", *arguments]) == 1
    assert message in capsys.readouterr().err

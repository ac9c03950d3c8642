"""The documents tell the truth: their snippets run, their commands parse, their links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from rolltape.recipes import (
    running_max_compaction,
    smollm2_gsm8k,
    sort_digits,
    sort_digits_async,
    sort_digits_sao,
    tool_digits_dis,
    two_teachers_opd,
)
from rolltape.recipes.cli import COMMANDS
from rolltape.recipes.config import RunConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "*/README.md", "docs/*.md", "tests/data/README.md")
    for path in ROOT.glob(pattern)
    if ".venv" not in path.parts
)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"`([\w/…*]+\.py)`")
ROOMS = ("schema", "store", "ingest", "numerics", "trainers", "rollout", "recipes")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
# Commands that end by themselves in seconds; those that train are only parsed.
LIGHT = {"import", "sql", "verify", "compact", "show"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def snippets(path: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(path.read_text(encoding="utf-8")) if language in languages]


def shell_lines(path: Path) -> list[str]:
    lines = [line.strip() for body in snippets(path, "bash", "sh") for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the repository's test data and recipes beside it, as a reader's shell would see them."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("tests", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_in(folder: Path, *command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_first_command_stands_in_the_first_twenty_lines() -> None:
    top = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:20])
    assert "```bash\nmake demo\n```" in top


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_modules_that_a_document_names_exist(path: Path) -> None:
    named = {name.rpartition("/")[2] for name in MODULE.findall(path.read_text(encoding="utf-8"))}
    places = [ROOT / name for name in (*ROOMS, "tests", "benchmarks")]
    assert sorted(name for name in named if not any(any(place.rglob(name)) for place in places)) == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if snippets(path, "python")], ids=name_of)
def test_python_snippets_run(path: Path, folder: Path) -> None:
    run_in(folder, sys.executable, "-W", "error", "-c", "\n".join(snippets(path, "python")))


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if snippets(path, "toml")], ids=name_of)
def test_toml_snippets_are_recipes(path: Path) -> None:
    for body in snippets(path, "toml"):
        RunConfig.from_dict(tomllib.loads(body))


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if shell_lines(path)], ids=name_of)
def test_make_targets_exist(path: Path) -> None:
    defined = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {shlex.split(line, comments=True)[1] for line in shell_lines(path) if line.startswith("make ")}
    assert named <= defined


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if shell_lines(path)], ids=name_of)
def test_commands_run_or_at_least_parse(path: Path, folder: Path) -> None:
    for line in shell_lines(path):
        if not line.startswith("rolltape "):
            continue
        words = shlex.split(line, comments=True)
        assert words[1] in COMMANDS
        if words[1] in LIGHT:
            run_in(folder, "bash", "-c", line)
        else:
            run_in(folder, sys.executable, "-c", PARSE, *words[1:])


RECIPES = [
    running_max_compaction,
    smollm2_gsm8k,
    sort_digits,
    sort_digits_async,
    sort_digits_sao,
    tool_digits_dis,
    two_teachers_opd,
]

PARSE = """
import sys
from rolltape.recipes.cli import _parser
_parser(sys.argv[1]).parse_args(sys.argv[1:])
"""


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_example_file_is_the_recipe_of_the_same_name(recipe: ModuleType) -> None:
    name = recipe.__name__.rpartition(".")[2]
    assert RunConfig.from_toml(ROOT / "recipes" / "examples" / f"{name}.toml") == recipe.config()

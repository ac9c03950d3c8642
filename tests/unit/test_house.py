"""The house itself: what is committed names no machine, and the files that hold it together agree."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("schema", "store", "ingest", "numerics", "trainers", "rollout", "recipes")

# Put together here so that this file does not find itself.
MACHINE_PATHS = tuple(f"/{name}/" for name in ("work", "tmp", "root", "home"))
REGISTRY_HOSTS = ("pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "npm" + "js.com", "download." + "pytorch")
DEVICE_NAMES = re.compile(r"""["'](cuda|npu|hccl|nccl)\b""")


def committed_files() -> list[Path]:
    """Files under version control or about to be, save the copies of public data."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = [ROOT / name for name in listing.split("\0") if name and not name.startswith("tests/data/")]
    return [path for path in paths if path.is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_no_file_names_a_machine_or_a_registry() -> None:
    wanted = re.compile("|".join(map(re.escape, (*MACHINE_PATHS, *REGISTRY_HOSTS))))
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in committed_files()
        if path.name != "LICENSE"
        for match in wanted.finditer(text_of(path))
    ]
    assert found == []


def test_device_names_stay_in_the_device_module() -> None:
    allowed = ROOT / "numerics/rolltape/numerics/device.py"
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path != allowed]
    assert [str(path.relative_to(ROOT)) for path in sources if DEVICE_NAMES.search(text_of(path))] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_typed_part_of_the_namespace_with_a_readme(room: str) -> None:
    assert (ROOT / room / "README.md").is_file()
    assert (ROOT / room / "rolltape" / room / "py.typed").is_file()
    assert (ROOT / room / "rolltape" / room / "__init__.py").is_file()
    assert not (ROOT / room / "rolltape" / "__init__.py").exists()


def test_every_room_is_built_linted_and_typed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tool = settings["tool"]
    assert tool["hatch"]["build"]["dev-mode-dirs"] == list(ROOMS)
    assert tool["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"{room}/rolltape" for room in ROOMS]
    assert set(ROOMS) <= set(tool["mypy"]["files"])
    assert tool["mypy"]["mypy_path"].split(":") == [*ROOMS, "benchmarks"]
    assert set(ROOMS) <= set(tool["pyright"]["include"])
    assert tool["ruff"]["src"] == list(ROOMS)


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    names = {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower() for requirement in asked} - {"rolltape"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert names - pins.keys() == set()
    assert not any("+" in version for version in pins.values())


def test_every_target_that_the_makefile_explains_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    explained = re.findall(r"^#   make (\S+)", makefile, flags=re.MULTILINE)
    defined = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    assert explained
    assert set(explained) <= defined

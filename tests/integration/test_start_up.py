"""Start-up: the base installs and starts without a model's libraries, and ``--help`` answers at once."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

MODEL_VENDORS = ("torch", "transformers", "safetensors", "ray", "vllm", "torch_npu", "gguf")
STORE_VENDORS = ("pyarrow", "duckdb", "deltalake", "polars", "pandas", "numpy")

LIST_VENDORS = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
IMPORT_ALL = """
import importlib, pkgutil
for name in ("rolltape.schema", "rolltape.store", "rolltape.ingest"):
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""
HELP = """
import contextlib, io, sys
sys.argv = ["rolltape", "--help"]
from rolltape.recipes.cli import main
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    main()
assert "replay" in shown.getvalue(), shown.getvalue()
"""


def modules_after(program: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after running ``program``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{LIST_VENDORS}"], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["rolltape.schema", "rolltape.store", "rolltape.ingest"])
def test_a_base_package_loads_no_model_library(package: str) -> None:
    assert modules_after(f"import {package}").isdisjoint(MODEL_VENDORS)


def test_no_module_of_the_base_loads_a_model_library() -> None:
    loaded = modules_after(IMPORT_ALL)
    assert "pyarrow" in loaded
    assert loaded.isdisjoint(MODEL_VENDORS)


def test_help_loads_neither_model_nor_store_libraries() -> None:
    assert modules_after(HELP).isdisjoint(MODEL_VENDORS + STORE_VENDORS)


def test_help_takes_less_than_300_ms() -> None:
    """CPU time, the least of five starts: what else the machine does must not decide."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "rolltape.recipes.cli", "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(spent) < 0.3

"""The room's README is true: its snippet runs, its map names every module."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOM = Path(__file__).parents[3] / "schema"
README = (ROOM / "README.md").read_text(encoding="utf-8")


def test_the_first_event_can_be_made() -> None:
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert snippets
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), {})


def test_the_map_names_every_module_and_no_other() -> None:
    named = re.findall(r"`([a-z_*]+\.py|kinds/)`", README.split("## Map")[1].split("## ")[0])
    modules = {path.name for path in (ROOM / "rolltape" / "schema").glob("*.py")} - {"__init__.py"}
    assert [module for module in sorted(modules) if not any(fnmatch(module, name) for name in named)] == []
    assert [name for name in named if name != "kinds/" and not any(fnmatch(module, name) for module in modules)] == []

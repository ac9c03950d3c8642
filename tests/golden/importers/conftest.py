"""One lake that holds every importable file of tests/data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rolltape.ingest.importers import ImportReport, import_file
from rolltape.ingest.log import open_log
from rolltape.store.lake import Lake
from rolltape.store.location import Location

DATA = Path(__file__).parents[2] / "data"
FILES = (
    "nemogym/cc_rollouts_with_logprobs.jsonl",
    "nemogym/round_trip_token_ids.json",
    "nemogym/reasoning_gym_rollouts.jsonl",
    "nemogym/calendar_rollouts.jsonl",
    "nemogym/anyswe_claude_code.jsonl",
    "nemorl/merged_tokens_drift.json",
    "nemorl/nemo_gym_sanity.json",
    "gsm8k/gsm8k_model_solutions.jsonl",
    "gsm8k/gsm8k_test.jsonl",
)


@pytest.fixture(scope="package")
def lake_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("imports") / "lake")
    Lake.create(Location.parse(url))
    return url


@pytest.fixture(scope="package")
def reports(lake_url: str) -> Mapping[str, ImportReport]:
    """Reports of importing all files, by path within tests/data."""
    with open_log(lake_url) as log:
        return {name: import_file(log, str(DATA / name)) for name in FILES}


@pytest.fixture(scope="package")
def lake(lake_url: str, reports: Mapping[str, ImportReport]) -> Lake:
    """The lake after all imports."""
    assert set(reports) == set(FILES)
    return Lake.open(Location.parse(lake_url), read_only=True)

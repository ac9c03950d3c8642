"""The compose file's one-shot program that makes the bucket, against a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rolltape.store.lake import Lake
from rolltape.store.location import Location

PROGRAM = Path(__file__).parents[2] / "deploy" / "make_bucket.py"


def test_the_bucket_is_made_once_and_holds_a_lake(s3_server: Any) -> None:
    environment = {**os.environ, **s3_server.options}
    for _ in range(2):
        subprocess.run([sys.executable, str(PROGRAM), "made-by-compose"], env=environment, check=True)
    location = Location.parse("s3://made-by-compose/main", s3_server.options)
    Lake.create(location)
    assert Lake.open(location).read("rollout_started").num_rows == 0

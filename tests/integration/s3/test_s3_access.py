"""What is wrong with an object store is said in words that help; secrets are neither stored nor printed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.servers.process import free_port
from tests.servers.s3_server import Bucket, S3Server

from rolltape.schema.errors import LakeNotFoundError, StoreAccessError, StoreError, StoreUnreachableError
from rolltape.store import Lake
from rolltape.store.maintenance import checkpoint, compact

# What a client waits for at most, in seconds: these tests ask servers that never answer.
QUICK = {"timeout": "1", "connect_timeout": "0.5", "retry_timeout": "1"}


def test_no_lake_and_no_bucket_are_told_apart(s3_bucket: Bucket) -> None:
    with pytest.raises(LakeNotFoundError, match=f"no lake at {s3_bucket.url}/none"):
        Lake.open(f"{s3_bucket.url}/none", options=s3_bucket.options)
    for reach in (Lake.open, Lake.create):
        with pytest.raises(StoreAccessError, match="there is no bucket s3://no-such-bucket"):
            reach("s3://no-such-bucket/lake", options=s3_bucket.options)


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_are_called_so_and_not_shown(s3_bucket: Bucket, name: str) -> None:
    wrong = {**s3_bucket.options, name: "planted-wrong"}
    for reach in (Lake.open, Lake.create):
        with pytest.raises(StoreAccessError, match="refused the credentials") as raised:
            reach(f"{s3_bucket.url}/lake", options=wrong)
        for secret in ("planted", s3_bucket.options["AWS_SECRET_ACCESS_KEY"]):
            assert secret not in str(raised.value)


def test_no_credentials_say_which_variables_to_set(
    s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = {"AWS_ENDPOINT_URL": s3_bucket.options["AWS_ENDPOINT_URL"]}
    with pytest.raises(StoreAccessError, match=r"no credentials .* set AWS_ACCESS_KEY_ID .* or AWS_PROFILE"):
        Lake.open(f"{s3_bucket.url}/lake", options=options)


def test_an_end_point_that_nobody_listens_at_is_an_error_in_time(s3_bucket: Bucket) -> None:
    for address in (f"http://127.0.0.1:{free_port()}", "http://no-such-host.invalid:9000"):
        options = {**s3_bucket.options, "AWS_ENDPOINT_URL": address, **QUICK}
        started = time.monotonic()
        with pytest.raises(StoreUnreachableError, match="did not answer in time"):
            Lake.open(f"{s3_bucket.url}/lake", options=options)
        assert time.monotonic() - started < 30


def test_a_read_only_store_can_be_read_and_says_that_it_cannot_be_written(
    s3_server: S3Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, feed: Any
) -> None:
    del s3_server  # asked for so that this runs where there is a program to start
    with S3Server(os.environ["ROLLTAPE_S3_SERVER"], tmp_path) as server:
        bucket = server.bucket()
        Lake.create(f"{bucket.url}/lake", options=bucket.options).append(*feed.commit())
        server.stop()
        monkeypatch.setenv("VGW_READ_ONLY", "true")
        server.start()
        lake = Lake.open(f"{bucket.url}/lake", options=bucket.options)
        assert lake.read("reward_assigned").num_rows == 4
        with pytest.raises(StoreAccessError, match="may not be written with these credentials"):
            lake.append(*feed.commit())
        with pytest.raises(StoreError, match=r"delta-rs failed at s3://.*AccessDenied"):
            checkpoint(lake)
        with pytest.raises(StoreAccessError, match="may not be written"):
            Lake.create(f"{bucket.url}/other", options=bucket.options)


def test_a_profile_is_enough_for_everything(
    s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, feed: Any
) -> None:
    _use_profile(s3_bucket, monkeypatch, tmp_path)
    lake = Lake.create(f"{s3_bucket.url}/lake")
    for _ in range(3):
        lake.append(*feed.commit())
    compact(lake)
    checkpoint(lake)
    assert lake.sql("select count(*) as n from reward_assigned").rows() == [{"n": 12}]
    command = [sys.executable, "-m", "rolltape.recipes.cli", "sql", "--lake", lake.location.url]
    done = subprocess.run(
        [*command, "select count(*) as n from reward_assigned"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, '{"n":12}'), done.stderr
    monkeypatch.setenv("AWS_PROFILE", "missing")
    done = subprocess.run([*command, "select 1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "expected an AWS profile 'missing'" in done.stderr


def test_a_command_of_a_profile_may_give_the_key_and_may_fail(
    s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, feed: Any
) -> None:
    _use_profile(s3_bucket, monkeypatch, tmp_path)
    key, secret = s3_bucket.options["AWS_ACCESS_KEY_ID"], s3_bucket.options["AWS_SECRET_ACCESS_KEY"]
    program = tmp_path / "key.py"
    program.write_text(f'print(\'{{"Version":1,"AccessKeyId":"{key}","SecretAccessKey":"{secret}"}}\')')
    (tmp_path / "credentials").write_text(f"[tests]\ncredential_process = {sys.executable} {program}\n")
    lake = Lake.create(f"{s3_bucket.url}/lake")
    lake.append(*feed.commit())
    checkpoint(lake)
    assert lake.read("reward_assigned").num_rows == 4
    program.write_text("raise SystemExit(3)")
    (tmp_path / "credentials").write_text(f"[tests]\ncredential_process = {sys.executable} {program} again\n")
    with pytest.raises(StoreAccessError, match="credential_process of the AWS profile failed"):
        Lake.open(lake.location.url)


def test_a_secret_is_stored_nowhere(
    s3_environment: Bucket, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    from rolltape.ingest import Recorder, open_log

    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    lake = Lake.create(f"{s3_environment.url}/lake")
    with open_log(lake.location.url) as log, Recorder(log, producer_id="p", run_id="run") as recorder:
        recorder.record("alarm_raised", alarm="entropy_collapse")
        recorder.flush("logged")
    assert lake.sql("select count(*) as n from alarm_raised").rows() == [{"n": 1}]
    checkpoint(lake)
    secret = s3_environment.options["AWS_SECRET_ACCESS_KEY"].encode()
    folders = [
        s3_server.objects / s3_environment.url.removeprefix("s3://"),
        lake.spool_path,
        cache,
    ]
    written = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 4
    assert not [path for path in written if secret in path.read_bytes()]


def _use_profile(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
    """Reach the bucket by a profile alone."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (folder / "credentials").write_text(
        f"[tests]\naws_access_key_id = {bucket.options['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {bucket.options['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (folder / "config").write_text(
        f"[profile tests]\nregion = us-east-1\nendpoint_url = {bucket.options['AWS_ENDPOINT_URL']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
    monkeypatch.setenv("AWS_PROFILE", "tests")

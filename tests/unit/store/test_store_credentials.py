"""Where credentials come from, in which order, and that no text ever holds them."""

from __future__ import annotations

import pathlib
import sys

import pytest

from rolltape.schema.errors import ConfigError, StoreAccessError
from rolltape.store.credentials import Credentials, resolve
from rolltape.store.location import Location

SHARED = """
[default]
aws_access_key_id = default-id
aws_secret_access_key = planted-default
[work]
aws_access_key_id = work-id
aws_secret_access_key = planted-work
aws_session_token = planted-token
"""
CONFIG = """
[default]
region = eu-west-1
[profile work]
region = eu-central-1
endpoint_url = http://store:9000/
[profile role]
role_arn = arn:aws:iam::1:role/x
source_profile = work
"""


@pytest.fixture
def files(tmp_path: pathlib.Path) -> dict[str, str]:
    """An environment that names two profile files."""
    (tmp_path / "credentials").write_text(SHARED)
    (tmp_path / "config").write_text(CONFIG)
    return {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        "AWS_CONFIG_FILE": str(tmp_path / "config"),
    }


def key_of(found: Credentials) -> tuple[str, str, str | None]:
    key = found.current()
    assert key is not None
    return key.access_key_id, key.secret, key.token


def test_given_options_come_before_the_environment_and_that_before_profiles(files: dict[str, str]) -> None:
    environment = {**files, "AWS_PROFILE": "work"}
    assert key_of(resolve(None, environment)) == ("work-id", "planted-work", "planted-token")
    environment |= {"AWS_ACCESS_KEY_ID": "e", "AWS_SECRET_ACCESS_KEY": "es", "AWS_SESSION_TOKEN": "et"}
    assert key_of(resolve(None, environment)) == ("e", "es", "et")
    given = {"AWS_ACCESS_KEY_ID": "g", "AWS_SECRET_ACCESS_KEY": "gs"}
    assert key_of(resolve(given, environment)) == ("g", "gs", None)


def test_region_and_end_point_come_from_the_profile_too(files: dict[str, str]) -> None:
    found = resolve(None, {**files, "AWS_PROFILE": "work"}).options
    assert (found["AWS_REGION"], found["AWS_ENDPOINT_URL"]) == ("eu-central-1", "http://store:9000")
    assert found["AWS_ALLOW_HTTP"] == "true"
    assert resolve(None, files).options["AWS_REGION"] == "eu-west-1"
    assert resolve(None, {**files, "AWS_DEFAULT_REGION": "r"}).options["AWS_REGION"] == "r"
    assert resolve({"AWS_ENDPOINT_URL_S3": "https://s3"}, files).options["AWS_ENDPOINT_URL"] == "https://s3"
    assert resolve(None, {"HOME": "/nowhere"}).options["AWS_REGION"] == "us-east-1"


def test_profiles_lie_in_the_home_folder_unless_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(SHARED)
    assert key_of(resolve(None, {"HOME": str(tmp_path)}))[0] == "default-id"
    assert resolve(None, {"HOME": str(tmp_path / "none")}).current() is None


def test_where_the_machine_is_to_be_asked_no_profile_is_looked_at(files: dict[str, str]) -> None:
    assert resolve(None, {**files, "AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}).current() is None


def test_a_command_of_the_profile_prints_the_key(files: dict[str, str]) -> None:
    said = '{"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "ps", "Expiration": "2030-01-01T00:00:00Z"}'
    program = pathlib.Path(files["AWS_CONFIG_FILE"]).with_name("key.py")
    program.write_text(f"print('''{said}''')")
    with pathlib.Path(files["AWS_CONFIG_FILE"]).open("a") as file:
        file.write(f"[profile asks]\ncredential_process = {sys.executable} {program}\n")
    found = resolve(None, {**files, "AWS_PROFILE": "asks"})
    assert key_of(found) == ("p", "ps", None)
    program.write_text("print('planted-work'); raise SystemExit(1)")
    with pytest.raises(StoreAccessError, match="credential_process of the AWS profile failed") as raised:
        found.current()
    assert "planted" not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AWS_PROFILE": "none"}, "expected an AWS profile 'none'"),
        ({"AWS_PROFILE": "role"}, "credential_process = aws configure export-credentials --profile role"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named(files: dict[str, str], environment: dict[str, str], said: str) -> None:
    with pytest.raises(StoreAccessError, match=said):
        resolve(None, {**files, **environment})


def test_half_a_key_is_refused_without_showing_it(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY alone; set AWS_ACCESS_KEY_ID") as raised:
        resolve(None, {"AWS_SECRET_ACCESS_KEY": "planted"})
    assert "planted" not in str(raised.value)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("endpoint", ["http://user:planted@store:9000", "store:9000", "ftp://store"])
def test_an_end_point_that_is_no_address_is_refused_without_showing_a_secret(variable: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL: expected") as raised:
        resolve(None, {variable: endpoint, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"})
    assert "planted" not in str(raised.value)


def test_authorities_that_cannot_be_read_are_named() -> None:
    options = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_CA_BUNDLE": "/nowhere/at/all"}
    with pytest.raises(ConfigError, match="AWS_CA_BUNDLE: expected a file of certificates"):
        Location.parse("s3://bucket/lake", options)


def test_a_broken_profile_file_is_named_and_not_quoted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "credentials").write_text("aws_secret_access_key = planted\n")
    with pytest.raises(StoreAccessError, match="expected a readable AWS profile file at") as raised:
        resolve(None, {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "HOME": str(tmp_path)})
    assert "planted" not in str(raised.value) + repr(raised.value.__cause__)


def test_nothing_that_can_be_printed_holds_a_secret(files: dict[str, str]) -> None:
    found = resolve(None, {**files, "AWS_PROFILE": "work"})
    place = Location.parse("s3://bucket/lake", {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "planted"})
    for thing in (found, found.key, place, place.bucket, place.child("x")):
        assert "planted" not in repr(thing) + str(thing)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:planted@bucket/lake", "expected a URL without credentials"),
        ("s3:///lake", "expected s3://BUCKET/PATH"),
        ("ftp://planted@host/lake", "expected a path, or a URL of s3"),
    ],
)
def test_urls_that_name_no_lake_are_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        Location.parse(url)
    assert "planted" not in str(raised.value)

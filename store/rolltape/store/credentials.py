"""Credentials and end points of an object store: from the caller, the environment, or an AWS profile.

They are looked up when a process first needs them, kept in its memory alone, and never printed. The order is that of
the AWS tools: what the caller passed, the ``AWS_…`` variables, then the profile (``AWS_PROFILE``, else ``default``) in
``~/.aws/credentials`` and ``~/.aws/config``. Where none of these holds a key, the client asks the machine (web
identity, container, instance).
"""

from __future__ import annotations

import configparser
import datetime as dt
import json
import os
import pathlib
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from rolltape.schema.errors import ConfigError, StoreAccessError

KEY: Final = "AWS_ACCESS_KEY_ID"
SECRET: Final = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 (the variable's name)
TOKEN: Final = "AWS_SESSION_TOKEN"  # noqa: S105 (the variable's name)
REGION: Final = "AWS_REGION"
ENDPOINT: Final = "AWS_ENDPOINT_URL"
ALLOW_HTTP: Final = "AWS_ALLOW_HTTP"

NO_CREDENTIALS: Final = (
    "no credentials for the object store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
)

_ASK_MACHINE: Final = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", ENDPOINT, "AWS_ENDPOINT")
_ELSEWHERE: Final = ("role_arn", "sso_session", "sso_start_url")
_PROCESS_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An access key; ``expires_at`` is None where it is good for ever."""

    access_key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    expires_at: dt.datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one bucket is reached with.

    Attributes:
        options: end point, region and other options, under the names of the AWS variables; no keys among them.
        key: the key, if it is known and does not change.
        process: the command that prints a key (``credential_process`` of a profile), if that is its source.
    """

    options: Mapping[str, str]
    key: Key | None = field(default=None, repr=False)
    process: str | None = field(default=None, repr=False)

    def current(self) -> Key | None:
        """The key to sign with now; None where the client has to ask the machine.

        Raises:
            StoreAccessError: the profile's command failed.
        """
        return self.key if self.process is None else _ask_process(self.process)


def resolve(given: Mapping[str, str] | None, environment: Mapping[str, str] | None = None) -> Credentials:
    """Find end point, region and key for S3.

    Raises:
        StoreAccessError: the profile is not there, or takes its key from where this cannot follow; says what to do.
        ConfigError: half a key was given.
    """
    variables = os.environ if environment is None else environment
    options = {name: value for name, value in variables.items() if name.startswith("AWS_") and value}
    options |= given or {}
    if given and KEY in given and TOKEN not in given:
        options.pop(TOKEN, None)
    profile = _Profile.read(options, variables)
    key, process = _static_key(options), None
    if key is None and not any(name in options for name in _ASK_MACHINE):
        key, process = profile.key(), profile.process()
        if key is None and process is None and options.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise StoreAccessError(NO_CREDENTIALS)
    region = options.get(REGION) or options.get("AWS_DEFAULT_REGION") or profile.values.get("region") or "us-east-1"
    endpoint = next((options[name] for name in _ENDPOINTS if name in options), None) or profile.values.get(
        "endpoint_url"
    )
    kept = {name: value for name, value in options.items() if name not in {KEY, SECRET, TOKEN, *_ENDPOINTS}}
    kept[REGION] = region
    if endpoint:
        kept[ENDPOINT] = _checked(endpoint).rstrip("/")
        if endpoint.startswith("http://"):
            kept.setdefault(ALLOW_HTTP, "true")
    return Credentials(options=kept, key=key, process=process)


def _checked(endpoint: str) -> str:
    """The end point, if it is an address and nothing else."""
    if "@" in endpoint:
        raise ConfigError(
            f"{ENDPOINT}: expected an address without a user (this one is not shown: addresses are part of messages); "
            f"the key is {KEY} and {SECRET}"
        )
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{ENDPOINT}: expected http://HOST:PORT or https://HOST:PORT, got {endpoint!r}")
    return endpoint


def _static_key(options: Mapping[str, str]) -> Key | None:
    found = [name for name in (KEY, SECRET) if options.get(name)]
    if len(found) == 1:
        missing = SECRET if found == [KEY] else KEY
        raise ConfigError(f"expected {KEY} and {SECRET} together, got {found[0]} alone; set {missing} too")
    return Key(access_key_id=options[KEY], secret=options[SECRET], token=options.get(TOKEN)) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """One profile's entries of both files; empty where there is no default one."""

    name: str
    values: Mapping[str, str] = field(repr=False)

    @classmethod
    def read(cls, options: Mapping[str, str], variables: Mapping[str, str]) -> _Profile:
        chosen = options.get("AWS_PROFILE") or options.get("AWS_DEFAULT_PROFILE")
        name = chosen or "default"
        home = pathlib.Path(variables.get("HOME") or "~").expanduser()
        shared = pathlib.Path(options.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials")
        config = pathlib.Path(options.get("AWS_CONFIG_FILE") or home / ".aws" / "config")
        sections = (
            (config.expanduser(), name if name == "default" else f"profile {name}"),
            (shared.expanduser(), name),
        )
        values: dict[str, str] = {}
        found = False
        for path, section in sections:
            parser = _read_ini(path)
            if parser is not None and parser.has_section(section):
                found = True
                values |= dict(parser.items(section))
        if chosen and not found and KEY not in options:
            raise StoreAccessError(
                f"expected an AWS profile {name!r} in {shared} or {config}, found none; correct AWS_PROFILE or add it"
            )
        return cls(name=name, values=values)

    def key(self) -> Key | None:
        key_id, secret = self.values.get("aws_access_key_id"), self.values.get("aws_secret_access_key")
        if key_id and secret:
            return Key(access_key_id=key_id, secret=secret, token=self.values.get("aws_session_token"))
        return None

    def process(self) -> str | None:
        if self.key() is not None:
            return None
        if "credential_process" in self.values:
            return self.values["credential_process"]
        if any(name in self.values for name in _ELSEWHERE):
            raise StoreAccessError(
                f"AWS profile {self.name!r} takes its key from a role or single sign-on; let the AWS tools do that: "
                "name a profile of its own with "
                f"`credential_process = aws configure export-credentials --profile {self.name}`"
            )
        return None


def _read_ini(path: pathlib.Path) -> configparser.RawConfigParser | None:
    parser = configparser.RawConfigParser(default_section="", strict=False)
    try:
        with path.open(encoding="utf-8") as file:
            parser.read_file(file)
    except FileNotFoundError:
        return None
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        # The parser quotes the line that it stumbled over, and that line may hold a secret.
        raise StoreAccessError(f"expected a readable AWS profile file at {path}, got {type(error).__name__}") from None
    return parser


def _ask_process(command: str) -> Key:
    """Run a profile's ``credential_process`` and read the key that it prints."""
    try:
        done = subprocess.run(  # noqa: S603 (the user's own command, from the user's own profile)
            shlex.split(command), capture_output=True, check=True, timeout=_PROCESS_TIMEOUT_S
        )
        said = json.loads(done.stdout)
        expires = said.get("Expiration")
        return Key(
            access_key_id=said["AccessKeyId"],
            secret=said["SecretAccessKey"],
            token=said.get("SessionToken"),
            expires_at=dt.datetime.fromisoformat(expires) if expires else None,
        )
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        # Its output holds a secret: only the kind of failure is told.
        raise StoreAccessError(
            f"credential_process of the AWS profile failed ({type(error).__name__}); run it by hand to see why"
        ) from None

"""How to reach a Kafka cluster and how to treat it: from the log's URL, the environment and a file, in this order.

Secrets come from the environment (``ROLLTAPE_KAFKA_SASL_PASSWORD``), from a file that an environment variable names
(``ROLLTAPE_KAFKA_SASL_PASSWORD_FILE``) or from the configuration file; never from a URL, which ends up in process lists
and on the tape. No message, representation or log line shows one.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qsl, urlsplit

from rolltape.schema.errors import ConfigError

SCHEME: Final = "kafka://"
ENVIRONMENT_PREFIX: Final = "ROLLTAPE_KAFKA_"
DEFAULT_PREFIX: Final = "rolltape"
DEFAULT_PORT: Final = 9092

_MIB: Final = 1 << 20
_PREFIX: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")


class Secret(str):
    """A text that shows itself nowhere: only who asks for :meth:`reveal` (or encodes it) gets it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def reveal(self) -> str:
        """The text itself."""
        return "".join(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaConfig:
    """One cluster and one set of topics in it. Each field but the first two may be an option of the URL.

    Attributes:
        bootstrap: brokers to ask first, as ``host:port``.
        prefix: of the topics' names: broker topic ``<prefix>.rollout`` and so on.
        lake: path or URL of the lake that this log is archived in; claim checks lie beside it.
        spool: folder of the producers' spools; the lake's own unless given.
        security_protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        sasl_mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.
        sasl_username: who we are.
        sasl_password: secret.
        ssl_cafile: certificates of the authorities that we trust (PEM); the system's unless given.
        ssl_certfile: our own certificate (PEM), for brokers that ask for one.
        ssl_keyfile: its private key (PEM).
        ssl_key_password: of the private key; secret.
        ssl_check_hostname: whether the brokers' certificates must name the host that we reached.
        client_id: how the brokers' logs name us.
        linger_s: how long small events of a lane may wait for others to fill a record.
        max_in_flight_bytes: bound on bytes that a producer has sent and that are not acknowledged.
        claim_check_bytes: larger payloads lie beside the lake, and the record names their digest.
        request_timeout_s: after which a request is given up and sent again.
        delivery_timeout_s: after which a record is given up by the client and sent again from the spool.
        bootstrap_timeout_s: how long the first answer of the cluster may take.
    """

    bootstrap: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    lake: str | None = None
    spool: str | None = None
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: Secret | None = dataclasses.field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_key_password: Secret | None = dataclasses.field(default=None, repr=False)
    ssl_check_hostname: bool = True
    client_id: str = "rolltape"
    linger_s: float = 0.005
    max_in_flight_bytes: int = 32 * _MIB
    claim_check_bytes: int = 8 * _MIB
    request_timeout_s: float = 30.0
    delivery_timeout_s: float = 60.0
    bootstrap_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            ConfigError: a value outside its range, or one that another one needs is missing.
        """
        if not self.bootstrap or not all(self.bootstrap):
            raise ConfigError(f"bootstrap: expected one or more host:port, got {','.join(self.bootstrap)!r}")
        if not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"prefix: expected 1 to 200 letters, digits, '.', '_' or '-', got {self.prefix!r}; it is the path of "
                "kafka://host:port/PREFIX"
            )
        _one_of("security_protocol", self.security_protocol, _PROTOCOLS)
        if self.security_protocol.startswith("SASL"):
            _one_of("sasl_mechanism", self.sasl_mechanism, _MECHANISMS)
            for name in ("sasl_username", "sasl_password"):
                if not getattr(self, name):
                    raise ConfigError(
                        f"{name}: expected a value for security_protocol {self.security_protocol}, got none; set "
                        f"{_variables(name)}"
                    )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_certfile: expected the certificate of ssl_keyfile, got none; name both")
        for name in ("max_in_flight_bytes", "claim_check_bytes", "request_timeout_s", "bootstrap_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: expected more than 0, and a number, got {getattr(self, name)}")
        if not 0 <= self.linger_s <= 1:
            raise ConfigError(f"linger_s: expected 0 to 1 s, got {self.linger_s}")
        if not self.request_timeout_s <= self.delivery_timeout_s < math.inf:
            raise ConfigError(
                f"delivery_timeout_s: expected at least request_timeout_s ({self.request_timeout_s}), got "
                f"{self.delivery_timeout_s}"
            )

    @classmethod
    def from_url(cls, url: str, environment: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Read a URL such as ``kafka://host1:9092,host2:9092/prefix?lake=s3://bucket/lake``.

        What the URL leaves out comes from the environment (``ROLLTAPE_KAFKA_<FIELD>``), then from the TOML file that
        ``ROLLTAPE_KAFKA_CONFIG`` names. ``overrides`` that are not None win over all of them.

        Raises:
            ConfigError: not such a URL, an unknown option, a secret in the URL, or a value outside its range.

        >>> KafkaConfig.from_url("kafka://one:9092,two/runs", {}).bootstrap
        ('one:9092', 'two:9092')
        """
        environment = os.environ if environment is None else environment
        address, prefix, options = _parse_url(url)
        values: dict[str, Any] = {"bootstrap": address, "prefix": prefix}
        values |= _from_file(environment)
        values |= _from_environment(environment)
        for name, text in options.items():
            values[name] = _parsed(name, text, "the URL's option")
        values |= {"bootstrap": address, "prefix": prefix}
        values |= {name: value for name, value in overrides.items() if value is not None}
        return cls(**values)

    @property
    def url(self) -> str:
        """Address and prefix, with no option."""
        return f"{SCHEME}{','.join(self.bootstrap)}/{self.prefix}"

    def broker_topic(self, topic: str) -> str:
        """The brokers' name of one of our topics."""
        return f"{self.prefix}.{topic}"

    def topic_of(self, broker_topic: str) -> str:
        """The inverse of :meth:`broker_topic`."""
        return broker_topic.removeprefix(f"{self.prefix}.")


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def _parse_url(url: str) -> tuple[tuple[str, ...], str, dict[str, str]]:
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        # What it stumbled over may be secret.
        raise ConfigError(
            f"expected a log such as kafka://host:9092/{DEFAULT_PREFIX}?lake=URL, its options joined by '&', got "
            f"another form: {_without_user(url)!r}"
        ) from None
    if parts.scheme != "kafka" or not parts.netloc or parts.fragment:
        raise ConfigError(f"expected a log such as kafka://host:9092/{DEFAULT_PREFIX}, got {_without_user(url)!r}")
    if "@" in parts.netloc or "@" in parts.path:
        raise ConfigError(
            f"expected a Kafka URL without a user, got {_without_user(url)!r}: URLs are seen by others; set "
            f"{ENVIRONMENT_PREFIX}SASL_USERNAME and {ENVIRONMENT_PREFIX}SASL_PASSWORD (or …_FILE)"
        )
    prefix = parts.path.strip("/") or DEFAULT_PREFIX
    for name in options:
        if name in _SECRETS:
            raise ConfigError(
                f"expected no secret in a URL, got the option {name}: URLs are seen by others; set {_variables(name)}"
            )
        if name not in _PARSERS:
            raise ConfigError(f"expected an option of a Kafka log, got {name!r}; there are {', '.join(_PARSERS)}")
    return tuple(_with_port(host) for host in parts.netloc.split(",") if host), prefix, options


def _without_user(url: str) -> str:
    """The URL for a message: what stands before ``@`` and after ``?`` or ``#`` may be secret."""
    start = url.find("://") + 3 if "://" in url else 0
    user, _, rest = url[start:].rpartition("@")
    # Where one of them comes before the @, nobody knows what is the password and what the options.
    return url[:start] + ("…" if set(user) & set("?#") else re.split("[?#]", rest)[0])


def _variables(name: str) -> str:
    """The environment variables that an option may come from."""
    variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
    return f"{variable} or {variable}_FILE" if name in _SECRETS else variable


def _with_port(host: str) -> str:
    bare = host.rpartition("]")[2] if host.startswith("[") else host
    if host.startswith(":") or any(character.isspace() for character in host):
        raise ConfigError(f"expected host:port, got {host!r}")
    if ":" not in bare:
        return f"{host}:{DEFAULT_PORT}"
    port = bare.rpartition(":")[2]
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"expected host:port with a port of 1 to 65535, got {host!r}")
    return host


def _from_file(environment: Mapping[str, str]) -> dict[str, Any]:
    name = environment.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if not name:
        return {}
    text = _read_text(f"{ENVIRONMENT_PREFIX}CONFIG", name)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # The parser's message may quote the line, and the line may hold a secret.
        raise ConfigError(f"{ENVIRONMENT_PREFIX}CONFIG: expected TOML in {name}, got a line that is not") from None
    unknown = sorted(content.keys() - _PARSERS.keys())
    if unknown:
        raise ConfigError(f"{name}: expected options of a Kafka log ({', '.join(_PARSERS)}), got {', '.join(unknown)}")
    return {key: _parsed(key, str(value), f"{name}:") for key, value in content.items()}


def _read_text(variable: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{variable}: expected a file that can be read, got {name}: {error.strerror}") from error
    except UnicodeDecodeError:
        # The error carries all bytes of the file.
        raise ConfigError(f"{variable}: expected a text in UTF-8, got other bytes in {name}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in _PARSERS:
        variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
        text = environment.get(variable)
        place = environment.get(f"{variable}_FILE") if name in _SECRETS else None
        if not text and place:
            text = _read_text(f"{variable}_FILE", place).strip("\r\n")
        if text:
            values[name] = _parsed(name, text, variable)
    return values


def _parsed(name: str, text: str, where: str) -> Any:
    try:
        return _PARSERS[name](text)
    except ValueError as error:
        shown = "a value that is not" if name in _SECRETS else repr(text)
        raise ConfigError(f"{where} {name}: expected {_EXPECTED[_PARSERS[name]]}, got {shown}") from error


def _flag(text: str) -> bool:
    if text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    raise ValueError(text)


_EXPECTED: Final[dict[Callable[[str], Any], str]] = {
    str: "a text",
    Secret: "a secret",
    int: "a whole number",
    float: "a number",
    _flag: "true or false",
}
_SECRETS: Final = ("sasl_password", "ssl_key_password")
_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "lake": str,
    "spool": str,
    "security_protocol": str.upper,
    "sasl_mechanism": str.upper,
    "sasl_username": str,
    "sasl_password": Secret,
    "ssl_cafile": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_key_password": Secret,
    "ssl_check_hostname": _flag,
    "client_id": str,
    "linger_s": float,
    "max_in_flight_bytes": int,
    "claim_check_bytes": int,
    "request_timeout_s": float,
    "delivery_timeout_s": float,
    "bootstrap_timeout_s": float,
}

"""Where the settings of a Kafka log come from, and that secrets show up nowhere."""

from __future__ import annotations

import copy
import pickle
import traceback
from pathlib import Path

import pytest

from rolltape.ingest.kafka.config import KafkaConfig, Secret
from rolltape.recipes.cli import main
from rolltape.schema.errors import ConfigError

SASL = {
    "ROLLTAPE_KAFKA_SECURITY_PROTOCOL": "sasl_ssl",
    "ROLLTAPE_KAFKA_SASL_MECHANISM": "scram-sha-256",
    "ROLLTAPE_KAFKA_SASL_USERNAME": "alice",
}


def test_a_url_names_brokers_prefix_and_options() -> None:
    config = KafkaConfig.from_url("kafka://one:9093,two,[::1]:9094/runs.a?lake=s3://bucket/lake&linger_s=0.01", {})
    assert config.bootstrap == ("one:9093", "two:9092", "[::1]:9094")
    assert (config.prefix, config.lake, config.linger_s) == ("runs.a", "s3://bucket/lake", 0.01)
    assert config.url == "kafka://one:9093,two:9092,[::1]:9094/runs.a"
    assert config.broker_topic("rollout") == "runs.a.rollout"
    assert config.topic_of("runs.a.policy-versions") == "policy-versions"


def test_the_url_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kafka.toml"
    file.write_text('client_id = "file"\nlinger_s = 0.5\nmax_in_flight_bytes = 1000\nssl_check_hostname = false\n')
    environment = {"ROLLTAPE_KAFKA_CONFIG": str(file), "ROLLTAPE_KAFKA_LINGER_S": "0.25", "ROLLTAPE_KAFKA_HOME": "x"}
    config = KafkaConfig.from_url("kafka://one?max_in_flight_bytes=2000", environment, lake="here", spool=None)
    assert (config.client_id, config.linger_s, config.max_in_flight_bytes) == ("file", 0.25, 2000)
    assert (config.prefix, config.lake, config.spool, config.ssl_check_hostname) == ("rolltape", "here", None, False)


def test_a_password_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hush hush\n")
    by_file = KafkaConfig.from_url("kafka://one", {**SASL, "ROLLTAPE_KAFKA_SASL_PASSWORD_FILE": str(file)})
    by_value = KafkaConfig.from_url("kafka://one", {**SASL, "ROLLTAPE_KAFKA_SASL_PASSWORD": "hush hush"})
    assert by_file.sasl_password is not None
    assert by_file.sasl_password.reveal() == "hush hush"
    assert by_file == by_value
    assert (by_file.security_protocol, by_file.sasl_mechanism) == ("SASL_SSL", "SCRAM-SHA-256")


def test_a_secret_shows_itself_nowhere() -> None:
    config = KafkaConfig.from_url("kafka://one", {**SASL, "ROLLTAPE_KAFKA_SASL_PASSWORD": "hush"})
    secret = config.sasl_password
    shown = [repr(config), str(config), repr(secret), str(secret), f"{secret}", f"{secret!r}", "%s" % secret]  # noqa: UP031
    shown += [str({"password": secret}), repr([secret]), config.url, "{}".format(secret)]  # noqa: UP032
    assert "hush" not in " ".join(shown)
    # What has to be told to the brokers is the text itself.
    assert secret is not None
    assert secret.encode() == b"hush"
    parts = ["alice", secret]
    assert "/".join(parts) == "alice/hush"
    assert pickle.loads(pickle.dumps(secret)).reveal() == copy.copy(secret).reveal() == "hush"


@pytest.mark.parametrize(
    "url", ["kafka://alice:hush@one/x", "kafka://one?sasl_password=hush", "kafka://one?ssl_key_password=hush"]
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="ROLLTAPE_KAFKA_") as found:
        KafkaConfig.from_url(url, {})
    assert "hush" not in str(found.value)


@pytest.mark.parametrize("secret", ["hush?hush", "hush/hush", "hush#hush", "hush@hush", "hush:hush", "hush]hush"])
@pytest.mark.parametrize("form", ["kafka://alice:{}@one/x", "kafka://one?{}", "kafka://one/x#{}", "kafka:alice:{}@one"])
def test_no_form_of_a_url_has_its_secret_repeated(form: str, secret: str) -> None:
    with pytest.raises(ConfigError) as found:
        KafkaConfig.from_url(form.format(secret), {})
    assert "hush" not in "".join(traceback.format_exception(found.value)[-1:])


def test_a_broken_file_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "kafka.toml"
    file.write_text('sasl_password = "hush\n')
    with pytest.raises(ConfigError, match="expected TOML") as found:
        KafkaConfig.from_url("kafka://one", {"ROLLTAPE_KAFKA_CONFIG": str(file)})
    assert "hush" not in str(found.value)


def test_a_file_of_other_bytes_is_named_and_its_bytes_go_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"hush\xff")
    for variable in ("ROLLTAPE_KAFKA_CONFIG", "ROLLTAPE_KAFKA_SASL_PASSWORD_FILE"):
        with pytest.raises(ConfigError, match=f"{variable}: expected a text in UTF-8") as found:
            KafkaConfig.from_url("kafka://one", {**SASL, variable: str(file)})
        assert found.value.__cause__ is None


def test_an_empty_variable_leaves_the_password_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hush")
    environment = {"ROLLTAPE_KAFKA_SASL_PASSWORD": "", "ROLLTAPE_KAFKA_SASL_PASSWORD_FILE": str(tmp_path / "password")}
    config = KafkaConfig.from_url("kafka://one", {**SASL, **environment})
    assert config.sasl_password is not None
    assert config.sasl_password.reveal() == "hush"


@pytest.mark.parametrize(
    ("url", "environment", "named"),
    [
        ("http://one", {}, "kafka://host:9092"),
        ("kafka:///x", {}, "kafka://host:9092"),
        ("kafka://one:port", {}, "port of 1 to 65535"),
        ("kafka://one:0", {}, "port of 1 to 65535"),
        ("kafka://one/a/b", {}, "prefix"),
        ("kafka://one/ä", {}, "prefix"),
        ("kafka://one?linger=1", {}, "an option of a Kafka log, got 'linger'"),
        ("kafka://one?linger_s=soon", {}, "linger_s: expected a number, got 'soon'"),
        ("kafka://one?linger_s=2", {}, "linger_s: expected 0 to 1 s"),
        ("kafka://one?max_in_flight_bytes=0", {}, "max_in_flight_bytes: expected more than 0"),
        ("kafka://one?ssl_check_hostname=maybe", {}, "expected true or false"),
        ("kafka://one?security_protocol=TLS", {}, "security_protocol: expected one of PLAINTEXT"),
        ("kafka://one?security_protocol=SASL_SSL", {}, "sasl_mechanism: expected one of"),
        ("kafka://one?delivery_timeout_s=1", {}, "delivery_timeout_s: expected at least"),
        ("kafka://one?delivery_timeout_s=inf", {}, "delivery_timeout_s: expected at least"),
        ("kafka://one?request_timeout_s=nan", {}, "request_timeout_s: expected more than 0"),
        ("kafka://one?ssl_keyfile=key.pem", {}, "ssl_certfile: expected the certificate"),
        ("kafka://[::1/x", {}, "expected a log such as kafka://host:9092"),
        ("kafka://:9092/x", {}, "expected host:port"),
        ("kafka://one two/x", {}, "expected host:port"),
        ("kafka://one?lake", {}, "options joined by '&'"),
        (
            "kafka://one",
            {"ROLLTAPE_KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "ROLLTAPE_KAFKA_SASL_MECHANISM": "PLAIN"},
            "got none; set ROLLTAPE_KAFKA_SASL_USERNAME",
        ),
        ("kafka://one", SASL, "sasl_password: expected a value"),
        ("kafka://one", {"ROLLTAPE_KAFKA_LINGER_S": "x"}, "ROLLTAPE_KAFKA_LINGER_S"),
        ("kafka://one", {"ROLLTAPE_KAFKA_CONFIG": "/nowhere/at/all"}, "a file that can be read"),
        ("kafka://one", {**SASL, "ROLLTAPE_KAFKA_SASL_PASSWORD_FILE": "/nowhere/at/all"}, "SASL_PASSWORD_FILE"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_it(url: str, environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError) as found:
        KafkaConfig.from_url(url, environment)
    assert named in str(found.value)


def test_an_unknown_setting_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kafka.toml"
    file.write_text("lingers = 1\n")
    with pytest.raises(ConfigError, match="lingers"):
        KafkaConfig.from_url("kafka://one", {"ROLLTAPE_KAFKA_CONFIG": str(file)})


def test_an_empty_password_is_none() -> None:
    with pytest.raises(ConfigError, match="sasl_password"):
        KafkaConfig(
            bootstrap=("one:9092",),
            security_protocol="SASL_SSL",
            sasl_mechanism="PLAIN",
            sasl_username="a",
            sasl_password=Secret(""),
        )


def test_a_sink_refuses_another_lake_than_the_one_that_the_log_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = f"kafka://127.0.0.1:1/x?lake={tmp_path / 'one'}&bootstrap_timeout_s=0.1"
    assert main(["sink", "--log", log, "--lake", str(tmp_path / "two"), "--once"]) == 1
    assert "--lake: expected the lake that the log names" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()
    assert main(["sink", "--log", log, "--lake", (tmp_path / "one").as_uri(), "--once"]) == 1
    assert "LogUnreachableError" in capsys.readouterr().err

"""Settings that producer, consumer and admin have in common, and the vendor's errors as ours.

A wrong password, a closed port or an unknown host is told apart at the first connection, where the vendor's client
alone would only report a timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from rolltape.ingest.kafka.client.vendor import AUTHENTICATION, UNTRUSTED, VendorClient, VendorManager, vendor
from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.ingest.kafka.tls import tls_context
from rolltape.schema.errors import (
    LogAuthenticationError,
    LogAuthorizationError,
    LogError,
    LogUnreachableError,
    RecordTooLargeError,
    RolltapeError,
    TopicError,
)

_MAX_FRAME_BYTES: Final = 1 << 30
_AUTHORIZATION: Final = (
    vendor.TopicAuthorizationFailedError,
    vendor.GroupAuthorizationFailedError,
    vendor.ClusterAuthorizationFailedError,
)


class Connection:
    """Settings of one vendor object, and translation of its errors."""

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self._client: VendorClient | None = None
        self._manager: VendorManager | None = None

    def settings(self) -> dict[str, Any]:
        """What producer, consumer and admin have in common."""
        config = self.config
        return {
            "bootstrap_servers": list(config.bootstrap),
            "client_id": config.client_id,
            "security_protocol": config.security_protocol,
            "sasl_mechanism": config.sasl_mechanism,
            "sasl_plain_username": config.sasl_username,
            "sasl_plain_password": config.sasl_password,
            "ssl_context": tls_context(config),
            "request_timeout_ms": int(config.request_timeout_s * 1000),
            "bootstrap_timeout_ms": int(config.bootstrap_timeout_s * 1000),
            "reconnect_backoff_max_ms": 1000,
            "receive_message_max_bytes": _MAX_FRAME_BYTES,
            "kafka_client": lambda **configs: VendorClient(on_created=self._created, **configs),
        }

    def _created(self, client: VendorClient, manager: VendorManager) -> None:
        self._client, self._manager = client, manager

    def together(self) -> contextlib.AbstractContextManager[None]:
        """See :meth:`VendorClient.together`."""
        if self._client is None:
            raise LogError("expected a connection to send records through, got none yet")
        return self._client.together()

    @property
    def cluster(self) -> Any:
        """What the brokers last said of themselves."""
        if self._manager is None:
            raise LogError("expected a connection to look at the cluster through, got none yet")
        return self._manager.cluster

    @contextlib.contextmanager
    def opening(self, what: str) -> Iterator[None]:
        """As :meth:`errors`; closes what was opened for an object of the vendor that did not come to be."""
        try:
            with self.errors(what):
                yield
        except BaseException:
            if self._client is not None:
                self._client.close()
            raise

    @contextlib.contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Raise the vendor's errors as ours; ``what`` says what was tried."""
        try:
            yield
        except RolltapeError:
            raise
        except vendor.KafkaError as error:
            raise self.translated(error, what) from error

    def translated(self, error: Exception, what: str) -> Exception:
        """Our error for one of the vendor's."""
        where = ",".join(self.config.bootstrap)
        last = None if self._manager is None else self._manager.last_error
        for found in (error, last):
            decisive = isinstance(found, AUTHENTICATION) and (found is error or isinstance(error, _TIMEOUTS))
            if found is not None and decisive:
                return self._authentication(found, where)
        if isinstance(error, _AUTHORIZATION):
            return LogAuthorizationError(
                f"{what}: expected the right to do so, got {_text(error)} for user {self.config.sasl_username!r} at "
                f"{where}; ask whoever runs the cluster for it"
            )
        if isinstance(error, _TOO_LARGE):
            return RecordTooLargeError(f"{what}: expected a record that the topic takes, got {_text(error)}")
        if isinstance(error, vendor.UnknownTopicOrPartitionError):
            return TopicError(
                f"{what}: expected topics {self.config.prefix}.*, got {_text(error)} at {where}; create them: rolltape "
                f"topics --log {self.config.url} --create"
            )
        if isinstance(error, (*_TIMEOUTS, vendor.KafkaConnectionError, vendor.NodeNotReadyError)):
            return self._unreachable(last if last is not None and isinstance(error, _TIMEOUTS) else error, what, where)
        return LogError(f"{what}: the brokers at {where} refuse: {_text(error)}")

    def _authentication(self, error: Exception, where: str) -> LogAuthenticationError:
        config = self.config
        return LogAuthenticationError(
            f"authentication failed at {where}: expected the brokers to accept user {config.sasl_username!r} by "
            f"{config.sasl_mechanism} over {config.security_protocol}, got {_text(error)}; check user and password "
            "(ROLLTAPE_KAFKA_SASL_USERNAME, …_SASL_PASSWORD or …_SASL_PASSWORD_FILE) and …_SASL_MECHANISM"
        )

    def _unreachable(self, error: Exception, what: str, where: str) -> LogError:
        text = _text(error)
        if UNTRUSTED in text or "certificate" in text.lower():
            return LogAuthenticationError(
                f"authentication failed at {where}: expected a certificate that we trust, got {text}; check "
                "ROLLTAPE_KAFKA_SSL_CAFILE and the host name in the URL"
            )
        certificate = (
            " A broker that asks for clients' certificates hangs up on those without (ssl_certfile)."
            if "SSL" in self.config.security_protocol and self.config.ssl_certfile is None
            else ""
        )
        return LogUnreachableError(
            f"{what}: expected a Kafka broker at {where} that answers {self.config.security_protocol} within "
            f"{self.config.bootstrap_timeout_s:g} s, got {text}; is it running, is the address right, and the "
            f"security_protocol?{certificate}"
        )


_TOO_LARGE: Final = (vendor.MessageSizeTooLargeError, vendor.RecordListTooLargeError)
_TIMEOUTS: Final = (vendor.KafkaTimeoutError, vendor.RequestTimedOutError)


def _text(error: Exception) -> str:
    # The vendor's own texts start with the name of their type already.
    name, text = type(error).__name__, str(error)
    return text if text.startswith(name) else f"{name}: {text}".rstrip(": ")

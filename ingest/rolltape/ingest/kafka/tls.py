"""TLS as configured: whom we trust, and who we are."""

from __future__ import annotations

import ssl

from rolltape.ingest.kafka.config import KafkaConfig
from rolltape.schema.errors import ConfigError


def tls_context(config: KafkaConfig) -> ssl.SSLContext | None:
    """What encrypts connections; None where the protocol does not.

    Raises:
        ConfigError: a certificate or key that cannot be read; names the field, never a password.
    """
    if not config.security_protocol.endswith("SSL"):
        return None
    try:
        context = ssl.create_default_context(cafile=config.ssl_cafile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_cafile: expected certificates (PEM), got {config.ssl_cafile}: {error}") from error
    context.check_hostname = config.ssl_check_hostname
    if config.ssl_certfile is not None:
        password = None if config.ssl_key_password is None else config.ssl_key_password.reveal()
        try:
            # Without a password OpenSSL would ask on the terminal.
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password or "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"ssl_certfile, ssl_keyfile, ssl_key_password: expected a certificate and its key (PEM), got "
                f"{config.ssl_certfile} and {config.ssl_keyfile}: {error}"
            ) from error
    return context

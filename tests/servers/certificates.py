"""A certificate authority of the tests, and what it signs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files of one authority.

    Attributes:
        ca_file: the authority's certificate, for clients.
        server_file: a server's key (PKCS#8) and certificate, as Kafka's PEM key store wants them.
        stranger_ca_file: the certificate of an authority that signed nothing here.
    """

    ca_file: Path
    server_file: Path
    stranger_ca_file: Path


def make_certificates(folder: Path, *names: str) -> Certificates:
    """Sign a server certificate for ``names`` (127.0.0.1 and localhost unless told)."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    server = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
    found = Certificates(
        ca_file=folder / "ca.pem", server_file=folder / "server.pem", stranger_ca_file=folder / "stranger_ca.pem"
    )
    authority.cert_pem.write_to_path(found.ca_file)
    trustme.CA().cert_pem.write_to_path(found.stranger_ca_file)
    key = load_pem_private_key(server.private_key_pem.bytes(), None)
    pkcs8 = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = b"".join(part.bytes() for part in server.cert_chain_pems)
    found.server_file.touch(mode=0o600)
    found.server_file.write_bytes(pkcs8 + chain)
    return found

"""Certificates and keys for a first try on one machine, and for tests.

Real ones are made with openssl and ssh-keygen, as ``docs/deployment.md`` shows.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

_AUTHORITY = x509.Name.from_rfc4514_string("CN=CoCoFL authority")
_SERVER = x509.Name.from_rfc4514_string("CN=localhost")
_ADDRESSES = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
_VALID = timedelta(days=30)


def make_certificates(folder: Path) -> None:
    """An authority of one's own, and a certificate for a server on this machine.

    A SuperLink needs ``ca.crt``, ``server.crt`` and ``server.key`` for TLS, devices the first only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP384R1())
    server_key = _new_private_key(folder / "server.key", PrivateFormat.PKCS8)
    for file, name, key in (
        ("ca.crt", _AUTHORITY, authority_key.public_key()),
        ("server.crt", _SERVER, server_key.public_key()),
    ):
        made = _certificate(name, key, authority_key)
        (folder / file).write_bytes(made.public_bytes(Encoding.PEM))


def make_node_key(path: Path) -> Path:
    """A private key as ``ssh-keygen -t ecdsa -b 384`` makes it; the public one, beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = _new_private_key(path, PrivateFormat.OpenSSH).public_key()
    public = path.with_suffix(".pub")
    public.write_bytes(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return public


def _new_private_key(path: Path, form: PrivateFormat) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP384R1())
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    return key


def _certificate(
    name: x509.Name, key: ec.EllipticCurvePublicKey, issuer_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    now = datetime.now(UTC)
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    is_authority = name == _AUTHORITY
    made = (
        x509.CertificateBuilder(_AUTHORITY, name, key, x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(of_issuer, critical=False)
    )
    if not is_authority:
        made = made.add_extension(x509.SubjectAlternativeName(_ADDRESSES), critical=False)
    return made.sign(issuer_key, hashes.SHA384())

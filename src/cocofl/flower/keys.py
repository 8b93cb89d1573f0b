"""Keys of devices and servers, as ``ssh-keygen -t ecdsa -b 384`` and ``openssl`` make them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def new_private_key(path: Path, form: PrivateFormat) -> ec.EllipticCurvePrivateKey:
    """A new key, in a file that nobody else can read."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    return key


def new_device_key(path: Path) -> Path:
    """A new key of a device, and beside it what the server is to know of it, ``.pub``."""
    public = new_private_key(path, PrivateFormat.OpenSSH).public_key()
    known = path.with_suffix(".pub")
    known.write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return known

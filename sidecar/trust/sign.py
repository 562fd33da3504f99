"""Sign a folder with a key, or with a key and its certificate. ``model_signing verify`` takes the result."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.trust import bundle, statement
from lora_fs.sidecar.trust.signers import HASHES, hint_of, usable_key


def sign(
    folder: Path, key: bytes, *, password: bytes | None = None, certificates: bytes | None = None
) -> bytes:
    """Return the bundle for every file of a folder.

    Args:
        key: a private key in PEM. password: of the key.
        certificates: in PEM: the key's own first, then its issuers; None: the key alone signs.
    Raises:
        InputError: the key or a certificate is unusable, or the folder holds a file that cannot be signed.
    """
    private = _private(key, password)
    material = _material(private.public_key(), certificates)
    digests = {path: _sha256(folder / path) for path in _files(folder)}
    if not digests:
        raise InputError(f"{folder} holds no file to sign")
    payload = statement.state(folder.resolve().name, digests)
    signed = private.sign(bundle.pre_authenticated(payload), ec.ECDSA(HASHES[private.curve.name]))
    return bundle.write(payload, signed, material)


def _private(key: bytes, password: bytes | None) -> ec.EllipticCurvePrivateKey:
    try:
        private = serialization.load_pem_private_key(key, password)
    except TypeError as error:
        need = "it is encrypted: give --password-file" if password is None else "it has no password"
        raise InputError(f"the private key cannot be used: {need}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError("the private key is none in PEM, or its password is another one") from error
    usable_key(private.public_key())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    return private


def _material(key: ec.EllipticCurvePublicKey, certificates: bytes | None) -> dict[str, Any]:
    if certificates is None:
        return {"publicKey": {"hint": hint_of(key)}}
    try:
        chain = x509.load_pem_x509_certificates(certificates)
    except ValueError as error:
        raise InputError("the certificate is none in PEM") from error
    if chain[0].public_key() != key:
        raise InputError("the first certificate is not the private key's: put the signer's own first")
    der = (one.public_bytes(serialization.Encoding.DER) for one in chain)
    every = [{"rawBytes": base64.b64encode(one).decode()} for one in der]
    return {"x509CertificateChain": {"certificates": every}}


def _files(folder: Path) -> Iterator[str]:
    """Every file to sign, by its path in the folder."""

    def fail(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error

    for at, folders, files in os.walk(folder, onerror=fail):
        here = Path(at).relative_to(folder)
        folders[:] = [name for name in folders if (here / name).as_posix() not in statement.IGNORED]
        for name in (*folders, *files):
            if (path := Path(at, name)).is_symlink() or not (path.is_dir() or path.is_file()):
                kind = "a symlink" if path.is_symlink() else "no regular file"
                raise InputError(f"{here / name} is {kind}, which is not signed: put a file in its place")
        yield from (
            (here / name).as_posix() for name in files if (here / name).as_posix() not in statement.IGNORED
        )


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error

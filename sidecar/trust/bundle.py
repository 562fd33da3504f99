"""``model.sig``: a Sigstore bundle with an in-toto statement, as OpenSSF Model Signing writes it.

The reader is strict. Every byte of the file is either signed, or has one allowed value: it takes no
unknown or repeated field, none of another type, no base64 with a second spelling. So no changed byte passes.
"""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from lora_fs.sidecar import field_errors
from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.trust.refusal import BUNDLE, Refusal

MAX_BUNDLE_BYTES: Final = 1 << 20
MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"


def decoded(text: str) -> bytes:
    """Decode base64; raises ValueError if it is none, or has another spelling than the usual one."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("is not base64") from error
    if base64.b64encode(data).decode() != text:
        raise ValueError("is base64 in another spelling than the usual one")
    return data


def _base64(text: str) -> str:
    decoded(text)
    return text


_Base64 = Annotated[str, AfterValidator(_base64)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Key(_Part):
    hint: str | None = None


class _Certificate(_Part):
    rawBytes: _Base64


class _Chain(_Part):
    certificates: list[_Certificate] = Field(min_length=1, max_length=8)


class _Material(_Part):
    """The means to verify the signature: exactly one of key, chain and certificate (an identity's)."""

    publicKey: _Key | None = None
    x509CertificateChain: _Chain | None = None
    certificate: _Certificate | None = None
    tlogEntries: list[dict[str, Any]] = []
    timestampVerificationData: dict[str, Any] | None = None


class _Signature(_Part):
    sig: _Base64
    keyid: Literal[""] = ""


class _Envelope(_Part):
    payload: _Base64
    payloadType: Literal["application/vnd.in-toto+json"]
    signatures: list[_Signature] = Field(min_length=1, max_length=1)


class _Bundle(_Part):
    mediaType: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    verificationMaterial: _Material
    dsseEnvelope: _Envelope


@dataclass(frozen=True, slots=True)
class Bundle:
    """A signature, not verified yet.

    Attributes:
        raw: the file.
        payload: the signed statement.
        key_hint: SHA-256 of the public key's PEM, in hexadecimal; None if the bundle is no key's.
        chain: DER, the signer's first, its issuer's next; empty where the bundle is no certificate's.
        keyless: whether it is an identity's, with a certificate of minutes and a log's entry.
    """

    raw: bytes
    payload: bytes
    signature: bytes
    key_hint: str | None
    chain: tuple[bytes, ...]
    keyless: bool

    @property
    def signed(self) -> bytes:
        """The bytes under the signature: DSSE's pre-authentication encoding."""
        return pre_authenticated(self.payload)


def pre_authenticated(payload: bytes) -> bytes:
    """Return DSSE's encoding of a payload, which is what a signature is over."""
    return b"DSSEv1 %d %s %d " % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload)) + payload


def parse(raw: bytes) -> Bundle:
    """Read a bundle; verifies nothing of it.

    Raises:
        Refusal: it is none, or one of another shape than model signing writes.
    """
    if len(raw) > MAX_BUNDLE_BYTES:
        raise Refusal("untrusted", f"has more than {MAX_BUNDLE_BYTES} bytes")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
        bundle = _Bundle.model_validate(value)
    except ValidationError as error:
        path, reason = field_errors.first(error, "JSON object")
        field = ".".join(map(str, path))
        why = f"is no signature that is read: {shown(field)}: {shown(reason)}"
        raise Refusal("untrusted", why) from error
    except (ValueError, RecursionError) as error:
        raise Refusal("untrusted", f"is no signature that is read: {shown(str(error))}") from error
    material, envelope = bundle.verificationMaterial, bundle.dsseEnvelope
    key, chain, identity = material.publicKey, material.x509CertificateChain, material.certificate
    if sum(one is not None for one in (key, chain, identity)) != 1:
        raise Refusal("untrusted", "is signed by no key, no certificate and no identity, or by several")
    if identity is None and (material.tlogEntries or material.timestampVerificationData is not None):
        raise Refusal("untrusted", "has a log's entry or a timestamp, which nothing verifies")
    return Bundle(
        raw,
        base64.b64decode(envelope.payload),
        base64.b64decode(envelope.signatures[0].sig),
        (key.hint or "") if key is not None else None,
        tuple(base64.b64decode(one.rawBytes) for one in chain.certificates) if chain is not None else (),
        identity is not None,
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def read(folder: Path, dir_fd: int | None = None) -> bytes | None:
    """Read a folder's ``model.sig``; None: it has none.

    Args:
        dir_fd: the folder, opened by the caller.
    Raises:
        Refusal: it is no regular file. VolumeUnavailable: it cannot be read.
    """
    path = folder / BUNDLE if dir_fd is None else Path(BUNDLE)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise Refusal("untrusted", "is no regular file")
            return file.read(MAX_BUNDLE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Refusal("untrusted", "is a symlink, which is not followed") from error
        why = os.strerror(error.errno or 0)
        raise VolumeUnavailable(f"cannot read {folder / BUNDLE}: {why}") from error


def write(payload: bytes, signature: bytes, material: dict[str, Any]) -> bytes:
    """Return the file for a signed statement. ``material``: the key's hint, or the certificates."""
    encoded = {"payload": payload, "sig": signature}
    text = {name: base64.b64encode(data).decode() for name, data in encoded.items()}
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {**material, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": text["payload"],
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": text["sig"], "keyid": ""}],
        },
    }
    return json.dumps(bundle, separators=(",", ":")).encode()

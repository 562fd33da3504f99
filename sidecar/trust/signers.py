"""Who may sign: a public key, a certificate authority, an identity. Each says whether a bundle is its own.

It fetches nothing. A certificate counts while it is valid: an expired one signs nothing any more. An
identity's certificate lives for minutes, and its log's entry proves that it was valid at the signature.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.trust.bundle import Bundle
from lora_fs.sidecar.trust.refusal import Refusal

Now = Callable[[], datetime.datetime]
HASHES: Final[dict[str, hashes.HashAlgorithm]] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
# What cryptography raises for a changed certificate: some of it is no ValueError.
UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
CURVES: Final = "an elliptic curve's (P-256, P-384 or P-521)"


class Method(Protocol):
    """A way to know a signer."""

    def verify(self, bundle: Bundle, now: Now) -> str | None:
        """Return who signed, for people; None: the bundle is not this signer's.

        Raises:
            Refusal: the bundle cannot count for this signer. Another signer may still accept it.
        """


def usable_key(key: object) -> ec.EllipticCurvePublicKey:
    """Return a public key that model signing signs with. Raises InputError: it is of another kind."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in HASHES:
        raise InputError(f"the key is not {CURVES}")
    return key


def hint_of(key: ec.EllipticCurvePublicKey) -> str:
    """Return what a bundle calls a key: SHA-256 of its PEM, in hexadecimal."""
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _verify(key: ec.EllipticCurvePublicKey, bundle: Bundle) -> None:
    try:
        key.verify(bundle.signature, bundle.signed, ec.ECDSA(HASHES[key.curve.name]))
    except InvalidSignature as error:
        raise Refusal("untrusted", "is damaged: its signature is not over what it says") from error


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The holder of a private key."""

    key: ec.EllipticCurvePublicKey

    def verify(self, bundle: Bundle, now: Now) -> str | None:
        """See ``Method``."""
        hint = hint_of(self.key)
        if bundle.key_hint != hint:
            return None
        _verify(self.key, bundle)
        return f"key {hint[:12]}"


@dataclass(frozen=True, slots=True)
class Authority:
    """Who has a certificate of these authorities. ``subject``: and this name; None: any."""

    roots: tuple[x509.Certificate, ...]
    subject: str | None = None

    def verify(self, bundle: Bundle, now: Now) -> str | None:
        """See ``Method``."""
        if not bundle.chain:
            return None
        try:
            leaf, *others = map(_certificate, bundle.chain)
            return self._verify(leaf, others, bundle, now())
        except UNREADABLE as error:
            raise Refusal("untrusted", "holds a certificate that cannot be read") from error

    def _verify(
        self, leaf: x509.Certificate, others: list[x509.Certificate], bundle: Bundle, at: datetime.datetime
    ) -> str | None:
        used = self._chain(leaf, others, at)
        if used is None:
            return None
        names = _names(leaf)
        if self.subject is not None and self.subject not in names:
            return None
        if not set(bundle.chain) <= {one.public_bytes(serialization.Encoding.DER) for one in used}:
            raise Refusal("untrusted", "holds certificates that lead to no trusted authority")
        if not _signs(leaf):
            raise Refusal("untrusted", f"is by the certificate {names[0]}, which is not one for signatures")
        try:
            key = usable_key(leaf.public_key())
        except InputError as error:
            raise Refusal("untrusted", f"is by the certificate {names[0]}: {error}") from error
        _verify(key, bundle)
        return f"certificate {names[0]}"

    def _chain(
        self, leaf: x509.Certificate, others: list[x509.Certificate], at: datetime.datetime
    ) -> list[x509.Certificate] | None:
        """The way from the leaf to a trusted root; None: there is none.

        Raises:
            Refusal: there is one, and the certificate is not valid now.
        """
        found = self._path(leaf, others, at)
        if found is not None or leaf.not_valid_before_utc <= at <= leaf.not_valid_after_utc:
            return found
        if self._path(leaf, others, leaf.not_valid_before_utc) is None:
            return None
        state = "expired" if at > leaf.not_valid_after_utc else "is not valid before"
        when = leaf.not_valid_after_utc if at > leaf.not_valid_after_utc else leaf.not_valid_before_utc
        raise Refusal(
            "untrusted",
            f"is by the certificate {_names(leaf)[0]}, which {state} {when:%Y-%m-%d %H:%M} UTC",
            "sign the folder again with a certificate that is valid",
        )

    def _path(
        self, leaf: x509.Certificate, others: list[x509.Certificate], at: datetime.datetime
    ) -> list[x509.Certificate] | None:
        any_extension = verification.ExtensionPolicy.permit_all()
        authority = any_extension.require_present(
            x509.BasicConstraints, verification.Criticality.AGNOSTIC, None
        )
        builder = verification.PolicyBuilder().store(verification.Store([*self.roots])).time(at)
        builder = builder.extension_policies(ca_policy=authority, ee_policy=any_extension)
        try:
            return builder.build_client_verifier().verify(leaf, others).chain
        except (verification.VerificationError, ValueError):
            return None


def _certificate(der: bytes) -> x509.Certificate:
    """Read a certificate, all of whose bytes count.

    Raises:
        ValueError: it is none, or leaves bits of its signature unused: those could be any number.
    """
    certificate = x509.load_der_x509_certificate(der)
    if not der.endswith(b"\x00" + certificate.signature):
        raise ValueError("its signature is no whole number of bytes")
    return certificate


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    """The names of a certificate: its alternative names, then its common name; at least one."""
    found: list[str] = []
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found += map(str, names.get_values_for_type(x509.RFC822Name))
        found += map(str, names.get_values_for_type(x509.UniformResourceIdentifier))
        found += map(str, names.get_values_for_type(x509.DNSName))
    except x509.ExtensionNotFound:
        pass
    common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    found += [str(one.value) for one in common]
    return tuple(found) or (certificate.subject.rfc4514_string() or "without a name",)


def _signs(certificate: x509.Certificate) -> bool:
    """Whether it says that it is for signatures: of data, or of code."""
    extensions = certificate.extensions
    try:
        if extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return True
    except x509.ExtensionNotFound:
        pass
    try:
        purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return ExtendedKeyUsageOID.CODE_SIGNING in purposes


def public_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    """Read a public key. Raises InputError: it is none, or of another kind."""
    try:
        return usable_key(serialization.load_pem_public_key(pem))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError("its key is no public key in PEM") from error

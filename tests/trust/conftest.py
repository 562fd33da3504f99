"""Keys, certificates and trust files, made on the spot."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lora_fs.sidecar.trust import Trust
from tests.registry.conftest import write_adapter

UTC = datetime.UTC
DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Key:
    """A key pair; ``certificates``: PEM, its own first."""

    private: ec.EllipticCurvePrivateKey
    certificates: bytes | None = None

    @property
    def pem(self) -> bytes:
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def public(self) -> str:
        return (
            self.private.public_key()
            .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
            .decode()
        )


def new_key(curve: ec.EllipticCurve | None = None) -> Key:
    return Key(ec.generate_private_key(curve or ec.SECP256R1()))


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


@dataclass(frozen=True)
class Authority:
    """A certificate authority; ``above``: its own and its issuers' certificates."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate
    above: tuple[x509.Certificate, ...] = ()

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def issue(
        self,
        name: str,
        *,
        begins: datetime.datetime | None = None,
        ends: datetime.datetime | None = None,
        signs: bool = True,
    ) -> Key:
        """Certify a new key; the chain has every issuer below the root."""
        key = new_key()
        usage = x509.KeyUsage(signs, False, not signs, False, False, False, False, False, False)
        leaf = _certificate(name, key.private, self.certificate.subject, self.key, begins, ends, usage)
        pems = [one.public_bytes(serialization.Encoding.PEM) for one in (leaf, *self.above)]
        return Key(key.private, b"".join(pems))

    def below(self, name: str) -> Authority:
        """An intermediate authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, self.certificate.subject, self.key, None, None, None)
        return Authority(key, certificate, (certificate, *self.above))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    by: ec.EllipticCurvePrivateKey,
    begins: datetime.datetime | None,
    ends: datetime.datetime | None,
    usage: x509.KeyUsage | None,
) -> x509.Certificate:
    """A leaf with ``usage``, an authority without."""
    now = datetime.datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins or now - DAY)
        .not_valid_after(ends or now + DAY)
    )
    if usage is None:
        built = built.add_extension(x509.BasicConstraints(True, None), True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    return built.add_extension(usage, True).sign(by, hashes.SHA256())


def new_authority(name: str = "acme root") -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    return Authority(key, _certificate(name, key, _name(name), key, None, None, None))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "support", 1)


@pytest.fixture
def trusting(tmp_path: Path) -> Callable[..., Trust]:
    """``trusting({"name": …})``: a trust file with these signers."""

    def write(*signers: dict[str, object], unsigned: tuple[str, ...] = ()) -> Trust:
        path = tmp_path / "trust.yaml"
        path.write_text(yaml.safe_dump({"signers": list(signers), "unsigned": list(unsigned)}))
        return Trust(path)

    return write

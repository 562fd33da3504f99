"""A Sigstore of our own: a certificate authority and two logs, made on the spot."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lora_fs.sidecar.trust.bundle import MEDIA_TYPE, PAYLOAD_TYPE, pre_authenticated

NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
SCT_LIST = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
MINUTES = datetime.timedelta(minutes=10)
SHA256 = ec.ECDSA(hashes.SHA256())


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def der(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.DER, form)


def key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(der(key)).digest()


@dataclass
class Witness:
    """Signs checkpoints of logs, as C2SP's tlog-cosignature says: the time, and what it is of."""

    name: str
    key: ed25519.Ed25519PrivateKey = field(default_factory=ed25519.Ed25519PrivateKey.generate)

    def sign(self, note: str, at_s: int) -> str:
        """Return the line for below the note."""
        raw = self.key.public_key().public_bytes_raw()
        key = hashlib.sha256(self.name.encode() + b"\n\x04" + raw).digest()[:4]
        signed = self.key.sign(f"cosignature/v1\ntime {at_s}\n{note}".encode())
        return f"\u2014 {self.name} {b64(key + struct.pack('>Q', at_s) + signed)}\n"


@dataclass
class Sigstore:
    """Signs for whoever an issuer knows. ``at``: when it does. ``witnesses``: sign the log's checkpoint."""

    at: datetime.datetime
    witnesses: tuple[Witness, ...] = ()
    authority: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificate_log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)

    def __post_init__(self) -> None:
        begins = self.at - 10 * MINUTES
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.root = (
            x509.CertificateBuilder(
                NAME, NAME, self.authority.public_key(), 1, begins, begins + 9999 * MINUTES
            )
            .add_extension(x509.BasicConstraints(True, 0), True)
            .add_extension(usage, True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.authority.public_key()), False)
            .sign(self.authority, hashes.SHA256())
        )

    def trusted_root(self) -> str:
        """What a verifier pins, as Sigstore publishes it."""
        valid = {"start": (self.at - 10 * MINUTES).isoformat().replace("+00:00", "Z")}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            public = {
                "rawBytes": b64(der(key)),
                "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                "validFor": valid,
            }
            return {
                "baseUrl": "https://log.example",
                "hashAlgorithm": "SHA2_256",
                "publicKey": public,
                "logId": {"keyId": b64(key_id(key))},
            }

        chain = {"certificates": [{"rawBytes": b64(self.root.public_bytes(serialization.Encoding.DER))}]}
        authority = {
            "subject": {"organization": "acme", "commonName": "authority"},
            "uri": "https://authority.example",
            "certChain": chain,
            "validFor": valid,
        }
        return json.dumps(
            {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [log(self.log)],
                "certificateAuthorities": [authority],
                "ctlogs": [log(self.certificate_log)],
                "timestampAuthorities": [],
            }
        )

    def sign(self, payload: bytes, identity: str, issuer: str) -> bytes:
        """Return the bundle of a statement."""
        key = new_key()
        certificate = self._certify(key, identity, issuer)
        signature = key.sign(pre_authenticated(payload), SHA256)
        raw = certificate.public_bytes(serialization.Encoding.DER)
        bundle = {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {
                "certificate": {"rawBytes": b64(raw)},
                "tlogEntries": [self._entry(payload, signature, certificate)],
            },
            "dsseEnvelope": {
                "payload": b64(payload),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": b64(signature)}],
            },
        }
        return json.dumps(bundle).encode()

    def _certify(self, key: ec.EllipticCurvePrivateKey, identity: str, issuer: str) -> x509.Certificate:
        mine = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key())
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        built = (
            x509.CertificateBuilder(NAME, x509.Name([]), key.public_key(), 2, self.at, self.at + MINUTES)
            .add_extension(usage, True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)
            .add_extension(x509.SubjectAlternativeName([x509.RFC822Name(identity)]), True)
            .add_extension(mine, False)
            .add_extension(x509.UnrecognizedExtension(ISSUER, issuer.encode()), False)
        )
        before = built.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        at_ms = int(self.at.timestamp() * 1000)
        logged = struct.pack(">BBQH", 0, 0, at_ms, 1) + key_id(self.authority)
        logged += len(before).to_bytes(3, "big") + before + b"\0\0"
        proof = self.certificate_log.sign(logged, SHA256)
        sct = b"\0" + key_id(self.certificate_log) + struct.pack(">QHBBH", at_ms, 0, 4, 3, len(proof)) + proof
        listed = struct.pack(">HH", len(sct) + 2, len(sct)) + sct
        octets = (
            b"\x04" + (bytes([len(listed)]) if len(listed) < 128 else bytes([0x81, len(listed)])) + listed
        )
        return built.add_extension(x509.UnrecognizedExtension(SCT_LIST, octets), False).sign(
            self.authority, hashes.SHA256()
        )

    def _entry(self, payload: bytes, signature: bytes, certificate: x509.Certificate) -> dict[str, Any]:
        """The transparency log's only entry, with the proof that it is in the log."""
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        digest = {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()}
        spec = {
            "envelopeHash": digest,
            "payloadHash": digest,
            "signatures": [{"signature": b64(signature), "verifier": b64(pem)}],
        }
        body = _canonical({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
        at_s = int(self.at.timestamp())
        promised = {"body": b64(body), "integratedTime": at_s, "logID": key_id(self.log).hex(), "logIndex": 0}
        top = hashlib.sha256(b"\0" + body).digest()
        note = f"log.example - 1\n1\n{b64(top)}\n"
        signed = key_id(self.log)[:4] + self.log.sign(note.encode(), SHA256)
        lines = [f"\u2014 log.example {b64(signed)}\n", *(one.sign(note, at_s) for one in self.witnesses)]
        return {
            "logIndex": "0",
            "logId": {"keyId": b64(key_id(self.log))},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(at_s),
            "inclusionPromise": {"signedEntryTimestamp": b64(self.log.sign(_canonical(promised), SHA256))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": b64(top),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": "\n".join((note, "".join(lines)))},
            },
            "canonicalizedBody": b64(body),
        }


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

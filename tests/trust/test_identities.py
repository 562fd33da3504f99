"""Identities without a key: verified offline by Sigstore's own library, with a trusted root of our own."""

from __future__ import annotations

import base64
import datetime
import itertools
import json
import socket
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import TrustUnreadable
from lora_fs.sidecar.registry.lifecycle.artifacts import SERVED, hash_files
from lora_fs.sidecar.trust import Refusal, Trust
from lora_fs.sidecar.trust.sign import sign
from lora_fs.sidecar.trust.statement import state
from tests.trust.conftest import UTC, new_authority, new_key
from tests.trust.sigstore_stack import Sigstore, Witness

WHO, ISSUER = "release@acme.example", "https://issuer.example"
VERSION_3 = b"\xa0\x03\x02\x01\x02"  # in DER
AGO = datetime.timedelta(days=30)


@pytest.fixture
def sigstore() -> Sigstore:
    """It signed a month ago: its certificates lived for ten minutes."""
    return Sigstore((datetime.datetime.now(UTC) - AGO).replace(microsecond=0))


@pytest.fixture
def trust(sigstore: Sigstore, tmp_path: Path, trusting: Callable[..., Trust]) -> Trust:
    (tmp_path / "root.json").write_text(sigstore.trusted_root())
    return trusting({"name": "ci", "identity": WHO, "issuer": ISSUER, "trustedRoot": "root.json"})


def statement(folder: Path) -> bytes:
    return state("support", {one.path: one.sha256 for one in hash_files(folder, SERVED)})


def test_an_identity_signs(
    adapter: Path, sigstore: Sigstore, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle of a certificate that was valid when the log took it passes, and nothing is fetched."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    raw = sigstore.sign(statement(adapter), WHO, ISSUER)
    assert trust.check("default", hash_files(adapter, SERVED), raw) == f"ci (identity {WHO})"


def test_either_of_two_identities(
    adapter: Path, sigstore: Sigstore, trusting: Callable[..., Trust], tmp_path: Path
) -> None:
    """Each of two identities can sign, in any order; no damaged bundle counts, and no third one's."""
    (tmp_path / "root.json").write_text(sigstore.trusted_root())
    files, said = hash_files(adapter, SERVED), statement(adapter)
    key = new_key()
    by = {who: sigstore.sign(said, f"{who}@acme.example", ISSUER) for who in ("alice", "bob", "eve")}
    by["ops"] = sign(adapter, key.pem)
    root = {"issuer": ISSUER, "trustedRoot": "root.json"}
    signers = [
        {"name": "alice", "identity": "alice@acme.example", **root},
        {"name": "bob", "identity": "bob@acme.example", **root},
        {"name": "ops", "key": key.public},
        {"name": "acme", "certificates": new_authority().pem},
    ]
    for order in itertools.permutations(signers):
        trust = trusting(*order)
        for who in ("alice", "bob", "ops"):
            told = trust.check("default", files, by[who])
            assert told is not None
            assert told.startswith(f"{who} (")
        value = json.loads(by["bob"])
        value["dsseEnvelope"]["payload"] = base64.b64encode(b"{}").decode()
        for raw in (by["eve"], json.dumps(value).encode()):
            with pytest.raises(
                Refusal, match=r"is not by bob@acme\.example of https://issuer\.example"
            ) as refused:
                trust.check("default", files, raw)
            assert refused.value.code == "untrusted"
            assert f"asked: {', '.join(str(one['name']) for one in order)}" in str(refused.value)


def test_the_first_of_two_identities_signed_other_bytes(
    adapter: Path, sigstore: Sigstore, trusting: Callable[..., Trust], tmp_path: Path
) -> None:
    """A trusted signature of other bytes stays a mismatch, whoever else may sign."""
    (tmp_path / "root.json").write_text(sigstore.trusted_root())
    root = {"issuer": ISSUER, "trustedRoot": "root.json"}
    raw = sigstore.sign(state("support", dict.fromkeys(SERVED, 64 * "0")), WHO, ISSUER)
    signers = (
        {"name": "ci", "identity": WHO, **root},
        {"name": "bob", "identity": "bob@acme.example", **root},
    )
    for order in itertools.permutations(signers):
        with pytest.raises(Refusal, match="signs other bytes") as refused:
            trusting(*order).check("default", hash_files(adapter, SERVED), raw)
        assert refused.value.code == "signature-mismatch"


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.long)])
def test_every_byte_of_the_bundle_counts(adapter: Path, sigstore: Sigstore, trust: Trust, step: int) -> None:
    """A bundle of which one bit is another one is refused, whichever bit it is; no error is any other."""
    raw, files = sigstore.sign(statement(adapter), WHO, ISSUER), hash_files(adapter, SERVED)
    assert trust.check("default", files, raw) is not None
    passed = []
    for at in range(0, len(raw), step):
        changed = bytearray(raw)
        changed[at] ^= 1 << (at % 8)
        try:
            trust.check("default", files, bytes(changed))
        except Refusal:
            continue
        passed.append(at)
    assert passed == []


def test_a_witness_signed_as_well(adapter: Path, sigstore: Sigstore, trust: Trust) -> None:
    """Whoever else signed the log's checkpoint, and wherever its line stands, the log's signature counts.

    Of the witnesses' lines, which nobody here can verify, a byte may be another one. No byte of the log's
    may, nor of anything else.
    """
    sigstore.witnesses = (Witness("witness.example"), Witness("log.example"))
    files = hash_files(adapter, SERVED)
    value = json.loads(sigstore.sign(statement(adapter), WHO, ISSUER))
    checkpoint = value["verificationMaterial"]["tlogEntries"][0]["inclusionProof"]["checkpoint"]
    note, _, below = checkpoint["envelope"].partition("\n\n")
    logs, *others = below.splitlines(keepends=True)
    assert len(others) == 2
    for lines in ([logs, *others], [*others, logs], [others[0], logs, others[1]]):
        checkpoint["envelope"] = "\n\n".join((note, "".join(lines)))
        told = trust.check("default", files, json.dumps(value).encode())
        assert told == f"ci (identity {WHO})"
    checkpoint["envelope"] = "\n\n".join((note, "".join(others)))
    with pytest.raises(Refusal, match="Signature not found"):
        trust.check("default", files, json.dumps(value).encode())
    envelope = "\n\n".join((note, "".join([others[0], logs, others[1]])))
    counts = range(len(note) + 2 + len(others[0]), len(note) + 2 + len(others[0]) + len(logs))
    passed = []
    for at in (*range(0, len(note) + 2, 5), *counts):
        checkpoint["envelope"] = envelope[:at] + chr(ord(envelope[at]) ^ 1) + envelope[at + 1 :]
        try:
            trust.check("default", files, json.dumps(value).encode())
        except Refusal:
            continue
        passed.append((at, envelope[at]))
    assert passed == []


def others(line: str) -> Callable[[str], str]:
    """Write one more line below the log's signature."""
    return lambda envelope: envelope + line


CHECKPOINTS = {
    "another name": lambda envelope: envelope.replace("\u2014 log.", "\u2014 lag."),
    "two signatures": lambda envelope: envelope + envelope.rpartition("\n\n")[2],
    "a line between": lambda envelope: envelope.replace("\n\n", "\n\nx\n"),
    "padded": lambda envelope: envelope[:-1] + "=\n",
    "no dash": others("witness.example AAAAAAAAAAAA\n"),
    "no name": others("\u2014  AAAAAAAAAAAA\n"),
    "a name with a plus": others("\u2014 a+b AAAAAAAAAAAA\n"),
    "a key alone": others("\u2014 witness.example AAAAAA==\n"),
    "no base64": others("\u2014 witness.example AAAAAAAAAA*A\n"),
    "base64 of another spelling": others("\u2014 witness.example AAAAAAAAAAB=\n"),
    "no end": others("\u2014 witness.example AAAAAAAAAAAA"),
    "an empty line": others("\n"),
    "100 more": others("\u2014 witness.example AAAAAAAAAAAA\n" * 100),
}


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_what_nothing_signs_in_a_checkpoint(
    adapter: Path, sigstore: Sigstore, trust: Trust, what: str
) -> None:
    """Below a log's checkpoint stand signatures and nothing else, one of them the log's: Sigstore's library
    reads over the rest."""
    value = json.loads(sigstore.sign(statement(adapter), WHO, ISSUER))
    checkpoint = value["verificationMaterial"]["tlogEntries"][0]["inclusionProof"]["checkpoint"]
    checkpoint["envelope"] = CHECKPOINTS[what](checkpoint["envelope"])
    with pytest.raises(Refusal) as caught:
        trust.check("default", hash_files(adapter, SERVED), json.dumps(value).encode())
    assert caught.value.code == "untrusted"


@pytest.mark.parametrize("how", ["identity", "certificate"])
def test_a_certificate_of_no_version(
    adapter: Path, sigstore: Sigstore, trust: Trust, trusting: Callable[..., Trust], how: str
) -> None:
    """A certificate that cannot be read is a refusal, whatever cryptography raises for it."""
    raw = sigstore.sign(statement(adapter), WHO, ISSUER)
    if how == "certificate":
        root = new_authority()
        trust = trusting({"name": "ops", "certificates": root.pem})
        key = root.issue("build@acme")
        raw = sign(adapter, key.pem, certificates=key.certificates)
    value = json.loads(raw)
    material = value["verificationMaterial"]
    holder = (
        material["certificate"] if how == "identity" else material["x509CertificateChain"]["certificates"][0]
    )
    encoded = base64.b64decode(holder["rawBytes"])
    assert encoded.count(VERSION_3) == 1
    holder["rawBytes"] = base64.b64encode(encoded.replace(VERSION_3, VERSION_3[:-1] + b"\x6a")).decode()
    with pytest.raises(Refusal) as caught:
        trust.check("default", hash_files(adapter, SERVED), json.dumps(value).encode())
    assert caught.value.code == "untrusted"


@pytest.mark.parametrize(
    ("who", "issuer"), [("someone@acme.example", ISSUER), (WHO, "https://other.example")]
)
def test_another_identity(adapter: Path, sigstore: Sigstore, trust: Trust, who: str, issuer: str) -> None:
    """Someone else of the issuer, and the same name of another issuer, sign nothing."""
    with pytest.raises(Refusal, match=f"is not by {WHO} of {ISSUER}") as caught:
        trust.check("default", hash_files(adapter, SERVED), sigstore.sign(statement(adapter), who, issuer))
    assert caught.value.code == "untrusted"


def test_another_root(adapter: Path, sigstore: Sigstore, trust: Trust) -> None:
    """A Sigstore that the trusted root does not know signs nothing."""
    raw = Sigstore(sigstore.at).sign(statement(adapter), WHO, ISSUER)
    with pytest.raises(Refusal) as caught:
        trust.check("default", hash_files(adapter, SERVED), raw)
    assert caught.value.code == "untrusted"


def test_an_identity_for_other_bytes(adapter: Path, sigstore: Sigstore, trust: Trust) -> None:
    """A statement that was signed and logged does not stand for other bytes."""
    raw = sigstore.sign(statement(adapter), WHO, ISSUER)
    (adapter / SERVED[0]).write_text("{}")
    with pytest.raises(Refusal) as caught:
        trust.check("default", hash_files(adapter, SERVED), raw)
    assert caught.value.code == "signature-mismatch"


def test_no_library(adapter: Path, trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra nothing is trusted, and the message says what to install."""
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    with pytest.raises(TrustUnreadable, match=r"sigstore is not installed: .* pip install '\.\[sign\]'"):
        trust.check("default", hash_files(adapter, SERVED), None)

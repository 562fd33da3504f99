"""Identities without a key: verified offline by Sigstore's own library, with a trusted root of our own."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import TrustUnreadable
from lora_fs.sidecar.registry.lifecycle.artifacts import SERVED, hash_files
from lora_fs.sidecar.trust import Refusal, Trust
from lora_fs.sidecar.trust.statement import state
from tests.trust.conftest import UTC
from tests.trust.sigstore_stack import Sigstore

WHO, ISSUER = "release@acme.example", "https://issuer.example"
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
    with pytest.raises(TrustUnreadable, match=r"sigstore is not installed: pip install 'lora-fs\[sign\]'"):
        trust.check("default", hash_files(adapter, SERVED), None)

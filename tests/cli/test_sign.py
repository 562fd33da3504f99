"""sign and verify, and the signer that other commands show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from cryptography.hazmat.primitives import serialization

from lora_fs.sidecar.trust import BUNDLE
from tests.cli.conftest import LoraFs
from tests.trust.conftest import Key, new_authority, new_key


@pytest.fixture
def shop(root: Path, tmp_path: Path, folder: Callable[[int], str], monkeypatch: pytest.MonkeyPatch) -> Key:
    """An adapter in ``lora-1``, a key in ``key.pem``, and a trust file that names it."""
    monkeypatch.delenv("LORA_FS_TRUST", raising=False)
    folder(1)
    key = new_key()
    (tmp_path / "key.pem").write_bytes(key.pem)
    (tmp_path / "key.pub").write_text(key.public)
    signers = [{"name": "ops", "key": "key.pub"}]
    (tmp_path / "trust.yaml").write_text(yaml.safe_dump({"signers": signers, "unsigned": ["playground"]}))
    return key


def test_sign_then_verify(lora_fs: LoraFs, shop: Key, tmp_path: Path) -> None:
    """A folder is signed once, anew with --force, and verified by the trust file."""
    assert lora_fs("verify", "lora-1", "--trust", "trust.yaml").code == 5
    ran = lora_fs("sign", "lora-1", "--key", "key.pem")
    assert (ran.code, (tmp_path / "lora-1" / BUNDLE).exists()) == (0, True)
    assert "sign anew with --force" in (again := lora_fs("sign", "lora-1", "--key", "key.pem")).err
    assert again.code == 4
    assert lora_fs("sign", "lora-1", "--key", "key.pem", "--force").code == 0
    ran = lora_fs("verify", "lora-1", "--trust", "trust.yaml")
    assert (ran.code, ran.out.partition("(")[0]) == (0, "lora-1 is signed by ops ")
    (tmp_path / "lora-1" / "adapter_config.json").write_text(
        (tmp_path / "lora-1" / "adapter_config.json").read_text() + " "
    )
    ran = lora_fs("verify", "lora-1", "--trust", "trust.yaml", "-o", "json")
    assert (ran.code, ran.json["ok"], ran.json["findings"][0]["code"]) == (5, False, "signature-mismatch")
    assert (
        "needs no signature" in lora_fs("verify", "lora-1", "--trust", "trust.yaml", "-n", "playground").out
    )


def test_a_rehearsed_signature(lora_fs: LoraFs, shop: Key, tmp_path: Path) -> None:
    """--dry-run signs in memory and writes nothing; what the command refuses it refuses alike."""
    words, bundle = ("sign", "lora-1", "--key", "key.pem"), tmp_path / "lora-1" / BUNDLE
    ran = lora_fs(*words, "--dry-run")
    assert (ran.code, ran.out, bundle.exists()) == (0, f"would sign lora-1: {bundle}\n", False)
    assert lora_fs("sign", "lora-1", "--key", "key.pub", "--dry-run").code == 2
    lora_fs(*words)
    signed = bundle.read_bytes()
    assert (lora_fs(*words, "--dry-run").code, lora_fs(*words, "--dry-run", "--force").code) == (4, 0)
    assert bundle.read_bytes() == signed


def test_a_certificate_and_a_password(lora_fs: LoraFs, shop: Key, tmp_path: Path) -> None:
    """A certificate stands for the key; an encrypted key takes its password from a file."""
    root = new_authority()
    key = root.issue("build@acme")
    locked = serialization.BestAvailableEncryption(b"secret")
    pem = key.private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    assert key.certificates is not None
    for name, data in {
        "locked.pem": pem,
        "own.crt": key.certificates,
        "password": b"secret\n",
        "root.pem": root.pem.encode(),
        "other.yaml": b"signers:\n- {name: release, certificates: root.pem, subject: build@acme}\n",
    }.items():
        (tmp_path / name).write_bytes(data)
    sign = ("sign", "lora-1", "--key", "locked.pem", "--certificate", "own.crt")
    ran = lora_fs(*sign)
    assert (ran.code, "give --password-file" in ran.err) == (2, True)
    assert lora_fs(*sign, "--password-file", "password").code == 0
    ran = lora_fs("verify", "lora-1", "--trust", "other.yaml")
    assert ran.out == "lora-1 is signed by release (certificate build@acme)\n"


@pytest.mark.parametrize("word", ["nowhere.pem", "lora-1", "key.pub"])
def test_a_key_that_cannot_be_used(lora_fs: LoraFs, shop: Key, word: str) -> None:
    """It is refused in a line; nothing is written."""
    ran = lora_fs("sign", "lora-1", "--key", word)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert not Path("lora-1", BUNDLE).exists()


def test_verify_without_a_trust_file(lora_fs: LoraFs, shop: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for one; an empty variable is a mistake, and a missing file is an error with its name."""
    assert "say who may sign: --trust FILE" in lora_fs("verify", "lora-1").err
    monkeypatch.setenv("LORA_FS_TRUST", "")
    assert "LORA_FS_TRUST is empty" in lora_fs("verify", "lora-1").err


@pytest.mark.parametrize("word", ["nowhere.yaml", "lora-1", "key.pub"])
def test_a_trust_file_that_cannot_be_used(
    lora_fs: LoraFs, shop: Key, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the command names is its mistake; one of the environment may come later."""
    ran = lora_fs("verify", "lora-1", "--trust", word)
    assert (ran.code, ran.err.count("\n"), f"the trust file {word}: " in ran.err) == (2, 1, True)
    monkeypatch.setenv("LORA_FS_TRUST", word)
    ran = lora_fs("verify", "lora-1")
    assert (ran.code, "nothing new is trusted" in ran.err) == (1, True)


def test_what_a_registration_tells(
    lora_fs: LoraFs, shop: Key, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An unsigned folder exits 5; of a signed one show, its JSON and the audit name the signer."""
    monkeypatch.setenv("LORA_FS_TRUST", "trust.yaml")
    monkeypatch.setenv("LORA_FS_AUDIT_FILE", "audit.log")
    ran = lora_fs("register", "support", "lora-1")
    assert (ran.code, "[unsigned]" in ran.err) == (5, True)
    lora_fs("sign", "lora-1", "--key", "key.pem")
    assert lora_fs("register", "support", "lora-1").code == 0
    told = lora_fs("show", "support", "-o", "json").json["revisions"][0]["spec"]["signer"]
    assert told.startswith("ops (key ")
    assert f"signed by  {told}" in lora_fs("show", "support").out
    assert told in (tmp_path / "audit.log").read_text()

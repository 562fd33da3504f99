"""OpenSSF Model Signing's own command signs what is verified here, and verifies what is signed here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.registry.lifecycle.artifacts import SERVED, hash_files
from lora_fs.sidecar.trust import BUNDLE, Refusal, Trust
from lora_fs.sidecar.trust.sign import sign
from tests.trust.conftest import Key, new_authority, new_key


def model_signing(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def written(folder: Path, **files: bytes) -> dict[str, Path]:
    folder.mkdir()
    paths = {name: folder / name for name in files}
    for name, data in files.items():
        paths[name].write_bytes(data)
    return paths


@pytest.fixture
def by_certificate(tmp_path: Path) -> tuple[Key, dict[str, Path]]:
    root = new_authority()
    issuer = root.below("issuer")
    key = issuer.issue("build@acme")
    assert key.certificates is not None
    own, end, above = key.certificates.partition(b"-----END CERTIFICATE-----\n")
    return key, written(tmp_path / "keys", key=key.pem, own=own + end, above=above, root=root.pem.encode())


def test_a_key(adapter: Path, tmp_path: Path, trusting: Callable[..., Trust]) -> None:
    """What it signs with a key is trusted; what is signed here with that key it verifies."""
    key = new_key()
    at = written(tmp_path / "keys", key=key.pem, public=key.public.encode())
    trust, bundle = trusting({"name": "ops", "key": "keys/public"}), adapter / BUNDLE
    ran = model_signing("sign", "key", adapter, "--private_key", at["key"], "--signature", bundle)
    assert ran.returncode == 0, ran.stderr
    files = hash_files(adapter, SERVED)
    assert str(trust.check("default", files, bundle.read_bytes())).startswith("ops (key ")
    bundle.write_bytes(sign(adapter, key.pem))
    verify = ("verify", "key", adapter, "--public_key", at["public"], "--signature", bundle)
    assert model_signing(*verify).returncode == 0
    (adapter / SERVED[0]).write_text("{}")
    assert model_signing(*verify).returncode != 0
    with pytest.raises(Refusal):
        trust.check("default", hash_files(adapter, SERVED), bundle.read_bytes())


def test_a_certificate(
    adapter: Path, by_certificate: tuple[Key, dict[str, Path]], trusting: Callable[..., Trust]
) -> None:
    """What it signs with a certificate is trusted; what is signed here with that one it verifies."""
    key, at = by_certificate
    trust, bundle = trusting({"name": "release", "certificates": "keys/root"}), adapter / BUNDLE
    ran = model_signing(
        *("sign", "certificate", adapter, "--private_key", at["key"], "--signature", bundle),
        *("--signing_certificate", at["own"], "--certificate_chain", at["above"]),
    )
    assert ran.returncode == 0, ran.stderr
    files = hash_files(adapter, SERVED)
    assert trust.check("default", files, bundle.read_bytes()) == "release (certificate build@acme)"
    bundle.write_bytes(sign(adapter, key.pem, certificates=key.certificates))
    ran = model_signing(
        "verify", "certificate", adapter, "--certificate_chain", at["root"], "--signature", bundle
    )
    assert ran.returncode == 0, ran.stderr

"""What docs/security.md promises of signatures."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lora_fs.sidecar.errors import InvalidAdapter, TrustUnreadable
from lora_fs.sidecar.model import Phase, Scope
from lora_fs.sidecar.reconcile.stage import trusted
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.trust import BUNDLE, Trust
from lora_fs.sidecar.trust.sign import sign
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine
from tests.registry.conftest import write_adapter
from tests.trust.conftest import Key, new_key
from tests.trust.serving import (
    SCOPE,
    code_of,
    conditions,
    hint,
    holds,
    register,
    replica,
    stager,
    until,
    until_held,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def key() -> Key:
    return new_key()


@pytest.fixture
def trust(key: Key, tmp_path: Path) -> Trust:
    path = tmp_path / "trust.yaml"
    path.write_text(yaml.safe_dump({"signers": [{"name": "ops", "key": key.public}]}))
    return Trust(path)


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry", create=True)


@pytest.fixture
def signed(tmp_path: Path, key: Key) -> Path:
    folder = write_adapter(tmp_path / "support", 1)
    (folder / BUNDLE).write_bytes(sign(folder, key.pem))
    return folder


async def test_a_writer_of_the_volume(registry: Registry, signed: Path, trust: Trust, tmp_path: Path) -> None:
    """With `LORA_FS_TRUST` a replica registers no bytes, and gives none to an engine, unless somebody who
    may has signed them. It does not matter who wrote the volume, its records and signatures."""
    good = register(registry, signed, None)
    other = write_adapter(tmp_path / "other", 2)
    forged = register(registry, other, None, Scope("team-a", "tiny"))
    staging = stager(registry, tmp_path / "stage", trust)
    with pytest.raises(InvalidAdapter) as caught:
        await staging.stage(forged)
    assert code_of(caught.value) == "unsigned"
    place = registry.layout.artifact(forged.key)
    (place / BUNDLE).write_bytes((signed / BUNDLE).read_bytes())
    with pytest.raises(InvalidAdapter) as caught:
        await staging.stage(forged)
    assert code_of(caught.value) == "signature-mismatch"
    lying = forged.model_copy(update={"spec": forged.spec.model_copy(update={"files": good.spec.files})})
    with pytest.raises(InvalidAdapter) as caught:
        await staging.stage(lying)
    assert code_of(caught.value) == "signature-mismatch"
    swapped = lying.model_copy(update={"spec": lying.spec.model_copy(update={"digest": good.spec.digest})})
    with pytest.raises(InvalidAdapter) as caught:
        await staging.stage(swapped)
    assert code_of(caught.value) == "digest-mismatch"


async def test_a_trust_file_that_turns_unreadable(
    registry: Registry,
    signed: Path,
    key: Key,
    trust: Trust,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a replica cannot use the trust file it registers and loads nothing new, and a condition says
    so. What is in the engine serves on."""
    monkeypatch.setattr(trusted, "LOOK_S", 0.05)
    register(registry, signed, trust)
    engine = FakeEngine()
    made = await replica(tmp_path, trust, engine)
    async with made.running():
        await holds(made, "support")
        assert made.replica.notable()[0]["support"].signer == "ops (key " + hint(key) + ")"
        text = trust.path.read_text()
        trust.path.write_text("signers: [")
        new = write_adapter(tmp_path / "new", 3)
        (new / BUNDLE).write_bytes(sign(new, key.pem))
        wanted = Registration("late", new, new.as_uri())
        ingest.register(registry, SCOPE, wanted, Expectation(), writer="test")
        with pytest.raises(TrustUnreadable):
            register(registry, new, trust)
        with pytest.raises(TrustUnreadable, match=f"the trust file {trust.path}: line 1: not YAML"):
            await holds(made, "late")
        await holds(made, "support")
        assert engine.public() == {"support"}
        told = made.replica.notable()[0]["late"]
        assert (told.phase, told.reason) == (Phase.FAILED, "TrustUnreadable")
        await until(lambda: any("TrustFile: the trust file" in one for one in conditions(made)))
        trust.path.write_text(text)
        await until(lambda: not any("TrustFile" in one for one in conditions(made)))
        await until_held(made, "late")

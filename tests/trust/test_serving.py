"""Only signed bytes are registered, and only signed bytes reach an engine, whoever wrote the volume."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import InvalidAdapter, TrustUnreadable
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.reconcile.stage.trusted import Trusted
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.lifecycle.artifacts import SERVED
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.trust import BUNDLE, Trust
from lora_fs.sidecar.trust.sign import sign
from tests.reconcile.conftest import FakeEngine
from tests.trust.conftest import Key, new_key
from tests.trust.serving import SCOPE, code_of, conditions, holds, register, replica, stager, until

pytestmark = pytest.mark.anyio

BOUND_S = 20


@pytest.fixture
def key() -> Key:
    return new_key()


@pytest.fixture
def trust(key: Key, trusting: Callable[..., Trust]) -> Trust:
    return trusting({"name": "ops", "key": key.public}, unsigned=("playground",))


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry", create=True)


@pytest.fixture
def signed(adapter: Path, key: Key) -> Path:
    (adapter / BUNDLE).write_bytes(sign(adapter, key.pem))
    return adapter


async def test_signed_bytes_pass(registry: Registry, signed: Path, trust: Trust, tmp_path: Path) -> None:
    """They are registered with their signature, a replica copies both, and each tells who signed."""
    record = register(registry, signed, trust)
    assert str(record.spec.signer).startswith("ops (key ")
    assert (registry.layout.artifact(record.key) / BUNDLE).read_bytes() == (signed / BUNDLE).read_bytes()
    staging = stager(registry, tmp_path / "stage", trust)
    copy = Path(await staging.stage(record))
    assert (copy / BUNDLE).read_bytes() == (signed / BUNDLE).read_bytes()
    assert staging.trusted.signer_of(record) == record.spec.signer


def test_unsigned_bytes_are_not_registered(registry: Registry, adapter: Path, trust: Trust) -> None:
    """Without a signature, or with another's, nothing is written; a namespace may be exempt."""
    with pytest.raises(InvalidAdapter, match=r"model\.sig: is not there") as caught:
        register(registry, adapter, trust)
    assert code_of(caught.value) == "unsigned"
    (adapter / BUNDLE).write_bytes(sign(adapter, new_key().pem))
    with pytest.raises(InvalidAdapter) as caught:
        register(registry, adapter, trust)
    assert code_of(caught.value) == "untrusted"
    assert registry.mentions(SCOPE, "support", registry.revisions(SCOPE)) == {}
    assert register(registry, adapter, trust, Scope("playground", "tiny")).spec.signer is None


def test_every_byte_counts_at_a_registration(registry: Registry, signed: Path, trust: Trust) -> None:
    """Each byte of the model, the config and the bundle is changed once: each time it is refused."""
    passed = []
    for name in (*SERVED, BUNDLE):
        whole = (signed / name).read_bytes()
        for at in range(len(whole)):
            (signed / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                register(registry, signed, trust, dry_run=True)
            except InvalidAdapter:
                continue
            passed.append((name, at))
        (signed / name).write_bytes(whole)
    assert passed == []
    assert register(registry, signed, trust, dry_run=True).spec.signer


async def test_every_byte_counts_before_an_engine(
    registry: Registry, signed: Path, trust: Trust, tmp_path: Path
) -> None:
    """Each byte on the volume is changed once: each time no copy is given to the engine."""
    record = register(registry, signed, trust)
    at_rest = registry.layout.artifact(record.key)
    staging, passed = stager(registry, tmp_path / "stage", trust), []
    for name in (*SERVED, BUNDLE):
        whole = (at_rest / name).read_bytes()
        for at in range(len(whole)):
            (at_rest / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            try:
                await staging.stage(record)
            except InvalidAdapter:
                continue
            passed.append((name, at))
        (at_rest / name).write_bytes(whole)
    assert passed == []
    assert await staging.stage(record)


async def test_each_namespace_is_asked(
    registry: Registry, adapter: Path, trust: Trust, tmp_path: Path
) -> None:
    """Bytes that an exempt namespace staged unsigned are not given to another one's adapter."""
    staging = stager(registry, tmp_path / "stage", trust)
    assert await staging.stage(register(registry, adapter, trust, Scope("playground", "tiny")))
    with pytest.raises(InvalidAdapter) as caught:
        await staging.stage(register(registry, adapter, None))
    assert code_of(caught.value) == "unsigned"


async def test_a_signature_that_comes_later(
    registry: Registry, adapter: Path, key: Key, trust: Trust, tmp_path: Path
) -> None:
    """Registered bytes that are signed and registered again are the same revision, signed."""
    first = register(registry, adapter, None)
    (adapter / BUNDLE).write_bytes(sign(adapter, key.pem))
    second = register(registry, adapter, trust)
    assert (second.revision, second.generation) == (first.revision, first.generation + 1)
    assert second.spec.signer
    assert await stager(registry, tmp_path / "stage", trust).stage(second)


async def test_a_copy_outlives_the_volume(
    registry: Registry, signed: Path, trust: Trust, tmp_path: Path
) -> None:
    """A staged copy has its signature beside it: it is trusted while the volume is away."""
    record = register(registry, signed, trust)
    assert await stager(registry, tmp_path / "stage", trust).stage(record)
    os.rename(registry.layout.root, tmp_path / "away")
    again = stager(registry, tmp_path / "stage", trust)
    again.sweep()
    assert await again.stage(record)


async def test_a_signed_copy_needs_no_thread_of_the_volume(
    registry: Registry, signed: Path, trust: Trust, tmp_path: Path
) -> None:
    """The volume hangs under other adapters' signatures: one that is staged is loaded all the same."""
    record = register(registry, signed, trust)
    staging, answers, asked = stager(registry, tmp_path / "stage", trust), threading.Event(), Queue[str]()
    assert await staging.stage(record)

    def hangs(one: Record) -> Path:
        asked.put(one.name)
        answers.wait(BOUND_S)
        return registry.layout.resolve(one.spec.path)

    staging.trusted._locate = hangs
    others = [record.model_copy(update={"name": f"other-{n}"}) for n in range(8)]
    waiting = [asyncio.ensure_future(staging.stage(one)) for one in others]
    try:
        for _ in others:
            await asyncio.to_thread(asked.get, timeout=BOUND_S)
        async with asyncio.timeout(BOUND_S / 2):
            assert await staging.stage(record)
    finally:
        answers.set()
        await asyncio.gather(*waiting)


async def test_who_signed_is_forgotten_with_the_adapter(
    registry: Registry, signed: Path, trust: Trust, tmp_path: Path
) -> None:
    """Adapters come and go by the thousand: a replica knows who signed those that there are."""
    register(registry, signed, trust)
    made = await replica(tmp_path, trust, FakeEngine())
    async with made.running():
        await holds(made, "support")
        assert made.replica.notable()[0]["support"].signer
        release.unregister(registry, SCOPE, "support", all_revisions=True, writer="test")
        await until(lambda: not made.stager.trusted._signers)


async def test_who_signed_is_known_while_it_is_checked_again(
    registry: Registry, signed: Path, trust: Trust, tmp_path: Path
) -> None:
    """A trust file that turns unreadable changes nothing of what was checked before."""
    record = register(registry, signed, trust)
    staging = stager(registry, tmp_path / "stage", trust)
    await staging.stage(record)
    trust.path.write_text("signers: [")
    with pytest.raises(TrustUnreadable):
        await staging.stage(record)
    assert staging.trusted.signer_of(record) == record.spec.signer


def test_nothing_more_is_read(
    registry: Registry, signed: Path, trust: Trust, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check compares digests that the registration has: each served file is opened once."""
    opened: list[str] = []
    real = os.open

    def noting(path: str | Path, *arguments: int, **more: Any) -> int:
        opened.append(Path(path).name)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", noting)
    register(registry, signed, None, dry_run=True)
    without = len([name for name in opened if name in SERVED])
    opened.clear()
    register(registry, signed, trust, dry_run=True)
    assert len([name for name in opened if name in SERVED]) == without
    assert opened.count(BUNDLE) == 1


async def test_a_look_that_ends_as_its_replica_stops(trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cancellation counts, also at that moment: else a replica would never end."""
    looked = asyncio.get_running_loop().create_future()

    async def run(_: Daemons, __: Callable[[], None]) -> None:
        await looked

    monkeypatch.setattr(Daemons, "run", run)
    watching = asyncio.create_task(Trusted(trust, lambda record: Path(record.spec.path)).watch())
    for _ in range(3):  # it begins the look
        await asyncio.sleep(0)
    looked.set_result(None)
    watching.cancel()
    ended, _ = await asyncio.wait({watching}, timeout=1)
    assert ended == {watching}


@pytest.mark.parametrize("text", ["", "signers: []\n"])
async def test_a_replica_with_an_empty_trust_file(
    registry: Registry, signed: Path, trust: Trust, tmp_path: Path, text: str
) -> None:
    """It starts, says that nothing can be trusted, and loads nothing."""
    register(registry, signed, trust)
    trust.path.write_text(text)
    made = await replica(tmp_path, trust, engine := FakeEngine())
    async with made.running():
        with pytest.raises(InvalidAdapter, match="names no signer for namespace default"):
            await holds(made, "support")
        assert engine.public() == set()
        told = f"TrustFile: the trust file {trust.path} names no signer: nothing can be trusted"
        assert told in conditions(made)

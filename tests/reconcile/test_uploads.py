"""An upload whose volume stops answering: nobody waits for it, and nothing of it stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import SourceUnavailable, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.reconcile.admin import uploads
from lora_fs.sidecar.reconcile.admin.uploads import Upload, Uploads
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.sources.offer import ARCHIVE
from tests.registry.conftest import write_adapter
from tests.sources.conftest import tar_of

pytestmark = pytest.mark.anyio

SCOPE = Scope("default", "tiny")
KEY = AdapterKey(*SCOPE, "v1", "one")
BOUND_S = 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def files() -> AsyncIterator[tuple[str, bytes]]:
    """One, all at once."""
    yield "adapter_config.json", b"{}"


async def test_a_server_that_ends_does_not_wait_for_the_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is removed as soon as the volume answers."""
    registry = Registry(tmp_path / "volume", create=True)
    hang, begun, append = threading.Event(), asyncio.Event(), uploads._Arriving.append
    loop = asyncio.get_running_loop()

    def stuck(self: uploads._Arriving, name: str, data: bytes) -> None:
        with self._lock:
            loop.call_soon_threadsafe(begun.set)
            hang.wait(BOUND_S)
        append(self, name, data)

    monkeypatch.setattr(uploads._Arriving, "append", stuck)
    monkeypatch.setattr(uploads, "DISCARD_S", 0.1)
    here = Uploads(registry, 1 << 20, 60.0, 60.0)
    sending = asyncio.create_task(here.receive(KEY, Upload("one", files())))
    await asyncio.wait_for(begun.wait(), BOUND_S)
    (folder,) = registry.layout.incoming(SCOPE).iterdir()
    sending.cancel()
    done, _ = await asyncio.wait({sending}, timeout=BOUND_S / 4)
    hang.set()
    assert done
    for _ in range(100):
        if not folder.exists():
            break
        await asyncio.sleep(0.05)
    assert not folder.exists()


async def test_a_sender_does_not_wait_for_a_volume_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns soon that the volume is at fault, though an upload may take an hour."""
    registry, hang = Registry(tmp_path / "volume", create=True), threading.Event()
    monkeypatch.setattr(uploads._Arriving, "append", lambda *_: hang.wait(BOUND_S))
    here = Uploads(registry, 1 << 20, 3600.0, 0.1)
    try:
        async with asyncio.timeout(BOUND_S / 2):
            with pytest.raises(VolumeUnavailable, match="the volume took no part of the upload in"):
                await here.receive(KEY, Upload("one", files()))
    finally:
        hang.set()


async def test_a_tar_that_unpacks_for_too_long(tmp_path: Path) -> None:
    """A thread that unpacks ends in time, whatever a tar unpacks to; nothing of it stays."""
    registry = Registry(tmp_path / "volume", create=True)
    packed = tar_of(write_adapter(tmp_path / "source"), prefix="")

    async def tar() -> AsyncIterator[tuple[str, bytes]]:
        yield ARCHIVE, packed

    here = Uploads(registry, 1 << 20, 60.0, 60.0)
    folder = await here.receive(KEY, Upload("one", tar()))
    here.most_s = 0.0

    def unpack() -> None:
        with here.unpacked(folder):
            pytest.fail("it was unpacked")

    with pytest.raises(SourceUnavailable, match="LORA_FS_FETCH_TIMEOUT_S"):
        await asyncio.to_thread(unpack)
    assert not folder.exists()

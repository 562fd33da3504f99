"""An upload whose volume stops answering: nobody waits for it, and nothing of it stays."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.admin import uploads
from lora_fs.sidecar.reconcile.admin.uploads import Upload, Uploads
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation

pytestmark = pytest.mark.anyio

SCOPE = Scope("default", "tiny")
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
    here = Uploads(registry, Expectation(), 1 << 20, 60.0)
    sending = asyncio.create_task(here.receive(SCOPE, "one", Upload("one", files())))
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

"""A sidecar whose port another process has leaves alone what that one wrote, as its own twin's."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.serve import sidecar
from lora_fs.sidecar.errors import OperatorError
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.settings import Settings


@pytest.fixture
def written(tmp_path: Path) -> list[Path]:
    """What the one that runs reports."""
    root = tmp_path / "volume"
    Registry(root, create=True).close()
    layout = Layout(root)
    files = [layout.replica("pod"), layout.event_list("pod")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("the one that runs")
    return files


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_second_start(
    written: list[Path], tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the port was taken before it started, or by one that started at the same time."""
    with ExitStack() as other, socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        settings = Settings(
            root=tmp_path / "volume",
            model="tiny",
            stage_dir=tmp_path / "stage",
            replica_id="pod",
            engine_url="http://127.0.0.1:9",
            host="127.0.0.1",
            port=port,
        )
        if when == "meanwhile":
            listening.close()
            real = assemble

            async def meanwhile(*args: Any) -> Any:
                other.enter_context(socket.create_server(("127.0.0.1", port)))
                return await real(*args)

            monkeypatch.setattr(sidecar, "assemble", meanwhile)
        with pytest.raises(OperatorError, match=f"cannot listen on 127.0.0.1:{port}"):
            asyncio.run(
                sidecar._serve(Context(settings.model_dump(exclude_unset=True)), settings, lambda: None)
            )
    assert [file.read_text() for file in written] == ["the one that runs"] * 2

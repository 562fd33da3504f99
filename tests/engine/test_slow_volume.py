"""A first request for an adapter on a slow volume, beside a stream: stock stands still, the plugin does not.

The volume is so slow that reading is nearly all of the request: who waits for it is plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from lora_fs.demo.slow_volume import slow_volume
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from tests.e2e.mounts import may_mount
from tests.engine.client import owned
from tests.engine.stream import Stream

LATENCY_MS = 150
LEAST_S = 0.8  # of reading, at that: less shows nothing

Folder = Callable[[int], Path]
Replace = Callable[[Path, int], Path]
Right = Callable[[int], str]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A folder, and the same folder through the slow volume."""
    if not may_mount():
        pytest.skip("mounting needs root and /dev/fuse, which this machine does not give")
    folder = tmp_path_factory.mktemp("volume")
    (folder / "disk").mkdir()
    speed = {"mbps": 100, "latency_ms": LATENCY_MS}
    with slow_volume(folder / "disk", folder / "slow", folder / "slow.log", **speed) as slow:
        yield folder / "disk", slow


def test_in_stock_the_stream_stands_still(
    farm: EngineFarm, model_dir: Path, shared: tuple[Path, Path], replace: Replace
) -> None:
    """The engine reads, and the server's event loop before it: no token comes meanwhile."""
    disk, slow = shared
    for seed, name in enumerate(("bystander", "cold")):
        replace(disk / "loras" / name, seed)
    env = {
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(slow / "loras"),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    }
    with owned(farm.start("stock-slow", model_dir, env=env)) as client:
        with Stream(client.url, "bystander") as stream:
            cold = client.complete("cold")
        assert cold.status == 200
        assert cold.took_s > LEAST_S
        assert stream.longest_gap_s > LEAST_S


def test_with_the_plugin_it_goes_on(
    farm: EngineFarm,
    model_dir: Path,
    shared: tuple[Path, Path],
    adapters: Folder,
    right: Right,
    tmp_path: Path,
) -> None:
    """The request takes its time, and answers; no token of the stream waits for it."""
    disk, slow = shared
    (disk / "root").mkdir()
    volume = Volume(disk / "root", MODEL_NAME, cwd=tmp_path)
    for seed, name in enumerate(("bystander", "cold")):
        volume.run("register", name, str(adapters(seed)))
    env = {
        **volume.env,
        **PLUGIN_ENV,
        "LORA_FS_ROOT": str(slow / "root"),
        "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
    }
    with owned(farm.start("plugin-slow", model_dir, env=env), "/readyz") as client:
        with Stream(client.url, "bystander") as stream:
            cold = client.complete("cold")
        stream.check_unharmed()
        assert cold.text == right(1)
        assert cold.took_s > LEAST_S
        assert stream.longest_gap_s < cold.took_s / 4

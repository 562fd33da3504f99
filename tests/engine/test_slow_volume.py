"""A first request for an adapter on a slow volume, beside a stream: stock stands still, the plugin does not.

The volume answers no read of one of the adapter's files while it is looked whether tokens come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from tests.e2e.mounts import may_mount
from tests.engine.bad_adapters import CONFIG, WEIGHTS
from tests.engine.client import owned
from tests.engine.held_volume import HeldVolume, held_volume
from tests.engine.stream import Stream

COLD = {"cold": CONFIG, "colder": WEIGHTS}  # each with the file that is held at its first request
STILL_S = 1.0  # without a token: undisturbed, one came every 0.02 s
TOKENS = 20

Folder = Callable[[int], Path]
Replace = Callable[[Path, int], Path]
Right = Callable[[int], str]


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldVolume]:
    """A folder, and the same folder through the volume."""
    if not may_mount():
        pytest.skip("mounting needs root and /dev/fuse, which this machine does not give")
    with held_volume(tmp_path_factory.mktemp("volume")) as volume:
        yield volume


def test_in_stock_the_stream_stands_still(
    farm: EngineFarm, model_dir: Path, volume: HeldVolume, replace: Replace
) -> None:
    """The engine reads, and the server's event loop before it: no token comes meanwhile."""
    for seed, name in enumerate(("bystander", *COLD)):
        replace(volume.disk / "loras" / name, seed)
    env = {
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(volume.mount / "loras"),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    }
    with (
        owned(farm.start("stock-slow", model_dir, env=env)) as client,
        Stream(client.url, "bystander") as stream,
        ThreadPoolExecutor(1) as thread,
    ):
        for name, file in COLD.items():
            with volume.holding(Path("loras", name, file)):
                asking = thread.submit(client.complete, name)
                volume.wait_asked()
                assert stream.wait_still(STILL_S, limit_s=10)
                assert not asking.done()
            assert asking.result().status == 200
            stream.wait_tokens(1)


def test_with_the_plugin_it_goes_on(
    farm: EngineFarm,
    model_dir: Path,
    volume: HeldVolume,
    adapters: Folder,
    right: Right,
    tmp_path: Path,
) -> None:
    """The request takes its time, and answers; no token of the stream waits for it."""
    root = volume.disk / "root"
    root.mkdir()
    registry = Volume(root, MODEL_NAME, cwd=tmp_path)
    registry.run("init")
    for seed, name in enumerate(("bystander", *COLD)):
        registry.run("register", name, str(adapters(seed)))
    env = {
        **registry.env,
        **PLUGIN_ENV,
        "LORA_FS_ROOT": str(volume.mount / "root"),
        "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
    }
    with owned(farm.start("plugin-slow", model_dir, env=env), "/readyz") as client:
        with (
            Stream(client.url, "bystander", engine=client.engine) as stream,
            ThreadPoolExecutor(1) as thread,
        ):
            for seed, (name, file) in enumerate(COLD.items(), 1):
                with volume.holding((registry.scope_dir / "v1" / name / file).relative_to(volume.disk)):
                    asking = thread.submit(client.complete, name)
                    volume.wait_asked()
                    stream.wait_tokens(TOKENS)
                    assert not asking.done()
                assert asking.result().text == right(seed)
        stream.check_unharmed()

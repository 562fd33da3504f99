"""While vLLM sleeps the device's memory for adapters is unmapped: one byte copied there ends the process.

Here that memory is pages of this process's own, which a forked child may not touch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu_worker import Worker

from lora_fs.kernels.gpu import scatter
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.slots.sleep import watch
from lora_fs.worker_patch.worker.slots.stacks import StackedLayers
from tests.plugin.block import Make
from tests.plugin.test_models import sleeping
from tests.plugin.test_room import ID, Files, load, worker

KERNELS = pytest.mark.parametrize("kernels", ["off", "triton"])
KILLED = -signal.SIGSEGV


@pytest.fixture
def manager(make: Make, kernels: str, monkeypatch: pytest.MonkeyPatch) -> TieredWorkerManager:
    """A worker's, with a device beside host memory."""
    if kernels == "off":
        monkeypatch.setattr(StackedLayers, "_lands", lambda self, stacks: True)
        monkeypatch.setattr(scatter, "scatter", lambda *args, **how: None)
    return worker(make, 1 << 26, kernels=kernels)


@pytest.fixture
def unmap(manager: TieredWorkerManager, kernels: str) -> Callable[[], None]:
    """What vLLM does to the device's memory when it sleeps."""
    layers: Any = manager._adapter_manager.layers
    owner, field = (layers._landing, "_pool") if kernels == "off" else (layers._arena, "_storage")
    pool = getattr(owner, field)
    pages = mmap.mmap(-1, -(-pool.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    ours = torch.frombuffer(pages, dtype=pool.dtype, count=pool.numel())
    setattr(owner, field, ours)

    def unmap() -> None:
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        assert protect(ctypes.c_void_p(ours.data_ptr()), ctypes.c_size_t(len(pages)), 0) == 0

    return unmap


def in_a_child(work: Callable[[], object]) -> int:
    """The exit status of a child that does this; negative: of the signal that ended it."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def runner(manager: TieredWorkerManager) -> Any:
    return SimpleNamespace(lora_manager=manager)


@KERNELS
def test_a_copy_there_ends_the_process(
    manager: TieredWorkerManager, unmap: Callable[[], None], tmp_path: Path
) -> None:
    """What the other tests here would see, if anything of theirs were copied."""
    files = Files(tmp_path / "one")

    def work() -> None:
        unmap()
        load(manager, files)

    assert in_a_child(work) == KILLED


@KERNELS
def test_calls_go_on_while_vllm_sleeps(
    manager: TieredWorkerManager, unmap: Callable[[], None], tmp_path: Path
) -> None:
    """An adapter comes to host memory, and to the device by the next hold or step after the wake."""
    files, other = Files(tmp_path / "one"), Files(tmp_path / "two")
    hold = {"id": ID, "user": "api", "sequence": 2}

    def work() -> None:
        sleeping(runner(manager))
        unmap()
        assert load(manager, files) == {"state": "ready", "reason": ""}
        assert rpc.hold(manager, hold) == {"held": True}
        assert manager.add_adapter(LoRARequest("other", ID + 1, other.path))
        assert manager.pin_adapter(ID)
        assert manager.tiers.device == set()
        assert rpc.drop(manager, {"id": ID, "user": "api"}) == {"gone": True}

    assert in_a_child(work) == 0
    asleep = sleeping(runner(manager))
    load(manager, files)
    assert manager.tiers.device == set()
    asleep.wake_up()
    rpc.hold(manager, hold)
    assert manager.tiers.device == {ID}


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize(
    ("tags", "asleep"),
    [(None, False), (["weights"], False), (["kv_cache"], True), (["kv_cache", "weights"], False)],
)
def test_only_the_weights_count(manager: TieredWorkerManager, tags: list[str] | None, asleep: bool) -> None:
    """Of an engine that wakes in parts."""
    worker = sleeping(runner(manager))
    assert manager._adapter_manager.asleep
    worker.wake_up(tags=tags)
    assert manager._adapter_manager.asleep is asleep


@pytest.mark.parametrize("kernels", ["torch"])
@pytest.mark.parametrize(("tags", "asleep"), [(("weights",), True), (("kv_cache",), False)])
def test_what_is_discarded_alone(manager: TieredWorkerManager, tags: tuple[str, ...], asleep: bool) -> None:
    """As a program does that will write other weights."""

    class Discards:
        model_runner = runner(manager)

        def sleep(self, level: int = 1) -> None: ...

        def wake_up(self, tags: Any = None) -> None: ...

        def discard(self, tags: tuple[str, ...]) -> None: ...

    for _ in range(2):
        watch(Discards)
    Discards().discard(tags)
    assert manager._adapter_manager.asleep is asleep


def test_vllms_own_worker_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that vLLM's configuration has; one whose class is not known yet is left alone."""

    class Watched(Worker):  # type: ignore[misc]
        """The other tests' vLLM stays as it is."""

    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker", Watched)
    watch("auto")
    watch("vllm.v1.worker.gpu_worker.Worker")
    for call in ("sleep", "wake_up"):
        assert getattr(Watched, call).__wrapped__ is getattr(Worker, call)

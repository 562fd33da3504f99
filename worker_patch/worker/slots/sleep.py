"""vLLM's sleep, as adapters see it: the device's memory for them is unmapped meanwhile, and comes back empty.

vLLM allocates the layers' stacks, and what lora-fs adds to them, among the model's weights (``weights``).
A copy there while the engine sleeps would end the process. A deep sleep discards what was there.
Source: vllm/v1/worker/gpu_worker.py, 0.32.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

TAG = "weights"


def watch(worker: str | type) -> None:
    """Let a worker's class tell its adapter manager when it sleeps and wakes; again changes nothing.

    Args:
        worker: vLLM's ``parallel_config.worker_cls``. A class that cannot sleep stays as it is.
    """
    if isinstance(worker, str):
        if "." not in worker:  # "auto": no platform has chosen one
            return
        worker = pkgutil.resolve_name(worker)
    kind: Any = worker
    if "lora_fs_sleeps" in vars(kind) or not hasattr(kind, "wake_up"):
        return
    sleep, wake_up = kind.sleep, kind.wake_up

    @functools.wraps(sleep)
    def sleep_(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tell(self, asleep=True)
        return sleep(self, *args, **kwargs)

    @functools.wraps(wake_up)
    def wake_up_(self: Any, tags: Any = None) -> Any:
        answer = wake_up(self, tags)
        if tags is None or TAG in tags:
            _tell(self, asleep=False)
        return answer

    kind.sleep, kind.wake_up, kind.lora_fs_sleeps = sleep_, wake_up_, True
    if hasattr(kind, "discard"):  # since 0.31
        kind.discard = _watched(kind.discard)


def _watched(discard: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(discard)
    def discard_(self: Any, tags: Any) -> None:
        if TAG in tags:
            _tell(self, asleep=True)
        discard(self, tags)

    return discard_


def _tell(worker: Any, *, asleep: bool) -> None:
    runner = getattr(worker, "model_runner", None)
    manager: Any = getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)
    if hasattr(manager, "lose_device"):  # not a manager of vLLM's own
        manager.asleep = asleep
        if not asleep:
            manager.lose_device()

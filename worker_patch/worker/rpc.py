"""What the API server asks of the worker, between two steps; every call returns at once.

Called through vLLM's ``collective_rpc("lora_fs", ...)``. Arguments and answers are plain JSON
values, since that is what crosses the processes without pickling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.tiers import NoRoom

Answer = dict[str, Any]


def load(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """Have an adapter in the host tier, held: start its load, or say how it stands.

    ``ask``: ``id, name, path, size_bytes, priority, pinned, user, sequence, again`` (a failure is forgotten).
    Returns ``{"state": "ready" | "loading" | "failed" | "full", "reason": str}``.
    """
    manager.collect()
    adapter = ask["id"]
    manager.forget_blank(adapter)
    entry = manager.tiers.entries.get(adapter)
    if entry is not None:
        manager.tiers.keep(adapter, ask["user"], ask["sequence"])
        manager.named.setdefault(adapter, (ask["name"], ask["path"]))
        return {"state": "ready", "reason": ""}
    if manager.loading(adapter):
        return {"state": "loading", "reason": ""}
    if adapter in manager.failures and not ask["again"]:
        return {"state": "failed", "reason": manager.failures[adapter]}
    request = LoRARequest(ask["name"], adapter, ask["path"])
    try:
        manager.begin_load(request, ask)
    except NoRoom as error:
        return {"state": "full", "reason": str(error)}
    return {"state": "loading", "reason": ""}


def hold(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """Keep an adapter in the host tier until a ``sync`` says otherwise. ``ask``: ``id, user, sequence``."""
    manager.collect()
    manager.forget_blank(ask["id"])
    return {"held": manager.tiers.hold(ask["id"], ask["user"], ask["sequence"])}


def drop(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """``user`` wants an adapter no more; it goes when nobody does. ``ask``: ``id, user``."""
    gone = manager.tiers.drop(ask["id"], ask["user"])
    if gone:
        manager.remove(ask["id"])
    return {"gone": gone}


def sync(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """Say which holds are still meant, and see what is where. ``ask``: ``user, holds, sequence``."""
    manager.collect()
    tiers = manager.tiers
    tiers.keep_holds(ask["user"], set(ask["holds"]), ask["sequence"])
    resident = {
        str(adapter): {
            "name": manager.named.get(adapter, ("", ""))[0],
            "level": "gpu" if adapter in tiers.slots else "cpu",
            "bytes": entry.size_bytes,
            "pinned": entry.pinned,
            "rank": manager.rank(adapter),
            "users": sorted(entry.users),
        }
        for adapter, entry in tiers.entries.items()
    }
    return {
        "resident": resident,
        "slots": len(tiers.slots),
        "budget_bytes": tiers.budget_bytes,
        "used_bytes": tiers.used_bytes,
        "counters": {**tiers.counters, **manager.counters},
    }


CALLS = {call.__name__: call for call in (load, hold, drop, sync)}


def answer(worker: Any, call: str, ask: Mapping[str, Any]) -> Answer:
    """The method that is put on vLLM's worker."""
    manager = worker.model_runner.lora_manager
    if not isinstance(manager, TieredWorkerManager):
        raise TypeError(f"the worker's adapter manager is {type(manager).__name__}, not lora-fs's")
    return CALLS[call](manager, ask)

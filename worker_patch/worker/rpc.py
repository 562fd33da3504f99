"""What the API server asks of the worker, between two steps; no call waits that a step might wait for.

Called through vLLM's ``collective_rpc("lora_fs", ...)``. Arguments and answers are plain JSON
values, since that is what crosses the processes without pickling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.lora.request import LoRARequest

from lora_fs.worker_patch import processors
from lora_fs.worker_patch.worker.load.resident import size_bytes
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.slots.tiers import NoRoom, TooLarge

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


def load(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """Have an adapter in the host tier, held: start its load, or say how it stands.

    ``ask``: ``id, name, path, size_bytes, dtype, priority, pinned, user, sequence, spare`` (evicts no other),
    ``rank`` and ``target_modules`` of its files, if known;
    ``again`` (forget a failure); ``wait_s``: so long the engine has nothing better to do;
    ``passing``: remove the files once it is ready; ``notices``: where to report the end of the load;
    ``admit``: as ``calls.admission`` makes it, once every rank has its share.
    Returns ``{"state": "ready" | "loaded" | "loading" | "failed" | "full", "reason": str}``. "loaded": it
    waits for the other ranks. "loaded" and "loading" have the ``load``'s number, and whom it is ``from``.
    """
    notifies = manager.notices.reach(ask["user"], ask.get("notices", ""))  # before anything can end
    manager.collect()
    adapter = ask["id"]
    manager.forget_blank(adapter)
    manager.under_way.want(adapter, ask)
    if admit := ask.get("admit"):
        manager.admit(adapter, admit["loads"], admit["bytes"])
    known = adapter in manager.tiers.entries or manager.loading(adapter)
    if not known and (ask["again"] or adapter not in manager.failures):
        try:
            manager.begin_load(LoRARequest(ask["name"], adapter, ask["path"]), ask)
        except TooLarge as error:
            return {"state": "failed", "reason": str(error)}
        except NoRoom as error:
            return {"state": "full", "reason": str(error)}
    if ask["wait_s"]:
        manager.wait(adapter, ask["wait_s"], ask["user"])
    if adapter in manager.tiers.entries:
        manager.tiers.keep(adapter, ask["user"], ask["sequence"])
        manager.named[adapter] = ask["name"]
        manager.bring(adapter)
        return {"state": "ready", "reason": ""}
    if adapter in manager.failures:
        return {"state": "failed", "reason": manager.failures[adapter]}
    load = manager.under_way.get(adapter)
    if load is None:  # it ended, and was gone before it could be held: the next call begins it anew
        return {"state": "loading", "reason": "", "load": "", "from": manager.notices.name, "notifies": False}
    told = {"reason": "", "load": load.number, "from": manager.notices.name}
    if load.adapter is not None:
        return {"state": "loaded", **told, "bytes": size_bytes(load.adapter)}
    return {"state": "loading", **told, "notifies": notifies}


def hold(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """Keep an adapter in the host tier until a ``sync`` says otherwise. ``ask``: ``id, user, sequence``."""
    manager.collect()
    manager.forget_blank(ask["id"])
    held = manager.tiers.hold(ask["id"], ask["user"], ask["sequence"])
    if held:
        manager.bring(ask["id"])
    return {"held": held}


def drop(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """``user`` wants an adapter no more, loaded or not; it goes when nobody does. ``ask``: ``id, user``."""
    manager.under_way.give_up(ask["id"], ask["user"])
    gone = manager.tiers.drop(ask["id"], ask["user"])
    if gone:
        manager.remove(ask["id"])
    elif ask["id"] not in manager.tiers.entries:
        manager.forget_blank(ask["id"])
    return {"gone": gone}


def sync(manager: TieredWorkerManager, ask: Mapping[str, Any]) -> Answer:
    """Say which holds still count and what to keep how, and see what is where.

    ``ask``: ``user, holds, sequence``, and ``policies``: id → priority, and whether it is pinned.
    """
    manager.collect()
    manager.notices.reach(ask["user"], ask.get("notices", ""))
    tiers = manager.tiers
    tiers.prefer({int(adapter): tuple(policy) for adapter, policy in ask["policies"].items()})
    tiers.keep_holds(ask["user"], set(ask["holds"]), ask["sequence"])
    manager.end_unmeant(ask["user"], set(ask["holds"]), ask["sequence"])
    resident = {
        str(adapter): {
            "name": manager.named.get(adapter, ""),
            "level": "gpu" if tiers.on_device(adapter) else "cpu",
            "bytes": entry.size_bytes,
            "pinned": entry.pinned,
            "rank": manager.rank(adapter),
            "users": sorted(entry.users),
        }
        for adapter, entry in tiers.entries.items()
        if adapter not in manager.blank
    }
    return {
        "resident": resident,
        "blank": {str(adapter): manager.failures.get(adapter, "") for adapter in manager.blank},
        "slots": len(tiers.slots),
        "budget_bytes": tiers.budget_bytes,
        "used_bytes": tiers.used_bytes,
        "counters": manager.counted,
        "processors": sorted(processors.of_steps()),
    }


CALLS = {call.__name__: call for call in (load, hold, drop, sync)}


def answer(worker: Any, call: str, ask: Mapping[str, Any]) -> Answer:
    """The method that is put on vLLM's worker.

    Raises nothing: of several workers vLLM would leave the others' answers unread, and take them for those of
    the next call.
    """
    try:
        manager = worker.model_runner.lora_manager
        if not isinstance(manager, TieredWorkerManager):
            raise TypeError(f"the worker's adapter manager is {type(manager).__name__}, not lora-fs's")
        return CALLS[call](manager, ask)
    except Exception as error:
        logger.exception("lora-fs's %s failed", call)
        return {"error": repr(error)}

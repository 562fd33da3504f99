"""A gateway's view of its replicas, for people. It names no adapter: the gateway checks no token."""

from __future__ import annotations

from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Seen, Watch
from lora_fs.sidecar.server.bodies import EngineQueue, FleetBody, FleetReplica

EJECTED = "its last answers all failed"


def view(router: Router, watch: Watch, now: float, adapter: str | None = None) -> FleetBody:
    """Return every replica, by its id.

    Args:
        now: seconds, on the clock of ``watch``.
        adapter: return this one's order of the ready replicas, too.
    """
    ejected, peers = router.ejected, {peer.name: peer for peer in router.peers}

    def told(seen: Seen) -> FleetReplica:
        peer = peers.get(seen.name or "") if not seen.why else None
        left_s = ejected.get(seen.name or "") if peer is not None else None
        queue = seen.queue if peer is not None else None
        return FleetReplica(
            replica=seen.name,
            url=seen.url,
            state="out" if peer is None else "ready" if left_s is None else "ejected",
            why=seen.why or ("" if left_s is None else EJECTED),
            ejected_s=None if left_s is None else round(left_s, 1),
            in_flight=0 if peer is None else peer.in_flight,
            queue=None if queue is None else EngineQueue(running=queue[0], waiting=queue[1]),
            loading=0 if peer is None else len(peer.loading),
            loaded=seen.loaded,
            capacity=None if peer is None else seen.capacity,
            version=seen.version,
            engine_version=seen.engine_version,
            seen_s=None if seen.answered_at is None else round(now - seen.answered_at, 1),
        )

    replicas = sorted(map(told, watch.seen.values()), key=lambda one: (one.replica or "~", one.url))
    order = None if adapter is None else router.order(adapter)
    return FleetBody(replicas=replicas, waiting=router.waiting, problem=watch.problem, order=order)

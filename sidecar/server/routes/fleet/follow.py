"""How a fleet follows a load at one replica: ``POST …/{name}/load`` loads that revision at each other one.

``POST /v1/lora_adapters/next`` is a hint before that: this replica loads the name's next revision as soon as
it sees it, while the first replica loads it too. ``POST …/{name}/undo`` takes a refused load back.

A replica that has not read the registry since waits until it has: a mount that lags costs its lag, no error.
"""

# No postponed annotations: FastAPI has to see ``Request`` and the bodies, of a function inside one.

import asyncio
from contextlib import suppress

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from lora_fs.sidecar.errors import LoraFsError, WaitTimeout
from lora_fs.sidecar.registry.lifecycle.undo import Made
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.admin import AdminCalls
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.ports import ReplicaPort, Served, full_name
from lora_fs.sidecar.server.routes.changes import ERRORS
from lora_fs.sidecar.server.routes.registered import NAME, Model, Name, Namespace, scope_of

MOST_HINTS = 64  # that wait at once; beyond that a replica loads a moment later
ACTIVE_S = 10.0  # in which a mount that shows a revision shows that its name serves it


class LoadHere(BaseModel):
    """Which revision to load."""

    revision: str = Field(description="Waited for until this replica sees it in the registry")
    active: bool = Field(
        True,
        description="Wait until the name serves it, too, up to 10 s. False: load it by its own name",
    )


class LoadNext(BaseModel):
    """Whose next revision to load."""

    lora_name: str = Field(description="As in `POST /v1/load_lora_adapter`, which is under way elsewhere")


class LoadedHere(BaseModel):
    """What the engine has loaded."""

    replica: str = Field(description="This replica's id")
    revision: str = Field(description="As in the request")
    digest: str = Field(description="Of its files")


def router(replica: ReplicaPort, admin: Admin, trail: Trail, *, hold_timeout_s: float) -> APIRouter:
    """The route. ``trail``: records admin calls."""
    calls = AdminCalls(replica, admin, trail)
    token_first = calls.token_first(load_here=Verb.REGISTER, load_next=Verb.REGISTER, undo=Verb.REGISTER)
    routes = APIRouter(tags=["fleet"], route_class=token_first)

    @routes.post(
        f"{NAME}/load",
        summary="Load a registered revision here, once this replica sees it",
        responses=ERRORS,
    )
    async def load_here(
        namespace: Namespace, model: Model, name: Name, body: LoadHere, request: Request
    ) -> LoadedHere:
        admitted = calls.admitted(request, Verb.REGISTER, name, namespace=namespace, act="load")
        async with admitted as (_, what):
            scope_of(replica, namespace, model)
            public = name if len(replica.namespaces) == 1 else f"{namespace}/{name}"
            served = await _seen(replica, public, body, hold_timeout_s)
            digest = served.record.spec.digest
            what |= {"revision": body.revision, "digest": digest}
            async with replica.hold(served.name, hold_timeout_s):
                return LoadedHere(replica=replica.replica_id, revision=body.revision, digest=digest)

    @routes.post(
        f"{NAME}/undo",
        summary="Take a load back: the name serves what it did before, and what the load wrote is withdrawn",
        responses=ERRORS,
    )
    async def undo(namespace: Namespace, model: Model, name: Name, body: Made, request: Request) -> Made:
        admitted = calls.admitted(request, Verb.REGISTER, name, namespace=namespace, act="undo")
        async with admitted as (caller, what):
            scope = scope_of(replica, namespace, model)
            what["revision"] = body.revision
            await replica.administration.take_back(scope, name, body, writer=caller.writer)
        return body

    hints = set[asyncio.Task[None]]()

    @routes.post(
        "/v1/lora_adapters/next",
        summary="Load what a name serves next, as soon as this replica sees it. Answers at once: a hint",
        status_code=202,
        responses=ERRORS,
    )
    async def load_next(body: LoadNext, request: Request) -> LoadNext:
        name = full_name(body.lora_name, replica.namespaces)
        # The audit has the call that registers the adapter, and not this one.
        async with calls.admitted(request, Verb.REGISTER, name, act="load", dry_run=True):
            if len(hints) < MOST_HINTS:
                hint = asyncio.create_task(
                    _load_next(replica, name, hold_timeout_s), name=f"next {name[:200]}"
                )
                hints.add(hint)
                hint.add_done_callback(hints.discard)
        return body

    return routes


async def _load_next(replica: ReplicaPort, name: str, timeout_s: float) -> None:
    """Load what a name serves that it does not serve yet. Requests for the adapter report a failure."""
    before = replica.lookup(name)
    with suppress(TimeoutError, LoraFsError):
        async with asyncio.timeout(timeout_s):
            while True:
                served = replica.lookup(name)
                if served is not None and (before is None or served.record.key != before.record.key):
                    async with replica.hold(served.name, timeout_s):
                        return
                await replica.changed()


async def _seen(replica: ReplicaPort, name: str, wanted: LoadHere, timeout_s: float) -> Served:
    """Return what serves that revision: if it is active, the plain name, for which a trainer asks next.

    A mount may show a revision before it shows that the name serves it. If the name still serves another
    revision after ``ACTIVE_S``, somebody promoted that one since: load this revision by its own name.

    Raises:
        WaitTimeout: this replica has not seen it in time.
    """
    revision, patience_s = wanted.revision, min(ACTIVE_S, timeout_s / 2) if wanted.active else 0.0
    clock, since = asyncio.get_running_loop().time, None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                plain, left_s = replica.lookup(name), None
                if plain is not None and plain.record.revision == revision:
                    return plain
                if (served := replica.lookup(f"{name}@{revision}")) is not None:
                    since = clock() if since is None else since
                    left_s = since + patience_s - clock()
                    if left_s <= 0:
                        return served
                with suppress(TimeoutError):  # its own: the outer one ends the loop
                    async with asyncio.timeout(left_s):
                        await replica.changed()
    except TimeoutError as error:
        raise WaitTimeout(
            f"{name}@{revision} is not in the registry as this replica reads it: not in {timeout_s:g} s"
        ) from error

"""``POST /v1/lora_adapters/{namespace}/{model}/{name}/promote`` and its kin: the command line's acts.

Each route does what the command of its name does at a volume, by the same function. ``register`` waits a
bounded time for a download: repeated, it waits on.
"""

# No postponed annotations: FastAPI has to see ``Request`` and the bodies, of a function inside one.

from fastapi import APIRouter, Request

from lora_fs.sidecar.registry.lifecycle.acts import ACTS, Act, Done, Unregister
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs
from lora_fs.sidecar.server.bodies import RegisterFrom
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.admin import AdminCalls
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.ports import ReplicaPort
from lora_fs.sidecar.server.routes.changes import ERRORS
from lora_fs.sidecar.server.routes.registered import NAME, Model, Name, Namespace, scope_of
from lora_fs.sidecar.sources.uri import redacted


def router(replica: ReplicaPort, admin: Admin, trail: Trail) -> APIRouter:
    """The routes. ``trail``: records admin calls."""
    calls = AdminCalls(replica, admin, trail)
    verbs = {kind.word: Verb.UNREGISTER if kind is Unregister else Verb.REGISTER for kind in ACTS}
    token_first = calls.token_first(register=Verb.REGISTER, **verbs)
    routes = APIRouter(tags=["registry"], route_class=token_first)

    def add(kind: type[Act]) -> None:
        async def act(namespace: Namespace, model: Model, name: Name, body: Act, request: Request) -> Done:
            admitted = calls.admitted(
                request, verbs[kind.word], name, namespace=namespace, act=kind.word, dry_run=body.dry_run
            )
            async with admitted as (caller, what):
                what |= body.audited()
                scope = scope_of(replica, namespace, model)
                done = await replica.administration.act(scope, name, body, writer=caller.writer)
                if done.records:
                    what["revision"] = ",".join(record.revision for record in done.records)
                elif done.pointer is not None:
                    what["revision"] = done.pointer.revision
            return done

        act.__annotations__["body"] = kind  # what FastAPI reads the body as
        summary = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
        routes.post(f"{NAME}/{kind.word}", name=kind.word, summary=summary, responses=ERRORS)(act)

    for kind in ACTS:
        add(kind)

    @routes.post(f"{NAME}/register", summary="Register an adapter from a source", responses=ERRORS)
    async def register(
        namespace: Namespace, model: Model, name: Name, body: RegisterFrom, request: Request
    ) -> Outcome:
        admitted = calls.admitted(
            request, Verb.REGISTER, name, namespace=namespace, act="register", dry_run=body.dry_run
        )
        async with admitted as (caller, what):
            what["source"] = redacted(body.source)
            sight = await admin.sight(request.headers)
            scope = scope_of(replica, namespace, model)
            said = RegisterAs.model_validate(body.model_dump(exclude={"source"}))
            done = await replica.administration.register(
                scope, name, body.source, said, sight.namespaces, writer=caller.writer
            )
            what |= done.record.told
        return done

    return routes

"""``POST /v1/lora_adapters``: an adapter's files, as a tar or a form, passed on as they come.

The query has the name and all else. So the route refuses a caller who may not upload before it reads a
byte of the body. The body is a tar, packed or not, or ``multipart/form-data`` of files.
"""

# No postponed annotations: FastAPI has to see ``Request``, of a function inside one.

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import PolicyKind, Priority
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs
from lora_fs.sidecar.server.bodies import ErrorBody, Uploaded
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.admin import AdminCalls
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import Verb
from lora_fs.sidecar.server.ports import ReplicaPort, full_name
from lora_fs.sidecar.server.routes.registered import NAME, Model, Name, Namespace, scope_of
from lora_fs.sidecar.sources.offer import ARCHIVE
from lora_fs.sidecar.sources.receive.tarball import TAKEN

FORM = "multipart/form-data"
TARS = ("application/x-tar", "application/gzip", "application/x-gzip", "application/octet-stream")
MOST_HEADER_BYTES = 8 << 10

_BODY = {"schema": {"type": "string", "format": "binary"}}
_OPENAPI = {"requestBody": {"required": True, "content": dict.fromkeys((*TARS, FORM), _BODY)}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"model": Uploaded, "description": "These bytes were registered already"},
    **{code: {"model": ErrorBody} for code in (400, 401, 403, 413, 422, 429, 503)},
}


def router(replica: ReplicaPort, admin: Admin, trail: Trail) -> APIRouter:
    """The route. ``trail``: records admin calls."""
    calls = AdminCalls(replica, admin, trail)
    token_first = calls.token_first(None, upload=Verb.REGISTER, upload_as=Verb.REGISTER)
    routes = APIRouter(tags=["adapters"], route_class=token_first)

    @routes.post(
        "/v1/lora_adapters",
        summary="Upload an adapter",
        status_code=201,
        responses={201: {"model": Uploaded}, **_ANSWERS},
        response_class=JSONResponse,
        openapi_extra=_OPENAPI,
    )
    async def upload(
        request: Request,
        name: Annotated[str, Query(description="What clients send as their model")],
        revision: Annotated[str | None, Query(description="Null: the next vN")] = None,
        activate: Annotated[bool, Query(description="Let the plain name serve it")] = True,
    ) -> Response:
        name = full_name(name, replica.namespaces)
        async with calls.admitted(request, Verb.REGISTER, name) as (caller, what):
            sent = Upload(name, _files(request), revision, activate, _length(request))
            done = await replica.upload(sent, writer=caller.writer)
            what |= {"source": "upload", **done.record.told}
        warnings = [finding.render() for finding in done.report.warnings]
        body = Uploaded(name=name, record=done.record, changed=done.changed, warnings=warnings)
        return JSONResponse(body.model_dump(mode="json"), 201 if done.changed else 200)

    @routes.post(
        f"{NAME}/upload",
        summary="Upload an adapter, with all that `lora-fs register` may say of it",
        responses=_ANSWERS | {200: {"model": Outcome}, 404: {"model": ErrorBody}},
        response_class=JSONResponse,
        openapi_extra=_OPENAPI,
    )
    async def upload_as(
        namespace: Namespace,
        model: Model,
        name: Name,
        request: Request,
        label: Annotated[list[str], Query(default_factory=list, description="`key=value`, repeatable")],
        allow: Annotated[list[str], Query(default_factory=list, description="Codes of findings to allow")],
        revision: Annotated[str | None, Query(description="Null: the next vN")] = None,
        base_model: Annotated[str | None, Query(description="What it was made for")] = None,
        policy: Annotated[PolicyKind | None, Query(description="Null: as what the name serves")] = None,
        ttl_s: Annotated[int | None, Query(ge=1, description="Idle seconds of a lazy one")] = None,
        priority: Annotated[Priority | None, Query(description="Greater loads first")] = None,
        amend: Annotated[bool, Query(description="Known bytes get this policy and labels")] = True,
        activate: Annotated[bool, Query(description="Let the plain name serve it")] = True,
        force: Annotated[bool, Query(description="Register also what no live replica can serve")] = False,
        dry_run: Annotated[bool, Query(description="Check, and answer what would change")] = False,
    ) -> Response:
        how = calls.admitted(
            request, Verb.REGISTER, name, namespace=namespace, act="register", dry_run=dry_run
        )
        async with how as (caller, what):
            said = RegisterAs(
                revision=revision,
                base_model=base_model,
                policy=policy,
                ttl_s=ttl_s,
                priority=priority,
                labels=_labels(label),
                amend=amend,
                activate=activate,
                allow=tuple(allow),
                force=force,
                dry_run=dry_run,
            )
            scope, files = scope_of(replica, namespace, model), _files(request)
            done = await replica.administration.upload(
                scope, name, files, _length(request), said, writer=caller.writer
            )
            what |= {"source": "upload", **done.record.told}
        return JSONResponse(done.model_dump(mode="json"))

    return routes


def _length(request: Request) -> int | None:
    """The body's bytes, as announced."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else None


def _labels(said: list[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in said]
    if not all(key and equals for key, equals, _ in pairs):
        raise InputError("write a label as key=value")
    return {key: text for key, _, text in pairs}


async def _files(request: Request) -> AsyncIterator[tuple[str, bytes]]:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    try:
        if kind.decode("latin-1") in TARS:
            async for chunk in request.stream():
                if chunk:
                    yield ARCHIVE, chunk
        elif kind.decode("latin-1") == FORM and options.get(b"boundary"):
            form = _Form(options[b"boundary"])
            async for chunk in request.stream():
                for one in form.take(chunk):
                    yield one
            form.end()
        else:
            raise InputError(f"send the adapter as {TARS[0]}, or as {FORM} with its files")
    except FormParserError as error:
        raise InputError(f"the form cannot be read: {str(error)[:160]}") from error
    except ClientDisconnect as error:
        raise InputError("the client left before all of it was here") from error


class _Form:
    """The files of a form, fed as it comes."""

    def __init__(self, boundary: bytes) -> None:
        self._header, self._value, self._name = bytearray(), bytearray(), ""
        self._ready: list[tuple[str, bytes]] = []
        self._ended = False
        self._seen: set[str] = set()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._add(self._header, data[start:end]),
                "on_header_value": lambda data, start, end: self._add(self._value, data[start:end]),
                "on_header_end": self._head,
                "on_headers_finished": self._named,
                "on_part_data": lambda data, start, end: self._data(data[start:end]),
                "on_end": self._end,
            },
        )

    def take(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """Return the parts of the files in a chunk."""
        self._ready = []
        self._parser.write(chunk)
        return self._ready

    def end(self) -> None:
        """Raise InputError unless the form is complete."""
        if not self._ended:
            raise InputError("the form was cut: its end did not come")

    def _begin(self) -> None:
        self._name = ""

    def _end(self) -> None:
        self._ended = True

    def _add(self, to: bytearray, data: bytes) -> None:
        to += data
        if len(to) > MOST_HEADER_BYTES:
            raise InputError(f"a part of the form has a header of more than {MOST_HEADER_BYTES} bytes")

    def _head(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            sent = (
                options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
            )
            self._name = sent if sent in TAKEN or not _is_tar(sent) else ARCHIVE
        self._header.clear()
        self._value.clear()

    def _named(self) -> None:
        """Check a part's name: a servable file or a tar, and one part each. So there are few.

        Two parts of a name would be joined. This also sees a part without data, and its size.
        """
        if not self._name:
            raise InputError("a part of the form is no file: what is said of the adapter stands in the query")
        what = "a tar" if self._name == ARCHIVE else f"{self._name[:80]!a}"
        if self._name not in (*TAKEN, ARCHIVE):
            raise InputError(f"{what} is no file that is served: send {', '.join(TAKEN[:2])}, or one tar")
        if self._name in self._seen:
            raise InputError(f"{what} is sent twice: send each file once, or one tar")
        self._seen.add(self._name)

    def _data(self, data: bytes) -> None:
        self._ready.append((self._name, data))


def _is_tar(name: str) -> bool:
    return name.endswith((".tar", ".tar.gz", ".tgz"))

"""A registry behind a sidecar: this machine mounts no volume."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlencode

import click
from pydantic import BaseModel, ValidationError

from lora_fs.sidecar import __version__
from lora_fs.sidecar.cli.backends.client import ANSWER_S, Client
from lora_fs.sidecar.cli.backends.port import Named
from lora_fs.sidecar.cli.backends.sending import Sending
from lora_fs.sidecar.cli.output import complain
from lora_fs.sidecar.cli.progress import reading
from lora_fs.sidecar.errors import InvalidAdapter, OperatorError, WaitTimeout
from lora_fs.sidecar.model import Scope, check_segment, model_slug
from lora_fs.sidecar.registry.lifecycle.acts import Act, Done
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs
from lora_fs.sidecar.registry.store.evaluations import Evaluations
from lora_fs.sidecar.registry.view.reports import Happened, Reports
from lora_fs.sidecar.registry.view.snapshot import ByScope, Desired, no_pointers, no_records
from lora_fs.sidecar.server.bodies import (
    FleetBody,
    Metadata,
    NameBody,
    ReplicaEventsBody,
    ReplicasBody,
    ScopeBody,
)
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.sources.uri import is_uri, redacted, scheme_of
from lora_fs.sidecar.trust import BUNDLE
from lora_fs.sidecar.validate import validate

if TYPE_CHECKING:
    from lora_fs.sidecar.cli.options.context import Context

Body = TypeVar("Body", bound=BaseModel)

ADAPTERS: Final = "/v1/lora_adapters"
COMPLETION_S: Final = 1.0  # a shell waits for what it proposes, and the person in front of it


class OverHttp:
    """Implements ``Backend``. ``url``: a sidecar's."""

    def __init__(self, context: Context, url: str) -> None:
        self._context, self.place = context, url
        answer_s = COMPLETION_S if context.completes else ANSWER_S
        self._client = Client(url, context.settings.client_token_file, answer_s, quiet=context.completes)

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    @cached_property
    def _metadata(self) -> Metadata:
        return self._read(Metadata, self._client.get("/metadata"))

    def _read(self, kind: type[Body], answer: bytes) -> Body:
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            raise OperatorError(
                f"{self.place} answers, and not as a sidecar of lora-fs {__version__} does: "
                f"{error.error_count()} fields of {kind.__name__} are missing or wrong"
            ) from error

    def scope(self) -> Scope:
        settings = self._context.settings
        namespace = check_segment("namespace", settings.namespace)
        return Scope(namespace, model_slug(settings.model) if settings.model else self._metadata.model.name)

    def scopes(self) -> tuple[Scope, ...]:
        return tuple(Scope(one, self._metadata.model.name) for one in self._metadata.namespaces)

    def desired(self, scopes: Sequence[Scope], name: str | None = None) -> Desired:
        bodies = {scope: self._read(ScopeBody, self._client.get(_path(scope))) for scope in scopes}
        records = {scope: {one.key: one for one in body.records} for scope, body in bodies.items()}
        pointers = {
            scope: {(scope, one.name): one for one in body.pointers} for scope, body in bodies.items()
        }
        return Desired(
            records=ByScope(no_records().scope_of, records),
            pointers=ByScope(no_pointers().scope_of, pointers),
            problems={at: why for body in bodies.values() for at, why in body.problems.items()},
        )

    def names(self, scope: Scope, beginning: str) -> list[str]:
        body = self._read(ScopeBody, self._client.get(_path(scope)))
        return [one.name for one in body.records if one.present and one.name.startswith(beginning)]

    def named(self, scope: Scope, name: str) -> Named:
        body = self._read(NameBody, self._client.get(_path(scope, name)))
        found = Evaluations(body.evaluations, body.unreadable_evaluations)
        return Named(body.pointer, tuple(body.revisions), found)

    def reports(self) -> Reports:
        body = self._read(ReplicasBody, self._client.get("/v1/replicas"))
        return Reports(tuple(body.replicas), body.unreadable, tuple(body.young))

    def happened(self) -> Happened:
        body = self._read(ReplicaEventsBody, self._client.get("/v1/replicas/events"))
        return Happened(tuple(body.lists), body.unreadable)

    def fleet(self, name: str | None) -> FleetBody | None:
        if not self._client.meets_a_gateway:
            return None
        query = "" if name is None else "?" + urlencode({"adapter": name})
        return self._read(FleetBody, self._client.get(f"/v1/fleet{query}"))

    def do(self, scope: Scope, name: str, act: Act) -> Done:
        answer = self._client.post(_path(scope, name, act.word), act.model_dump(mode="json"))
        return self._read(Done, answer)

    def register(
        self, scope: Scope, name: str, source: str, said: RegisterAs, *, link: bool, plugin: str | None
    ) -> Outcome:
        for option, given in (("--link", link), ("--lora-downloader-plugin", plugin is not None)):
            if given:
                raise click.UsageError(f"{option} needs the volume: leave it out, or give --root")
        allow = {*said.allow, *self._context.settings.allow}
        said = said.model_copy(update={"allow": tuple(sorted(allow))})
        if is_uri(source) and scheme_of(source) != "file":
            return self._fetched(scope, name, source, said)
        return self._uploaded(scope, name, source, said)

    def _fetched(self, scope: Scope, name: str, source: str, said: RegisterAs) -> Outcome:
        """Let the server fetch it; asked again as long as it goes on there."""
        body = {**said.model_dump(mode="json", exclude_defaults=True), "source": source}
        while True:
            try:
                return self._read(Outcome, self._client.post(_path(scope, name, "register"), body))
            except WaitTimeout as error:
                complain(f"{redacted(source)}: {error}")

    def _uploaded(self, scope: Scope, name: str, source: str, said: RegisterAs) -> Outcome:
        """Check it here, so that a refusal costs no upload, and send the servable files."""
        folder = resolve(source)
        expectation = self._context.expectation(said.base_model, said.allow)
        plain = said.model_dump(mode="json", exclude={"labels", "allow"}, exclude_defaults=True)
        query = [(field, str(value)) for field, value in plain.items()]
        query += [("label", f"{key}={text}") for key, text in said.labels.items()]
        query += [("allow", code) for code in said.allow]
        with reading(folder, times=2) as advance:
            report = validate(folder, expectation, progress=advance)
            if not report.ok:
                raise InvalidAdapter(str(folder), report.errors)
            signature = [BUNDLE] if (folder / BUNDLE).is_file() else []
            sending = Sending(folder, [*report.served_files, *signature], advance)
            headers = {"Content-Type": "application/x-tar", "Content-Length": str(sending.size_bytes)}
            answer = self._client.post(
                _path(scope, name, "upload"), query=query, content=sending, headers=headers
            )
        return self._read(Outcome, answer)


def _path(scope: Scope, *more: str) -> str:
    return "/".join((ADAPTERS, *scope, *more))

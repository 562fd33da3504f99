"""A registry whose volume this machine mounts.

Only a write imports what only a write needs: ``list`` begins sooner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from lora_fs.sidecar.cli.backends.port import Named
from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import AdapterKey
from lora_fs.sidecar.registry.view.view import Desired, RegistryView

if TYPE_CHECKING:
    from lora_fs.sidecar.cli.options.context import Context
    from lora_fs.sidecar.model import Scope
    from lora_fs.sidecar.registry.lifecycle.acts import Act, Done
    from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs
    from lora_fs.sidecar.registry.store.reader import Reader
    from lora_fs.sidecar.registry.view.reports import Happened, Reports

MAX_LOOKED_AT: Final = 200  # records read for one completion; beyond it withdrawn names appear, too


class OnVolume:
    """Implements ``Backend``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._views: dict[tuple[Scope, ...], RegistryView] = {}

    @property
    def place(self) -> str:
        return str(self._context.root())

    @cached_property
    def _reader(self) -> Reader:
        return self._context.reader()

    def scope(self) -> Scope:
        return self._context.scope_of_settings()

    def scopes(self) -> tuple[Scope, ...]:
        return tuple(self._reader.scopes())

    def desired(self, scopes: Sequence[Scope], name: str | None = None) -> Desired:
        if name is not None:
            narrow = RegistryView(self._context.reader(only=name), tuple(scopes))
            narrow.refresh()
            return narrow.desired
        view = self._views.get(tuple(scopes))
        if view is None:
            view = self._views[tuple(scopes)] = RegistryView(self._reader, tuple(scopes))
        view.refresh()
        return view.desired

    def names(self, scope: Scope, beginning: str) -> Iterator[str]:
        looked_at = 0
        for revision, listing in self._reader.scan(scope).revisions.items():
            for name, generation in listing.records.items():
                if not name.startswith(beginning):
                    continue
                looked_at += 1
                series = self._reader.records(AdapterKey(*scope, revision, name))
                try:
                    if looked_at > MAX_LOOKED_AT or self._reader.read(series, generation).present:
                        yield name
                except LoraFsError:
                    yield name

    def named(self, scope: Scope, name: str) -> Named:
        from lora_fs.sidecar.registry.lifecycle import release
        from lora_fs.sidecar.registry.store import evaluations

        pointer = release.active(self._reader, scope, name)
        records = tuple(release.present_revisions(self._reader, scope, name).values())
        return Named(pointer, records, evaluations.of(self._reader, records))

    def reports(self) -> Reports:
        from lora_fs.sidecar.registry.format.layout import Layout
        from lora_fs.sidecar.registry.view.reports import read_reports

        return read_reports(Layout(self._context.root()))

    def happened(self) -> Happened:
        from lora_fs.sidecar.registry.view.reports import read_events

        return read_events(self._reader.layout)

    def fleet(self, name: str | None) -> None:
        return None

    def do(self, scope: Scope, name: str, act: Act) -> Done:
        from lora_fs.sidecar.registry.lifecycle.acts import By
        from lora_fs.sidecar.settings import writer_id

        with self._context.opened(dry_run=act.dry_run) as registry:
            return act.do(registry, scope, name, By(writer_id(), self._context.default_policy()))

    def register(
        self, scope: Scope, name: str, source: str, said: RegisterAs, *, link: bool, plugin: str | None
    ) -> Outcome:
        from lora_fs.sidecar.cli.backends import writing

        return writing.register(self._context, scope, name, source, said, link=link, plugin=plugin)

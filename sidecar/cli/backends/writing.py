"""Register in a registry whose volume this machine mounts. Removes half-done files at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_fs.sidecar.cli.progress import downloading, reading
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.admin import fetching
from lora_fs.sidecar.reconcile.limits import with_fleet
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.lifecycle import ingest, register_as
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs
from lora_fs.sidecar.settings import Settings, writer_id
from lora_fs.sidecar.sources.allowed import Allowed
from lora_fs.sidecar.sources.known import is_remote
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.sources.uri import redacted

if TYPE_CHECKING:
    from lora_fs.sidecar.cli.options.context import Context


def register(
    context: Context,
    scope: Scope,
    name: str,
    source: str,
    said: RegisterAs,
    *,
    link: bool,
    plugin: str | None,
) -> Outcome:
    """Register a folder of this machine, or a fetched source; see ``Backend.register``."""
    settings, by = context.settings, writer_id()
    plugin = plugin or settings.lora_downloader_plugin
    expectation = context.expectation(said.base_model, said.allow)
    expectation = with_fleet(expectation, Layout(context.root()), scope, forced=said.force)
    is_fetched, folder = is_remote(source, plugin), Path()
    if is_fetched and link:
        raise InputError(
            f"--link refers to a folder where it is, and {redacted(source)} is fetched: leave it out"
        )
    if not is_fetched:
        folder = resolve(source, settings.mounts())
    if link:
        check_linked(folder, context.root(), settings)
    with context.opened(create=not said.dry_run) as registry:

        def copied(wanted: Registration) -> Registered:
            ready = replace(wanted, source=folder, uri=folder.as_uri(), link=link)
            with reading(folder) as advance:
                return ingest.register(
                    registry, scope, ready, expectation, writer=by, dry_run=said.dry_run, progress=advance
                )

        def fetched(wanted: Registration) -> Registered:
            with downloading(redacted(source)) as tell:
                how = replace(fetching.Fetching.by(settings), plugin=plugin, tell=tell)
                return fetching.register(
                    registry, scope, wanted, source, expectation, how, writer=by, dry_run=said.dry_run
                )

        bring = fetched if is_fetched else copied
        return register_as.register(registry, scope, name, said, bring, default=context.default_policy())


def check_linked(folder: Path, root: Path, settings: Settings) -> None:
    """Refuse a folder outside the allowed ones: every sidecar will read the folder where it is."""
    allowed = Allowed(root, settings.allowed_sources)
    if not allowed.covers(folder):
        places = ", ".join(map(str, allowed.places))
        raise InputError(
            f"--link may refer to folders under {places}; {folder} is not: copy it (leave --link out), "
            "or name its folder in LORA_FS_ALLOWED_SOURCES"
        )

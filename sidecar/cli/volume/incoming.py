"""Adapters from other systems, registered one by one: what one of them lacks does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_fs.sidecar.cli.backends.writing import check_linked
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.progress import downloading
from lora_fs.sidecar.errors import InputError, LoraFsError, NotFound, SourceUnavailable
from lora_fs.sidecar.model import Scope, check_segment, model_slug
from lora_fs.sidecar.reconcile.admin.fetching import Fetching
from lora_fs.sidecar.reconcile.admin.fetching import register as fetch_and_register
from lora_fs.sidecar.reconcile.limits import with_fleet
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.settings import writer_id
from lora_fs.sidecar.sources.known import opened
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.sources.migration import gie, nim
from lora_fs.sidecar.sources.uri import redacted
from lora_fs.sidecar.validate import Expectation

Row = dict[str, Any]
WRITTEN = frozenset({"registered", "restored", "unregistered"})


@dataclass(frozen=True, slots=True)
class How:
    """The options for each adapter; see ``register``."""

    link: bool
    allow: tuple[str, ...]
    force: bool
    dry_run: bool


def from_gie(context: Context, file: Path, folders: Mapping[str, str], how: How) -> list[Row]:
    """Register the adapters of ``ensureExist``, and unregister those of ``ensureNotExist``.

    Raises:
        InputError, NotFound: the file is none, or cannot be read.
    """
    try:
        config = gie.parse(file.read_text())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFound(f"{file}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from error
    except InputError as error:
        raise InputError(f"{file}: {error}") from error
    rows: list[Row] = [
        _row(name, "skipped", "in both lists, as its sidecar skipped it") for name in config.both
    ]
    with context.opened(create=not how.dry_run) as registry:
        for one in config.exist:

            def register(one: gie.Listed = one) -> Row:
                scope, source = _scope(context, one.base_model), one.source or ""
                given = folders.get(source)
                if given is None and (uri := gie.uri_of(source)) is not None:
                    try:
                        return _fetch(context, registry, scope, one, uri, how)
                    except (NotFound, SourceUnavailable) as error:
                        raise type(error)(
                            f"{error}; or download it and say --folder {redacted(source)}=DIR"
                        ) from error
                folder = _local(given or source, source)
                return _register(context, registry, scope, one.name, folder, one.base_model, how)

            rows.append(_attempt(context, one.name, register))
        for one in config.not_exist:

            def unregister(one: gie.Listed = one) -> Row:
                return _unregister(registry, _scope(context, one.base_model), one.name, how.dry_run)

            rows.append(_attempt(context, one.name, unregister))
    return rows


def from_nim(context: Context, store: Path, how: How) -> list[Row]:
    """Register every folder of a flat store under its name.

    Raises:
        InputError, NotFound: it is no such store.
    """
    scope, found = context.scope(), nim.adapters(resolve(str(store)))
    rows = []
    with context.opened(create=not how.dry_run) as registry:
        for name, folder in found.items():

            def register(name: str = name, folder: Path = folder) -> Row:
                return _register(context, registry, scope, name, resolve(str(folder)), None, how)

            rows.append(_attempt(context, name, register))
    return rows


def _row(what: str, outcome: str, why: str = "") -> Row:
    return {"what": what, "outcome": outcome, "why": why}


def _attempt(context: Context, name: str, act: Callable[[], Row]) -> Row:
    try:
        row = act()
    except LoraFsError as error:
        return _row(name, "failed", str(error))
    if row["outcome"] in WRITTEN:
        context.written.append(row["what"])
    return row


def _local(source: str, named: str) -> Path:
    try:
        return resolve(source)
    except NotFound as error:
        raise NotFound(f"{error}: download it and say --folder {redacted(named)}=DIR") from error


def _scope(context: Context, base_model: str | None) -> Scope:
    """The file's base model, else the one of the command."""
    if base_model is None:
        return context.scope()
    return Scope(check_segment("namespace", context.settings.namespace), model_slug(base_model))


def _expectation(context: Context, scope: Scope, base_model: str | None, how: How) -> Expectation:
    """Judge as ``register`` does: refuse what no live replica can serve, unless forced."""
    own = context.expectation(base_model, how.allow)
    return with_fleet(own, Layout(context.root()), scope, forced=how.force)


def _register(
    context: Context,
    registry: Registry,
    scope: Scope,
    name: str,
    folder: Path,
    base_model: str | None,
    how: How,
) -> Row:
    check_segment("name", name)
    if how.link:
        check_linked(folder, context.root(), context.settings)
    wanted = Registration(
        name, folder, folder.as_uri(), base_model=base_model, link=how.link, origin="import"
    )
    judged_by = _expectation(context, scope, base_model, how)
    done = ingest.register(registry, scope, wanted, judged_by, writer=writer_id(), dry_run=how.dry_run)
    return _registered(scope, done)


def _fetch(
    context: Context,
    registry: Registry,
    scope: Scope,
    one: gie.Listed,
    uri: str,
    how: How,
) -> Row:
    """From the hub, or wherever it lies. A dry run asks what is there, and fetches nothing."""
    check_segment("name", one.name)
    fetching = Fetching.by(context.settings)
    if how.dry_run:
        with opened(uri, fetching.timed(uri, fetching.meter())) as source:
            offer = source.look()
        return _row(f"{scope}: {one.name}", "would fetch", f"{offer.uri} at {offer.pin}")
    wanted = Registration(one.name, Path(), "", base_model=one.base_model, origin="import")
    judged_by = _expectation(context, scope, one.base_model, how)
    with downloading(redacted(uri)) as tell:
        done = fetch_and_register(
            registry, scope, wanted, uri, judged_by, replace(fetching, tell=tell), writer=writer_id()
        )
    return _registered(scope, done)


def _registered(scope: Scope, done: Registered) -> Row:
    what = f"{scope}: {done.record.name}@{done.record.revision}"
    if done.changed:
        return _row(what, "registered")
    if done.restored:
        return _row(what, "restored", "lost files of the same bytes")
    return _row(what, "unchanged", "the same bytes")


def _unregister(registry: Registry, scope: Scope, name: str, dry_run: bool) -> Row:
    check_segment("name", name)
    what = f"{scope}: {name}"
    if not release.present_revisions(registry, scope, name):
        return _row(what, "unchanged", "is not registered")
    if not dry_run:
        release.unregister(registry, scope, name, writer=writer_id(), all_revisions=True)
    return _row(what, "unregistered")

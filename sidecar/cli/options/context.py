"""What a command works with: the settings, the registry, the scope. Each is read when it is first asked for.

Settings and records are pydantic's, which takes longer to import than a page of help takes to print.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lora_fs.sidecar.cli import output
from lora_fs.sidecar.cli.output import Format, complain

if TYPE_CHECKING:
    from rich.console import Console

    from lora_fs.sidecar.cli.backends.port import Backend
    from lora_fs.sidecar.model import Policy, Scope
    from lora_fs.sidecar.registry.store.reader import Reader
    from lora_fs.sidecar.registry.store.writer import Registry
    from lora_fs.sidecar.settings import Settings
    from lora_fs.sidecar.validate import Expectation


@dataclass
class Context:
    """The context of one run of a command.

    Attributes:
        given: the options that stand above settings; None and () are absent ones.
        headers: whether tables have a header line.
        wait_s: how long to wait for the replicas after a change; None: not at all.
        min_replicas: how many live ones there must be then.
        checks_base_config: read ``--base-config`` if given, whatever the command does.
        noted: what a command wrote, for the audit; empty until it is written.
        written: the same of a command that may write many adapters: their names so far.
        completes: whether a shell asks what to propose: a server has little time, and nothing is said.
    """

    given: dict[str, Any] = field(default_factory=dict)
    headers: bool = True
    wait_s: float | None = None
    min_replicas: int = 1
    checks_base_config: bool = False
    noted: dict[str, object] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    completes: bool = False
    _kept: Registry | None = field(default=None, init=False)
    _keeps: bool = field(default=False, init=False)

    @cached_property
    def settings(self) -> Settings:
        """The options over the environment; raises click.UsageError for a value that cannot be."""
        return read_settings(**self.given)

    @cached_property
    def backend(self) -> Backend:
        """Where the registry of this run is: on a volume, or behind a server."""
        if (url := self.server()) is not None:
            from lora_fs.sidecar.cli.backends.http import OverHttp

            backend = OverHttp(self, url)
            click.get_current_context().find_root().call_on_close(backend.close)
            return backend
        from lora_fs.sidecar.cli.backends.volume import OnVolume

        return OnVolume(self)

    def server(self) -> str | None:
        """Return the server to ask; None: this machine mounts the volume. An option beats both variables."""
        root, server = self.given.get("root"), self.given.get("server")
        if root is not None and server is not None:
            raise click.UsageError("--root and --server exclude each other: the registry is at one of them")
        if root is None and server is None and self.settings.root and self.settings.server:
            raise click.UsageError(
                "LORA_FS_ROOT and LORA_FS_SERVER are both set: say which with --root or --server"
            )
        url = self.settings.server if root is None else None
        if url is None and "client_token_file" in self.given:
            raise click.UsageError("--token-file is what a server is shown: give --server, too")
        return url

    @cached_property
    def out(self) -> Console:
        from rich.console import Console

        return Console()

    def take(self, **options: Any) -> None:
        """Add options that stand above settings; the later one wins."""
        self.given.update({name: value for name, value in options.items() if value not in (None, ())})
        for made in ("settings", "backend"):
            self.__dict__.pop(made, None)

    def root(self) -> Path:
        """Return the registry's folder; raises click.UsageError where there is a server in its place."""
        if (url := self.server()) is not None:
            command = click.get_current_context().command.name
            raise click.UsageError(
                f"{command} needs the volume, which {url} has: run it where that is mounted, with --root"
            )
        if self.settings.root is None:
            raise click.UsageError("say where the registry is: --root DIR or LORA_FS_ROOT")
        return self.settings.root

    def reader(self, *, only: str | None = None) -> Reader:
        """Open the registry to read it. ``only``: this name alone."""
        from lora_fs.sidecar.registry.store.reader import Reader

        return Reader.of(self.root(), only=only)

    def registry(self, *, create: bool = False) -> Registry:
        """Open the registry. ``create``: make one if there is none and the settings say so."""
        from lora_fs.sidecar.registry.store import marker
        from lora_fs.sidecar.registry.store.writer import Registry

        if create and self.settings.create and marker.create(self.root()).made:
            complain(f"{self.root()} held no registry: made one there")
        return Registry(self.root())

    def nothing_in(self, scopes: Sequence[Scope]) -> None:
        """Warn on stderr that scopes are empty, and name the others: the user may have misspelt one."""
        others = [str(one) for one in self.backend.scopes() if one not in scopes]
        where = ", ".join(map(str, scopes)) or self.backend.place
        told = f"; there is {', '.join(others[:5])}{' …' * (len(others) > 5)}" if others else ""
        complain(f"nothing is registered in {where}{told}")

    @contextmanager
    def opened(self, *, create: bool = False, dry_run: bool = False) -> Iterator[Registry]:
        """Open the registry to write to. Removes half-done files at the end.

        Args:
            dry_run: appends return what they would write, and write nothing.
        """
        if dry_run:
            from lora_fs.sidecar.registry.store.rehearsal import Rehearsal

            yield Rehearsal(self.root())
            return
        registry = self._kept or self.registry(create=create)
        if self._keeps:
            self._kept = registry
        try:
            yield registry
        finally:
            if not self._keeps:
                registry.close()

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Let all writes inside use one open registry: closing one waits 50 ms for its temporary names."""
        self._keeps = True
        try:
            yield
        finally:
            registry, self._kept, self._keeps = self._kept, None, False
            if registry is not None:
                registry.close()

    def scope(self) -> Scope:
        """The namespace and the base model of this run."""
        return self.backend.scope()

    def scope_of_settings(self) -> Scope:
        """The same, as the settings alone say it."""
        from lora_fs.sidecar.model import Scope, check_segment, model_slug

        if not self.settings.model:
            also = "" if self.settings.root else "; and where the registry is: --root DIR or LORA_FS_ROOT"
            raise click.UsageError(f"say which base model: --model ID or LORA_FS_MODEL{also}")
        namespace = check_segment("namespace", self.settings.namespace)
        return Scope(namespace, model_slug(self.settings.model))

    def scopes(self, *, all_namespaces: bool) -> tuple[Scope, ...]:
        """The scope of this run, or those of every namespace that has this base model."""
        own = self.scope()
        if not all_namespaces:
            return (own,)
        return tuple(sorted(one for one in self.backend.scopes() if one.model == own.model))

    def expectation(self, base_model: str | None = None, allow: tuple[str, ...] = ()) -> Expectation:
        from lora_fs.sidecar.validate import expect

        return expect(self.settings, base_model, allow)

    def default_policy(self) -> Policy:
        """Return where a record without a policy begins, as far as this command's settings say."""
        from lora_fs.sidecar.model import Policy

        return Policy(kind=self.settings.default_policy, ttl_s=self.settings.default_ttl_s)

    def say(self, text: str) -> None:
        """Print a line for people, escaped."""
        output.say(text)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], folds: str = "") -> None:
        """Print a row a line; ``folds``: the column to fold on a narrow terminal."""
        output.table(columns, rows, folds=folds, headers=self.headers)

    def printed(self, value: Mapping[str, Any] | list[Any], form: Format, names: Iterable[str] = ()) -> bool:
        """Print for scripts, if ``form`` is for them; returns whether it was.

        Args:
            names: what ``-o name`` prints, a line each.
        """
        if form.for_people:
            return False
        if form is Format.NAME:
            for name in names:
                output.say(name)
        else:
            output.put(output.document(value, form))
        return True


def read_settings(**options: Any) -> Settings:
    """Options over the environment.

    Raises:
        click.UsageError: a value that cannot be, by the name of its option or of its variable.
    """
    from pydantic import ValidationError

    from lora_fs.sidecar.settings import load_settings, refusal

    try:
        return load_settings(**options)
    except ValidationError as error:
        variable, _, why = refusal(error).partition("=")
        field = variable.removeprefix("LORA_FS_").lower()
        option = _option(field) if field in options else None
        raise click.UsageError(f"{option} {why}" if option is not None else f"{variable}={why}") from error


def _option(field: str) -> str | None:
    """Return the option of the running command that gives a setting; None if it has none."""
    context = click.get_current_context(silent=True)
    while context is not None:
        for one in context.command.params:
            if one.name == field and isinstance(one, click.Option):
                return one.opts[-1]
        context = context.parent
    return None

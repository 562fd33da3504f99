"""What every command shares: the settings, the registry, output, and the exit codes."""

from __future__ import annotations

import datetime
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError
from rich.cells import cell_len
from rich.console import Console

from lora_fs.sidecar.errors import (
    Conflict,
    InputError,
    InvalidAdapter,
    InvalidName,
    LoraFsError,
    NotFound,
    OverQuota,
    RegistryMissing,
    TooManyRegistrations,
    WaitTimeout,
)
from lora_fs.sidecar.model import Policy, Scope, check_segment, model_slug
from lora_fs.sidecar.settings import Settings, load_settings
from lora_fs.sidecar.validate.report import printable

if TYPE_CHECKING:
    from lora_fs.sidecar.registry.store.writer import Registry
    from lora_fs.sidecar.validate import Expectation

GAP = "  "
LEAST_FOLDED = 24

# The first match from the top wins.
EXIT_CODES: tuple[tuple[type[LoraFsError], int], ...] = (
    (NotFound, 3),
    (RegistryMissing, 3),
    (OverQuota, 7),
    (TooManyRegistrations, 7),
    (Conflict, 4),
    (InvalidAdapter, 5),
    (InvalidName, 2),
    (WaitTimeout, 6),
    (InputError, 2),
    (LoraFsError, 1),
)


@dataclass(frozen=True, slots=True)
class Context:
    """Settings merged from options and environment. ``noted``: what the audit is to be told besides."""

    settings: Settings
    out: Console
    noted: dict[str, object] = field(default_factory=dict)

    def root(self) -> Path:
        if self.settings.root is None:
            raise click.UsageError("say where the registry is: --root DIR or LORA_FS_ROOT")
        return self.settings.root

    def registry(self, *, create: bool = False) -> Registry:
        """Open the registry. ``create``: make one if there is none and the settings say so."""
        from lora_fs.sidecar.registry.store import marker  # not needed to say what commands there are
        from lora_fs.sidecar.registry.store.writer import Registry

        if create and self.settings.create and marker.create(self.root()).made:
            complain(f"{self.root()} held no registry: made one there")
        return Registry(self.root())

    def nothing_in(self, scope: Scope) -> None:
        """Say on stderr that a scope is empty, and which others there are: a name may be misspelt."""
        others = [str(one) for one in self.registry().scopes() if one != scope]
        told = f"; there is {', '.join(others[:5])}{' …' * (len(others) > 5)}" if others else ""
        complain(f"nothing is registered in {scope}{told}")

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[Registry]:
        """The registry, to write to; what it left half done is tidied at the end."""
        registry = self.registry(create=create)
        try:
            yield registry
        finally:
            registry.close()

    def scope(self) -> Scope:
        if not self.settings.model:
            also = "" if self.settings.root else "; and where the registry is: --root DIR or LORA_FS_ROOT"
            raise click.UsageError(f"say which base model: --model ID or LORA_FS_MODEL{also}")
        namespace = check_segment("namespace", self.settings.namespace)
        return Scope(namespace, model_slug(self.settings.model))

    def expectation(self, base_model: str | None = None, allow: tuple[str, ...] = ()) -> Expectation:
        from lora_fs.sidecar.validate import expect

        return expect(self.settings, base_model, allow)

    def default_policy(self) -> Policy:
        """Where a record without a policy begins, as far as this command's settings say."""
        return Policy(kind=self.settings.default_policy, ttl_s=self.settings.default_ttl_s)

    def say(self, text: str) -> None:
        """Print a line for people; what a terminal would act on is escaped."""
        click.echo(printable(text))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], folds: str = "") -> None:
        """Print a row a line, no cell cut, escaped as ``say`` does.

        Args:
            folds: the column that is folded where a terminal is too narrow for a row.
        """
        cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        folded = columns.index(folds) if folds and self.out.is_terminal else None
        if folded is not None:
            others = sum(widths) - widths[folded] + len(GAP) * (len(widths) - 1)
            widths[folded] = min(widths[folded], max(LEAST_FOLDED, self.out.width - others))
        for row in cells:
            lines = [""] if folded is None else textwrap.wrap(row[folded], widths[folded]) or [""]
            for number, line in enumerate(lines):
                shown = [cell if number == 0 else "" for cell in row]
                if folded is not None:
                    shown[folded] = line
                padded = (
                    cell + " " * (width - cell_len(cell)) for cell, width in zip(shown, widths, strict=True)
                )
                click.echo(GAP.join(padded).rstrip())

    def emit(self, value: Mapping[str, Any] | list[Any]) -> None:
        """Print JSON for scripts."""
        click.echo(json.dumps(value, indent=2))


def read_settings(**options: Any) -> Settings:
    """Options over the environment.

    Raises:
        click.UsageError: a value that cannot be, by its variable's name.
    """
    try:
        return load_settings(**options)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        variable = field if field.isupper() else f"LORA_FS_{field.upper()}"
        why = first["msg"].removeprefix("Value error, ")
        raise click.UsageError(f"{variable}={first['input']}: {why}") from error


def shown_bytes(size_bytes: int) -> str:
    """``0.9 kB``, ``12.3 MB``, ``4.0 GB``."""
    unit, scale = ("GB", 1e9) if size_bytes >= 1e9 else ("MB", 1e6) if size_bytes >= 100_000 else ("kB", 1e3)
    return f"{size_bytes / scale:.1f} {unit}"


def shown_time(written: str) -> str:
    """A time of a record in UTC, as ``2026-11-21T18:08:37Z``; what is no time is shown as it is."""
    try:
        at = datetime.datetime.fromisoformat(written).astimezone(datetime.UTC)
    except (ValueError, OverflowError):  # a zone may lead out of the years there are
        return written
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def complain(message: str) -> None:
    """Say on stderr what is wrong, line by line, escaped as ``Context.say`` does."""
    click.echo("lora-fs: " + "\n".join(map(printable, message.split("\n"))), err=True)


def unread() -> None:
    """Nobody reads stdout any more: let what is left of it, which the exit writes, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def exit_code(error: LoraFsError) -> int:
    """The documented exit code of an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))

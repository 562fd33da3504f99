"""What every command shares: the settings, the registry, output, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from lora_fs.sidecar.errors import (
    Conflict,
    InputError,
    InvalidAdapter,
    InvalidName,
    LoraFsError,
    NotFound,
    WaitTimeout,
)
from lora_fs.sidecar.model import Scope, check_segment, model_slug
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation, load_base_config

# The first match from the top wins.
EXIT_CODES: tuple[tuple[type[LoraFsError], int], ...] = (
    (NotFound, 3),
    (Conflict, 4),
    (InvalidAdapter, 5),
    (InvalidName, 2),
    (WaitTimeout, 6),
    (InputError, 2),
    (LoraFsError, 1),
)


@dataclass(frozen=True, slots=True)
class Context:
    """Settings merged from options and environment."""

    settings: Settings
    out: Console

    def root(self) -> Path:
        if self.settings.root is None:
            raise click.UsageError("say where the registry is: --root DIR or LORA_FS_ROOT")
        return self.settings.root

    def registry(self, *, create: bool = False) -> Registry:
        return Registry(self.root(), create=create)

    def scope(self) -> Scope:
        if not self.settings.model:
            raise click.UsageError("say which base model: --model ID or LORA_FS_MODEL")
        namespace = check_segment("namespace", self.settings.namespace)
        return Scope(namespace, model_slug(self.settings.model))

    def expectation(self, base_model: str | None = None, allow: tuple[str, ...] = ()) -> Expectation:
        settings = self.settings
        ids = [i for i in (base_model, settings.base_model, settings.model) if i]
        config = None
        for candidate in (str(settings.base_config) if settings.base_config else None, *ids):
            if candidate is not None and config is None:
                config = load_base_config(candidate)
        return Expectation(tuple(ids), config, settings.max_rank, frozenset(allow + settings.allow))

    def say(self, text: str) -> None:
        """Print a line for people, as it is."""
        self.out.print(text, markup=False, highlight=False)

    def emit(self, value: Mapping[str, Any] | list[Any]) -> None:
        """Print JSON for scripts."""
        click.echo(json.dumps(value, indent=2))


def exit_code(error: LoraFsError) -> int:
    """The documented exit code of an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))

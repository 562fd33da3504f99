"""Show how far a read or a download is: a bar on a terminal's stderr, and lines of a download elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from lora_fs.sidecar.escaping import printable

if TYPE_CHECKING:
    from lora_fs.sidecar.reconcile.admin.fetching import Tell

LINE_S = 5.0


def _draws() -> bool:
    """Whether stderr is a terminal that moves its cursor: on another one each bar leaves an empty line."""
    return sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal


def _bar(*columns: ProgressColumn) -> Progress:
    """A bar on stderr, which nobody sees where none can be drawn."""
    what, console = TextColumn("{task.description}", markup=False), Console(stderr=True)
    return Progress(what, *columns, console=console, transient=True, disable=not _draws())


@contextmanager
def reading(folder: Path, *, times: int = 1) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, over so many reads of the weights; yields what moves it."""
    with _bar(BarColumn(), DownloadColumn()) as bar:
        size = sum(path.stat().st_size for path in folder.glob("adapter_model.*") if path.is_file())
        task = bar.add_task(f"reading {folder.name}", total=times * size)
        yield lambda count: bar.advance(task, count)


@contextmanager
def asking(cases: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, over the cases of an evaluation; yields what moves it."""
    with _bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("cases", total=cases)
        yield lambda count: bar.advance(task, count)


@contextmanager
def downloading(source: str) -> Iterator[Tell]:
    """Yields what tells how far it is. ``source``: without credentials."""
    if not _draws():
        yield _Lines(source).tell
        return
    with _bar(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(printable(source), total=None)

        def tell(step: str, received: int, total: int | None) -> None:
            bar.update(task, description=f"{step} {printable(source)}", completed=received, total=total)

        yield tell


class _Lines:
    """A line at every step, and every LINE_S seconds of one."""

    def __init__(self, source: str) -> None:
        self._source, self._step, self._told_at = source, "", 0.0

    def tell(self, step: str, received: int, total: int | None) -> None:
        now = time.monotonic()
        if step == self._step and now - self._told_at < LINE_S:
            return
        self._step, self._told_at = step, now
        of = "" if total is None else f" of {total / 1e6:.1f}"
        click.echo(f"{step} {printable(self._source)}: {received / 1e6:.1f}{of} MB", err=True)

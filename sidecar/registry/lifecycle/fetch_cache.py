"""Fetches a remote adapter onto the volume once, however many callers ask: a lease, a folder, a hint.

The holder of a source's lease fetches it into ``.incoming/fetch-<key>``, where the key comes from the URI
and the pin. After a kill the next caller resumes there: the key stands for the same bytes. The caller
that registers the files leaves a hint that says where they lie. A caller that waited reads the hint, hashes
the files and takes them from the volume. If they are damaged, it fetches and mends them. Where a lease fails,
two callers fetch the same bytes. The later one takes over what has arrived, and the earlier one ends.

A refused download, or one that does not fit the volume, goes at once. An interrupted one stays until gc.
"""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lora_fs.sidecar.errors import (
    CorruptRecord,
    InputError,
    LoraFsError,
    SourceUnavailable,
    VolumeUnavailable,
    WaitTimeout,
)
from lora_fs.sidecar.model import AdapterKey, Record, Scope
from lora_fs.sidecar.registry.format.layout import FETCH
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.lifecycle.mending import is_whole, mend_files
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.leases import lease

ASK_AGAIN_S = 0.5

Bring = Callable[[Path], tuple[Path, Mapping[str, str]]]
Told = Callable[[int], None]


class Placed(BaseModel):
    """``.leases/fetch-<key>.json``, a hint: the record whose files came from ``uri`` at ``pin``."""

    model_config = ConfigDict(frozen=True, extra="allow")

    uri: str
    pin: str
    key: tuple[str, str, str, str]
    sum: str = ""


@dataclass(slots=True)
class Fetched:
    """An adapter's folder on the volume.

    Attributes:
        fresh: this caller fetched the files, and may move them; else they belong to a registered revision.
        hashes: the SHA-256 of files as they arrived, by name.
        mended: the record whose damaged files were replaced.
        record: set by the registration, for the next caller.
    """

    folder: Path
    fresh: bool
    hashes: Mapping[str, str] = field(default_factory=dict)
    mended: AdapterKey | None = None
    record: Record | None = None


@contextmanager
def fetched(
    registry: Registry,
    scope: Scope,
    uri: str,
    pin: str | None,
    bring: Bring,
    *,
    wait_s: float,
    waiting: Told = lambda _: None,
) -> Iterator[Fetched]:
    """Yield the files of a source; the block registers them.

    Args:
        pin: the same pin is the same bytes. None: unknown, so every call fetches anew.
        bring: fetches into a folder, resuming from its files; returns the adapter's folder, and hashes.
        wait_s: how long to wait for another process that fetches the same.
        waiting: called meanwhile with the bytes it has; raises to end the wait.
    Raises:
        WaitTimeout: the other one is not done yet. What ``bring`` raises.
    """
    registry.check_writable()
    name = FETCH + hashlib.sha256(f"{uri}\n{pin}".encode()).hexdigest()[:32]
    hint = registry.layout.leases / f"{name}.json"
    folder = registry.layout.incoming(scope) / name
    ready, _ = _placed(registry, hint, uri, pin)
    if ready is not None:
        yield ready
        return
    make_folder(folder.parent, root=registry.layout.root)
    with _turn(registry.layout.lease(name), folder, uri, wait_s, waiting):
        ready, damaged = _placed(registry, hint, uri, pin)
        if ready is not None:
            yield ready
            return
        if pin is None:
            artifacts.discard(folder)
        make_folder(folder, root=registry.layout.root)
        try:
            adapter, hashes = bring(folder)
            atomic.sync_names(adapter)
            mended = damaged.key if damaged is not None and _mend(registry, adapter, damaged) else None
            done = Fetched(adapter, fresh=True, hashes=hashes, mended=mended)
            yield done
        except LoraFsError as error:
            spoiled = isinstance(error, SourceUnavailable) and error.spoiled
            if isinstance(error, InputError) or _is_full(error) or spoiled:
                artifacts.discard(folder)
            raise
        artifacts.discard(folder)
        if done.record is not None and pin is not None:
            with suppress(LoraFsError):
                atomic.replace(hint, seal(Placed(uri=uri, pin=pin, key=tuple(done.record.key))))


@contextmanager
def _turn(path: Path, folder: Path, uri: str, wait_s: float, waiting: Told) -> Iterator[None]:
    deadline = time.monotonic() + wait_s
    stack = ExitStack()
    while stack.enter_context(lease(path, wait_s=ASK_AGAIN_S)).is_anothers:
        stack.close()
        if time.monotonic() >= deadline:
            raise WaitTimeout(
                f"another process has been fetching {uri} for {wait_s:.0f} s: ask again, or remove {path} "
                "if none does"
            )
        waiting(_bytes_in(folder))
    with stack:
        yield


def _placed(
    registry: Registry, hint: Path, uri: str, pin: str | None
) -> tuple[Fetched | None, Record | None]:
    """The folder of a registered adapter of this source; None, and the record, where it is not whole."""
    record = _hinted(registry, hint, uri, pin) if pin is not None else None
    if record is None:
        return None, None
    with suppress(VolumeUnavailable):  # what cannot be read is not whole
        if is_whole(registry.layout, record):
            return Fetched(registry.layout.resolve(record.spec.path), fresh=False), None
    return None, record


def _mend(registry: Registry, adapter: Path, damaged: Record) -> bool:
    """Put fetched files in the place of damaged ones, if they are what the record names.

    Raises:
        VolumeUnavailable: the volume did not take one.
    """
    target = registry.layout.artifact(damaged.key)
    if registry.layout.resolve(damaged.spec.path) != target or artifacts.look(target) is None:
        return False  # another's folder, a link, or none: its next registration makes it anew
    same = is_whole(registry.layout, damaged, adapter)  # else the source has other files now
    if same:
        mend_files(registry.layout, adapter, damaged)
    return same


def _hinted(registry: Registry, hint: Path, uri: str, pin: str) -> Record | None:
    """The record whose files came from this source, if a hint names one."""
    if hint.name not in registry.names(hint.parent):
        return None
    try:
        data = atomic.read_bytes(hint)
        told = decode(Placed, data) if data is not None else None
        if told is None or (told.uri, told.pin) != (uri, pin):
            return None
        record = registry.latest(registry.records(AdapterKey.checked(*told.key)))[1]
    except (CorruptRecord, InputError):
        return None
    if record is None or not record.present:
        return None
    source = record.spec.source
    return record if (source.uri, source.pin) == (uri, pin) else None


def _bytes_in(folder: Path) -> int:
    """The bytes in a folder so far. A file that several ranges fill counts as its whole length."""
    with suppress(OSError):
        return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
    return 0


def _is_full(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)

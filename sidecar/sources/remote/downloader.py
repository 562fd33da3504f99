"""A downloader of somebody's own, in Dynamo's shape: ``--lora-downloader-plugin my.module.Class``.

It makes the class without arguments. ``download_lora_to_disk(name)`` returns an object with a
``local_path``, or the path itself. It copies the adapter from there, and then calls
``delete_lora_from_disk(name)``. The class is code that runs with this process's rights: only the command
line or the environment can name it, and no request.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_fs.sidecar.errors import InputError, LoraFsError, SourceUnavailable
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.sources.offer import Offer, Piece, Read, wanted
from lora_fs.sidecar.sources.uri import Uri, redacted
from lora_fs.sidecar.validate.files import Refused, open_file, open_folder

CHUNK_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class Downloader:
    """One name, of a class named ``my.module.Class`` or ``my.module:Class``."""

    def __init__(self, name: str, plugin: str) -> None:
        self._name, self._plugin = name, _load(plugin)
        self._downloaded = False

    def look(self) -> Offer:
        try:
            model = self._plugin.download_lora_to_disk(self._name)
            self._downloaded = True
            folder = Path(os.fspath(getattr(model, "local_path", model)))
            sizes = {one.name: one.stat().st_size for one in folder.iterdir() if one.is_file()}
        except LoraFsError:
            raise
        except Exception as error:
            told = event("downloader.failed", source=redacted(self._name))
            logger.exception("the downloader failed for %s", redacted(self._name), extra=told)
            raise SourceUnavailable(
                f"{type(self._plugin).__name__} did not download {shown(redacted(self._name))}: "
                f"{type(error).__name__}; the log says more"
            ) from error
        pieces = tuple(Piece(name, sizes[name], _reader(folder, name)) for name in wanted(dict(sizes)))
        return Offer(shown(redacted(self._name)), None, pieces)

    def close(self) -> None:
        """Let it delete what it downloaded."""
        if not self._downloaded:
            return
        try:
            self._plugin.delete_lora_from_disk(self._name)
        except Exception:
            name = shown(redacted(self._name))
            told = event("downloader.left", source=name)
            logger.warning("the downloader left %s on the disk", name, exc_info=True, extra=told)


def downloaded(name: str) -> Uri:
    """The form of a downloader's name that the allowed places match: ``plugin://name``."""
    return Uri("plugin", shown(redacted(name)), ())


def _load(plugin: str) -> Any:
    module, _, name = plugin.replace(":", ".").rpartition(".")
    try:
        made = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise InputError(
            f"the downloader {plugin} cannot be made: {type(error).__name__}: {error}"
        ) from error
    for method in ("download_lora_to_disk", "delete_lora_from_disk"):
        if not callable(getattr(made, method, None)):
            raise InputError(f"the downloader {plugin} has no {method}(name)")
    return made


def _reader(folder: Path, name: str) -> Read:
    @contextmanager
    def read(start: int, end: int | None) -> Iterator[Iterator[bytes]]:
        try:
            with open_folder(folder) as fd, open_file(fd, name) as file:
                if file is None:
                    raise SourceUnavailable(f"{name} is not there any more")
                upto = file.size_bytes if end is None else min(end, file.size_bytes)
                yield (file.read(at, min(CHUNK_BYTES, upto - at)) for at in range(start, upto, CHUNK_BYTES))
        except Refused as refused:
            raise InputError(f"the downloader's {name} {refused.message}") from refused

    return read

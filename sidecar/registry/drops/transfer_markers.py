"""What the names in a folder say of the transfer that brings it: done, under way, or broken off.

Tools write beside the file that they bring and rename: a new config may lie there for an hour beside the
old weights. This module reads names only, of the folder itself and of what a hub's client keeps in it.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.registry.lifecycle.artifacts import MAX_ENTRIES, SERVED, Sight, entered

READY_MARKS = frozenset({"_READY", "SHA256SUMS"})
SHOWN = 128  # of a name that anybody may have chosen

_SERVED = "|".join(map(re.escape, SERVED))
_UNFINISHED = re.compile(
    rf"\.(?:{_SERVED})\.[A-Za-z0-9]{{6}}"  # rsync
    rf"|(?:{_SERVED})\.[0-9A-Fa-f]{{8}}"  # aws s3
    r"|\.~tmp~|\.rsync-partial"
    r"|.*(?:\.part|\.partial|\.incomplete|\.filepart|\.crdownload|\.aria2|\.tmp|_\.gstmp)",
    re.DOTALL,
)
_HUBS = {".cache": ("huggingface", "download"), ".huggingface": ("download",)}  # where hf keeps its parts


def is_marked(sight: Sight) -> bool:
    """Whether who brought it says that it is done."""
    return not READY_MARKS.isdisjoint(sight.names)


def unfinished(folder: Path, sight: Sight) -> str | None:
    """A name in it that a transfer leaves while it runs, or where it broke off; None if there is none.

    The name is escaped for display.

    Raises:
        VolumeUnavailable: the volume does not show the folder's names.
    """
    found = min(filter(_UNFINISHED.fullmatch, sight.names), default=None)
    for top in _HUBS.keys() & sight.names if found is None else ():
        inner = (top, *_HUBS[top])
        try:
            part = _part_in(folder, inner)
        except (FileNotFoundError, NotADirectoryError):
            continue  # this hub's client fetched nothing, or a link lies there: never followed
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise VolumeUnavailable(f"cannot look into {folder.joinpath(*inner)}: {why}") from error
        found = "/".join((*inner, part)) if part is not None else found
    return ascii(found[:SHOWN])[1:-1] if found is not None else None


def _part_in(folder: Path, inner: tuple[str, ...]) -> str | None:
    with entered(folder, *inner) as handle, os.scandir(handle) as entries:
        names = (entry.name for entry in islice(entries, MAX_ENTRIES))
        return next((name for name in names if name.endswith(".incomplete")), None)

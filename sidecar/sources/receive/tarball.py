"""Unpacks one adapter from a tar of unknown origin: the served files, and nothing else.

No member's name becomes a path: the last segment selects a file, and must be one of five names. It refuses a
tar in which such a name is a link, a device or a sparse file. It refuses one that holds two adapters, or
leaves its folder. Of the files that only come along it takes those beside the adapter. A budget bounds what
all archives of a fetch unpack to together. Memory has a bound: a header is the largest thing read whole. It
reads a gzip file to its end, where its checksum is.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lora_fs.sidecar.errors import InputError, TooLarge, VolumeUnavailable
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.sources.offer import CARRIED, MAX_CARRIED_BYTES
from lora_fs.sidecar.validate import packed
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE
from lora_fs.sidecar.validate.folder import PICKLES, WEIGHTS_FILE

MOST_MEMBERS = 10_000
CHUNK_BYTES = 1 << 20
TAKEN = (CONFIG_FILE, WEIGHTS_FILE, *PICKLES, *CARRIED)


@dataclass(slots=True)
class Budget:
    """How much one fetch or upload may still unpack, over all its archives.

    Attributes:
        uri: what errors name.
        most_bytes: of all that is unpacked, also of what nobody keeps.
        check: called at each step; what it raises ends the unpacking.
    """

    uri: str
    most_bytes: int
    check: Callable[[], None] = lambda: None
    _bytes: int = 0
    _members: int = 0

    def take(self, size_bytes: int) -> None:
        """Count bytes that were unpacked.

        Raises:
            TooLarge: they are more than what is left.
        """
        self.check()
        self._bytes += size_bytes
        self._refuse(self._bytes > self.most_bytes)

    def take_member(self, size_bytes: int) -> None:
        """Count a member, and refuse one of more bytes than are left before it is unpacked."""
        self._members += 1
        self._refuse(self._members > MOST_MEMBERS or size_bytes > self.most_bytes - self._bytes)

    def _refuse(self, too_much: bool) -> None:
        if too_much:
            raise TooLarge(
                f"{self.uri} unpacks to more than {MOST_MEMBERS} files or {self.most_bytes} bytes: pack the "
                "adapter alone, or raise LORA_FS_FETCH_MAX_BYTES"
            )


def unpack_within(file: Path, folder: Path, budget: Budget) -> None:
    """Write the served files of a .tar or .tar.gz into an existing folder.

    Raises:
        InputError: it is no tar, or an incomplete one, or does not hold one adapter.
        TooLarge: it unpacks to more than the budget has left. What ``budget.check`` raises.
        VolumeUnavailable: the volume does not take the files.
    """
    uri = budget.uri
    try:
        with packed.tar(file, budget.take) as archive:
            inside: str | None = None
            held: dict[str, Path] = {}  # of each folder what comes along, until the adapter is seen
            for name, member in _adapter(archive, budget):
                parent = posixpath.normpath(posixpath.dirname(member.name))
                target = folder
                if name not in CARRIED:
                    if inside not in (None, parent):
                        raise InputError(f"{uri} holds more than one adapter: pack one folder")
                    inside = parent
                elif inside is None:
                    target = held.setdefault(parent, folder / str(len(held)))
                    target.mkdir(exist_ok=True)
                elif inside != parent:
                    continue
                reader = archive.extractfile(member)
                assert reader is not None
                _write(reader, target / name)
            packed.finish(archive)
        for parent, place in held.items():
            for path in place.iterdir() if inside in (None, parent) else ():
                if not (folder / path.name).exists():  # of two of one name the later one counts
                    path.replace(folder / path.name)
            shutil.rmtree(place)
    except packed.OtherPacking as error:
        raise InputError(f"{uri}: {error}") from error
    except packed.NotTar as error:
        raise InputError(f"{uri} is no tar, or was cut: {error}; send a {packed.KINDS}") from error
    except OSError as error:
        raise VolumeUnavailable(f"cannot unpack {uri}: {os.strerror(error.errno or 0)}") from error


def _adapter(archive: tarfile.TarFile, budget: Budget) -> Iterator[tuple[str, tarfile.TarInfo]]:
    for member in archive:
        budget.take_member(member.size)
        parts = member.name.split("/")
        if member.name.startswith("/") or ".." in parts:
            raise InputError(f"{budget.uri}: {shown(member.name)} leaves its folder")
        if parts[-1] not in TAKEN or member.isdir():
            continue
        if parts[-1] in CARRIED and not (member.isreg() and member.size <= MAX_CARRIED_BYTES):
            continue
        if not member.isreg():
            raise InputError(f"{budget.uri}: {shown(member.name)} is not a regular file")
        yield parts[-1], member


def _write(reader: IO[bytes], target: Path) -> None:
    with target.open("wb") as out:
        while chunk := reader.read(CHUNK_BYTES):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())

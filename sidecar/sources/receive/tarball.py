"""Unpacks one adapter from a tar of unknown origin: the served files, and nothing else.

No member's name becomes a path: the last segment selects a file, and must be one of five names. It refuses a
tar in which such a name is a link, a device or a sparse file. It refuses one that holds two adapters, leaves
its folder, or unpacks to more bytes than allowed. Memory has a bound: a header is the largest thing read
whole. It reads a gzip file to its end, where its checksum is.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from lora_fs.sidecar.errors import InputError, TooLarge, VolumeUnavailable
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.sources.offer import CARRIED, MAX_CARRIED_BYTES
from lora_fs.sidecar.validate import packed
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE
from lora_fs.sidecar.validate.folder import PICKLES, WEIGHTS_FILE

MOST_MEMBERS = 10_000
CHUNK_BYTES = 1 << 20
TAKEN = (CONFIG_FILE, WEIGHTS_FILE, *PICKLES, *CARRIED)


def unpack(file: Path, folder: Path, uri: str, most_bytes: int) -> None:
    """Write the served files of a .tar or .tar.gz into an existing folder.

    Raises:
        InputError: it is no tar, or an incomplete one, or does not hold one adapter.
        VolumeUnavailable: the volume does not take the files.
    """
    try:
        with packed.tar(file) as archive:
            inside: str | None = None
            for name, member in _adapter(archive, uri, most_bytes):
                parent = member.name.rpartition("/")[0].removeprefix("./")
                if inside not in (None, parent):
                    raise InputError(f"{uri} holds more than one adapter: pack one folder")
                inside = parent
                reader = archive.extractfile(member)
                assert reader is not None
                _write(reader, folder / name)
            if isinstance(archive.fileobj, gzip.GzipFile):
                _end(cast(IO[bytes], archive.fileobj), uri, most_bytes)
    except packed.OtherPacking as error:
        raise InputError(f"{uri}: {error}") from error
    except packed.NotTar as error:
        raise InputError(f"{uri} is no tar, or was cut: {error}; send a {packed.KINDS}") from error
    except OSError as error:
        raise VolumeUnavailable(f"cannot unpack {uri}: {os.strerror(error.errno or 0)}") from error


def _end(stream: IO[bytes], uri: str, most_bytes: int) -> None:
    """Read what stands behind the last member, up to the checksum."""
    size = 0
    while chunk := stream.read(CHUNK_BYTES):
        size += len(chunk)
        if size > most_bytes:
            raise _too_much(uri, most_bytes)


def _adapter(archive: tarfile.TarFile, uri: str, most_bytes: int) -> Iterator[tuple[str, tarfile.TarInfo]]:
    size = 0
    for count, member in enumerate(archive):
        size += max(0, member.size)
        if count >= MOST_MEMBERS or size > most_bytes:
            raise _too_much(uri, most_bytes)
        parts = member.name.split("/")
        if member.name.startswith("/") or ".." in parts:
            raise InputError(f"{uri}: {shown(member.name)} leaves its folder")
        if parts[-1] not in TAKEN or member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise InputError(f"{uri}: {shown(member.name)} is not a regular file")
        if parts[-1] not in CARRIED or member.size <= MAX_CARRIED_BYTES:
            yield parts[-1], member


def _too_much(uri: str, most_bytes: int) -> TooLarge:
    return TooLarge(
        f"{uri} unpacks to more than {MOST_MEMBERS} files or {most_bytes} bytes: pack the adapter alone, or "
        "raise LORA_FS_FETCH_MAX_BYTES"
    )


def _write(reader: IO[bytes], target: Path) -> None:
    with target.open("wb") as out:
        while chunk := reader.read(CHUNK_BYTES):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())

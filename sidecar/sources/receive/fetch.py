"""Fetch what a source offers into a folder: piece by piece, then unpacked what is a tar."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.offer import CARRIED, Meter, Offer
from lora_fs.sidecar.sources.receive import tarball, transfer
from lora_fs.sidecar.sources.receive.part import no_access

ADAPTER, UNPACKED = "adapter", "unpacked"


def bring(offer: Offer, folder: Path, meter: Meter) -> tuple[Path, dict[str, str]]:
    """Fetch an offer into ``folder``, going on from what an earlier try left there.

    Returns:
        The adapter's folder in it, and each known SHA-256 of its files.
    Raises:
        See ``transfer.fetch`` and ``_unpack``. VolumeUnavailable: the folder, too, if it is gone.
    """
    meter.check_size(offer.uri, offer.size_bytes)
    meter.total = offer.size_bytes
    try:
        return _bring(offer, folder, meter)
    except OSError as error:
        raise no_access(folder, error) from error


def _bring(offer: Offer, folder: Path, meter: Meter) -> tuple[Path, dict[str, str]]:
    adapter = folder / ADAPTER
    adapter.mkdir(exist_ok=True)
    hashes: dict[str, str] = {}
    archives: list[Path] = []
    arrived = 0
    for piece in offer.pieces:
        if not piece.packed and piece.name not in tarball.TAKEN:
            raise InputError(f"{offer.uri} offers {piece.name[:80]!a}, which no engine reads")
        target = folder / f"{piece.name}.whole" if piece.packed else adapter / piece.name
        sha256 = transfer.fetch(piece, target, folder, offer.uri, meter, arrived)
        arrived += target.stat().st_size
        if piece.packed:
            archives.append(target)
        else:
            hashes[piece.name] = sha256
    if archives:
        _unpack(archives, adapter, folder / UNPACKED, set(hashes), offer.uri, meter)
    meter.tell(arrived, arrived)
    return adapter, hashes


def _unpack(
    archives: list[Path], adapter: Path, unpacked: Path, whole: set[str], uri: str, meter: Meter
) -> None:
    """Unpack each tar beside the files that are no tar, which are ``whole``; then let go of the tars.

    Raises:
        InputError: two of them have a served file in common. See ``tarball.unpack_within``.
        SourceUnavailable: the time of the fetch is over. The archives stay for the next one.
    """
    for path in adapter.iterdir():  # of an earlier try, which may have ended in the middle
        if path.name not in whole:
            path.unlink()
    budget = tarball.Budget(uri, meter.most_bytes, partial(meter.check_time, uri))
    for archive in archives:
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.mkdir()
        tarball.unpack_within(archive, unpacked, budget)
        paths = sorted(unpacked.iterdir())
        holds_adapter = any(path.name not in CARRIED for path in paths)
        for path in paths:
            target = adapter / path.name
            if target.exists() and path.name not in CARRIED:
                raise InputError(f"{uri} holds more than one adapter: pack one folder")
            if not target.exists() or (holds_adapter and path.name not in whole):
                path.replace(target)
        shutil.rmtree(unpacked)
    for archive in archives:
        archive.unlink()

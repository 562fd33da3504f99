"""Fetch what a source offers into a folder: piece by piece, then unpacked where it is a tar."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lora_fs.sidecar.errors import InputError, VolumeUnavailable
from lora_fs.sidecar.sources import tarball, transfer
from lora_fs.sidecar.sources.offer import ARCHIVE, Meter, Offer

ADAPTER = "adapter"


def bring(offer: Offer, folder: Path, meter: Meter) -> tuple[Path, dict[str, str]]:
    """Fetch an offer into ``folder``, going on from what an earlier try left there.

    Returns:
        The adapter's folder in it, and the SHA-256 of each file in it that is known.
    Raises:
        See ``transfer.fetch`` and ``tarball.unpack``.
    """
    meter.check_size(offer.uri, offer.size_bytes)
    meter.total = offer.size_bytes
    adapter, archive = folder / ADAPTER, folder / f"{ARCHIVE}.whole"
    try:
        adapter.mkdir(exist_ok=True)
    except OSError as error:
        raise VolumeUnavailable(f"cannot create {adapter}: {os.strerror(error.errno or 0)}") from error
    hashes: dict[str, str] = {}
    arrived = 0
    for piece in offer.pieces:
        if piece.name != ARCHIVE and piece.name not in tarball.TAKEN:
            raise InputError(f"{offer.uri} offers {piece.name[:80]!a}, which no engine reads")
        target = archive if piece.name == ARCHIVE else adapter / piece.name
        hashes[piece.name] = transfer.fetch(piece, target, folder, offer.uri, meter, arrived)
        arrived += target.stat().st_size
        if piece.name == ARCHIVE:
            shutil.rmtree(adapter)  # of an earlier try, which may have ended in the middle
            adapter.mkdir()
            tarball.unpack(archive, adapter, offer.uri, meter.most_bytes)
            archive.unlink()
    meter.tell(arrived, arrived)
    return adapter, {name: sha256 for name, sha256 in hashes.items() if name != ARCHIVE}

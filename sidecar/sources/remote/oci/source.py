"""``oci://registry/repository[:tag][@sha256:…]``: one adapter, as files in layers or as tars.

The pin is the digest of the manifest that the URI names. The manifest is read whole and hashed, and it has
the digest of each layer: whoever stores or sends the bytes, they are those that the manifest's author pushed.
"""

from __future__ import annotations

import hashlib
from typing import Any

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.offer import ARCHIVE, Offer, Options, Piece
from lora_fs.sidecar.sources.remote.oci import manifest
from lora_fs.sidecar.sources.remote.oci.reference import DIGEST, reference
from lora_fs.sidecar.sources.remote.oci.registry import Repository
from lora_fs.sidecar.sources.uri import Uri

_ACCEPT = ", ".join((*manifest.MANIFESTS, *manifest.INDEXES))


class Oci:
    """One artifact."""

    def __init__(self, uri: Uri, options: Options) -> None:
        self._told = str(uri)
        self._reference = reference(uri)
        self._repository = Repository(uri, self._reference, options)

    def look(self) -> Offer:
        named, pin = self._manifest(self._reference.named)
        if named["mediaType"] in manifest.INDEXES:
            named, _ = self._manifest(manifest.only_manifest(self._told, named))
            if named["mediaType"] in manifest.INDEXES:
                raise InputError(f"{self._told}: its index leads to another index")
        chosen = manifest.choose(self._told, named)
        pieces = [self._piece(name, layer) for name, layer in chosen.files.items()]
        pieces += [self._piece(f"{ARCHIVE}{at or ''}", layer) for at, layer in enumerate(chosen.tars)]
        return Offer(self._told, pin, tuple(pieces))

    def close(self) -> None:
        """Nothing is held."""

    def _manifest(self, named: str) -> tuple[dict[str, Any], str]:
        """The manifest or index that a tag or digest names, and its digest.

        Raises:
            InputError: its bytes have another digest than the URI or the manifest says.
        """
        where = self._reference.manifest(named)
        data, announced = self._repository.body(where, _ACCEPT, manifest.MOST_BYTES)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        for wants in (named, announced):
            if DIGEST.fullmatch(wants) and wants != digest:
                raise InputError(
                    f"{self._told}: the manifest has the digest {digest}, and {wants} is asked for or "
                    "announced; it was damaged on its way, or replaced"
                )
        return manifest.read(self._told, data), digest

    def _piece(self, name: str, layer: manifest.Layer) -> Piece:
        read = self._repository.reader(self._reference.blob(layer.digest), layer.size_bytes)
        return Piece(name, layer.size_bytes, read, True, layer.digest.removeprefix("sha256:"))

"""What an ``oci://`` URI names: a registry, a repository, and a tag or a digest in it. Pure: no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.remote.connection import is_loopback
from lora_fs.sidecar.sources.uri import Uri, parse

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAMED = re.compile(
    rf"({_PART}(?:/{_PART})*)(?::([A-Za-z0-9_][A-Za-z0-9._-]{{0,127}}))?(?:@({DIGEST.pattern}))?"
)
MOST_REPOSITORY = 255
DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")  # the last one answers


@dataclass(frozen=True, slots=True)
class Reference:
    """An artifact.

    Attributes:
        base: the registry's URL: ``https://``, or ``http://`` where its host is this machine's loopback.
        named: the tag, or the digest where there is one: a digest beats the tag beside it.
    """

    base: Uri
    repository: str
    named: str

    @property
    def digest(self) -> str | None:
        """The manifest's digest, if the URI has it."""
        return self.named if DIGEST.fullmatch(self.named) else None

    def manifest(self, named: str) -> Uri:
        """Where the manifest lies that a tag or a digest names."""
        return parse(f"{self.base}/v2/{self.repository}/manifests/{named}")

    def blob(self, digest: str) -> Uri:
        """Where a blob lies."""
        return parse(f"{self.base}/v2/{self.repository}/blobs/{digest}")


def reference(uri: Uri) -> Reference:
    """Take the path of an ``oci://`` URI apart; without a tag it is ``latest``.

    Raises:
        InputError: it names no repository.
    """
    match = _NAMED.fullmatch("/".join(uri.path))
    if match is None or len(match[1]) > MOST_REPOSITORY:
        raise InputError(
            f"{uri}: write oci://registry/repository:tag or oci://registry/repository@sha256:…, the "
            "repository in lower case and the digest with 64 hex digits"
        )
    repository, tag, digest = match.groups()
    scheme = "http" if is_loopback(uri.place) else "https"
    place = DOCKER_HUB[-1] if uri.place in DOCKER_HUB else uri.place
    return Reference(parse(f"{scheme}://{place}"), repository, digest or tag or "latest")

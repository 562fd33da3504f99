"""Where everything lies on the volume, and what a file's name says. Pure: no I/O.

Every path is built here from checked segments; nothing else joins names to paths. The
name of a record or pointer tells which adapter and which generation it is, so that a
listing is enough to know what to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lora_fs.sidecar.model import SEGMENT, AdapterKey, Scope

MARKER = "lora-fs.json"
HEAD = "HEAD"
LEASES = ".leases"
REPLICAS = ".replicas"
ACTIVE = ".active"
INCOMING = ".incoming"
TEMPORARY = ".tmp-"

# One spelling a generation: eight digits, or more without a leading zero.
_GENERATION = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})\.@(?P<generation>[0-9]{8}|[1-9][0-9]{8,17})"
    r"(?:\.(?P<token>[0-9a-f]{32}))?\.json"
)


class Generation(NamedTuple):
    """A file's name taken apart. Ordered: the greatest of a name is the one in force.

    ``token`` is empty on volumes with link(); on others it tells siblings apart.
    """

    generation: int
    token: str


def generation_name(name: str, generation: int, token: str = "") -> str:
    """``a1.@00000002.json``, or with a token ``a1.@00000002.<token>.json``."""
    suffix = f".{token}" if token else ""
    return f"{name}.@{generation:08d}{suffix}.json"


def parse_generation(file_name: str) -> tuple[str, Generation] | None:
    """Take a file's name apart; None if it is not a generation file."""
    match = _GENERATION.fullmatch(file_name)
    if match is None or int(match["generation"]) < 1:
        return None
    return match["name"], Generation(int(match["generation"]), match["token"] or "")


def latest_by_name(file_names: Iterable[str]) -> dict[str, Generation]:
    """The greatest generation of each name in a listing."""
    latest: dict[str, Generation] = {}
    for file_name in file_names:
        parsed = parse_generation(file_name)
        if parsed is not None and parsed[1] > latest.get(parsed[0], Generation(0, "")):
            latest[parsed[0]] = parsed[1]
    return latest


def is_segment(name: str) -> bool:
    """Whether a folder's name may be a namespace, model, revision or adapter."""
    return SEGMENT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one registry."""

    root: Path

    @property
    def marker(self) -> Path:
        return self.root / MARKER

    @property
    def head(self) -> Path:
        return self.root / HEAD

    @property
    def replicas(self) -> Path:
        return self.root / REPLICAS

    @property
    def leases(self) -> Path:
        return self.root / LEASES

    def lease(self, task: str) -> Path:
        return self.leases / f"{task}.lock"

    def replica(self, replica_id: str) -> Path:
        return self.replicas / f"{replica_id}.json"

    def scope(self, scope: Scope) -> Path:
        return self.root / scope.namespace / scope.model

    def revision(self, scope: Scope, revision: str) -> Path:
        return self.scope(scope) / revision

    def active(self, scope: Scope) -> Path:
        return self.scope(scope) / ACTIVE

    def incoming(self, scope: Scope) -> Path:
        return self.scope(scope) / INCOMING

    def artifact(self, key: AdapterKey) -> Path:
        """The folder a revision's own files lie in (a linked one lies elsewhere)."""
        return self.revision(key.scope, key.revision) / key.name

    def resolve(self, path: str) -> Path:
        """A record's ``spec.path``: relative to the root, or absolute when linked."""
        return self.root / path

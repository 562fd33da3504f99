"""The paths of a registry, and the grammar of its file names. Pure: no I/O.

This module alone builds paths, from checked segments. The name of a record or pointer says which adapter
and which generation it is, so a listing tells what to read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from lora_fs.sidecar.model import SEGMENT, AdapterKey, Scope

MARKER = "lora-fs.json"
HEAD = "HEAD"
LEASES = ".leases"
REPLICAS = ".replicas"
EVENTS = ".events"
ACTIVE = ".active"
INCOMING = ".incoming"
QUOTA = ".quota.json"
EVALUATIONS = ".evaluations"
TEMPORARY = ".tmp-"
REGISTERING = ".registering"  # in a copy that has its place and no record yet: nobody dropped it
FETCH = "fetch-"  # in .incoming a download under way, in .leases its lease and where it went

# One spelling a generation: eight digits, or more without a leading zero.
_GENERATION = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})\.@(?P<generation>[0-9]{8}|[1-9][0-9]{8,17})"
    r"(?:\.(?P<token>[0-9a-f]{32}))?\.json"
)


class Generation(NamedTuple):
    """A generation file's number and token. Ordered: the greatest of a name is in force.

    ``token`` is empty on volumes with link(); on others it tells siblings apart.
    """

    generation: int
    token: str


def generation_name(name: str, generation: int, token: str = "") -> str:
    """Return ``a1.@00000002.json``, or with a token ``a1.@00000002.<token>.json``."""
    suffix = f".{token}" if token else ""
    return f"{name}.@{generation:08d}{suffix}.json"


def parse_generation(file_name: str) -> tuple[str, Generation] | None:
    """Parse a file's name. Returns None if it is not a generation file."""
    match = _GENERATION.fullmatch(file_name)
    if match is None:
        return None
    name, generation, token = match.groups("")
    found = Generation(int(generation), token) if token else _generation(int(generation))
    return (sys.intern(name), found) if found.generation else None


@lru_cache(maxsize=1024)
def _generation(number: int) -> Generation:
    """One object for all the names of a low generation."""
    return Generation(number, "")


class Place(NamedTuple):
    """Whose generation a file is; ``revision`` is None for a pointer."""

    scope: Scope
    revision: str | None
    name: str
    generation: Generation

    @property
    def key(self) -> AdapterKey | tuple[Scope, str]:
        if self.revision is None:
            return self.scope, self.name
        return AdapterKey(*self.scope, self.revision, self.name)


def parse_place(path: str) -> Place | None:
    """Parse the path of a generation file, relative to the root. Returns None if it is not one."""
    segments = path.split("/")
    parsed = parse_generation(segments[-1])
    if len(segments) != 4 or parsed is None or not all(map(is_segment, segments[:2])):
        return None
    namespace, model, folder, _ = segments
    if folder != ACTIVE and not is_segment(folder):
        return None
    return Place(Scope(namespace, model), None if folder == ACTIVE else folder, *parsed)


def parse_evaluation(path: str) -> AdapterKey | None:
    """Parse the path of an evaluation, relative to the root. Returns None if it is not one."""
    segments = path.removesuffix(".json").split("/")
    if not path.endswith(".json") or len(segments) != 5 or segments.pop(2) != EVALUATIONS:
        return None
    return AdapterKey(*segments) if all(map(is_segment, segments)) else None


def is_segment(name: str) -> bool:
    """Return whether a folder's name may be a namespace, model, revision or adapter."""
    return SEGMENT.fullmatch(name) is not None


def pack(names: Sequence[str]) -> str:
    """A folder's names as ``Listing.packed`` has them: no name holds a slash."""
    return "/".join(names)


@dataclass(frozen=True, slots=True)
class Listing:
    """The parsed names of one folder.

    Attributes:
        packed: all names in the listing's order, in one text: a third of a list's memory.
        records: the newest generation of each name (in ``.active``: of each pointer).
        folders: names that an artifact's folder may have.
        siblings: names whose newest generation has several files, and how many.
    """

    packed: str = ""
    records: Mapping[str, Generation] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    siblings: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Sequence[str], last: Listing | None = None) -> Listing:
        """Parse a folder's names. If names were only added to ``last``, parse those alone."""
        fresh: Collection[str] = names
        before = set(last.packed.split("/")) if last is not None else set()
        if last is None or any(not gone.startswith(".") for gone in before.difference(names, [""])):
            last = cls()
        else:
            fresh = set(names) - before
        records, siblings = dict(last.records), dict(last.siblings)
        folders = set(last.folders)
        for file_name in fresh:
            if "@" not in file_name:
                if SEGMENT.fullmatch(file_name):
                    folders.add(sys.intern(file_name))
                continue
            parsed = parse_generation(file_name)
            if parsed is None:
                continue
            name, found = parsed
            known = records.get(name)
            if known is not None and known.generation == found.generation:
                siblings[name] = siblings.get(name, 1) + 1
            elif known is not None and known < found:
                siblings.pop(name, None)
            if known is None or known < found:
                records[name] = found
        return cls(pack(names), records, frozenset(folders), siblings)

    def histories(self) -> dict[str, list[Generation]]:
        """Return all listed generations of each name, in no order."""
        found: dict[str, list[Generation]] = {}
        for file_name in self.packed.split("/"):
            parsed = parse_generation(file_name)
            if parsed is not None:
                found.setdefault(parsed[0], []).append(parsed[1])
        return found


class Layout:
    """The paths of one registry."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.marker, self.head = root / MARKER, root / HEAD
        self.leases, self.replicas, self.events = root / LEASES, root / REPLICAS, root / EVENTS

    def lease(self, task: str) -> Path:
        return self.leases / f"{task}.lock"

    def replica(self, replica_id: str) -> Path:
        return self.replicas / f"{replica_id}.json"

    def event_list(self, replica_id: str) -> Path:
        return self.events / f"{replica_id}.json"

    def quota(self, namespace: str) -> Path:
        return self.root / namespace / QUOTA

    def scope(self, scope: Scope) -> Path:
        return self.root / scope.namespace / scope.model

    def revision(self, scope: Scope, revision: str) -> Path:
        return self.scope(scope) / revision

    def active(self, scope: Scope) -> Path:
        return self.scope(scope) / ACTIVE

    def incoming(self, scope: Scope) -> Path:
        return self.scope(scope) / INCOMING

    def evaluations(self, scope: Scope) -> Path:
        """Return the folder that has a folder of evaluations for each revision."""
        return self.scope(scope) / EVALUATIONS

    def evaluation(self, key: AdapterKey) -> Path:
        """Return the file of a revision's newest evaluation."""
        return self.evaluations(key.scope) / key.revision / f"{key.name}.json"

    def artifact(self, key: AdapterKey) -> Path:
        """Return the folder of a revision's own files; a linked adapter's files are elsewhere."""
        return self.revision(key.scope, key.revision) / key.name

    def key_of(self, artifact: Path) -> AdapterKey | None:
        """Whose folder a path is; None if it is nobody's."""
        parts = artifact.relative_to(self.root).parts if artifact.is_relative_to(self.root) else ()
        return AdapterKey(*parts) if len(parts) == 4 and all(map(is_segment, parts)) else None

    def resolve(self, path: str) -> Path:
        """A record's ``spec.path``: relative to the root, or absolute when linked."""
        return self.root / path

"""What a disk may hold after the power went: a writer's calls replayed, the unsynced ones dropped.

The model is stricter than any journal: a file's bytes are there for certain once that file was
synced, a name once its folder was, and whatever was not synced may be there or not, each by itself.
A rename is one step. Calls come from a trace; outcomes are trees to be written out and read.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.crash.tracing import Acknowledged

RECORDED = [
    "-e",
    "trace=openat,open,creat,write,pwrite64,writev,fsync,fdatasync,link,linkat,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,ftruncate,truncate,copy_file_range,sendfile",
    *("-xx", "-s", "1000000"),
]

ROOT = 0  # the inode of the registry's root


@dataclass(frozen=True)
class Names:
    """Names given or taken (inode None) in folders, as one step."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True)
class Bytes:
    """Bytes appended to a file."""

    inode: int
    data: bytes


@dataclass(frozen=True)
class Sync:
    """fsync of a file or folder; ``path`` is what it was called."""

    inode: int
    path: str


Step = Names | Bytes | Sync | Acknowledged


@dataclass
class Tree:
    """Folders by inode, with their names; files by inode, with their bytes."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Tree:
        tree, inodes = cls(), {folder: ROOT}
        for path in sorted(folder.rglob("*")):
            inode = inodes[path] = len(inodes)
            tree.folders[inodes[path.parent]][path.name] = inode
            if path.is_dir():
                tree.folders[inode] = {}
            else:
                tree.files[inode] = path.read_bytes()
        return tree

    def find(self, path: PurePosixPath) -> int | None:
        inode: int | None = ROOT
        for part in path.parts:
            inode = self.folders.get(inode if inode is not None else -1, {}).get(part)
        return inode

    def copy(self) -> Tree:
        return Tree({inode: dict(names) for inode, names in self.folders.items()}, dict(self.files))

    def apply(self, step: Names) -> None:
        for folder, name, inode in step.changes:
            if inode is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = inode

    def lines(self, inode: int = ROOT, at: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Every path below, with its bytes; None for a folder."""
        for name, child in sorted(self.folders[inode].items()):
            path = f"{at}/{name}" if at else name
            if child in self.folders:
                yield path, None
                yield from self.lines(child, path)
            else:
                yield path, self.files.get(child, b"")

    def write(self, target: Path, like: Path) -> Path:
        """Write it out; files that ``like`` has keep the times they have there."""
        target.mkdir()
        for path, data in self.lines():
            if data is None:
                (target / path).mkdir()
            else:
                (target / path).write_bytes(data)
                if (like / path).exists():
                    shutil.copystat(like / path, target / path)
        return target

    def digest(self) -> str:
        return hashlib.sha256(repr(list(self.lines())).encode()).hexdigest()


_LINE = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_HANDLE = re.compile(r"^(?:AT_FDCWD|\d+)<([^>]*)>")


def _decoded(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class Recorder:
    """Makes steps of a trace's lines, following names to inodes as the kernel did."""

    def __init__(self, root: Path, template: Path) -> None:
        self.start = Tree.of(template)
        self.steps: list[Step] = []
        self._root, self._now = root, self.start.copy()
        self._next = 1 + max([*self.start.folders, *self.start.files])

    def line(self, text: str) -> None:
        match = _LINE.match(text)
        if match is None or match[3].startswith("-"):
            return
        call, arguments = match[1], match[2]
        assert not re.search(r'"\.\.\.', arguments), "a write was cut in the trace"
        if call == "write" and self._handle(arguments).startswith("pipe:"):
            self._acknowledged(_decoded(_TEXT.findall(arguments)[0][0]).decode())
            return
        if call in ("write", "fsync", "fdatasync"):
            path = self._inside(self._handle(arguments))
            inode = self._now.find(path) if path is not None else None
            if path is None or inode is None:
                return  # of no file on the volume, or of one that has no name any more
            if call == "write":
                self._step(Bytes(inode, _decoded(_TEXT.findall(arguments)[0][0])[: int(match[3])]))
            else:
                self.steps.append(Sync(inode, str(path)))
            return
        paths = self._paths(arguments)
        if all(path is None for path in paths):
            return
        self._named(call, arguments, paths)

    def _named(self, call: str, arguments: str, paths: list[PurePosixPath | None]) -> None:
        assert None not in paths, f"{call} between the volume and another: {arguments}"
        first, *more = [path for path in paths if path is not None]
        known = self._now.find(first)
        if call in ("open", "openat", "creat"):
            if "O_CREAT" in arguments and known is None:
                self._step(Names((self._place(first, self._new()),)))
            else:
                assert "O_TRUNC" not in arguments, f"a file is changed in place: {first}"
        elif call in ("mkdir", "mkdirat"):
            inode = self._new()
            self._now.folders[inode] = self.start.folders.setdefault(inode, {}).copy()
            self._step(Names((self._place(first, inode),)))
        elif call in ("unlink", "unlinkat", "rmdir"):
            self._step(Names((self._place(first, None),)))
        elif call in ("link", "linkat"):
            self._step(Names((self._place(more[0], known),)))
        elif call in ("rename", "renameat", "renameat2"):
            assert "EXCHANGE" not in arguments
            self._step(Names((self._place(first, None), self._place(more[0], known))))
        else:
            raise AssertionError(f"{call} is not part of the model")

    def _step(self, step: Names | Bytes) -> None:
        if isinstance(step, Names):
            self._now.apply(step)
        self.steps.append(step)

    def _acknowledged(self, text: str) -> None:
        kind, _, rest = text.strip().partition(" ")
        if kind == "ACK":
            series, generation, token = rest.split(" ")
            self.steps.append(Acknowledged(series, int(generation), token))

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _place(self, path: PurePosixPath, inode: int | None) -> tuple[int, str, int | None]:
        folder = self._now.find(path.parent)
        assert folder is not None
        return folder, path.name, inode

    def _handle(self, arguments: str) -> str:
        match = _HANDLE.match(arguments)
        return _plain(match[1]) if match is not None else ""

    def _paths(self, arguments: str) -> list[PurePosixPath | None]:
        found = []
        for base, text in re.findall(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:\\x[0-9a-f]{2})*)"', arguments):
            found.append(self._inside(str(PurePosixPath(_plain(base) or "/", _decoded(text).decode()))))
        return found

    def _inside(self, path: str) -> PurePosixPath | None:
        try:
            return PurePosixPath(path).relative_to(self._root)
        except ValueError:
            return None


def _plain(text: str) -> str:
    return _decoded(text).decode() if text.startswith("\\x") else text


def recorded(root: Path, template: Path, trace: tuple[str, ...]) -> Recorder:
    recorder = Recorder(root, template)
    for line in trace:
        recorder.line(line)
    return recorder


@dataclass(frozen=True)
class Loss:
    """One thing that the disk may hold. ``at``: how many steps were made when the power went."""

    at: int
    tree: Tree
    acknowledged: tuple[Acknowledged, ...]
    kept: str


def losses(
    recorder: Recorder, *, each: bool, synced: Callable[[Sync], bool] = lambda _: True
) -> Iterator[Loss]:
    """What the disk may hold, each tree once: after every other step, the last one included.

    Args:
        each: after every step, and also with one unsynced step alone kept, or lost.
        synced: False for a sync that is to be left out, as if the writer had forgotten it.
    """
    seen: set[tuple[str, tuple[Acknowledged, ...], bool]] = set()
    for at in range(len(recorder.steps) % 2 if not each else 0, len(recorder.steps) + 1, 1 if each else 2):
        steps = recorder.steps[:at]
        acknowledged = tuple(step for step in steps if isinstance(step, Acknowledged))
        durable = _durable([step for step in steps if not isinstance(step, Sync) or synced(step)])
        open_ = [n for n, step in enumerate(steps) if isinstance(step, Names | Bytes) and step not in durable]
        certain = {n for n, step in enumerate(steps) if step in durable}
        names = {n for n in open_ if isinstance(steps[n], Names)}
        choices = [("nothing unsynced", certain), ("all", certain | set(open_)), ("names", certain | names)]
        if each:
            choices += [(f"{steps[n]} alone", certain | {n}) for n in open_]
            choices += [(f"all but {steps[n]}", (certain | set(open_)) - {n}) for n in open_]
        for kept, chosen in choices:
            for zeros in (False, True):
                tree = _outcome(recorder.start, steps, chosen, zeros=zeros)
                key = tree.digest(), acknowledged, at == len(recorder.steps)
                if key not in seen:
                    seen.add(key)
                    yield Loss(at, tree, acknowledged, kept + " (zeros)" * zeros)


def _durable(steps: list[Step]) -> set[Names | Bytes]:
    """The steps that a later sync covers; a rename is covered by its new folder's."""
    durable: set[Names | Bytes] = set()
    synced: set[int] = set()
    for step in reversed(steps):
        if isinstance(step, Sync):
            synced.add(step.inode)
        elif (isinstance(step, Bytes) and step.inode in synced) or (
            isinstance(step, Names) and step.changes[-1][0] in synced
        ):
            durable.add(step)
    return durable


def _outcome(start: Tree, steps: list[Step], chosen: set[int], *, zeros: bool) -> Tree:
    tree = start.copy()
    for number, step in enumerate(steps):
        if isinstance(step, Names) and number in chosen:
            tree.apply(step)
        elif isinstance(step, Bytes) and (zeros or number in chosen):
            data = step.data if number in chosen else bytes(len(step.data))
            tree.files[step.inode] = tree.files.get(step.inode, b"") + data
    return tree

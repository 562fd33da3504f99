"""No NFS 4 server is asked to delegate a file: a lost host would hold up the next writer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.registry.volume import atomic, mounts
from lora_fs.sidecar.registry.volume.mounts import Delegations


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Each file that is opened: its name, and whether for direct reads. This machine's own takes none."""
    monkeypatch.setattr(atomic, "_delegations", Delegations())
    calls, real = list[tuple[str, bool]](), os.open

    def open_one(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        calls.append((Path(path).name, bool(flags & os.O_DIRECT)))
        return real(path, flags & ~os.O_DIRECT, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_one)
    return calls


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A registry's files."""
    for name in ("lora-fs.json", "HEAD", "default/tiny/v1/a.@00000001.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def mounted_as(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel say that a folder is on a filesystem of that kind."""
    device = os.stat(root).st_dev
    line = f"36 25 {os.major(device)}:{os.minor(device)} / {root} rw,relatime - {kind} server:/ rw\n"
    (root / "mountinfo").write_text(line)
    monkeypatch.setattr(mounts, "MOUNTS", root / "mountinfo")


def read_all(root: Path) -> None:
    for path in (root / "lora-fs.json", root / "HEAD", root / "default/tiny/v1/a.@00000001.json"):
        assert atomic.read_bytes(path) == path.relative_to(root).as_posix().encode()


def test_after_the_marker_all_is_read_directly(
    root: Path, opened: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file, which nobody replaces, tells which filesystem it is, for all below its folder."""
    mounted_as("nfs4", root, monkeypatch)
    read_all(root)
    assert opened == [("lora-fs.json", False), ("HEAD", True), ("a.@00000001.json", True)]


@pytest.mark.parametrize("kind", ["nfs", "ext4", "fuse.glusterfs", "cifs"])
def test_where_nothing_is_delegated_nothing_changes(
    kind: str, root: Path, opened: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No direct read: a local filesystem would ask its disk each time. The mounts are read once."""
    mounted_as(kind, root, monkeypatch)
    read_all(root)
    mounts.MOUNTS.unlink()
    read_all(root)
    assert {direct for _, direct in opened} == {False}


@pytest.mark.parametrize("call", ["open", "read"])
def test_another_filesystem_takes_the_place(
    call: str, root: Path, opened: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may refuse direct reads, at the open or at the read: the file is then read as usual."""
    mounted_as("nfs4", root, monkeypatch)
    read_all(root)
    mounted_as("tmpfs", root, monkeypatch)
    del opened[:]
    refused, real = list[str](), getattr(os, call)

    def refuse(what: Any, *args: Any) -> Any:
        if args[0] & os.O_DIRECT if call == "open" else opened[-1][1]:
            refused.append(call)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(what, *args)

    monkeypatch.setattr(os, call, refuse)
    read_all(root)
    read_all(root)
    assert refused == [call]
    assert [name for name, direct in opened if not direct] == 2 * ["lora-fs.json", "HEAD", "a.@00000001.json"]


def test_who_cannot_tell_learns_nothing(
    root: Path, opened: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mounts could not be read once: they are read again at the next file."""
    mounted_as("nfs4", root, monkeypatch)
    at = mounts.MOUNTS
    monkeypatch.setattr(mounts, "MOUNTS", root / "nowhere")
    read_all(root)
    monkeypatch.setattr(mounts, "MOUNTS", at)
    read_all(root)
    read_all(root)
    assert [direct for _, direct in opened] == [False] * 4 + [True] * 5

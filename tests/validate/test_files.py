"""Files that are not files: validation refuses them at once and reads nothing through them."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.validate import Expectation, files, looks_preallocated, validate
from lora_fs.sidecar.validate.weights import contents
from tests.validate.conftest import CONFIG_FILE, WEIGHTS_FILE

FILES = (CONFIG_FILE, WEIGHTS_FILE)


def codes(folder: Path) -> set[str]:
    report = validate(folder)
    assert not report.ok
    return {finding.code for finding in report.errors}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", FILES)
def test_fifo(adapter: Path, name: str) -> None:
    """A FIFO does not block: stock vLLM's server freezes on one."""
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    assert codes(adapter) == {"not-regular-file"}
    assert not looks_preallocated(adapter)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", FILES)
def test_socket(adapter: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is refused as what it is."""
    (adapter / name).unlink()
    monkeypatch.chdir(adapter)  # a socket's path may have 107 characters
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        assert codes(adapter) == {"not-regular-file"}


@pytest.mark.parametrize("name", FILES)
def test_folder_in_place_of_a_file(adapter: Path, name: str) -> None:
    """A folder with a file's name is refused."""
    (adapter / name).unlink()
    (adapter / name).mkdir()
    assert codes(adapter) == {"not-regular-file"}


@pytest.mark.parametrize("target", ["/etc/passwd", "elsewhere", "/dev/zero", CONFIG_FILE])
@pytest.mark.parametrize("name", FILES)
def test_symlink(adapter: Path, name: str, target: str) -> None:
    """A symlink is never followed, wherever it leads; the hint says how to copy."""
    (adapter / name).unlink()
    (adapter / name).symlink_to(target)
    assert codes(adapter) == {"symlink"}
    assert "cp -rL" in validate(adapter).errors[0].hint


def test_folder_may_be_a_symlink(adapter: Path, tmp_path: Path) -> None:
    """The folder itself is the caller's choice: a link to it is followed."""
    (tmp_path / "link").symlink_to(adapter)
    assert validate(tmp_path / "link").ok


def test_file_in_place_of_the_folder(adapter: Path) -> None:
    """A file given as the adapter is a finding, and so is a name no file can have."""
    assert codes(adapter / CONFIG_FILE) == {"missing-folder"}
    assert codes(Path("a\0b")) == {"missing-folder"}
    assert codes(Path("x" * 5000)) == {"missing-folder"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", FILES)
def test_unreadable_file(adapter: Path, name: str) -> None:
    """A file without permission is not a missing file."""
    (adapter / name).chmod(0)
    assert codes(adapter) == {"permission"}


@pytest.mark.parametrize("call", ["open", "preadv", "listdir", "fstat"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_failing_volume(adapter: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that fails raises and is never read as "missing"; no permission is a finding."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    told = number == errno.EACCES and call in ("open", "listdir")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if told:
            assert "permission" in codes(adapter)
        else:
            with pytest.raises(VolumeUnavailable):
                validate(adapter)


def test_stale_handle_is_opened_again(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ESTALE means the name resolves anew: one is not told to the caller."""
    real, calls = os.open, [0]

    def stale_once(name: str, flags: int, *, dir_fd: int | None = None) -> int:
        calls[0] += 1
        if calls[0] == 1:
            raise OSError(errno.ESTALE, "stale")
        return real(name, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", stale_once)
    assert validate(adapter).ok


def test_file_that_shrinks_under_the_reader(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cut short after its header was read is truncated, not a crash."""

    def shrink(_: int) -> None:
        os.truncate(adapter / WEIGHTS_FILE, 700)

    monkeypatch.setattr(files, "SMALL_BYTES", 0)  # as one that is too large to be read at once
    monkeypatch.setattr(contents, "BUFFER_BYTES", 256)
    data = (adapter / WEIGHTS_FILE).read_bytes()
    assert len(data) > 700
    report = validate(adapter, Expectation(), progress=shrink)
    assert {finding.code for finding in report.errors} == {"truncated"}


def test_small_file_that_shrinks_once_it_is_open(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file is read whole: one that is shorter by then is truncated, too."""
    real, size = os.fstat, (adapter / WEIGHTS_FILE).stat().st_size

    def shrink(fd: int) -> os.stat_result:
        status = real(fd)
        if status.st_size == size:
            os.truncate(adapter / WEIGHTS_FILE, size - 8)
        return status

    monkeypatch.setattr(os, "fstat", shrink)
    assert {finding.code for finding in validate(adapter).errors} == {"truncated"}


def test_what_was_not_read_whole_is_not_kept(tmp_path: Path) -> None:
    """The zeros that stand where nothing was read are nobody's weights."""
    (tmp_path / "short").write_bytes(b"half")
    with (tmp_path / "short").open("rb") as file:
        longer = files.RegularFile(file.fileno(), "short", 8)
        for _ in range(2):
            with pytest.raises(files.Refused, match="shorter"):
                longer.read(4, 4)


def test_no_descriptor_is_left_open(adapter: Path) -> None:
    """Good or bad, validation closes what it opened."""
    before = set(os.listdir("/proc/self/fd"))
    validate(adapter)
    (adapter / CONFIG_FILE).write_text("{")
    (adapter / WEIGHTS_FILE).write_bytes(b"x")
    validate(adapter)
    looks_preallocated(adapter)
    assert set(os.listdir("/proc/self/fd")) == before

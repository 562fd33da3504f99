"""The volume fills up, turns read-only, is unmounted or hangs: nothing served is disturbed.

On a real mount, in this order, each test leaving the volume as it found it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import SidecarReplica
from lora_fs.demo.waiting import wait_until
from tests.e2e import mounts

SIZE_MIB = 8
TOLD_S = 60.0
LEAVES_S = 60.0
FAILED = 1

Answers = dict[str, str]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the volume's filesystem is mounted for good."""
    if not mounts.may_mount():
        pytest.skip("mounting needs root and /dev/fuse, which this machine does not give")
    folder = tmp_path_factory.mktemp("disk")
    with mounts.sized(folder, SIZE_MIB):
        yield folder


@pytest.fixture(scope="module")
def volume_root(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where it is mounted for the replicas, as a pod's volume is."""
    folder = tmp_path_factory.mktemp("volume")
    mounts.mount("--bind", str(disk), str(folder))
    yield folder
    mounts.detach(folder)


@pytest.fixture(scope="module")
def expected(
    pair: Pair[SidecarReplica], register: Callable[..., None], adapters: Callable[[int], Path]
) -> Answers:
    """Three adapters, and what both answer."""
    for seed, name in enumerate(("one", "two", "three"), start=10):
        register(name, adapters(seed))
    return {name: pair.answer(name) for name in ("one", "two", "three")}


def told(pair: Pair[SidecarReplica], condition: str) -> None:
    """Wait until a reports ``condition``."""
    wait_until(f"{condition} is told", lambda: condition in pair.a.http.get("/readyz").text, timeout_s=TOLD_S)


def undisturbed(pair: Pair[SidecarReplica], expected: Answers) -> None:
    """All are listed and answered as ever, and both are ready."""
    for replica in pair.both:
        assert set(expected) <= replica.names()
        assert replica.http.get("/health").status_code == 200
        assert replica.http.get("/readyz").status_code == 200
    assert {name: pair.answer(name) for name in expected} == expected


def refused_over_http(pair: Pair[SidecarReplica], folder: Path, name: str) -> str:
    """Try to load through a; returns the reason it gives with its 503."""
    body = {"lora_name": name, "lora_path": str(folder)}
    response = pair.a.http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 503, response.text
    return response.text


def test_a_full_volume(
    pair: Pair[SidecarReplica],
    disk: Path,
    expected: Answers,
    adapters: Callable[[int], Path],
    register: Callable[..., None],
) -> None:
    """Registering says that it is full; what was there serves on; freeing space is enough."""
    filler = disk / "filler"
    with filler.open("wb") as file, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        os.posix_fallocate(file.fileno(), 0, 2 * SIZE_MIB << 20)
    for size in (1 << 16, 1 << 12):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            for _ in range(SIZE_MIB << 8):
                file.write(b"\0" * size)
    ran = pair.volume.try_run("register", "late", str(adapters(13)))
    assert (ran.exit_code, "full" in ran.stderr) == (FAILED, True), ran
    assert "full" in refused_over_http(pair, adapters(13), "late")
    told(pair, "StatusNotWritten")
    undisturbed(pair, expected)
    filler.unlink()
    register("late", adapters(13))
    assert pair.answer("late")


def test_a_read_only_volume(
    pair: Pair[SidecarReplica], volume_root: Path, expected: Answers, adapters: Callable[[int], Path]
) -> None:
    """Registering says so; adapters that were never loaded here are loaded all the same."""
    pair.volume.run("register", "unused", str(adapters(14)))
    pair.wait_listed("unused")
    mounts.mount("-o", "remount,bind,ro", str(volume_root))
    try:
        ran = pair.volume.try_run("register", "never", str(adapters(15)))
        assert (ran.exit_code, "read-only" in ran.stderr) == (FAILED, True), ran
        assert "read-only" in refused_over_http(pair, adapters(15), "never")
        told(pair, "StatusNotWritten")
        undisturbed(pair, expected)
        assert pair.answer("unused")
    finally:
        mounts.mount("-o", "remount,bind,rw", str(volume_root))
    pair.volume.run("unregister", "unused", "--wait", "20")
    pair.wait_delisted("unused")


def test_an_unmounted_volume(
    pair: Pair[SidecarReplica],
    disk: Path,
    volume_root: Path,
    expected: Answers,
    register: Callable[..., None],
    adapters: Callable[[int], Path],
) -> None:
    """The empty folder beneath is not an empty registry; mounting it again is enough."""
    mounts.detach(volume_root)
    try:
        told(pair, "VolumeUnavailable")
        undisturbed(pair, expected)
        assert [path.name for path in volume_root.iterdir() if path.name != ".replicas"] == []
    finally:
        mounts.mount("--bind", str(disk), str(volume_root))
    register("back", adapters(16))
    assert pair.answer("back")


def test_a_volume_that_hangs(
    pair: Pair[SidecarReplica],
    volume_root: Path,
    expected: Answers,
    register: Callable[..., None],
    adapters: Callable[[int], Path],
) -> None:
    """Whoever looks into it waits for ever; no request does, and it is told."""
    with mounts.hanging(volume_root):
        told(pair, "VolumeStalled")
        undisturbed(pair, expected)
    register("awake", adapters(17))
    assert pair.answer("awake")
    assert "VolumeStalled" not in pair.a.http.get("/readyz").text


def test_a_sidecar_leaves_a_volume_that_hangs(
    pair: Pair[SidecarReplica], volume_root: Path, expected: Answers
) -> None:
    """SIGTERM ends it in bounded time; the kernel may keep a thread until the volume answers."""
    with mounts.hanging(volume_root):
        told(pair, "VolumeStalled")
        pair.a.sidecar.terminate()
        wait_until("it listens no more", lambda: not listens(pair.a.url), timeout_s=LEAVES_S)
    assert pair.a.sidecar.wait_ended(timeout_s=LEAVES_S)
    pair.a.start_sidecar()
    pair.a.sidecar.wait_ready("/readyz")
    undisturbed(pair, expected)


def listens(url: str) -> bool:
    """Whether a new connection is taken."""
    try:
        httpx.get(f"{url}/health", **LOCAL)
    except httpx.TransportError:
        return False
    return True

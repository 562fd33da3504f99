"""A lease whose holder died on another host: had on the other mount within the lease's time and 2 s.

The holder has host name and process numbers of its own, as in another pod: nobody can ask whether its
process lives. Short mode takes leases of 3 s, long mode the real ones: a mount
may show what the other one wrote a second later, and a busy machine keeps a holder from refreshing its lease.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.registry.volume.leases import lease
from tests.filesystems import serve
from tests.filesystems.rigs import Mounted

CLONE_NEWUTS, CLONE_NEWPID = 0x0400_0000, 0x2000_0000
ELSEWHERE = "elsewhere"
TAKEN_WITHIN_S = 2.0  # beyond the lease's own time
ALIVE = 1.5  # leases long nobody gets it from a holder that lives
FLAVOUR = {"sshfs": "tuned"}


def hold(path: Path) -> tuple[int, int]:
    """Have a process of another host take the lease; its parent's number, and its own."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(CLONE_NEWUTS | CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
        socket.sethostname(ELSEWHERE)
        holder = os.fork()
        if holder == 0:
            with lease(path, wait_s=5.0) as had:
                os.write(tells, b"had" if had else b"not")
                signal.pause()
        os.write(tells, f"{holder:10}".encode())
        os.waitpid(holder, 0)
        os._exit(0)
    os.close(tells)
    with os.fdopen(told, "rb") as reader:
        said = reader.read(13).decode()
    assert "had" in said, said
    return child, int(said.replace("had", ""))


def taken_over(held: Path, asked: Path, lease_s: float) -> float:
    """Seconds from the holder's death until who kept asking on the other mount has it."""
    leases.LEASE_S = leases.ABANDONED_S = lease_s  # of this process inside the rig alone
    held.parent.mkdir()
    serve.wait_for(f"the folder of {asked}", asked.parent.is_dir, held)
    parent, holder = hold(held)
    assert f"\nhost={ELSEWHERE}?" in held.read_text()
    alive_until = time.monotonic() + ALIVE * lease_s
    while time.monotonic() < alive_until:
        with lease(asked, wait_s=0.1) as had:
            assert not had, "taken from a holder that lives"
    os.kill(holder, signal.SIGKILL)
    died = time.monotonic()
    os.waitpid(parent, 0)
    while True:
        with lease(asked, wait_s=0.1) as had:
            if had:
                return time.monotonic() - died
        assert time.monotonic() - died < 10 * lease_s + 10


@pytest.mark.parametrize("volume", ["tmpfs", "glusterfs", "sshfs", "nfs"], indirect=True)  # s3fs keeps none
@pytest.mark.parametrize("lease_s", [3.0, pytest.param(leases.LEASE_S, marks=pytest.mark.long)])
def test_a_lease_of_another_host_is_had_in_time(volume: Mounted, lease_s: float) -> None:
    """Never from one that lives; from a dead one within the lease's time and 2 s."""
    here, there = volume.pair(FLAVOUR.get(volume.name, "plain"))
    name = f"lease-{lease_s:.0f}"
    took_s = volume.run(taken_over, here / name / "a.lock", there / name / "a.lock", lease_s)
    print(f"{volume.name}: taken over {took_s:.2f} s after the death of a holder of {lease_s:.0f} s")
    assert took_s <= lease_s + TAKEN_WITHIN_S

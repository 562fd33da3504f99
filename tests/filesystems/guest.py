"""Inside a virtual machine of its own kernel, as its first process: an NFS server, a client of it, or all.

Usage: guest.py FOLDER ROLE. The machine's root is the host's, by hostfs. ``alone`` exports an ext4
filesystem and mounts it twice for each flavour of ``serve``, from network namespaces with host names of
their own. ``server`` exports it to other machines, ``a`` and ``b``, which mount it once each. Then a machine
answers calls: a call is a file in ``FOLDER/calls/ROLE``, and so is its answer. Nothing of the host is
entered by a namespace here, so functions and their arguments are pickled: module and name.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.02
CLONE_NEWUTS, CLONE_NEWNET = 0x0400_0000, 0x4000_0000
FINIT_MODULE = 313  # x86-64
UBDA = os.makedev(98, 0)
MODULES = Path("/usr/lib/uml/modules")
EXPORT = "/mnt/export"
SIDES = ("a", "b")
LIBC = ctypes.CDLL(None, use_errno=True)


def run(*words: str | Path) -> None:
    """Run a command to its end; what it says goes to the console."""
    print("+", *words, flush=True)
    subprocess.run(list(map(str, words)), check=True)


def load(name: str, done: set[str]) -> None:
    """Load a module of this kernel with what it depends on, which its own file names."""
    name = name.replace("-", "_")
    if name in done:
        return
    done.add(name)
    found = [path for path in MODULES.rglob("*.ko") if path.stem.replace("-", "_") == name]
    if not found:
        return  # built in
    said = re.search(rb"\0depends=([^\0]*)\0", found[0].read_bytes())
    for other in filter(None, said[1].decode().split(",") if said else ()):
        load(other, done)
    with found[0].open("rb") as file:
        if LIBC.syscall(FINIT_MODULE, file.fileno(), b"", 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot load {name}")


def export(flavours: list[str]) -> None:
    """Serve an ext4 filesystem, NFS 4 alone; clients need not wait for those of an earlier server."""
    os.mknod("/run/ubda", 0o600 | 0o060000, UBDA)
    Path(EXPORT).mkdir()
    run("mount", "-t", "ext4", "/run/ubda", EXPORT)
    for flavour in flavours:
        Path(EXPORT, flavour).mkdir()
    run("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    run("exportfs", "-i", "-o", "rw,no_root_squash,fsid=0,no_subtree_check,insecure", f"*:{EXPORT}")
    run("rpc.mountd", "-N", "2", "-N", "3")
    run("rpc.nfsd", "-N", "3", "4")
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y")


def client(side: str, number: int, mounts: list[tuple[str, Path]]) -> None:
    """Mount from a host of its own; its process stays, and with it its network."""
    ready, tells = os.pipe()
    hears, go = os.pipe()
    child = os.fork()
    if child == 0:
        assert LIBC.unshare(CLONE_NEWUTS | CLONE_NEWNET) == 0
        os.write(tells, b".")
        os.read(hears, 1)
        mount(side, number, f"client{number}", mounts)
        os.write(tells, b".")
        while True:
            signal.pause()
    os.read(ready, 1)
    run(
        "ip", "link", "add", f"server{number}", "type", "veth", "peer", f"client{number}", "netns", str(child)
    )
    address(f"server{number}", f"10.9.{number}.1")
    os.write(go, b".")
    os.close(tells)
    if os.read(ready, 1) != b".":
        raise SystemExit(f"client {side} did not mount")


def address(device: str, own: str) -> None:
    """Give a network device its address."""
    run("ip", "address", "add", f"{own}/24", "dev", device)
    run("ip", "link", "set", device, "up")


def mount(side: str, number: int, device: str, mounts: list[tuple[str, Path]]) -> None:
    """Mount what the server at the other end of ``device`` exports, under a host name of its own."""
    socket.sethostname(f"client-{side}")
    run("ip", "link", "set", "lo", "up")
    address(device, f"10.9.{number}.2")
    for options, at in mounts:
        where = f"addr=10.9.{number}.1,clientaddr=10.9.{number}.2,vers=4.2,sec=sys,nosharecache{options}"
        run("mount", "-i", "-t", "nfs4", "-o", where, f"10.9.{number}.1:/{at.parent.name}", at)


def answer(call: Path) -> None:
    """Do what a call says, in a process of its own, and put the answer beside it."""
    if os.fork() != 0:
        return
    try:
        told = (True, pickle.loads(call.read_bytes())())  # noqa: S301  this test run's own
    except BaseException:
        told = (False, traceback.format_exc())
    draft = call.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(told))
    draft.rename(call.with_suffix(".answer"))
    os._exit(0)


def main(folder: Path, role: str, options: dict[str, str]) -> None:
    """Bring everything up, say so, and answer calls until the machine is ended from outside."""
    for kind, at in (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run"), ("tmpfs", "/mnt")):
        run("mount", "-t", kind, kind, at)
    for at in ("/dev/shm", "/var/lib/nfs"):
        Path(at).mkdir(parents=True, exist_ok=True)
        run("mount", "-t", "tmpfs", "tmpfs", at)
    for name in ("etab", "rmtab"):
        Path("/var/lib/nfs", name).touch()
    loaded = {line.split()[0] for line in Path("/proc/modules").read_text().splitlines()}
    for module in ("veth", "nfsd", "nfsv4"):
        load(module, loaded)
    bring_up(folder, role, options)
    import tests.filesystems.acts  # noqa: F401  before the first fork, so that none imports it anew

    calls = folder / "calls" / role
    (calls / "up").touch()
    while True:
        for call in sorted(calls.glob("*.call")):
            taken = call.with_suffix(".taken")
            call.rename(taken)
            answer(taken)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(LOOK_S)


def bring_up(folder: Path, role: str, options: dict[str, str]) -> None:
    """Serve, mount, or both."""
    if role in SIDES:
        at = folder / "plain" / role
        mount(role, SIDES.index(role) + 1, "vec0", [(options["plain"], at)])
        return
    run("ip", "link", "set", "lo", "up")
    socket.sethostname("server")
    for device in range(len(SIDES) if role == "server" else 0):
        address(f"vec{device}", f"10.9.{device + 1}.1")
    export(list(options))
    for number, side in enumerate(SIDES if role == "alone" else (), 1):
        client(side, number, [(text, folder / flavour / side) for flavour, text in options.items()])


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.filesystems.serve import NFS

    try:
        main(Path(sys.argv[1]), sys.argv[2], NFS)
    except BaseException:
        traceback.print_exc()
    Path("/proc/sysrq-trigger").write_text("o")
    time.sleep(60)

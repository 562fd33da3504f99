"""Inside a rig's own namespaces, as their first process: brings a server up, mounts it, and stays.

Usage: serve.py FILESYSTEM FOLDER PACKAGES. It says "ready" when ``FOLDER/plain/a`` and
``FOLDER/plain/b`` are two mounts of one filesystem, and so are those of its other flavours: ``tuned``
has the options that `lora-fs doctor` advises, ``lagging`` keeps listings for LAG_S. It ends when its
stdin does. With it the kernel ends every process and every mount of the namespaces: nothing is left
behind, however it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

START_S = 90.0
LOOK_S = 0.05
ADDRESS = "10.77.0.1"  # GlusterFS refuses loopback addresses
PORT = 5556
WIRES = 5600  # and the next few ports
SFTP_SERVERS = ("usr/lib/openssh/sftp-server", "usr/lib/ssh/sftp-server", "usr/libexec/openssh/sftp-server")
LAG_S = 4  # sshfs keeps a listing for 20 s unless told otherwise
NO_CACHE = ("attribute-timeout=0", "entry-timeout=0", "negative-timeout=0")
SSHFS = {
    "plain": "",
    "tuned": ",dir_cache=no,attr_timeout=0,entry_timeout=0,negative_timeout=0",
    "lagging": f",dcache_timeout={LAG_S}",
}
NFS = {"plain": "", "tuned": ",lookupcache=positive,actimeo=1"}
FLAVOURS = {
    "tmpfs": ("plain",),
    "glusterfs": ("plain", "tuned"),
    "sshfs": tuple(SSHFS),
    "s3fs": ("plain",),
    "nfs": tuple(NFS),
}
GLUSTERD = """\
volume management
    type mgmt/glusterd
    option working-directory /var/lib/glusterd
    option transport-type socket
    option transport.socket.listen-port 24007
    option ping-timeout 0
    option event-threads 1
    option max-port 60999
end-volume
"""


def run(*words: str | Path) -> None:
    """Run a command to its end; what it says is told if it fails."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: exit {done.returncode}: {done.stdout}{done.stderr}")


def wait_for(what: str, there: Callable[[], bool], log: Path) -> None:
    """Look until it is there; the end of the server's log is told if it does not come."""
    deadline = time.monotonic() + START_S
    while not there():
        if time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:]) if log.exists() else ""
            raise SystemExit(f"{what} did not come within {START_S:.0f} s:\n{tail}")
        time.sleep(LOOK_S)


def is_mounted(folder: Path) -> bool:
    """Whether something is mounted there."""
    return any(line.split(" ")[4] == str(folder) for line in Path("/proc/self/mountinfo").open())


def tmpfs(folder: Path) -> None:
    """One memory filesystem, bound to two places."""
    for side in ("a", "b"):
        mount_tmpfs(folder, "plain", side)


def mount_tmpfs(folder: Path, flavour: str, side: str) -> None:
    run("mount", "--bind", folder / "store", folder / flavour / side)


def glusterfs(folder: Path) -> None:
    """glusterd on an address of this namespace, a volume of one brick for each flavour, two clients each."""
    run("ip", "address", "add", f"{ADDRESS}/24", "dev", "lo")
    for place in ("/run", "/var/lib", "/var/log"):
        run("mount", "-t", "tmpfs", "tmpfs", place)
    for place in ("/run/gluster", "/var/log/glusterfs/bricks", *map("/var/lib/glusterd/{}".format, STATE)):
        Path(place).mkdir(parents=True)
    volfile, log = folder / "glusterd.vol", folder / "glusterd.log"
    volfile.write_text(GLUSTERD)
    # It runs Python scripts of its own, which import what lies beside them: not with our settings.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.Popen(["glusterd", "-N", f"--volfile={volfile}", f"--log-file={log}"], env=own)
    gluster = ("gluster", "--mode=script", "volume")

    def answers() -> bool:
        return subprocess.run([*gluster, "list"], capture_output=True, check=False).returncode == 0

    wait_for("glusterd", answers, log)
    for flavour in FLAVOURS["glusterfs"]:
        run(*gluster, "create", flavour, f"{ADDRESS}:{folder / 'store' / flavour}", "force")
        if flavour == "tuned":
            for option in ("quick-read", "stat-prefetch"):
                run(*gluster, "set", flavour, f"performance.{option}", "off")
        run(*gluster, "start", flavour)
        for side in ("a", "b"):
            mount_glusterfs(folder, flavour, side)


def mount_glusterfs(folder: Path, flavour: str, side: str) -> None:
    at, options = (
        folder / flavour / side,
        [f"--{option}" for option in NO_CACHE] if flavour == "tuned" else [],
    )
    run("glusterfs", f"--volfile-server={ADDRESS}", f"--volfile-id={flavour}", *options, at)
    wait_for(f"the mount {at}", partial(is_mounted, at), folder / "glusterd.log")


STATE = ("vols", "peers", "groups")


def sshfs(folder: Path) -> None:
    """sshfs straight to an sftp-server: no network, no key, the protocol as it is."""
    server = next(Path("/", path) for path in SFTP_SERVERS if Path("/", path).exists())
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {server}\n")
    ssh.chmod(0o755)
    for flavour, options in SSHFS.items():
        (folder / "store" / flavour).mkdir()
        for side in ("a", "b"):
            where = f"host:{folder / 'store' / flavour}"
            run("sshfs", "-o", f"ssh_command={ssh}{options}", where, folder / flavour / side)


def s3fs(folder: Path) -> None:
    """s3fs against moto's server of S3."""
    log, url = folder / "moto.log", f"http://127.0.0.1:{PORT}"
    subprocess.Popen(
        [sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT)],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        cwd=folder,
    )

    def answers() -> bool:
        try:
            urlopen(Request(f"{url}/bucket", method="PUT"), timeout=START_S).close()
        except (URLError, ConnectionError):
            return False
        return True

    wait_for("moto", answers, log)
    password = folder / "password"
    password.write_text("key:secret")
    password.chmod(0o600)
    options = f"url={url},use_path_request_style,passwd_file={password}"
    for side in ("a", "b"):
        at = folder / "plain" / side
        run("s3fs", "bucket", at, "-o", options)
        wait_for(f"the mount {at}", partial(is_mounted, at), log)


def nfs(folder: Path) -> None:
    """A virtual machine with a kernel of its own, which serves and mounts (``guest.py``)."""
    machine(folder, "alone", disk(folder), "mem=1G")


def hosts(folder: Path) -> None:
    """An NFS server and two clients of it, each in a virtual machine of its own, on one wire each."""
    machine(folder, "server", disk(folder), wire(0, 1, 0), wire(1, 2, 0), "mem=512M")
    for number, side in enumerate("ab", 1):
        machine(folder, side, wire(0, number, 1), "mem=512M")


def disk(folder: Path) -> str:
    """An empty ext4 filesystem, as a machine's first disk."""
    image = folder / "disk"
    with image.open("wb") as file:
        file.truncate(1 << 30)
    run("mkfs.ext4", "-q", image)
    return f"ubd0={image}"


def wire(device: int, number: int, end: int) -> str:
    """One end of an Ethernet in UDP packets, as a machine's network device."""
    ports = WIRES + 2 * number, WIRES + 2 * number + 1
    where = f"src=127.0.0.1,dst=127.0.0.1,srcport={ports[end]},dstport={ports[1 - end]}"
    return f"vec{device}:transport=l2tpv3,udp=1,rx_session=1,tx_session=1,{where}"


def machine(folder: Path, role: str, *words: str) -> None:
    """Boot one and wait until it is up. Its root is this one, and it takes its calls from ``calls``."""
    init, log, calls = folder / f"{role}.init", folder / f"{role}.log", folder / "calls" / role
    guest = Path(__file__).with_name("guest.py")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    init.write_text(f"#!/bin/sh\nexport PATH={path}\nexec {sys.executable} -P {guest} {folder} {role}\n")
    init.chmod(0o755)
    calls.mkdir(parents=True)
    own = ["rootfstype=hostfs", "rootflags=/", "rw", f"init={init}", f"uml_dir={folder}/", f"umid={role}"]
    subprocess.Popen(
        ["linux.uml", *words, *own, "con=null", "con0=null,fd:1", "quiet"],
        stdin=subprocess.DEVNULL,
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    wait_for(f"the virtual machine {role}", (calls / "up").exists, log)


FILESYSTEMS = {"tmpfs": tmpfs, "glusterfs": glusterfs, "sshfs": sshfs, "s3fs": s3fs, "nfs": nfs}
NETWORKS = {"hosts": hosts}  # whose sides are hosts: nothing runs on both


def main(name: str, folder: Path, packages: Path) -> None:
    """Everything below ``folder`` is this namespace's own, and so is what lies over /usr."""
    run("ip", "link", "set", "lo", "up")
    run("mount", "-t", "tmpfs", "tmpfs", folder)
    if (packages / "usr").is_dir():
        run("mount", "-t", "overlay", "overlay", "-o", f"lowerdir={packages / 'usr'}:/usr", "/usr")
    (folder / "store").mkdir()
    for flavour in FLAVOURS.get(name, ("plain",)):
        for side in ("a", "b"):
            (folder / flavour / side).mkdir(parents=True)
    os.environ["HOME"] = str(folder)
    (FILESYSTEMS | NETWORKS)[name](folder)
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

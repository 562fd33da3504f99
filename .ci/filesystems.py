#!/usr/bin/env python3
"""Which real filesystems must be tested on this machine: their names on stdout, the reasons on stderr.

The list below is the tracked one: tests/filesystems compares it with its rigs. What a machine lacks is
fetched with Debian's own client into ``<environment>/filesystems`` and unpacked there; nothing is
installed. A machine cannot run one (no root, no /dev/fuse, no Debian, no mirror) or it can, and then it
must: a package that cannot be had although the mirror answers is an error here, not a skipped test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Filesystem → what has to be there, a program or a file, and the Debian packages that have it.
FILESYSTEMS: dict[str, dict[str, str]] = {
    "tmpfs": {},
    "glusterfs": {"glusterd": "glusterfs-server", "gluster": "glusterfs-cli"},
    "sshfs": {"sshfs": "sshfs", "/usr/lib/openssh/sftp-server": "openssh-sftp-server"},
    "s3fs": {"s3fs": "s3fs"},
    "nfs": {
        "linux.uml": "user-mode-linux",
        "rpc.nfsd": "nfs-kernel-server",
        "exportfs": "nfs-kernel-server",
        "rpc.mountd": "nfs-kernel-server",
        "mkfs.ext4": "e2fsprogs",
    },
}
WITHOUT_FUSE = {"tmpfs", "nfs"}
MACHINES = {"nfs"}  # which need a kernel of their own
BOOT_S = 60.0
KNOWN_PACKAGE = "coreutils"  # in every Debian: if even this cannot be had, the mirror does not answer
FOLDER = Path(sys.prefix) / "filesystems"
NAMESPACES = ["unshare", "--mount", "--pid", "--fork", "--net", "--uts", "--ipc", "--mount-proc"]
APT = [
    "apt-get",
    "-qq",
    "-y",
    "--no-install-recommends",
    "-oDebug::NoLocking=1",
    "-oAPT::Sandbox::User=root",
    "-oAcquire::Retries=1",
    "-oAcquire::http::Timeout=15",
    "-oAcquire::https::Timeout=15",
]


def say(text: str) -> None:
    """For people; stdout is for the list."""
    print(f"filesystems: {text}", file=sys.stderr)


def is_here(wanted: str) -> bool:
    """Whether the machine has it, or the folder does."""
    if wanted.startswith("/"):
        return Path(wanted).exists() or (FOLDER / wanted[1:]).exists()
    own = os.pathsep.join(str(FOLDER / "usr" / part) for part in ("bin", "sbin"))
    return shutil.which(wanted, path=f"{own}{os.pathsep}{os.environ['PATH']}:/usr/sbin:/sbin") is not None


def no_namespaces() -> str | None:
    """Why no rig at all can run here; None if they can."""
    if os.geteuid() != 0:
        return "not root"
    for program in ("unshare", "ip", "mount"):
        if shutil.which(program) is None:
            return f"no program {program}"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


def no_fuse() -> str | None:
    """Why FUSE cannot be used here."""
    return None if os.access("/dev/fuse", os.R_OK | os.W_OK) else "no /dev/fuse that can be opened"


def no_machine() -> str | None:
    """Why no virtual machine boots here: its kernel is a process that traces others."""
    with tempfile.TemporaryDirectory(prefix="lora-fs-boot-") as folder:
        init = Path(folder) / "init"
        init.write_text(
            "#!/bin/sh\necho it boots\nmount -t proc proc /proc\necho o >/proc/sysrq-trigger\nsleep 9\n"
        )
        init.chmod(0o755)
        path = f"{FOLDER / 'usr' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        words = [
            "mem=128M",
            "rootfstype=hostfs",
            "rootflags=/",
            "rw",
            f"init={init}",
            "con=null",
            "con0=null,fd:1",
        ]
        try:
            ran = subprocess.run(
                ["linux.uml", *words, f"uml_dir={folder}/", "umid=boot", "quiet"],
                env={**os.environ, "PATH": path, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=BOOT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"user-mode-linux did not boot within {BOOT_S:.0f} s"
    if "it boots" in ran.stdout:
        return None
    before, panic, _ = ran.stdout.partition("Kernel panic")
    return "user-mode-linux does not boot: " + _last(before if panic else ran.stdout + ran.stderr)


def apt(archives: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run apt-get so that it writes in ``archives`` alone, package lists included where there are none."""
    own = [f"-oDir::Cache::archives={archives}"]
    if not any(Path("/var/lib/apt/lists").glob("*_Packages*")):
        (archives / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        own += [
            f"-oDir::State::lists={archives / 'lists'}",
            f"-oDir::Cache::pkgcache={archives / 'pkgcache'}",
        ]
        own += [f"-oDir::Cache::srcpkgcache={archives / 'srcpkgcache'}"]
        if words[0] != "update" and not any((archives / "lists").glob("*_Packages*")):
            apt(archives, "update")
    return subprocess.run([*APT, *own, *words], cwd=archives, capture_output=True, text=True, check=False)


def fetch(packages: list[str]) -> str | None:
    """Unpack packages with what they need and the machine lacks; why not, where the mirror is silent.

    Raises:
        SystemExit: the mirror answers and does not give them.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "no apt-get, dpkg: install " + ", ".join(packages) + " by hand"
    with tempfile.TemporaryDirectory(prefix="lora-fs-packages-") as folder:
        archives = Path(folder)
        (archives / "partial").mkdir()
        done = apt(archives, "install", "--download-only", "--reinstall", *packages)
        if done.returncode:
            if apt(archives, "download", KNOWN_PACKAGE).returncode:
                return "Debian's mirror does not answer: " + _last(done.stderr)
            raise SystemExit(f"filesystems: cannot fetch {' '.join(packages)}: {done.stderr}")
        unpacked = archives / "unpacked"
        for package in sorted(archives.glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, unpacked], check=True)
        for part in ("bin", "sbin", "lib"):  # /bin is /usr/bin where this is laid over
            if (unpacked / part).is_dir():
                shutil.copytree(unpacked / part, unpacked / "usr" / part, symlinks=True, dirs_exist_ok=True)
        shutil.copytree(unpacked / "usr", FOLDER / "usr", symlinks=True, dirs_exist_ok=True)
    return None


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason told"


def main() -> None:
    """Fetch what is missing; print what must run."""
    able, nothing, fuse = list[str](), no_namespaces(), no_fuse()
    reasons = {name: nothing or (None if name in WITHOUT_FUSE else fuse) for name in FILESYSTEMS}
    missing = {
        package: name
        for name, wanted in FILESYSTEMS.items()
        if reasons[name] is None
        for thing, package in wanted.items()
        if not is_here(thing)
    }
    unfetched = fetch(sorted(missing)) if missing else None
    for name, wanted in FILESYSTEMS.items():
        lacks = [thing for thing in wanted if not is_here(thing)]
        reason = reasons[name] or (f"no {', '.join(lacks)}: {unfetched}" if lacks else None)
        reason = reason or (no_machine() if name in MACHINES else None)
        if reason is not None:
            say(f"{name} is NOT RUN here: {reason}")
        else:
            able.append(name)
    print(" ".join(able))


if __name__ == "__main__":
    main()

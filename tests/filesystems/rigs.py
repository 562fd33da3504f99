"""Real filesystems, two mounts each, in namespaces of their own: nothing of them is seen outside.

A rig is one process, the first of its own process, mount, network, host-name and IPC namespaces
(``serve.py``). What a test does on its mounts it does in a forked process inside. When the rig ends,
by whatever cause, the kernel ends every process and every mount in there.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import pickle
import secrets
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

from tests.filesystems import serve

FORK = multiprocessing.get_context("fork")
PACKAGES = Path(sys.prefix) / "filesystems"  # where .ci/filesystems.py unpacks what the machine lacks
NAMESPACES = ("pid", "net", "uts", "ipc", "mnt")
UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--uts", "--ipc", "--mount-proc"]
REQUIRED = "LORA_FS_REQUIRE_FILESYSTEMS"
MACHINES = {"nfs"}  # whose mounts are in a virtual machine
LOOK_S = 0.02
ANSWER_S = 600.0  # the full suite on a slow filesystem takes minutes

P = ParamSpec("P")
T = TypeVar("T")


class RigFailed(Exception):
    """A rig that can run here did not come up, or what ran inside failed: the whole story."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a filesystem needs beyond namespaces: programs, and modules of Python."""

    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # one of them
    modules: tuple[str, ...] = ()
    fuse: bool = True


RIGS = {
    "tmpfs": Needs(fuse=False),
    "glusterfs": Needs(programs=("glusterd", "glusterfs", "gluster")),
    "sshfs": Needs(programs=("sshfs",), files=serve.SFTP_SERVERS),
    "s3fs": Needs(programs=("s3fs",), modules=("moto", "flask", "flask_cors")),
    "nfs": Needs(programs=("linux.uml", "mkfs.ext4", "rpc.nfsd", "rpc.mountd", "exportfs"), fuse=False),
}


def why_not(name: str) -> str | None:
    """Why this filesystem cannot run on this machine, in words; None: it can, so it must."""
    if (reason := _no_namespaces()) is not None:
        return reason
    needs = RIGS[name]
    if needs.fuse and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse that can be opened: load the kernel's module, or give the container the device"
    path = os.pathsep.join((*(str(PACKAGES / "usr" / part) for part in ("bin", "sbin")), os.environ["PATH"]))
    for program in needs.programs:
        if shutil.which(program, path=path) is None:
            return f"no program {program}: install it, or run `make filesystems` on a Debian"
    if needs.files and not any(
        (base / file).exists() for base in (Path("/"), PACKAGES) for file in needs.files
    ):
        return f"no {' or '.join(needs.files)}: install an SFTP server, or run `make filesystems` on a Debian"
    for module in needs.modules:
        if importlib.util.find_spec(module) is None:
            return f"no Python module {module}: run `make env`"
    return no_machine() if name in MACHINES else None


@cache
def no_machine() -> str | None:
    """Why no virtual machine boots here, by a boot of one: CI's own reason."""
    reason: str | None = ci_filesystems().no_machine()
    return reason


def ci_filesystems() -> ModuleType:
    """Return ``.ci/filesystems.py``, which says what must run."""
    path = Path(__file__).parents[2] / ".ci/filesystems.py"
    spec = importlib.util.spec_from_file_location("ci_filesystems", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _no_namespaces() -> str | None:
    if os.geteuid() != 0:
        return "not root: namespaces with mounts of their own need it"
    for program in ("unshare", "ip", "mount"):
        if shutil.which(program) is None:
            return f"no program {program} (util-linux, iproute2)"
    tried = subprocess.run(
        [*UNSHARE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


def required() -> frozenset[str]:
    """The filesystems that have to run here, by name."""
    return frozenset(os.environ.get(REQUIRED, "").replace(",", " ").split())


@dataclass(frozen=True, slots=True)
class Mounted:
    """A rig that is up; its folder's mounts are seen inside only."""

    name: str
    folder: Path
    init: int  # the first process of its namespaces, by the number it has outside

    def pair(self, flavour: str = "plain") -> tuple[Path, Path]:
        """Its two mounts, as they come or as a flavour of ``serve`` has them."""
        return self.folder / flavour / "a", self.folder / flavour / "b"

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a process inside; what it returns, or its traceback as RigFailed."""
        if self.name in MACHINES:
            return self.run_on("alone", function, *args, **kwargs)
        return self.run_outside(function, *args, **kwargs)

    def run_on(self, machine: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same on a virtual machine, whose processes cannot be entered from outside."""
        return cast(T, self.at_once({machine: partial(function, *args, **kwargs)})[machine])

    def at_once(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
        """Call a function on each of several virtual machines; what each returns."""
        told = {self.folder / "calls" / machine: pickle.dumps(call) for machine, call in calls.items()}
        return dict(zip(calls, self.run_outside(_in_the_machines, told), strict=True))

    def run_outside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same beside the virtual machines, if there are any."""
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_enter, args=(self.init, sender, lambda: function(*args, **kwargs)))
        process.start()
        sender.close()
        try:
            if not receiver.poll(ANSWER_S):
                raise RigFailed(f"{self.name}: no answer within {ANSWER_S:.0f} s")
            good, value = receiver.recv()
        except EOFError as error:
            raise RigFailed(f"{self.name}: the process inside ended by itself") from error
        finally:
            process.kill()
            process.join()
            receiver.close()
        if not good:
            raise RigFailed(f"{self.name}: {value}")
        return cast(T, value)


def _in_the_machines(calls: Mapping[Path, bytes]) -> list[object]:
    """Have calls made in virtual machines, by their folders; the answers, in the same order."""
    answers = []
    for folder, call in calls.items():
        path = folder / secrets.token_hex(8)
        path.with_suffix(".draft").write_bytes(call)
        path.with_suffix(".draft").rename(path.with_suffix(".call"))
        answers.append(path.with_suffix(".answer"))
    told = dict[Path, object]()
    while len(told) < len(answers):  # whoever waits for this process ends it
        for answer in answers:
            if answer not in told and answer.exists():
                good, told[answer] = pickle.loads(answer.read_bytes())  # noqa: S301  this test run's own
                if not good:
                    raise RigFailed(told[answer])
        time.sleep(LOOK_S)
    return [told[answer] for answer in answers]


def _enter(init: int, sender: Connection, call: Callable[[], object]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handles = [os.open(f"/proc/{init}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    for handle in handles:
        if libc.setns(handle, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(handle)
    inside = FORK.Process(
        target=_answer, args=(sender, call)
    )  # who enters a process namespace are its children
    inside.start()
    sender.close()
    inside.join()


def _answer(sender: Connection, call: Callable[[], object]) -> None:
    try:
        sender.send((True, call()))
    except BaseException:
        sender.send((False, traceback.format_exc()))


@contextmanager
def mounted(name: str, folder: Path) -> Iterator[Mounted]:
    """Bring a filesystem up in an empty folder, and down again.

    Raises:
        RigFailed: it can run here and did not come up; with what its server said.
    """
    said = folder.parent / f"{folder.name}.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [*UNSHARE, sys.executable, "-P", serve.__file__, name, str(folder), str(PACKAGES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if process.stdout.readline() != b"ready\n":
            raise RigFailed(f"{name} did not come up: {said.read_text(errors='replace')}")
        (init,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Mounted(name, folder, int(init))
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

"""What the tests let two hosts do, each with a kernel, a mount and a host name of its own, on one registry.

They tell one another what they did by files on the volume. ``time.time`` is nearly the same on both.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.model import ReplicaStatus
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.reports import read_reports
from lora_fs.sidecar.registry.volume import atomic, leases
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.leases import lease
from tests.crash import convergence
from tests.crash.convergence import Pace, Run, drive, judge
from tests.filesystems.acts import FORK, SCOPE, follower, present, put, register_some, served, wait
from tests.filesystems.serve import wait_for
from tests.registry.conftest import write_adapter

STEPS: tuple[dict[str, str], ...] = ({"a": "v1"}, {"a": "v2"}, {})


@dataclass(frozen=True, slots=True)
class Host:
    """Which machine it is: its kernel's own name for this boot, its host name, and what is mounted."""

    boot: str
    name: str
    mount: str


def itself(at: Path) -> Host:
    """Say who this host is."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (mount,) = (line for line in Path("/proc/mounts").read_text().splitlines() if f" {at} " in line)
    return Host(boot, socket.gethostname(), mount.split()[2])


def now() -> float:
    """Return the time by this host's clock."""
    return time.time()


def sign(signs: Path, name: str) -> None:
    """Tell the other host something, by a file on the volume."""
    (signs / name).touch()


def wait_for_sign(signs: Path, name: str) -> None:
    """Wait until the other host told it. A name that was asked for in vain would be unseen for seconds."""
    wait_for(name, lambda: name in os.listdir(signs), signs / name)


def change(root: Path, local: Path, signs: Path) -> list[float]:
    """Register, register another revision and unregister, each once the other host saw the one before.

    Returns:
        When each was acknowledged, by the clock.
    """
    registry = Registry(root)
    acts: tuple[Callable[[], object], ...] = (
        lambda: put(registry, write_adapter(local / "first", 1), "a", "v1"),
        lambda: put(registry, write_adapter(local / "second", 2), "a", "v2"),
        lambda: release.unregister(registry, SCOPE, "a", writer="test", all_revisions=True),
    )
    acknowledged = []
    for number, act in enumerate(acts):
        wait_for_sign(signs, f"ready-{number}")
        act()
        acknowledged.append(time.time())
    registry.close()
    return acknowledged


def follow(root: Path, signs: Path) -> list[float]:
    """Follow what ``change`` does; when each change was seen, by the clock."""
    view, saw = follower(root), []
    for number, step in enumerate(STEPS):
        sign(signs, f"ready-{number}")
        wait(view, lambda desired, step=step: served(desired) == step)  # type: ignore[misc]
        saw.append(time.time())
    return saw


def register_many(root: Path, local: Path, writers: int, each: int) -> tuple[dict[str, int], dict[str, str]]:
    """Have processes register names of their own and one common name; what was acknowledged and refused."""
    results = FORK.SimpleQueue()
    places = [local / f"{socket.gethostname()}-{number}" for number in range(writers)]
    processes = [
        FORK.Process(target=register_some, args=(root, place, each, results.put)) for place in places
    ]
    for process in processes:
        process.start()
    told = [results.get() for _ in processes]
    for process in processes:
        process.join()
    acknowledged = {key: int_id for part, _ in told for key, int_id in part.items()}
    return acknowledged, {key: why for _, part in told for key, why in part.items()}


def see(root: Path, keys: Iterable[str]) -> tuple[dict[str, int], str]:
    """Wait until all are seen; what is then registered, and what the common name serves."""
    view, wanted = follower(root), set(keys)
    wait(view, lambda desired: present(desired).keys() >= wanted)
    return present(view.desired), served(view.desired).get("shared", "")


def hold(at: Path, lease_s: float) -> None:
    """Acquire a lease, in a process that stays until its host ends; return once it holds it."""
    leases.LEASE_S = leases.ABANDONED_S = lease_s  # of this process and its child alone
    at.parent.mkdir()
    told, tells = os.pipe()
    if os.fork() == 0:
        with lease(at, wait_s=5.0) as had:
            os.write(tells, b"had" if had else b"not")
            while True:
                signal.pause()
    os.close(tells)
    assert os.read(told, 3) == b"had"


def ask_in_vain(at: Path, lease_s: float, seconds: float) -> None:
    """Try for so long to acquire a lease, which another host holds."""
    leases.LEASE_S = leases.ABANDONED_S = lease_s  # of this process alone
    wait_for(f"the folder of {at}", lambda: at.parent.name in os.listdir(at.parent.parent), at)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with lease(at, wait_s=0.1) as had:
            assert not had, "taken from a holder that lives"


def ask(at: Path, lease_s: float) -> float:
    """Try to acquire a lease until it succeeds; return when, by the clock."""
    leases.LEASE_S = leases.ABANDONED_S = lease_s  # of this process alone
    while True:
        with lease(at, wait_s=0.1) as had:
            if had:
                return time.time()


def report(registry: Registry) -> None:
    """Write a replica's report, over the one before."""
    status = ReplicaStatus(replica="r0", model=SCOPE.model, namespaces=(SCOPE.namespace,))
    path = registry.layout.replica(status.replica)
    make_folder(path.parent, root=registry.layout.root)
    atomic.replace(path, seal(status))


def read_all(root: Path) -> None:
    """Read a registry and the replicas' reports, as a replica and a gateway do."""
    follower(root)
    assert read_reports(Layout(root)).replicas


def change_alone(root: Path, local: Path) -> list[float]:
    """Report, register, move to another revision and unregister; the seconds that each took."""
    registry, took = Registry(root), []
    acts: tuple[Callable[[], object], ...] = (
        lambda: report(registry),
        lambda: put(registry, write_adapter(local / "other", 3), "b", "v1"),
        lambda: put(registry, write_adapter(local / "newer", 4), "a", "v2"),
        lambda: release.unregister(registry, SCOPE, "a", writer="test", all_revisions=True),
    )
    for act in acts:
        began = time.monotonic()
        act()
        took.append(time.monotonic() - began)
    registry.close()
    return took


def begin(root: Path, local: Path) -> None:
    """Make a registry with one adapter, and a replica's report."""
    with_one = Registry(root, create=True)
    put(with_one, write_adapter(local / "begun", 5), "a", "v1")
    report(with_one)
    with_one.close()


def make(root: Path) -> None:
    """Make an empty registry, and a folder beside it for signs."""
    root.parent.mkdir(exist_ok=True)
    Registry(root, create=True).close()
    (root.parent / "signs").mkdir()


def converge_here(
    root: Path, notes: Path, appends: int, kills: int, pace: Pace, seed: int
) -> tuple[Run, float]:
    """One writer and one reader of this host, killed and started again; see ``drive``."""
    convergence.clock = time.CLOCK_REALTIME  # the only one that hosts share
    own, run = notes / socket.gethostname(), Run()
    own.mkdir(parents=True)
    wait_for(f"the registry {root}", lambda: root.name in os.listdir(root.parent), own)
    ended = drive((root, root), own, run, 1, 1, appends, kills, pace, True, seed)
    return run, ended


def judge_all(root: Path, notes: Path, ended: float, within_s: float, apart_s: float) -> Run:
    """Judge the notes of both hosts."""
    run = Run()
    judge(root, notes, run, ended, within_s, writers=4, apart_s=apart_s)
    return run

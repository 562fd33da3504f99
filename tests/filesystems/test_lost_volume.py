"""Replicas whose volume is gone for five minutes: they serve what they have, and catch up at its return.

A stock vLLM with a sidecar and a vLLM with the plugin, both on one mount, which is lost in each of the
ways that a mount is: it is taken away, so that an empty folder is there; its client dies, so that every
call fails; its client stops, so that every call hangs; its server stops, so that calls hang and then fail.
But for the last one another host registers meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import module_command
from lora_fs.demo.replica import PluginReplica, Replica, SidecarReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.registry.store.writer import Registry
from tests.filesystems import rigs, serve
from tests.filesystems.conftest import skip_or_fail

AWAY_S = 300.0
ASK_EVERY_S = 1.0
POLL_S = 1.0  # of a sidecar on a network filesystem
CAUGHT_UP_S = 2 * POLL_S + 0.5  # a poll is jittered, and two cores run two engines
ANSWERED_S = 5.0  # the worst of 1,200 requests on a machine that is busy
KINDS: dict[str, type[Replica]] = {"sidecar": SidecarReplica, "plugin": PluginReplica}


@dataclass
class Lost:
    """What replicas did while the volume was away, and how soon they had what was registered meanwhile."""

    asked: int = 0
    slowest_s: float = 0.0
    told: dict[str, str] = field(default_factory=dict)
    caught_up_s: dict[str, float] = field(default_factory=dict)


class Way(NamedTuple):
    """How the mount ``a`` of a flavour is lost and had again. ``written``: the other one works meanwhile."""

    flavour: str
    lose: Callable[[Path], None]
    regain: Callable[[Path], None]
    written: bool = True


def processes(*words: str) -> Iterator[int]:
    """The numbers of those whose command line has all the words."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if all(any(word in part.decode(errors="replace") for part in said) for word in words):
            yield int(process.name)


def signal_all(number: int, *words: str) -> None:
    found = list(processes(*words))
    assert found, words
    for pid in found:
        os.kill(pid, number)


def stop_client(folder: Path) -> None:
    signal_all(signal.SIGSTOP, "sshfs", str(folder / "tuned/a"))


def go_on_client(folder: Path) -> None:
    signal_all(signal.SIGCONT, "sshfs", str(folder / "tuned/a"))


def kill_client(folder: Path) -> None:
    signal_all(signal.SIGKILL, "glusterfs", str(folder / "tuned/a"))


def mount_again(folder: Path) -> None:
    serve.run("umount", "-l", folder / "tuned/a")
    serve.mount_glusterfs(folder, "tuned", "a")


def stop_bricks(folder: Path) -> None:
    signal_all(signal.SIGSTOP, "glusterfsd", "--brick-name", str(folder / "store/tuned"))


def go_on_bricks(folder: Path) -> None:
    signal_all(signal.SIGCONT, "glusterfsd", "--brick-name", str(folder / "store/tuned"))


def unmount(folder: Path) -> None:
    serve.run("umount", "-l", folder / "plain/a")


def bind_again(folder: Path) -> None:
    serve.mount_tmpfs(folder, "plain", "a")


WAYS = {
    "tmpfs-unmounted": Way("plain", unmount, bind_again),
    "glusterfs-killed": Way("tuned", kill_client, mount_again),
    "glusterfs-stopped": Way("tuned", stop_bricks, go_on_bricks, written=False),
    "sshfs-stopped": Way("tuned", stop_client, go_on_client),
}


def lose(way: Way, folder: Path, local: Path, away_s: float) -> Lost:
    """Everything inside the rig: two engines, a sidecar, the loss and the return."""
    mine, theirs = folder / way.flavour / "a", folder / way.flavour / "b"
    Registry(theirs, create=True).close()
    with ExitStack() as stack:
        farm = stack.enter_context(EngineFarm(local / "engines"))
        made = module_command("lora_fs.demo.tiny_llama", str(local), "--adapters", "3")
        subprocess.run(made, check=True, capture_output=True)
        volume, writer = (Volume(root, MODEL_NAME, cwd=local) for root in (mine, theirs))
        replicas = {
            name: stack.enter_context(closing(kind(name, farm, local / MODEL_NAME, volume, local)))
            for name, kind in KINDS.items()
        }
        for replica in replicas.values():
            replica.wait_ready(timeout_s=120)
        for seed, name in enumerate(("one", "two")):
            writer.run("register", name, str(local / f"adapters/a{seed}"), "--wait", "30")
        expected = {name: replicas["sidecar"].answer(name) for name in ("one", "two")}
        lost = Lost()
        began = time.monotonic()
        way.lose(folder)
        registered = not way.written
        while (away := time.monotonic() - began) < away_s:
            if not registered and away > away_s / 2:
                writer.run("register", "three", str(local / "adapters/a2"))
                registered = True
            for replica in replicas.values():
                ask(replica, expected, lost)
            time.sleep(ASK_EVERY_S)
        lost.told = {name: replica.http.get("/readyz").text for name, replica in replicas.items()}
        assert not any(_lists(replica) for replica in replicas.values()), "the volume was not lost"
        way.regain(folder)
        subprocess.run(["ls", mine], check=True, capture_output=True, timeout=60)  # it answers again
        back = time.monotonic()
        if not way.written:
            writer.run("register", "three", str(local / "adapters/a2"))
            back = time.monotonic()
        waiting = dict(replicas)
        while waiting:
            wait_until("it is listed", lambda: any(_lists(r) for r in waiting.values()), timeout_s=60)
            for name in [name for name, replica in waiting.items() if _lists(replica)]:
                lost.caught_up_s[name] = time.monotonic() - back
                del waiting[name]
        for replica in replicas.values():
            assert replica.answer("three") not in expected.values()
        return lost


def _lists(replica: Replica) -> bool:
    return "three" in replica.names()


def ask(replica: Replica, expected: dict[str, str], lost: Lost) -> None:
    """Both adapters answer as ever, and the pod is not ended by its probes."""
    for name, answer in expected.items():
        began = time.monotonic()
        assert replica.answer(name) == answer
        lost.slowest_s = max(lost.slowest_s, time.monotonic() - began)
        lost.asked += 1
    assert set(expected) <= replica.names()
    for probe in ("/health", "/readyz"):
        assert replica.http.get(probe).status_code == 200, probe


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", WAYS)
def test_a_volume_that_is_away_for_five_minutes(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was loaded is answered all the time; what was registered meanwhile comes with one poll."""
    name = how.partition("-")[0]
    skip_or_fail(name)
    monkeypatch.setattr(rigs, "ANSWER_S", AWAY_S + 300)
    folder, local = tmp_path / "rig", tmp_path / "local"
    folder.mkdir()
    local.mkdir()
    with rigs.mounted(name, folder) as up:
        lost = up.run(lose, WAYS[how], folder, local, AWAY_S)
    print(
        f"{how}: {lost.asked} requests answered in {AWAY_S:.0f} s, the slowest in {lost.slowest_s:.2f} s; "
        f"caught up {', '.join(f'{name} {s:.2f} s' for name, s in lost.caught_up_s.items())} after its return"
    )
    assert all("Volume" in told for told in lost.told.values()), lost.told
    assert lost.slowest_s < ANSWERED_S
    assert max(lost.caught_up_s.values()) < CAUGHT_UP_S

"""Two NFS clients on hosts of their own: virtual machines, each with its kernel, on a wire to the server.

The other NFS tests mount twice in one kernel. Here nothing is shared but the server: no cache, no clock, no
lock, no process. And a host can be lost, with all that it held.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.filesystems import host_acts
from tests.filesystems.conftest import skip_or_fail
from tests.filesystems.rigs import Mounted, mounted
from tests.filesystems.test_convergence import NETWORK
from tests.filesystems.test_registry import PROMPT_S
from tests.filesystems.test_takeover import ALIVE, TAKEN_WITHIN_S

A, B = SIDES = "a", "b"
LEASE_S = 3.0
DELEGATED_S = 90.0  # for which a server waits for a lost host
ATTRIBUTES_S = 3.0  # for which a client keeps them, unless told otherwise


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A server, and the hosts a and b with one mount each."""
    skip_or_fail("nfs")
    with mounted("hosts", tmp_path_factory.mktemp("hosts")) as up:
        yield up


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Mounted]:
    """The same, of which a test may lose one."""
    skip_or_fail("nfs")
    folder = tmp_path / "hosts"
    folder.mkdir()
    with mounted("hosts", folder) as up:
        yield up


def roots(hosts: Mounted, name: str) -> dict[str, Path]:
    """Make an empty registry; its root as it is on each host."""
    at = {side: path / name / "root" for side, path in zip(SIDES, hosts.pair(), strict=True)}
    hosts.run_on(A, host_acts.make, at[A])
    return at


def apart_s(hosts: Mounted) -> float:
    """By how much the two clocks may differ, by asking each for its time between two of this machine.

    A busy machine answers late, which tells little: it is asked again until the bound is below a second.
    """
    least, most = dict.fromkeys(SIDES, -math.inf), dict.fromkeys(SIDES, math.inf)
    apart = math.inf
    for asked in range(100):
        for side in SIDES:
            before = time.time()
            told = hosts.run_on(side, host_acts.now)
            least[side], most[side] = max(least[side], told - time.time()), min(most[side], told - before)
        apart = max(most[A] - least[B], most[B] - least[A])
        if asked >= 10 and apart < 1:
            break
    return apart


def lose(hosts: Mounted, side: str) -> None:
    """End a host as a loss of power does."""
    hosts.run_outside(_kill, hosts.folder / side / "pid")


def _kill(pid: Path) -> None:
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_they_are_hosts_of_their_own(hosts: Mounted) -> None:
    """Each booted by itself, has a name of its own, and mounts what the third one serves."""
    told = hosts.at_once(
        {side: partial(host_acts.itself, at) for side, at in zip(SIDES, hosts.pair(), strict=True)}
    )
    assert len({host.boot for host in told.values()}) == len({host.name for host in told.values()}) == 2
    assert {host.mount for host in told.values()} == {"nfs4"}
    assert 0 < apart_s(hosts) < 1


def test_what_one_host_registers_the_other_follows(hosts: Mounted) -> None:
    """Registered, moved to another revision and withdrawn: each is followed in time."""
    at, local = roots(hosts, "follow"), hosts.folder / "follow"
    told: dict[str, Any] = hosts.at_once(
        {
            A: partial(host_acts.change, at[A], local, at[A].parent / "signs"),
            B: partial(host_acts.follow, at[B], at[B].parent / "signs"),
        }
    )
    took, slack_s = [saw - done for done, saw in zip(told[A], told[B], strict=True)], apart_s(hosts)
    print("registered, moved, withdrawn → followed, s:", *(f"{one:.3f}" for one in took), f"± {slack_s:.3f}")
    assert max(took) < PROMPT_S + slack_s


def test_concurrent_registrations_from_both_hosts(hosts: Mounted) -> None:
    """All are acknowledged, both end with all of them and no other, each with an id of its own."""
    at, local, writers, each = roots(hosts, "crowd"), hosts.folder / "crowd", 2, 3
    told = hosts.at_once(
        {side: partial(host_acts.register_many, at[side], local, writers, each) for side in SIDES}
    )
    assert [refused for _, refused in told.values()] == [{}, {}]
    acknowledged = told[A][0] | told[B][0]
    assert len(acknowledged) == len(set(acknowledged.values())) == 2 * writers * each * 2
    seen = hosts.at_once({side: partial(host_acts.see, at[side], tuple(acknowledged)) for side in SIDES})
    assert seen[A] == seen[B] == (acknowledged, seen[A][1])
    assert seen[A][1] != ""


def test_a_lost_host_holds_up_nobody(mortal: Mounted) -> None:
    """A host loses its power. Others replace what it read, and acquire the lease that it held.

    A server that had delegated what it read would make others wait for 90 s.
    """
    (held, asked), (here, there) = (
        [path / name for path in mortal.pair()] for name in ("lease/a.lock", "lost/root")
    )
    mortal.run_on(A, host_acts.begin, here, mortal.folder / "begun")
    mortal.run_on(A, host_acts.read_all, here)
    mortal.run_on(A, host_acts.hold, held, LEASE_S)
    mortal.run_on(B, host_acts.ask_in_vain, asked, LEASE_S, ALIVE * LEASE_S)
    before = mortal.run_on(B, host_acts.now)
    lose(mortal, A)
    lease_s = mortal.run_on(B, host_acts.ask, asked, LEASE_S) - before
    took = mortal.run_on(B, host_acts.change_alone, there, mortal.folder / "changed")
    print(f"beside a lost host: its lease of {LEASE_S:.0f} s acquired after {lease_s:.2f} s")
    print("reported, registered, moved, withdrawn, s:", *(f"{one:.2f}" for one in took))
    assert lease_s <= LEASE_S + ATTRIBUTES_S + TAKEN_WITHIN_S
    assert max(took) < DELEGATED_S / 3


@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    ("rounds", "each"), [(1, 20), pytest.param(40, 250, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_processes_on_both_hosts_converge(hosts: Mounted, rounds: int, each: int) -> None:
    """Nothing acknowledged is lost, nobody goes back, no half record is read, and ids are unique."""
    runs, slack_s = [], apart_s(hosts)
    for number in range(rounds):
        name = f"converge-{rounds}-{number}"
        at, notes = roots(hosts, name), hosts.folder / name
        told: dict[str, Any] = hosts.at_once(
            {
                side: partial(
                    host_acts.converge_here,
                    at[side],
                    notes,
                    each // 2,
                    max(2, each * 3 // 200),
                    NETWORK,
                    seed,
                )
                for seed, side in enumerate(SIDES, 10 * number)
            }
        )
        ended = max(when for _, when in told.values())
        done = hosts.run_on(A, host_acts.judge_all, at[A], notes, ended, NETWORK.within_s, slack_s)
        assert [*done.wrong, *(one for run, _ in told.values() for one in run.wrong)] == []
        done.appends, done.kills = (
            sum(getattr(run, what) for run, _ in told.values()) for what in ("appends", "kills")
        )
        assert done.appends >= each
        runs.append(done)
    print(
        f"two hosts, clocks at most {1000 * slack_s:.0f} ms apart: {sum(run.appends for run in runs)} "
        f"acknowledged appends, {sum(run.generations for run in runs)} generations, "
        f"{sum(run.kills for run in runs)} kills, {sum(run.sights for run in runs)} sights, settled at most "
        f"{max(run.settled_s for run in runs):.1f} s after the last write, 0 violations"
    )

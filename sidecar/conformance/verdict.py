"""The verdict on the measurements: which promises hold, what to set, what to change. Pure.

The format guards a promise that is not needed: its failure costs time, never data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.conformance.contention import Fenced, Races, Turns
from lora_fs.sidecar.conformance.files import Replaced
from lora_fs.sidecar.conformance.report import Delay, Promise, Rates, Verdict
from lora_fs.sidecar.registry.volume.mounts import LOCAL, Timing, timing_for

PROMPT_S = 0.25  # what shows within it needs no advice
POLL_MOST_S, SETTLE_MOST_S = 30.0, 120.0

# What makes listings and attributes fresh, by the kernel's name of the filesystem.
FRESHER = {
    "fuse.sshfs": "-o dir_cache=no,attr_timeout=0,entry_timeout=0,negative_timeout=0",
    "fuse.glusterfs": "-o attribute-timeout=0,entry-timeout=0,negative-timeout=0, and performance.quick-read "
    "and performance.stat-prefetch off (gluster volume set)",
    "nfs": "-o vers=4.2,lookupcache=positive,actimeo=1",
    "nfs4": "-o vers=4.2,lookupcache=positive,actimeo=1",
    "cifs": "-o cache=none,actimeo=0",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that the probes found on one pair."""

    kinds: tuple[str, str]
    turns: Turns
    races: Races
    fenced: Fenced
    replaced: Replaced
    delays: tuple[Delay, ...]
    notified: bool | None
    rates: Rates

    def delay(self, name: str) -> Delay:
        """One of them by its name."""
        return next(delay for delay in self.delays if delay.name == name)


def judge(root: Path, peer: Path | None, measured: Measured, *, quick: bool, took_s: float) -> Verdict:
    """Put it in words."""
    promises = tuple(_promises(measured))
    poll_s, settle_s = _poll_s(measured), _settle_s(measured)
    return Verdict(
        root=str(root),
        peer=str(peer) if peer is not None else None,
        kinds=measured.kinds,
        quick=quick,
        took_s=took_s,
        tier="cas" if measured.races.supported else "lww",
        ok=all(promise.holds for promise in promises if promise.needed),
        promises=promises,
        delays=measured.delays,
        rates=measured.rates,
        poll_s=poll_s,
        settle_s=settle_s,
        advice=tuple(_advice(measured, Timing(poll_s, settle_s, 0.0), peer)),
    )


def _promises(measured: Measured) -> Iterator[Promise]:
    races, fenced, replaced, turns = measured.races, measured.fenced, measured.replaced, measured.turns
    wrong = [
        f"{count} {what}"
        for count, what in (
            (races.double, "with two winners"),
            (races.nobody, "with none"),
            (races.disagreed, "read differently"),
        )
        if count
    ]
    raced = f"{races.tried} races of two mounts for a name: " + (", ".join(wrong) or "one winner each")
    yield Promise(
        name="one-winner",
        holds=races.supported and not wrong,
        needed=True,
        text=raced if races.supported else "no hard links here: of two writers at once both are acknowledged",
    )
    slept = f"{fenced.tried} writers slept in their lease while another wrote: "
    yield Promise(
        name="fencing",
        holds=races.supported and not fenced.broken,
        needed=True,
        text=slept + (f"{fenced.broken} wrote all the same" if fenced.broken else "all were refused")
        if races.supported
        else "a writer that slept is not refused: its file lies beside the other one",
    )
    reads = sum(replaced.reads.values())
    found = ", ".join(f"{count} {what}" for what, count in sorted(replaced.reads.items()) if what != "whole")
    yield Promise(
        name="whole-reads",
        holds=not replaced.half if reads else None,
        needed=False,
        text=f"{reads} reads of a file replaced {replaced.replaced} times: {found or 'all whole, in order'}",
    )
    taken = sum(turns.takes)
    yield Promise(
        name="lease",
        holds=None if not all(turns.takes) else not turns.overlaps,
        needed=False,
        text=f"taken {turns.takes[0]} and {turns.takes[1]} times by two mounts: "
        + (f"held by both {turns.overlaps} times" if turns.overlaps else "never held by both")
        if taken
        else "could not be taken: writers go on without it after 0.25 s",
    )
    yield Promise(
        name="notifies",
        holds=measured.notified,
        needed=False,
        text={
            True: "a change by the other mount wakes a watcher",
            False: "a change by the other mount wakes nobody: HEAD is polled",
            None: "this host has no inotify watch left: raise fs.inotify.max_user_watches",
        }[measured.notified],
    )


def _poll_s(measured: Measured) -> float:
    """No shorter than what a read of HEAD may lag: an earlier one would see the old bytes again."""
    usual = timing_for(measured.kinds[1]).poll_s
    return min(POLL_MOST_S, max(usual, _rounded(measured.delay("replace").bound_s)))


def _settle_s(measured: Measured) -> float:
    """No shorter than twice what a dropped file may lag, so that a copy under way does not look still."""
    usual = timing_for(measured.kinds[1]).settle_s
    lag_s = max(measured.delay("stat").bound_s, measured.delay("listing").bound_s)
    return min(SETTLE_MOST_S, max(usual, _rounded(2 * lag_s)))


def _rounded(seconds: float) -> float:
    return float(math.ceil(seconds - PROMPT_S)) if seconds > PROMPT_S else 0.0


def _advice(measured: Measured, timing: Timing, peer: Path | None) -> Iterator[str]:
    kind, usual = measured.kinds[1], timing_for(measured.kinds[1])
    if not measured.races.supported:
        yield (
            "Keep no registry here that two writers may write to: without hard links its tier is lww, where "
            "the last writer wins. One writer and any number of readers are fine."
        )
    elif measured.races.double or measured.fenced.broken:
        yield "Keep no registry here: two writers of one name were both acknowledged."
    if timing.poll_s != usual.poll_s:
        yield f"Set LORA_FS_POLL_S={timing.poll_s:g}: a replaced file is read as it was for as long."
    if timing.settle_s != usual.settle_s:
        yield f"Set LORA_FS_SETTLE_S={timing.settle_s:g}: a copy under way looks still while listings lag."
    asked = ("listing", "create-asked", "replace")
    late = [one for one in measured.delays if one.name in asked and one.usual_s > PROMPT_S]
    if late:
        options = f"with {FRESHER[kind]}" if kind in FRESHER else "without a cache of names and attributes"
        yield f"Mount {options}: {late[0].text} shows late ({told(late[0])})."
    if measured.replaced.half:
        yield (
            f"{measured.replaced.half} reads of a replaced file were torn or empty. The seal catches each: "
            "it is read again, which costs time, not data."
        )
    if peer is None and kind not in LOCAL:
        yield (
            "One mount was tried against itself, and another host may see things later: mount the volume a "
            "second time and give --peer."
        )


def told(delay: Delay) -> str:
    """A delay in words: ``1.2 ms, at most 8.0 ms``."""
    if delay.median_s is None or delay.worst_s is None:
        return f"not within {delay.waited_s:g} s"
    words = f"{_seconds(delay.median_s)}, at most {_seconds(delay.worst_s)}"
    return words + (f", {delay.unseen} not within {delay.waited_s:g} s" if delay.unseen else "")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 0.9995 else f"{value * 1000:.1f} ms"

"""What the suite found, rendered for people and for scripts. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True)


class Promise(_Told):
    """One thing that the registry stands on.

    Attributes:
        holds: None if there was no trial.
        needed: without it keep no registry here; the format guards the others.
    """

    name: str
    holds: bool | None
    needed: bool
    text: str


class Delay(_Told):
    """How long after one mount changed something the other one showed it.

    Attributes:
        median_s, worst_s: seconds, over the tries that showed; None if none did.
        unseen: tries that did not show within ``waited_s`` seconds.
    """

    name: str
    text: str
    tries: int
    unseen: int
    waited_s: float
    median_s: float | None
    worst_s: float | None

    @classmethod
    def of(cls, name: str, text: str, seen_s: Sequence[float | None], waited_s: float) -> Delay:
        """Sum up tries; None is one that did not show."""
        seen = sorted(one for one in seen_s if one is not None)
        return cls(
            name=name,
            text=text,
            tries=len(seen_s),
            unseen=len(seen_s) - len(seen),
            waited_s=waited_s,
            median_s=seen[len(seen) // 2] if seen else None,
            worst_s=seen[-1] if seen else None,
        )

    @property
    def bound_s(self) -> float:
        """The longest wait that ended, or the longest in vain."""
        return self.waited_s if self.unseen else self.worst_s or 0.0

    @property
    def usual_s(self) -> float:
        """The median, or what was waited in vain: a cache delays every try, a busy machine delays one."""
        return self.waited_s if self.unseen else self.median_s or 0.0


class Rates(_Told):
    """Files of 1 KiB: written as records are (synced, linked), and read by the other mount at first sight.

    ``lease_s`` is the time between two takes of a contended lease.
    """

    files: int
    written_per_s: float
    listed_s: float
    read_per_s: float
    lease_s: float | None


class Verdict(_Told):
    """The whole of it.

    Attributes:
        kinds: the filesystem of each folder, as the kernel names it.
        tier: what a registry created here would be: "cas" has link(), "lww" is last writer wins.
        ok: every needed promise holds.
        poll_s, settle_s: what LORA_FS_POLL_S and LORA_FS_SETTLE_S should be, in seconds.
        advice: what to set or to change, one sentence each; nothing that is right already.
    """

    root: str
    peer: str | None
    kinds: tuple[str, str]
    quick: bool
    took_s: float
    tier: Literal["cas", "lww"]
    ok: bool
    promises: tuple[Promise, ...]
    delays: tuple[Delay, ...]
    rates: Rates
    poll_s: float
    settle_s: float
    advice: tuple[str, ...]

    def promise(self, name: str) -> Promise:
        """One of them by its name."""
        return next(promise for promise in self.promises if promise.name == name)

    def delay(self, name: str) -> Delay:
        """One of them by its name."""
        return next(delay for delay in self.delays if delay.name == name)

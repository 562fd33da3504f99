"""What the suite found, rendered for people and for scripts. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

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


class Try(NamedTuple):
    """One change, in seconds after its writing call returned.

    Attributes:
        vain_s: when the last look in vain began; 0 if the first look showed the change.
        seen_s: when the first look was due that showed it; None if none did in time.
    """

    vain_s: float
    seen_s: float | None


class Delay(_Told):
    """How long after one mount changed something the other one showed it.

    Attributes:
        median_s, worst_s: seconds, over the tries that showed; None if none did.
        unseen: tries that did not show within ``waited_s`` seconds.
        vain_s: seconds until the last look in vain began, the median over all tries.
    """

    name: str
    text: str
    tries: int
    unseen: int
    waited_s: float
    vain_s: float
    median_s: float | None
    worst_s: float | None

    @classmethod
    def of(cls, name: str, text: str, tries: Sequence[Try], waited_s: float) -> Delay:
        """Sum up at least one try."""
        seen = sorted(one.seen_s for one in tries if one.seen_s is not None)
        vain = sorted(one.vain_s for one in tries)
        return cls(
            name=name,
            text=text,
            tries=len(tries),
            unseen=len(tries) - len(seen),
            waited_s=waited_s,
            vain_s=vain[len(vain) // 2],
            median_s=seen[len(seen) // 2] if seen else None,
            worst_s=seen[-1] if seen else None,
        )

    @property
    def bound_s(self) -> float:
        """The longest wait that ended, or the longest in vain."""
        return self.waited_s if self.unseen else self.worst_s or 0.0

    @property
    def usual_s(self) -> float:
        """How long the mount usually shows what was before: the median of looks in vain.

        A cache delays every try and a busy machine delays one. A look that began late proves nothing of the
        time before it.
        """
        return self.waited_s if self.unseen else self.vain_s


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

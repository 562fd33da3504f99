"""The probes in their order, each with its share of the time, and the verdict over them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from lora_fs.sidecar.conformance import contention, files, visibility
from lora_fs.sidecar.conformance.contention import Fenced
from lora_fs.sidecar.conformance.pair import ANSWER_S, scratch
from lora_fs.sidecar.conformance.report import Verdict
from lora_fs.sidecar.conformance.verdict import Measured, judge
from lora_fs.sidecar.conformance.visibility import Visibility


class Effort(NamedTuple):
    """How long it may take, in seconds.

    Attributes:
        budget_s: after it each probe acts once.
        share_s: a probe that acts as often as it can.
        wait_s: one change that does not show.
        rounds: of a writer that sleeps in its lease, each a quarter of a second at least.
    """

    quick: bool
    budget_s: float
    share_s: float
    wait_s: float
    rounds: int


QUICK = Effort(quick=True, budget_s=8.0, share_s=0.6, wait_s=1.5, rounds=2)
FULL = Effort(quick=False, budget_s=240.0, share_s=6.0, wait_s=70.0, rounds=10)


def examine(root: Path, peer: Path | None = None, effort: Effort = FULL) -> Verdict:
    """Try what a filesystem keeps.

    Args:
        root: a folder of it; a scratch folder is made in it and removed.
        peer: the same folder on another mount; None tries one mount against itself.
    Raises:
        NotFound: one of the folders is not there.
        InputError: they are not two mounts of one filesystem.
        VolumeUnavailable: the volume takes no write, or does not answer.
        OperatorError: the scratch folder stays; says where it is.
    """
    started = time.monotonic()

    def share_s() -> float:
        return effort.share_s if time.monotonic() - started < effort.budget_s else 0.0

    with scratch(root, peer, ANSWER_S) as pair:
        turns = contention.exclusion(pair, effort.share_s)
        races = contention.races(pair, share_s())
        roots = pair.make("registry", ANSWER_S)
        pair.here.agent.call(ANSWER_S, contention.make_registry, roots[0])
        fenced = contention.fencing(pair, roots, effort.rounds) if races.supported else Fenced(0, 0)
        replaced = files.replacing(pair, effort.share_s)
        delays = tuple(Visibility(pair, share_s, effort.wait_s).all())
        registered = visibility.registered(pair, roots, share_s(), effort.wait_s)
        measured = Measured(
            kinds=pair.kinds,
            turns=turns,
            races=races,
            fenced=fenced,
            replaced=replaced,
            delays=(*delays, registered),
            notified=visibility.notified(pair, min(1.0, effort.wait_s)),
            rates=files.rates(pair, share_s(), turns.each_s),
        )
    return judge(root, peer, measured, quick=effort.quick, took_s=time.monotonic() - started)

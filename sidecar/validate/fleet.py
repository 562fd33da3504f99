"""Hold an adapter against what each live replica judges by, and note who cannot serve it. Pure.

If none of them can serve it, that is an error; if some cannot, a warning. A replica without known limits may
serve anything, and without a replica nothing is noted.
"""

from __future__ import annotations

from dataclasses import replace

from lora_fs.sidecar.model import Severity
from lora_fs.sidecar.validate.report import Expectation, Findings, Peer
from lora_fs.sidecar.validate.since import needs_newer, too_old
from lora_fs.sidecar.validate.structure import Kind, read_config, study

MAX_REASONS = 3
MAX_NAMED = 20
_ITS_ENGINE = "its engine can load no adapter: start it with runtime LoRA loading"


def check_fleet(here: Expectation, config: bytes, kind: Kind | None, file: str, found: Findings) -> None:
    """Note the replicas that cannot serve what passed so far; nothing, where something did not.

    Args:
        here: what the caller judges by, with the fleet.
        config: the bytes of the adapter's configuration.
        kind: the facts about its weights; None: they are a pickle.
        file: the weights' name.
    """
    if any(one.severity is Severity.ERROR for one in found.freeze()):
        return
    alike: list[tuple[Peer, list[str]]] = []  # judges replicas with the same limits once
    for peer in here.fleet:
        known = [names for one, names in alike if replace(one, replica=peer.replica) == peer]
        if known:
            known[0].append(peer.replica)
        else:
            alike.append((peer, [peer.replica]))
    refusals = [
        (why, names) for peer, names in alike if (why := _why_not(peer, here, config, kind, file)) is not None
    ]
    nobody = sum(len(names) for _, names in refusals) == len(here.fleet)
    for why, names in refusals:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        found.add(
            "no-replica" if nobody else "some-replicas",
            ".",
            "",
            f"{', '.join(names[:MAX_NAMED])}{more} cannot serve it: {why}",
            hint="no live replica can: register it all the same with --force"
            if nobody and not here.forced
            else "",
            severity=Severity.WARNING if here.forced else None,
        )


def _why_not(peer: Peer, here: Expectation, config: bytes, kind: Kind | None, file: str) -> str | None:
    """Why a replica cannot serve it, in words; None if it can, or may."""
    if peer.loads is False:
        return _ITS_ENGINE
    judge = peer.judges_by
    # The record keeps what this allows, and every replica allows it then, but for pickles.
    found = Findings(judge.allow | (here.allow - {"pickle"}))
    said = read_config(config, judge, found)
    if kind is None:
        found.add("pickle", file, "", "is a pickle, which its LORA_FS_ALLOW does not name")
    elif said is not None:
        study(kind._replace(config=said.config), judge.base(), file, found)
    newer = too_old(needs_newer(config), peer.version) if peer.version is not None else ()
    errors = [one.render() for one in (*found.freeze(), *newer) if one.severity is Severity.ERROR]
    more = [f"and {len(errors) - MAX_REASONS} more"] if len(errors) > MAX_REASONS else []
    return "; ".join([*errors[:MAX_REASONS], *more]) or None

"""What one replica judges adapters by, as its status file tells the others; and what the live ones tell.

Unknown stays unknown: nothing here has a default.
"""

from __future__ import annotations

from dataclasses import replace

from lora_fs.sidecar.engine.protocol import Facts
from lora_fs.sidecar.errors import TemporaryError
from lora_fs.sidecar.model import EngineLimits, Scope
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.view.reports import LIVE_S, age_s, read_reports
from lora_fs.sidecar.validate import Expectation, Learned, Peer, compared


def limits_of(
    expectation: Expectation, facts: Facts, version: str | None, loads: bool | None
) -> EngineLimits:
    """Return what a replica reports of itself.

    Args:
        facts, version: what its engine says; loads: whether that can load adapters. None: not known.
    """
    base = expectation.base()
    ranks = [rank for rank in (expectation.max_rank, facts.max_lora_rank) if rank is not None]
    return EngineLimits(
        engine_version=version,
        runtime_loading=loads,
        max_lora_rank=min(ranks, default=None),
        dtype=facts.dtype,
        base_models=expectation.model_ids or None,
        engine_models=expectation.learned.names or None,
        base_config=compared(base) if base is not None else None,
        strict_base_model=expectation.strict_base_model,
        allow=tuple(sorted(expectation.allow)),
    )


def with_fleet(
    expectation: Expectation, layout: Layout, scope: Scope, *, forced: bool = False
) -> Expectation:
    """Add the live replicas of a scope: what none of them can serve does not validate. Reads every report.

    Args:
        forced: it does, with a warning.
    """
    try:
        reports = read_reports(layout)
    except TemporaryError:
        return expectation  # the replicas are unknown: refuse nothing on their account
    live = [status for status in reports.of(scope) if age_s(status) < LIVE_S]
    known = (_peer(status.replica, status.limits or EngineLimits()) for status in live)
    unknown = (Peer(replica) for replica in reports.young)
    return replace(expectation, fleet=(*known, *unknown), forced=forced)


def _peer(replica: str, told: EngineLimits) -> Peer:
    judges_by = Expectation(
        told.base_models or (),
        told.base_config,
        told.max_lora_rank,
        frozenset(Expectation().allowed(frozenset(told.allow or ()))),
        told.strict_base_model or False,
        Learned(names=told.engine_models or ()),
    )
    return Peer(replica, judges_by, told.runtime_loading, told.engine_version)

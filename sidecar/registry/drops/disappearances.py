"""Folders taken away: seen so twice, they unregister what a folder had registered, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lora_fs.sidecar.errors import LoraFsError, NotFound
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.drops.seen import Seen
from lora_fs.sidecar.registry.lifecycle import artifacts, release
from lora_fs.sidecar.registry.store.writer import Registry

logger = logging.getLogger(__name__)


class Withdrawals:
    """The folders that are missing, across passes. Not thread-safe: the adopter owns it."""

    def __init__(self, registry: Registry, writer: str) -> None:
        self._registry, self._writer = registry, writer
        self._gone_once: set[AdapterKey] = set()
        self._failed: set[AdapterKey] = set()

    def in_doubt(self) -> set[AdapterKey]:
        """Folders missing once, which the next step looks for again."""
        return self._gone_once - self._failed

    def forget(self) -> None:
        """Start over: no folder is missing."""
        self._gone_once.clear()

    def step(self, listed: Mapping[Scope, Seen], before: Mapping[Scope, Seen]) -> bool:
        """Withdraw the folders that are missing for the second time; True if there was one.

        Args:
            listed: the scopes looked at now. before: all of them, as of their last look.
        """
        missed = self._gone_once | self._failed
        doubtful = {key.scope for key in missed}
        gone = {key for key in missed if key.scope not in listed}
        for scope, seen in listed.items():
            if seen is not before.get(scope) or scope in doubtful:
                gone |= _missing(seen)
        twice = gone & self._gone_once
        self._failed &= gone
        for key in twice:
            self._withdraw(key)
        self._gone_once = gone - twice
        return bool(twice)

    def _withdraw(self, key: AdapterKey) -> None:
        try:
            if artifacts.look(self._registry.layout.artifact(key)) is not None:
                self._failed.add(key)
                unlisted = told("folder.unlisted", key)
                logger.warning("%s: its folder is not listed and is there", key, extra=unlisted)
                return
            release.unregister(
                self._registry,
                key.scope,
                key.name,
                revision=key.revision,
                writer=self._writer,
                taken_away=True,
            )
            logger.info("unregistered %s: its folder was taken away", key, extra=told("withdrawn", key))
        except NotFound:
            logger.info("%s is unregistered already", key, extra=told("withdrawn", key))
        except LoraFsError as error:
            self._failed.add(key)
            failed = told("withdrawal.failed", key)
            logger.warning("%s: its folder is gone and it is not unregistered: %s", key, error, extra=failed)


def _missing(seen: Seen) -> set[AdapterKey]:
    """The records that a folder's drop wrote, and whose folder is not listed."""
    return {
        key
        for key, record in (seen.records or {}).items()
        if record.present
        and record.origin == "folder"
        and key.name not in seen.listing.of(key.revision).folders
        and key.name in seen.listing.of(key.revision).records
    }


def told(name: str, key: object) -> dict[str, Any]:
    """The event of a log line about an adapter, or a folder."""
    return event(name, adapter=str(key))

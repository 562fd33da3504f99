"""Folders that may become adapters: since when each holds still, and why it is not adopted.

A reason is reported for as long as it lasts, and logged when its kind changes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lora_fs.sidecar.model import AdapterKey
from lora_fs.sidecar.registry.drops.disappearances import told

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # after the volume, or another replica at work, kept a folder from being adopted


@dataclass(slots=True)
class Candidate:
    """A folder as it was seen: ``fingerprint`` is empty where nothing else of it counts."""

    fingerprint: str
    still_since: float
    refused: str | None = None  # why this fingerprint was not adopted
    retried: bool = False  # the refusal may end without the files changing
    momentary: bool = False  # it is the volume's, and tried again without a look at every folder
    not_before: float = 0.0
    replaces: int | None = None  # the pointer's generation when an adoption began that did not end


class Candidates(dict[AdapterKey, Candidate]):
    """By key, those last tried at the end. One thread owns them; any may ask for ``refusals``."""

    def refusals(self) -> Mapping[AdapterKey, str]:
        """Folders that are not adopted, and why: a copy is read, which nobody changes."""
        return {key: one.refused for key, one in self.copy().items() if one.refused}

    def due(self, now: float) -> bool:
        """Whether one settles, or is to be tried again soon."""
        open_ones = (one for one in self.values() if one.refused is None or one.momentary)
        return any(one.not_before <= now for one in open_ones)

    def refuse(
        self, key: AdapterKey, candidate: Candidate, why: str | Exception, *, retried: bool = False
    ) -> Literal[False]:
        """Keep why it is not adopted: until its files change, or ``retried`` at every look at all folders."""
        self._keep(key, candidate, why, "folder %s is not adopted: %s", "adoption.refused")
        candidate.retried, candidate.momentary = retried, False
        return False

    def retry(
        self, key: AdapterKey, candidate: Candidate, why: str | Exception, now: float
    ) -> Literal[False]:
        """Keep what the volume answered: it is tried again in RETRY_S."""
        self._keep(key, candidate, why, "adoption of %s is retried: %s", "adoption.retried")
        candidate.retried, candidate.momentary = True, True
        candidate.not_before = now + RETRY_S
        return False

    def _keep(self, key: AdapterKey, candidate: Candidate, why: str | Exception, log: str, name: str) -> None:
        text = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        before = self.get(key)
        if before is None or before.refused is None or _kind(before.refused) != _kind(text):
            logger.warning(log, key, text, extra=told(name, key))
        candidate.refused = text
        self[key] = candidate


def _kind(refused: str) -> str:
    return refused.partition(":")[0]

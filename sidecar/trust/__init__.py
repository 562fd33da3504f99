"""Whose signature an adapter needs: ``model.sig`` beside its files, and a trust file that names the signers.

Callers use ``Trust.check``. It compares digests that they have already, and reads no weights.
"""

from __future__ import annotations

from lora_fs.sidecar.trust.bundle import read as read_bundle
from lora_fs.sidecar.trust.refusal import BUNDLE, Refusal
from lora_fs.sidecar.trust.trust import Trust

__all__ = ["BUNDLE", "Refusal", "Trust", "read_bundle"]

"""An identity without a key of its own: a workflow or a person that an OpenID Connect issuer knows.

Sigstore's own library verifies it, offline, with the trusted root that the trust file names. The library
passes over what stands beside the signature below a log's checkpoint. Here that has one value.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass

from lora_fs.sidecar.trust.bundle import PAYLOAD_TYPE, Bundle
from lora_fs.sidecar.trust.refusal import Refusal
from lora_fs.sidecar.trust.signers import UNREADABLE, Now


@dataclass(frozen=True, slots=True)
class Identity:
    """What an issuer calls the signer. ``root``: the trusted root, JSON as Sigstore publishes it."""

    identity: str
    issuer: str
    root: bytes

    def verify(self, bundle: Bundle, now: Now) -> str | None:
        """See ``signers.Method``."""
        if not bundle.keyless:
            return None
        from sigstore import errors, models
        from sigstore.verify import Verifier, policy
        from sigstore_models.bundle.v1 import Bundle as Wire
        from sigstore_models.trustroot.v1 import TrustedRoot

        try:
            read = models.Bundle.from_json(bundle.raw)
            verifier = Verifier(trusted_root=models.TrustedRoot(TrustedRoot.from_json(self.root)))
            kind, payload = verifier.verify_dsse(
                read, policy.Identity(identity=self.identity, issuer=self.issuer)
            )
            entries = Wire.from_json(bundle.raw).verification_material.tlog_entries
        except (errors.Error, *UNREADABLE) as error:
            first = str(error).strip().partition("\n")[0]
            raise Refusal("untrusted", f"is not by {self.identity} of {self.issuer}: {first}") from error
        if (kind, payload) != (PAYLOAD_TYPE, bundle.payload):
            raise Refusal("untrusted", "signs another statement than it holds")
        for entry in entries:
            checkpoint = entry.inclusion_proof.checkpoint
            if checkpoint is None or not _is_signed_once(checkpoint.envelope):
                raise Refusal("untrusted", "has a log's checkpoint with more than the log's own signature")
        return f"identity {self.identity}"


def _is_signed_once(checkpoint: str) -> bool:
    """Whether one signature stands below a checkpoint, in its one spelling, under the log's own name."""
    note, _, below = checkpoint.partition("\n\n")
    log = note.partition("\n")[0].partition(" - ")[0]
    line = re.fullmatch("\u2014 (\\S+) (\\S+)\n", below)
    if line is None or line[1] != log:
        return False
    return base64.b64encode(base64.b64decode(line[2])).decode() == line[2]

"""An identity without a key of its own: a workflow or a person that an OpenID Connect issuer knows.

Sigstore's own library verifies it, offline, with the trusted root that the trust file names. The library
passes over what stands beside the log's signature below a checkpoint. Here all of that is signatures: a
witness's is read and ignored, since no trust file names a witness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from lora_fs.sidecar.trust.bundle import PAYLOAD_TYPE, Bundle, decoded
from lora_fs.sidecar.trust.refusal import Refusal
from lora_fs.sidecar.trust.signers import UNREADABLE, Now

KEY_BYTES: Final = 4
MOST_SIGNATURES: Final = 100  # below a checkpoint, as in Go's note package


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
            if checkpoint is None or not _is_signed(checkpoint.envelope, bytes(entry.log_id.key_id)):
                raise Refusal("untrusted", "has a log's checkpoint that is no note which the log signed once")
        return f"identity {self.identity}"


def _is_signed(checkpoint: str, log_id: bytes) -> bool:
    """Whether the log signed a checkpoint, under its own name and once; others may have signed it, too.

    Source: C2SP, signed-note: its name and four bytes identify a key. Ignores unknown keys.
    """
    note, _, below = checkpoint.partition("\n\n")
    log = note.partition("\n")[0].partition(" - ")[0]
    *lines, rest = below.split("\n")
    if rest or len(lines) > MOST_SIGNATURES:
        return False
    keys = list[tuple[str, bytes]]()
    for line in lines:
        read = re.fullmatch("\u2014 ([^\\s+]+) (\\S+)", line)
        try:
            signature = decoded(read[2]) if read is not None else b""
        except ValueError:
            return False
        if read is None or len(signature) <= KEY_BYTES:
            return False
        keys.append((read[1], signature[:KEY_BYTES]))
    return keys.count((log, log_id[:KEY_BYTES])) == 1

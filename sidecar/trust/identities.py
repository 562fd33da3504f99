"""An identity without a key of its own: a workflow or a person that an OpenID Connect issuer knows.

Sigstore's own library verifies it, offline, with the trusted root that the trust file names.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_fs.sidecar.trust.bundle import PAYLOAD_TYPE, Bundle
from lora_fs.sidecar.trust.refusal import Refusal
from lora_fs.sidecar.trust.signers import Now


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
        from sigstore_models.trustroot.v1 import TrustedRoot

        try:
            read = models.Bundle.from_json(bundle.raw)
            verifier = Verifier(trusted_root=models.TrustedRoot(TrustedRoot.from_json(self.root)))
            kind, payload = verifier.verify_dsse(
                read, policy.Identity(identity=self.identity, issuer=self.issuer)
            )
        except (errors.Error, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise Refusal("untrusted", f"is not by {self.identity} of {self.issuer}: {first}") from error
        if (kind, payload) != (PAYLOAD_TYPE, bundle.payload):
            raise Refusal("untrusted", "signs another statement than it holds")
        return f"identity {self.identity}"

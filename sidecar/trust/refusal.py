"""Why a signature does not count."""

from __future__ import annotations

from typing import Final, Literal

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.model import Finding, Severity

BUNDLE: Final = "model.sig"
Code = Literal["unsigned", "untrusted", "signature-mismatch"]


class Refusal(LoraFsError):
    """The bytes are not what a trusted signer signed. ``code``: of the finding."""

    def __init__(self, code: Code, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code: Code = code
        self.hint = hint

    @property
    def finding(self) -> Finding:
        """The refusal as a finding of validation."""
        return Finding(
            code=self.code, severity=Severity.ERROR, file=BUNDLE, message=str(self), hint=self.hint
        )

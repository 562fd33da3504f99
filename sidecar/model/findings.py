"""The findings of validation."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Severity(StrEnum):
    """``error`` refuses the adapter; with a ``warning`` the adapter passes."""

    ERROR = "error"
    WARNING = "warning"


class Finding(BaseModel):
    """One thing validation saw: which file, which field, what is wrong, what changes it."""

    model_config = ConfigDict(frozen=True)

    code: str
    severity: Severity
    file: str
    field: str = ""
    message: str
    hint: str = ""

    def render(self) -> str:
        """One line for people: ``adapter_config.json: r: is missing (…)``."""
        where = f"{self.file}: {self.field}" if self.field else self.file
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}: {self.message}{hint} [{self.code}]"

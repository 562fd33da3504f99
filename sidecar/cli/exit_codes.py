"""The exit code of each error: the first match from the top wins."""

from __future__ import annotations

from typing import Final

from lora_fs.sidecar.errors import (
    Conflict,
    GateNotPassed,
    InputError,
    InvalidAdapter,
    InvalidName,
    LoraFsError,
    NotFound,
    OverQuota,
    RegistryMissing,
    TooManyRegistrations,
    WaitTimeout,
)

FAILED: Final = 1
INVALID: Final = 5
USAGE: Final = 2
DIFFERS: Final = 8
INTERRUPTED: Final = 130
EXIT_CODES: Final[tuple[tuple[type[LoraFsError], int], ...]] = (
    (NotFound, 3),
    (RegistryMissing, 3),
    (OverQuota, 7),
    (TooManyRegistrations, 7),
    (Conflict, 4),
    (InvalidAdapter, INVALID),
    (GateNotPassed, INVALID),
    (InvalidName, USAGE),
    (WaitTimeout, 6),
    (InputError, USAGE),
    (LoraFsError, FAILED),
)


def exit_code(error: LoraFsError) -> int:
    """Return the documented exit code of an error."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))

"""Every error lora-fs raises on purpose, in one tree; the branch says what the caller can do.

    LoraFsError
    ├── InputError                fix the input and call again
    │   ├── InvalidName           a name breaks the grammar or would leave its folder
    │   ├── InvalidAdapter        no engine can serve the adapter's files; carries the findings
    │   ├── NotFound              no such adapter, revision or registry
    │   ├── TooLarge              more bytes than the limit
    │   ├── GateNotPassed         the revision's evaluation forbids it to serve the name
    │   ├── OverQuota             the namespace has used up its quota
    │   └── Conflict              it exists already, or changed under the caller
    ├── TemporaryError            call again later; nothing was lost
    │   ├── VolumeUnavailable     the volume did not answer, is full or read-only
    │   ├── UnknownOutcome        a write may or may not have landed; look before repeating it
    │   ├── TrustUnreadable       the trust file is unusable: nothing new is trusted until its repair
    │   ├── SourceUnavailable     an adapter's source did not answer; the bytes so far stay
    │   ├── ServerUnavailable     the server did not answer: it may have done the call
    │   ├── EngineUnavailable     the engine did not answer: its state is unknown, not empty
    │   ├── NoSpareRoom           the engine's memory is full, and no request asks for the adapter
    │   ├── TooManyRegistrations  the namespace registered as often as it may for now
    │   └── WaitTimeout           a bounded wait ran out
    └── OperatorError             a person has to act
        ├── FormatTooNew          a newer lora-fs wrote the volume
        ├── RegistryLost          the marker is gone or another registry is mounted
        │   └── RegistryMissing   the root has no marker, and this process never saw one
        ├── TokenRefused          a server refuses the token, or asks for one
        └── EngineRejected        the engine answered and refused; carries its reason
            └── NameTaken         it has something else under that name

The codec alone raises CorruptRecord, which means "not yet visible": readers keep the
last good state. NewerRecord is one that is whole and of another apiVersion: nobody writes over
it. Their boundaries decide HTTP status and exit code, not this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_fs.sidecar.model import Finding


class LoraFsError(Exception):
    """Root of the tree. ``str()`` is a sentence an operator can act on."""


def name_of(error: LoraFsError) -> str:
    """Name an error in this tree: its class, or the nearest one above it that stands here."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)


def named(name: str, message: str) -> LoraFsError | None:
    """Make the error of that name again, from its message alone; None if there is no such error."""
    kind = globals().get(name)
    if not isinstance(kind, type) or not issubclass(kind, LoraFsError):
        return None
    return kind.__new__(kind, message)  # its other fields stayed where it was raised


def install_extra(extra: str) -> str:
    """Say how to install lora-fs with an extra, from a clone or from a wheel: no package index has it."""
    return (
        f"install lora-fs with its extra '{extra}': pip install '.[{extra}]' in a clone of lora-fs, "
        f"or pip install 'FILE.whl[{extra}]' from a wheel"
    )


class InputError(LoraFsError):
    """The input is at fault; the same call will fail again."""


class InvalidName(InputError):
    """A segment breaks the grammar.

    Args:
        what: which segment ("name", "namespace", "model", "revision").
        value: the offending value; shown shortened.
        why: the rule it broke.
    """

    def __init__(self, what: str, value: str, why: str) -> None:
        shown = ascii(value if len(value) <= 80 else value[:77] + "...")
        super().__init__(f"invalid {what} {shown}: {why}")
        self.what, self.value, self.why = what, value, why


class InvalidAdapter(InputError):
    """No engine may serve the adapter; ``findings`` say why, file and field."""

    def __init__(self, where: str, findings: Sequence[Finding]) -> None:
        lines = "\n".join(f"  - {finding.render()}" for finding in findings)
        super().__init__(f"{where} cannot be served:\n{lines}")
        self.where, self.findings = where, tuple(findings)


class NotFound(InputError):
    """There is no such thing, and the volume was read to know it."""


class Conflict(InputError):
    """The state on the volume is not the one the caller expected."""


class Taken(Conflict):
    """The revision has other bytes, on record or in its place, or somebody withdrew it meanwhile."""


class TooLarge(InputError):
    """The input is larger than the limit."""


class GateNotPassed(InputError):
    """A revision has no evaluation, or did not pass what its namespace or its caller wants."""


class OverQuota(InputError):
    """The request does not fit the namespace's quota; it does once somebody takes something away."""


class TemporaryError(LoraFsError):
    """The same call may succeed later; ``retry_after_s`` is a hint in seconds."""

    retry_after_s: float = 1.0


class VolumeUnavailable(TemporaryError):
    """The volume did not take the read or write; the last known state stays in force."""


class UnknownOutcome(TemporaryError):
    """The write may have landed: look at the registered adapters before you repeat it."""


class TrustUnreadable(TemporaryError):
    """The trust file is unreadable or wrong: whether anything has a valid signature is unknown."""


class ServerUnavailable(TemporaryError):
    """A sidecar did not answer over HTTP, or something else answered."""


class EngineUnavailable(TemporaryError):
    """The engine did not answer in time: its loaded adapters are unknown."""


class EngineGone(EngineUnavailable):
    """Nothing listens at the engine's address any more."""


class SourceUnavailable(TemporaryError):
    """A hub, bucket or server did not answer, or broke off; asked again it goes on from there.

    ``spoiled``: what arrived is of no use, and it begins anew.
    """

    retry_after_s = 5.0
    spoiled = False


class TooManyRegistrations(TemporaryError):
    """The namespace registered as often as its quota allows; ``retry_after_s`` says when it may again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoSpareRoom(TemporaryError):
    """There is no free room, and a load without a request evicts nobody."""


class WaitTimeout(TemporaryError):
    """A bounded wait ran out. ``wrote``: the writes before it."""

    wrote: object = None


class OperatorError(LoraFsError):
    """Retrying will not help and the input is not at fault: a person has to act."""


class FormatTooNew(OperatorError):
    """The registry's format is newer than this lora-fs may touch."""


class RegistryLost(OperatorError):
    """The registry in use is gone from the volume."""


class RegistryMissing(RegistryLost):
    """The root holds no registry: nobody mounted its volume, or ran ``lora-fs init`` yet."""


class TokenRefused(OperatorError):
    """A server refuses the token, or asks for one."""


class EngineRejected(OperatorError):
    """The engine answered and refused; ``reason`` is its own message, ``status`` its HTTP code."""

    def __init__(self, message: str, *, reason: str, status: int | None = None) -> None:
        super().__init__(message)
        self.reason, self.status = reason, status


class NameTaken(EngineRejected):
    """The engine has other bytes under that name: from ``path``, if it says so."""

    def __init__(self, message: str, *, reason: str, status: int | None = None, path: str | None) -> None:
        super().__init__(message, reason=reason, status=status)
        self.path = path


class CorruptRecord(LoraFsError):
    """A sealed file's bytes do not match their checksum, or are not a sealed file at all."""


class NewerRecord(CorruptRecord):
    """The record is whole, and has an ``apiVersion`` that this lora-fs does not read."""

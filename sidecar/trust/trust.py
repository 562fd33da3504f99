"""Whether somebody who may signed these bytes: reads the trust file anew at each check.

A rotation needs no restart. While the file is unusable, nothing new is trusted. An engine's loaded
adapters stay loaded: their signatures held at the load.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_fs.sidecar.errors import InputError, TrustUnreadable
from lora_fs.sidecar.model import FileEntry
from lora_fs.sidecar.trust import bundle as bundles
from lora_fs.sidecar.trust import statement, trust_file
from lora_fs.sidecar.trust.refusal import Refusal
from lora_fs.sidecar.trust.trust_file import Signers


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True, slots=True)
class Trust:
    """One trust file. Any thread may ask.

    Attributes:
        path: the file. What it names is relative to its folder.
    """

    path: Path
    now: Callable[[], datetime.datetime] = field(default=_utc_now, repr=False)

    def signers(self) -> Signers:
        """Read who may sign, now.

        Raises:
            TrustUnreadable: the file, or one that it names, cannot be read or is wrong.
        """
        try:
            text = trust_file.read_file(self.path)
            return trust_file.parse(text, lambda name: (self.path.parent / name).read_bytes())
        except OSError as error:
            why = f"cannot read {error.filename or self.path}: {os.strerror(error.errno or 0)}"
            raise TrustUnreadable(f"the trust file {self.path}: {why}: nothing new is trusted") from error
        except InputError as error:
            raise TrustUnreadable(f"the trust file {self.path}: {error}: nothing new is trusted") from error

    def check(self, namespace: str, files: Sequence[FileEntry], raw: bytes | None) -> str | None:
        """Return who signed these files, ``name (key 1a2b…)``; None: the namespace needs no signature.

        Args:
            files: those that an engine would read, hashed by the caller.
            raw: what ``model.sig`` holds; None: it is not there.
        Raises:
            Refusal: nobody who may sign in this namespace did, or signed other bytes.
            TrustUnreadable: the answer is unknown.
        """
        signers = self.signers()
        if namespace in signers.unsigned:
            return None
        able = [one for one in signers.every if one.covers(namespace)]
        if not able:
            why = f"is trusted by nobody: {self.path} names no signer for namespace {namespace}"
            raise Refusal("untrusted", why, "name one in the trust file")
        if raw is None:
            raise Refusal(
                "unsigned",
                f"is not there, and namespace {namespace} takes signed adapters only",
                "sign the folder: lora-fs sign FOLDER --key KEY",
            )
        read = bundles.parse(raw)
        refusals = list[Refusal]()
        for one in able:
            try:
                who = one.method.verify(read, self.now)
            except Refusal as refusal:  # another signer may still accept the bundle
                refusals.append(refusal)
                continue
            if who is not None:
                statement.check(statement.signed_files(read.payload), files)
                return f"{one.name} ({who})"
        raise _by_none(namespace, [one.name for one in able], refusals)

    def problem(self) -> str | None:
        """Return why nothing is trusted now, for a condition."""
        try:
            signers = self.signers()
        except TrustUnreadable as error:
            return str(error)
        if not signers.every and not signers.unsigned:
            return f"the trust file {self.path} names no signer: nothing can be trusted"
        return None


def _by_none(namespace: str, names: Sequence[str], refusals: Sequence[Refusal]) -> Refusal:
    """The refusal of a bundle that no signer accepts. It has every signer's reason, and who was asked."""
    asked = ", ".join(names)
    if not refusals:
        why = f"is by nobody who may sign in namespace {namespace}: {asked}"
        return Refusal("untrusted", why, "see the trust file")
    if len(names) == 1:
        return refusals[0]
    reasons = "; ".join(dict.fromkeys(map(str, refusals)))
    hint = next((one.hint for one in refusals if one.hint), "see the trust file")
    return Refusal("untrusted", f"{reasons} (asked: {asked})", hint)

"""Whether someone who may has signed the bytes of a copy, checked before an engine gets it.

Anybody who writes the volume may have written the record. So its files count only if they have its digest,
and a load verifies the copy against that digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import InvalidAdapter, LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.trust import Refusal, Trust, read_bundle

LOOK_S = 10.0  # between looks at the trust file that no load asked for


class Trusted:
    """Asks the trust file. ``trust`` None: whoever signed, or nobody, is as good.

    Args:
        locate: a record's folder on the volume.
    """

    def __init__(self, trust: Trust | None, locate: Callable[[Record], Path]) -> None:
        self._trust, self._locate = trust, locate
        self._signers: dict[tuple[str, str], str | None] = {}
        self._problem: str | None = None

    def __bool__(self) -> bool:
        return self._trust is not None

    def signer_of(self, record: Record) -> str | None:
        """Return who signed a record's bytes, as last checked: from memory."""
        return self._signers.get(_bytes_of(record))

    def keep_only(self, known: Container[str]) -> None:
        """Forget who signed bytes that no adapter has any more. ``known``: digests."""
        for one in list(self._signers):  # threads may add some meanwhile
            if one[1] not in known:
                self._signers.pop(one, None)

    def check_copy(self, record: Record, copy: Path) -> bool:
        """Whether the signature beside a copy is valid. Reads nothing on the volume.

        Raises:
            TrustUnreadable: unknown.
        """
        with suppress(Refusal, VolumeUnavailable):
            self._check(record, copy)
            return True
        return False

    def check(self, record: Record, copy: Path) -> None:
        """Check the signature of a record's bytes: the one beside the copy, else the one beside the original.

        Raises:
            InvalidAdapter: no valid one. TrustUnreadable, VolumeUnavailable: unknown.
        """
        if self.check_copy(record, copy):
            return
        try:
            self._check(record, self._locate(record))
        except Refusal as refusal:
            self._signers.pop(_bytes_of(record), None)
            raise InvalidAdapter(str(record.key), [refusal.finding]) from refusal

    def _check(self, record: Record, folder: Path) -> None:
        """Note who signed a record's bytes, by the signature in a folder."""
        if self._trust is None:
            return
        files = record.spec.files
        if artifacts.digest_of(files) != record.spec.digest:
            raise Refusal(
                "signature-mismatch", "cannot count: the record's files are not those of its digest"
            )
        signer = self._trust.check(record.namespace, files, read_bundle(folder))
        self._signers[_bytes_of(record)] = signer

    def conditions(self) -> tuple[str, ...]:
        """The problem, if the last look found no trust to verify with."""
        return (f"TrustFile: {self._problem}",) if self._problem is not None else ()

    def look(self) -> None:
        """Read the trust file. Blocks."""
        if self._trust is not None:
            self._problem = self._trust.problem()

    async def watch(self) -> None:
        """Look again and again; the condition comes before a load needs the file."""
        thread = Daemons(1, "lora-fs-trust")
        while self._trust is not None:
            with suppress(TimeoutError, LoraFsError):
                async with asyncio.timeout(LOOK_S):
                    await thread.run(self.look)
            await asyncio.sleep(LOOK_S)


def _bytes_of(record: Record) -> tuple[str, str]:
    return record.namespace, record.spec.digest

"""Evaluations beside their records: the newest one of each revision, replaced as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lora_fs.sidecar.errors import CorruptRecord, OperatorError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Record
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.store.reader import Reader
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder

TRIES: Final = 3  # gc may remove an old folder that is empty, and never the one that is made then
_WENT: Final = (FileNotFoundError, FileExistsError)  # before or after it was found to exist


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The newest ones of a name's revisions. ``unreadable``: why, of those that cannot be read."""

    found: Mapping[str, Evaluation] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)


def of(reader: Reader, records: Iterable[Record]) -> Evaluations:
    """Read the newest evaluation of each; raises VolumeUnavailable."""
    found, unreadable = dict[str, Evaluation](), dict[str, str]()
    for record in records:
        try:
            one = read(reader, record)
        except OperatorError as error:
            unreadable[record.revision] = str(error)
        else:
            found |= {record.revision: one} if one is not None else {}
    return Evaluations(found, unreadable)


def write(reader: Reader, evaluation: Evaluation) -> None:
    """Let an evaluation be its revision's newest. It survives a power loss.

    gc may remove the folder if it was empty for long; this makes it anew.
    """
    path, data = reader.layout.evaluation(_key(evaluation)), seal(evaluation)
    for attempt in range(TRIES):
        try:
            make_folder(path.parent, root=reader.layout.root)
            atomic.replace(path, data, sync=True)
            return
        except VolumeUnavailable as error:
            if attempt == TRIES - 1 or not isinstance(error.__cause__, _WENT):
                raise


def read(reader: Reader, record: Record) -> Evaluation | None:
    """Read the newest evaluation of a revision's bytes; None if there is none.

    Raises:
        OperatorError: it cannot be understood. VolumeUnavailable: the volume did not answer.
    """
    path = reader.layout.evaluation(record.key)
    if path.name not in reader.names(path.parent):
        return None  # not opened to know it: see ``atomic``
    try:
        data = atomic.read_bytes(path)
        found = parse(record.key, data) if data is not None else None
    except (CorruptRecord, atomic.NotRegular) as error:
        raise OperatorError(f"{path}: {error}: evaluate {record.name}@{record.revision} again") from error
    return found if found is not None and found.measured.digest == record.spec.digest else None


def parse(key: AdapterKey, data: bytes) -> Evaluation:
    """Decode what lies in the place of a revision's evaluation. Raises CorruptRecord."""
    found = decode(Evaluation, data)
    if _key(found) != key:
        raise CorruptRecord(f"holds an evaluation of {_key(found)}, which is not what its path says")
    return found


def _key(evaluation: Evaluation) -> AdapterKey:
    return AdapterKey(evaluation.namespace, evaluation.model, evaluation.measured.revision, evaluation.name)

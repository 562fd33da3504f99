"""Evaluations beside their records: the newest one of each revision, replaced as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lora_fs.sidecar.errors import CorruptRecord, OperatorError
from lora_fs.sidecar.model import AdapterKey, Record
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.store.reader import Reader
from lora_fs.sidecar.registry.volume import atomic


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
    """Let an evaluation be its revision's newest. It survives a power loss."""
    path = reader.layout.evaluation(_key(evaluation))
    atomic.make_folder(path.parent)
    atomic.replace(path, seal(evaluation), sync=True)


def read(reader: Reader, record: Record) -> Evaluation | None:
    """Read the newest evaluation of a revision's bytes; None if there is none.

    Raises:
        OperatorError: it cannot be understood. VolumeUnavailable: the volume did not answer.
    """
    path = reader.layout.evaluation(record.key)
    if path.name not in (atomic.list_names(path.parent) or ()):
        return None  # not opened to know it: see ``atomic``
    try:
        data = atomic.read_bytes(path)
        found = decode(Evaluation, data) if data is not None else None
    except (CorruptRecord, atomic.NotRegular) as error:
        raise OperatorError(f"{path}: {error}: evaluate {record.name}@{record.revision} again") from error
    if found is None or _key(found) != record.key or found.measured.digest != record.spec.digest:
        return None  # of other bytes
    return found


def _key(evaluation: Evaluation) -> AdapterKey:
    return AdapterKey(evaluation.namespace, evaluation.model, evaluation.measured.revision, evaluation.name)

"""Validate one adapter's folder: reads its two served files and applies every rule to them.

Bad input gives findings, never an exception; only a volume that does not
answer raises. It writes nothing, loads no pickle, follows no link, and blocks on no open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import InvalidAdapter
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model import LoraShape, Severity
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE, MAX_CONFIG_BYTES
from lora_fs.sidecar.validate.files import Refused, RegularFile, names, open_file, open_folder
from lora_fs.sidecar.validate.fleet import check_fleet
from lora_fs.sidecar.validate.report import Expectation, Findings, Report
from lora_fs.sidecar.validate.structure import Kind, Said, read_config, shape_of, study
from lora_fs.sidecar.validate.weights.contents import BUFFER_BYTES, is_preallocated, scan_contents
from lora_fs.sidecar.validate.weights.header import header_length, parse_header

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")  # in the order vLLM looks for them

_ADDED_EMBEDDINGS = ("new_embeddings.safetensors", "new_embeddings.bin")
_NOTHING_KNOWN = Expectation()

Taking = Callable[[str, memoryview], object]


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights file's name, its size, and what is in it."""

    name: str
    size_bytes: int
    shape: LoraShape | None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One validation under way."""

    folder: Path
    folder_fd: int
    expectation: Expectation
    found: Findings
    contents: bool
    arriving: bool
    progress: Callable[[int], None] | None
    taking: Taking | None


def validate(
    folder: Path,
    expectation: Expectation = _NOTHING_KNOWN,
    *,
    contents: bool = True,
    arriving: bool = True,
    progress: Callable[[int], None] | None = None,
    taking: Taking | None = None,
    folder_fd: int | None = None,
) -> Report:
    """Say whether an engine can serve the adapter in ``folder`` and would serve what is meant.

    Args:
        contents: also read the weights' bytes, for NaN, Inf and zeros.
        arriving: they may still be: report a copy that looks unfinished.
        progress: called with each number of bytes read of the weights.
        taking: called with the name and the next bytes of a served file, from its first byte to its last:
            those that the rules saw. Not called for a refused config or header. A
            part keeps its bytes until the call after the next one. Needs ``contents``.
        folder_fd: ``folder``, opened by the caller; None opens it here, links followed.
    Raises:
        VolumeUnavailable: the volume did not answer; the adapter's state is unknown.
    """
    found = Findings(expectation.allow, stock=expectation.stock)
    try:
        with open_folder(folder) if folder_fd is None else nullcontext(folder_fd) as fd:
            return _validate(_Reading(folder, fd, expectation, found, contents, arriving, progress, taking))
    except Refused as refused:
        found.add(refused.code, str(folder), "", refused.message, hint=refused.hint)
    return Report(found.freeze(), shape=None, base_model=None, served_files=())


@contextmanager
def open_adapter(folder: Path, called: str) -> Iterator[int]:
    """Open an adapter's folder, links followed, to judge and read it through this one handle.

    Args:
        called: what its sender calls it.
    Raises:
        InvalidAdapter: it is not there, is no folder, or may not be read.
        VolumeUnavailable: the volume did not answer.
    """
    try:
        with open_folder(folder) as fd:
            yield fd
    except Refused as refused:
        found = Findings()
        found.add(refused.code, str(folder), "", refused.message, hint=refused.hint)
        raise InvalidAdapter(called, found.freeze()) from refused


def looks_preallocated(folder: Path, folder_fd: int | None = None) -> bool:
    """Whether the weights have their full size while some of their bytes have not arrived.

    Reads the header and a few hundred bytes of the tensors. False where there are no weights,
    or where ``validate`` refuses them for another reason.

    Args:
        folder_fd: as for ``validate``.
    Raises:
        VolumeUnavailable: the volume did not answer.
    """
    found = Findings()
    try:
        with (
            open_folder(folder) if folder_fd is None else nullcontext(folder_fd) as fd,
            open_file(fd, WEIGHTS_FILE) as file,
        ):
            if file is None:
                return False
            header = _read_header(file, found)
            entries = None if header is None else parse_header(header, file.size_bytes, file.name, found)
            if entries is None:
                return any(finding.code == "unfinished-copy" for finding in found.freeze())
            return is_preallocated(file, entries)
    except Refused:
        return False


def _validate(reading: _Reading) -> Report:
    said, config = _read_config(reading)
    weights = _read_weights(reading, said, config)
    return Report(
        findings=reading.found.freeze(),
        shape=None if weights is None else weights.shape,
        base_model=None if said is None else said.base_model,
        served_files=() if said is None or weights is None else (CONFIG_FILE, weights.name),
        size_bytes=0 if said is None or weights is None else len(config) + weights.size_bytes,
    )


def _read_config(reading: _Reading) -> tuple[Said | None, bytes]:
    """The config's values, and its bytes."""
    found = reading.found
    try:
        with open_file(reading.folder_fd, CONFIG_FILE) as file:
            if file is None:
                found.add("missing-config", CONFIG_FILE, "", "is not there", hint=_not_here(reading))
                return None, b""
            if file.size_bytes > MAX_CONFIG_BYTES:
                found.add(
                    "config-too-large",
                    CONFIG_FILE,
                    "",
                    f"is {file.size_bytes} bytes; {MAX_CONFIG_BYTES} are the most that is read",
                )
                return None, b""
            file.head()
            raw = file.read(0, file.size_bytes)
            return read_config(raw, reading.expectation, found), raw
    except Refused as refused:
        found.add(refused.code, CONFIG_FILE, "", refused.message, hint=refused.hint)
        return None, b""


def _read_weights(reading: _Reading, said: Said | None, config: bytes) -> _Weights | None:
    found = reading.found
    try:
        present = names(reading.folder_fd, reading.folder)
        with open_file(reading.folder_fd, WEIGHTS_FILE) as file:
            if file is not None:
                _tell_unserved(present, found)
                return _check_weights(reading, file, said, config)
        for name in PICKLES:
            with open_file(reading.folder_fd, name) as file:
                if file is not None:
                    return _check_pickle(reading, file, said, config)
        _tell_missing(present, reading)
    except Refused as refused:
        found.add(refused.code, WEIGHTS_FILE, "", refused.message, hint=refused.hint)
    return None


def _check_weights(reading: _Reading, file: RegularFile, said: Said | None, config: bytes) -> _Weights | None:
    found = reading.found
    header = _read_header(file, found)
    if header is None:
        return None
    kind = Kind(None if said is None else said.config, header, file.size_bytes)
    structure = study(kind, reading.expectation.base(), file.name, found)
    if structure is None:
        return None
    check_fleet(reading.expectation, config, kind, file.name, found)
    if reading.contents:
        if reading.arriving and is_preallocated(file, structure.entries):
            found.add(
                "unfinished-copy",
                file.name,
                "",
                "some tensors begin or end in zero bytes, as in a copy that is under way",
                severity=Severity.WARNING,
            )
        taking = _begin(reading, file.name, config)
        taking(file.name, memoryview(len(header).to_bytes(8, "little") + header))

        def seen(part: memoryview) -> None:
            taking(file.name, part)
            if reading.progress is not None:
                reading.progress(len(part))

        scan_contents(file, structure.entries, structure.modules, found, seen)
    return _Weights(file.name, file.size_bytes, structure.shape)


def _begin(reading: _Reading, weights: str, config: bytes) -> Taking:
    """Hand the config out; returns who takes the weights. Nobody takes a refused adapter's."""
    taking = reading.taking
    if taking is None or any(one.severity is Severity.ERROR for one in reading.found.freeze()):
        return lambda *_: None
    taking(CONFIG_FILE, memoryview(config))
    taking(weights, memoryview(b""))
    return taking


def _read_header(file: RegularFile, found: Findings) -> bytes | None:
    head = file.head()
    length = header_length(head, file.size_bytes, file.name, found)
    return None if length is None else file.read(len(head), length)


def _check_pickle(reading: _Reading, file: RegularFile, said: Said | None, config: bytes) -> _Weights | None:
    found = reading.found
    file.head()
    refused = "pickle" not in found.allow
    found.add(
        "pickle",
        file.name,
        "",
        "is a pickle: loading it can run code, and its tensors are not checked",
        hint="save it as safetensors (PEFT: save_pretrained(safe_serialization=True))",
    )
    if refused:
        return None
    check_fleet(reading.expectation, config, None, file.name, found)
    taking = _begin(reading, file.name, config)
    for at in range(0, file.size_bytes, BUFFER_BYTES):
        taking(file.name, memoryview(file.read(at, min(BUFFER_BYTES, file.size_bytes - at))))
    known = None if said is None else said.config
    return _Weights(file.name, file.size_bytes, None if known is None else shape_of(known))


def _tell_unserved(present: frozenset[str], found: Findings) -> None:
    for name in sorted(present - {WEIGHTS_FILE}):
        if name in _ADDED_EMBEDDINGS:
            found.add("added-tokens", name, "", "holds embeddings of added tokens, which vLLM ignores")
        elif name.endswith(".safetensors") or name in (*PICKLES, "non_lora_trainables.bin"):
            found.add("unserved-weights", name, "", f"is not read; {WEIGHTS_FILE} is served")


def _tell_missing(present: frozenset[str], reading: _Reading) -> None:
    shards = sorted(n for n in present if n.startswith("adapter_model") and "safetensors" in n)
    if shards:
        reading.found.add(
            "sharded-weights",
            shards[0],
            "",
            f"is a part of the weights; vLLM reads {WEIGHTS_FILE} alone",
            hint="save the adapter in one file",
        )
        return
    others = sorted(n for n in present if n.endswith((".safetensors", ".bin", ".pt", ".gguf")))
    hint = f"the folder holds {shown(', '.join(others))}" if others else _not_here(reading)
    reading.found.add("missing-weights", WEIGHTS_FILE, "", "is not there", hint=hint)


def _not_here(reading: _Reading) -> str:
    return f"looked in {shown(str(reading.folder))}; is the copy complete?"

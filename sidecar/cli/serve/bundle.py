"""What a vLLM elsewhere needs to run the plugin, read from this installation: files, and whose they are.

Promise: lora-fs without its demo, and those of its dependencies that no vLLM brings, each with its metadata.
It leaves out what vLLM declares, so that nothing here can hide the engine's own copy. It refuses native
code, which must fit the other container's Python and C library. No network, no pip, no torch.

A metadata folder is called ``lora_fs.dist-info``, without the version: its METADATA tells it, and the name
stays the same when another version takes its place.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import io
from collections.abc import Iterator, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from lora_fs.sidecar.errors import OperatorError

OURS = "lora-fs"
PACKAGES = ("kernels", "schemas", "sidecar", "worker_patch")
# What the plugin imports and vLLM does not declare; a test works it out from vLLM's own metadata.
EXTRAS = ("watchdog",)
GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
COMMAND = """\
#!/usr/bin/env python3
import sys
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit("lora-fs needs Python 3.11 or newer; this one is " + sys.version.split()[0])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lora_fs.sidecar.cli import main

main()
"""
_NATIVE = {".so", ".pyd", ".dylib", ".dll"}
_OF_THE_INSTALLER = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}


class Part(NamedTuple):
    """One distribution: its files by their path in the folder, RECORD excepted."""

    name: str
    version: str
    files: Mapping[str, bytes]


def collect() -> tuple[Part, ...]:
    """Read lora-fs, which comes first, and what it brings along."""
    ours = _distribution(OURS)
    declared = {point.group for point in ours.entry_points if point.name == "lora_fs"}
    if missing := [group for group in GROUPS if group not in declared]:
        raise OperatorError(
            f"the installed metadata of {OURS} {ours.version} declares no plugin in {', '.join(missing)}: "
            "it is older than the code, install lora-fs again"
        )
    files = {path: data for package in PACKAGES for path, data in _package(package)}
    files |= {"bin/lora-fs": COMMAND.encode(), **_metadata(ours)}
    extras = map(_distribution, EXTRAS)
    return Part(OURS, ours.version, files), *(
        Part(extra.name, extra.version, {**dict(_modules(extra)), **_metadata(extra)}) for extra in extras
    )


def write(parts: tuple[Part, ...], folder: Path) -> None:
    """Write every part into the empty ``folder``, readable for all, each with its RECORD."""
    for part in parts:
        record = io.StringIO()
        rows = csv.writer(record, lineterminator="\n")
        for path, data in sorted(part.files.items()):
            _write(folder, path, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow((path, f"sha256={digest}", len(data)))
        where = f"{_metadata_folder(part.name)}/RECORD"
        rows.writerow((where, "", ""))
        _write(folder, where, record.getvalue().encode())
    for inner in (folder, *(entry for entry in folder.rglob("*") if entry.is_dir())):
        inner.chmod(0o755)


def tested() -> tuple[str, ...]:
    """The versions of vLLM that the plugin's tests ran on. Looked up by name, not imported."""
    return tuple(importlib.import_module("lora_fs.worker_patch.compat").TESTED)


def _write(folder: Path, path: str, data: bytes) -> None:
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    target.chmod(0o755 if path.startswith("bin/") else 0o644)


def _distribution(name: str) -> metadata.Distribution:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise OperatorError(f"{name} is not installed beside this command: install lora-fs again") from None
    if not found.files:
        raise OperatorError(
            f"the installed {name} has no RECORD of its files: install lora-fs again, with pip"
        )
    return found


def _package(name: str) -> Iterator[tuple[str, bytes]]:
    """A package's files as they are on the disk: an editable installation's RECORD has none of them."""
    spec = util.find_spec(f"lora_fs.{name}")  # finds it, imports nothing of it
    folders = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    if not any(folder.is_dir() for folder in folders):
        raise OperatorError(f"lora_fs.{name} is missing from this installation: install lora-fs again")
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            inside = file.relative_to(folder)
            hidden = any(part.startswith((".", "__pycache__")) for part in inside.parts)
            if file.is_file() and not hidden:
                yield f"lora_fs/{name}/{inside.as_posix()}", file.read_bytes()


def _modules(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    for file in distribution.files or ():
        outside = file.is_absolute() or ".." in file.parts
        if outside or "__pycache__" in file.parts or file.parts[0].endswith(".dist-info"):
            continue
        if _NATIVE & set(file.suffixes):
            raise OperatorError(
                f"{distribution.name} {distribution.version} holds native code ({file}), which may not fit "
                f"vLLM's Python: install {distribution.name} in vLLM's own environment, or use another build"
            )
        yield file.as_posix(), Path(str(file.locate())).read_bytes()


def _metadata(distribution: metadata.Distribution) -> dict[str, bytes]:
    folder = _metadata_folder(distribution.name)
    files = {f"{folder}/INSTALLER": f"{OURS}\n".encode()}
    for file in distribution.files or ():
        if file.parts[0].endswith(".dist-info") and file.name not in _OF_THE_INSTALLER:
            files["/".join((folder, *file.parts[1:]))] = Path(str(file.locate())).read_bytes()
    return files


def _metadata_folder(name: str) -> str:
    return f"{name.replace('-', '_')}.dist-info"

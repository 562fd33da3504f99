"""Small input that would cost much: each is answered within MEMORY_MB and SECONDS, in its own process."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import resource
import signal
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import CorruptRecord, InputError
from lora_fs.sidecar.model import Record, ReplicaStatus
from lora_fs.sidecar.registry.backup import archive
from lora_fs.sidecar.registry.format.sealed import _checksum, decode
from lora_fs.sidecar.server.middleware.tokens import parse
from lora_fs.sidecar.validate import Expectation, validate
from tests.fuzz.readers import GOLDEN
from tests.server.at_once import find_model
from tests.validate.conftest import CONFIG_FILE, WEIGHTS_FILE, Draft, raw_safetensors

MEMORY_MB = 400  # on top of what the process has: a sidecar's limit is 512 MiB
SECONDS = 10
HEADER_BYTES = 60_000_000

_fork = multiprocessing.get_context("fork")


def answered(act: Callable[[], object]) -> None:
    """Run ``act`` in a fork with its memory and its time bounded."""

    def child() -> None:
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        most = taken + (MEMORY_MB << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its own time; SIGPROF ends it
        act()

    process = _fork.Process(target=child)
    process.start()
    process.join(20 * SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, "killed" if (process.exitcode or 0) < 0 else "failed: see above"


def refused(folder: Path, code: str) -> Callable[[], None]:
    def act() -> None:
        assert {finding.code for finding in validate(folder, Expectation()).errors} == {code}

    return act


def entries(count: int) -> bytes:
    one = '"t%d":{"dtype":"F32","shape":[1,1],"data_offsets":[%d,%d]}'
    return ("{" + ",".join(one % (i, 4 * i, 4 * i + 4) for i in range(count)) + "}").encode()


HEADERS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a million tensors": ("header-too-large", lambda: entries(1_000_000)),
    "lists in lists, few commas": (
        "header-too-large",
        lambda: b'{"a":[' + b",".join([b"[" * 30 + b"]" * 30] * (HEADER_BYTES // 60)) + b"]}",
    ),
    "objects in objects": (
        "header-too-large",
        lambda: b'{"a":[' + b",".join([b'{"":' * 20 + b"0" + b"}" * 20] * (HEADER_BYTES // 101)) + b"]}",
    ),
    "one long word beyond ASCII": (
        "header-too-large",
        lambda: ('{"a":"\U0001f600' + "x" * HEADER_BYTES + '"}').encode(),
    ),
    "one long word": ("header", lambda: b'{"a":"' + b"x" * HEADER_BYTES + b'"}'),
    "blanks": ("header", lambda: b'{"a":1}' + b" " * HEADER_BYTES),
    "nested": ("header", lambda: b'{"a":' + b"[" * 400_000 + b"]" * 400_000 + b"}"),
    "a number of a million digits": ("header", lambda: b'{"a":' + b"9" * 1_000_000 + b"}"),
    "the same key twice": ("header", lambda: entries(2).replace(b"t1", b"t0")),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_costs(what: str, draft: Draft) -> None:
    """It is refused by its code before it is believed."""
    folder, (code, make) = draft.write(), HEADERS[what]
    (folder / WEIGHTS_FILE).write_bytes(raw_safetensors(make(), b""))
    answered(refused(folder, code))


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 100_000_001])
def test_a_header_that_claims_to_be_huge(length: int, draft: Draft) -> None:
    """Its length is compared with the format's bound before anything is made for it."""
    folder = draft.write()
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", length) + b"{}")
    answered(refused(folder, "header-too-large"))


def test_a_header_as_long_as_a_sparse_file(draft: Draft) -> None:
    """100 MB of nothing behind the length are a copy under way."""
    folder = draft.write()
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", 100_000_000))
    os.truncate(folder / WEIGHTS_FILE, 100_000_008)
    answered(refused(folder, "unfinished-copy"))


@pytest.mark.parametrize(
    "offsets", [[[0, 8], [4, 12]], [[0, 8], [0, 8]], [[0, 8], [9, 17]], [[0, 2**62], [2**62, 2**62 + 8]]]
)
def test_offsets_that_lie(offsets: list[list[int]], draft: Draft) -> None:
    """Overlaps, gaps and tensors beyond the file are told apart from nothing by their code."""
    folder = draft.write()
    header = {f"t{i}": {"dtype": "F32", "shape": [2], "data_offsets": at} for i, at in enumerate(offsets)}
    (folder / WEIGHTS_FILE).write_bytes(raw_safetensors(header, bytes(17)))
    answered(refused(folder, "offsets"))


def test_a_sparse_terabyte_is_not_read(draft: Draft) -> None:
    """Weights of 1 TB of which 4 KB were ever written, whole by their header: nobody waits for them."""
    folder = draft.write()
    half = 1 << 39
    at = [0, half, 2 * half]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    header = {
        name.format("A"): {"dtype": "F32", "shape": [4, half // 16], "data_offsets": at[:2]},
        name.format("B"): {"dtype": "F32", "shape": [half // 16, 4], "data_offsets": at[1:]},
    }
    data = raw_safetensors(header, b"\1" * 4096)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(data)
        file.truncate(len(data) - 4096 + 2 * half)
        for end in (half, 2 * half):
            file.seek(len(data) - 4096 + end - 4096)
            file.write(b"\1" * 4096)
    answered(refused(folder, "unfinished-copy"))


def test_a_sparse_config_is_not_read(draft: Draft) -> None:
    """A config of 1 TB is refused by its size."""
    folder = draft.write()
    os.truncate(folder / CONFIG_FILE, 1 << 40)
    answered(refused(folder, "config-too-large"))


def test_a_config_of_many_names(draft: Draft) -> None:
    """Targets and excluded modules, 30,000 of each, are not compared pair by pair: that took minutes."""
    for field, name in (("target_modules", "t"), ("exclude_modules", "e")):
        draft.config[field] = [f"{name}{number}" for number in range(30_000)]
    answered(refused(draft.write(), "target-modules"))


def test_a_config_of_a_long_name(draft: Draft) -> None:
    """A name of a quarter of a million parts is no module's."""
    draft.config["exclude_modules"] = ["." * 250_000]
    answered(refused(draft.write(), "config-field"))


def test_tensors_of_many_parts(draft: Draft) -> None:
    """What ends each of 4,000 names of 490 parts is not kept: it took 1 GB."""
    header: dict[str, object] = {}
    for number in range(8_000):
        name = f"base_model.model.{'a.' * 485}x{number // 2}.lora_{'AB'[number % 2]}.weight"
        shape = [[4, 1], [1, 4]][number % 2]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [16 * number, 16 * number + 16]}
    folder = draft.write()
    (folder / WEIGHTS_FILE).write_bytes(raw_safetensors(header, b"\1" * 128_000))
    answered(refused(folder, "target-modules"))


def _record(**spec: object) -> bytes:
    body = json.loads((GOLDEN / "default/Qwen--Qwen2.5-7B/v1/support.@00000001.json").read_bytes())
    body["spec"] |= spec
    return _sealed(body)


def _status(**fields: object) -> bytes:
    whole = {"replica": "a", "model": "m", "namespaces": ["n"], **fields}
    return _sealed(whole)


def _sealed(body: dict[str, object]) -> bytes:
    """As dense as it gets: more of it fits into what is read of one file."""
    body.pop("sum", None)
    return json.dumps(body | {"sum": _checksum(body)}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (Record, lambda: _record(files=[0] * 900_000)),
        (Record, lambda: _record(labels={str(i): 0 for i in range(250_000)})),
        (Record, lambda: _record(lora={"rank": 1, "alpha": 1, "dtype": "", "target_modules": [0] * 900_000})),
        (ReplicaStatus, lambda: _status(conditions=[0] * 900_000)),
        (ReplicaStatus, lambda: _status(adapters={str(i): {} for i in range(200_000)})),
        (ReplicaStatus, lambda: _status(counts={str(i): "x" for i in range(200_000)})),
    ],
    ids=["files", "labels", "target_modules", "conditions", "adapters", "counts"],
)
def test_a_sealed_file_of_a_million_faults(
    kind: type[Record] | type[ReplicaStatus], make: Callable[[], bytes]
) -> None:
    """The first one is told; a list of all took 3 GB."""
    data = make()

    def act() -> None:
        with pytest.raises(CorruptRecord) as told:
            decode(kind, data)
        assert len(str(told.value)) < 500

    answered(act)


@pytest.mark.parametrize(
    "line", [b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nx\r\n', b"\r\n--zz\r\n" * 8]
)
@pytest.mark.parametrize("boundary", ["zz", "b"])
def test_a_form_of_many_parts(line: bytes, boundary: str) -> None:
    """8 MB are gone through once: the pattern that looked for a part's end took minutes for 1 MB."""
    body = line * ((8 << 20) // len(line))
    answered(lambda: find_model(f"multipart/form-data; boundary={boundary}", body))


@pytest.mark.parametrize("piece", [b"[],", b'{"a":[]},', b"0,", b'"",'])
@pytest.mark.parametrize("place", [b'"x"', b'"user"', b'"background"'])
def test_a_request_of_many_values(piece: bytes, place: bytes) -> None:
    """A sidecar's largest: a tree of 20 MB of them takes 512, and one of 60 stopped all streams for 21 s."""
    body = b'{"model":"a0",%b:[%b0]}' % (place, piece * ((60 << 20) // len(piece)))

    def read() -> None:
        field = find_model("application/json", body)
        assert field is not None
        assert field.name == "a0"
        assert len(field.renamed("a0@v2")) == len(body) + 3

    answered(read)


def export_refused(path: Path) -> Callable[[], None]:
    def act() -> None:
        with pytest.raises(InputError) as told:
            archive.read(path)
        assert len(str(told.value)) < 500

    return act


def tar_header(kind: bytes, size_bytes: int) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size_bytes
    return member.tobuf()


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("packed", [True, False])
def test_an_export_whose_header_is_huge(tmp_path: Path, kind: bytes, packed: bool) -> None:
    """A header of 512 MB, half a megabyte when packed, is refused by its length; it was read whole."""
    path, size_bytes = tmp_path / "export.tar", 512 << 20
    begin = tar_header(kind, size_bytes)
    if packed:
        path.write_bytes(gzip.compress(begin) + gzip.compress(bytes(1 << 20)) * 512)
    else:
        path.write_bytes(begin)
        os.truncate(path, size_bytes)
    answered(export_refused(path))


def test_an_export_of_headers(tmp_path: Path) -> None:
    """Headers that each announce another one end where they nest too deep."""
    one = f"{32 << 10} comment=".encode()
    body = one + b"x" * ((32 << 10) - len(one) - 1) + b"\n"
    path = tmp_path / "export.tar"
    path.write_bytes((tar_header(tarfile.XGLTYPE, len(body)) + body) * 2_000)
    answered(export_refused(path))


def test_a_token_file_of_many_tokens() -> None:
    """As many as 1 MB holds are gone through once; each was compared with all before it."""
    text = "\n".join(f"{number:x}" for number in range(150_000))
    answered(lambda: parse(text))

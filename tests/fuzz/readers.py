"""What reads bytes that others wrote: each reader, what it may raise, and inputs to begin from.

A reader is a function of bytes that returns or raises what it declares; ``run`` tells everything
else. What it tells of bad input is one bounded line, since it ends in logs, statuses and terminals.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from pydantic import BaseModel

from lora_fs.sidecar.errors import (
    CorruptRecord,
    FormatTooNew,
    InputError,
    LoraFsError,
    RegistryLost,
)
from lora_fs.sidecar.model import Pointer, Record, ReplicaStatus
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.registry.backup import archive
from lora_fs.sidecar.registry.format.layout import Layout, Listing, generation_name
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.store import head, marker
from lora_fs.sidecar.registry.store.head import Head
from lora_fs.sidecar.registry.store.marker import Marker
from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.server.middleware import tokens
from lora_fs.sidecar.validate import Expectation, looks_preallocated, validate
from lora_fs.sidecar.validate.config.adapter_config import parse_config
from lora_fs.sidecar.validate.report import Findings
from tests.server.at_once import find_model
from tests.validate.conftest import (
    BASE_CONFIG,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Draft,
    good_config,
    good_tensors,
    raw_safetensors,
    safetensors_bytes,
)

HERE = Path(__file__).parent
GOLDEN = HERE.parents[0] / "golden/v1"
SHOWN_CHARACTERS = 1_000

_scratch = tempfile.TemporaryDirectory(prefix="lora-fs-fuzz-")
SCRATCH = Path(_scratch.name)


@dataclass(frozen=True)
class Reader:
    """``read``: raises nothing but ``may_raise``. ``seeds``: good inputs. ``words``: to put into others."""

    read: Callable[[bytes], object]
    may_raise: tuple[type[LoraFsError], ...]
    seeds: tuple[bytes, ...]
    words: tuple[str, ...] = ()

    def run(self, data: bytes) -> None:
        """Read ``data``; AssertionError or anything undeclared is a finding."""
        try:
            self.read(data)
        except self.may_raise as error:
            text = str(error)
            assert len(text) <= SHOWN_CHARACTERS, f"an error of {len(text)} characters"
            assert text.isprintable(), f"an error that a terminal would act on: {text!a}"


def resealed(data: bytes) -> bytes | None:
    """The same object with the seal that belongs to it, which no mutation finds by itself."""
    try:
        body = json.loads(data)
        return seal(body) if isinstance(body, dict) else None
    except (ValueError, RecursionError, InputError):
        return None


def _sealed(kind: type[BaseModel]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        with suppress(CorruptRecord):
            decode(kind, data)
        whole = resealed(data)
        if whole is not None:
            value = decode(kind, whole)
            assert decode(kind, seal(value)) == value.model_copy(update={"sum": _sum(seal(value))})

    return read


def _sum(data: bytes) -> str:
    return str(json.loads(data)["sum"])


def _in_a_root(data: bytes) -> Path:
    (SCRATCH / "root").mkdir(exist_ok=True)
    (SCRATCH / "root/lora-fs.json").write_bytes(data)
    (SCRATCH / "root/HEAD").write_bytes(data)
    return SCRATCH / "root"


def read_marker(data: bytes) -> None:
    """The marker: another registry's, a newer one's, or damaged."""
    for version in (resealed(data), data):
        if version is not None:
            marker.read_marker(_in_a_root(version))


def read_head(data: bytes) -> None:
    """HEAD: whatever it holds, it is replaced by the next writer."""
    for version in (resealed(data), data):
        if version is not None:
            layout = Layout(_in_a_root(version))
            layout.leases.mkdir(exist_ok=True)
            assert head.read_head(layout) == version[:4096]
            with patch.object(head, "TORN_S", (0.0,)):  # nobody is writing: no second look
                head.advance_head(layout, 1)
            decode(Head, head.read_head(layout) or b"")


def read_lease(data: bytes) -> None:
    """A lockfile of whatever content is had, or not: nothing else."""
    path = SCRATCH / "lease.lock"
    path.write_bytes(data)
    with leases.lease(path, wait_s=0) as had:
        assert had or had.is_anothers
    path.unlink(missing_ok=True)
    leases._contended.clear()  # a claim that was seen is remembered for as long as the process lives


def _judge(config: bytes | None = None, weights: bytes | None = None, base: object = BASE_CONFIG) -> None:
    folder = Draft(SCRATCH / "adapter").write()
    if config is not None:
        (folder / CONFIG_FILE).write_bytes(config)
    if weights is not None:
        (folder / WEIGHTS_FILE).write_bytes(weights)
    looks_preallocated(folder)
    known = base if isinstance(base, Mapping) else None
    report = validate(folder, Expectation(("acme/tiny-llama",), known, max_rank=16))
    for finding in report.findings:
        assert finding.render().isprintable()
        assert len(finding.render()) <= SHOWN_CHARACTERS
    if report.ok:
        assert report.shape is not None
        assert len(report.served_files) == 2


def read_weights(data: bytes) -> None:
    """A file as it is, and one whose header's length is right."""
    _judge(weights=data)
    begin = data.find(b"{")
    if begin >= 0:
        _judge(weights=raw_safetensors(data[begin:], b""))


def read_base_config(data: bytes) -> None:
    """The base model's config is the operator's, and may be any JSON."""
    _judge(base=parse_config(data, Findings()))


def read_export(data: bytes) -> None:
    """An archive as it comes."""
    path = SCRATCH / "export.tar"
    path.write_bytes(data)
    archive.read(path)


def read_names(data: bytes) -> None:
    """A folder's names: what is taken for a generation is spelt in one way."""
    names = data.decode(errors="surrogateescape").split("\n")
    listing = Listing.of(names)
    for name, generation in listing.records.items():
        assert generation_name(name, *generation) in names
    assert all("/" not in name and name not in (".", "..") for name in (*listing.records, *listing.folders))


def read_body(data: bytes) -> None:
    """A request: its content type, an empty line, its body."""
    content_type, _, body = data.partition(b"\n\n")
    field = find_model(content_type.decode("latin-1"), body)
    if field is not None and field.name != "other":
        again = find_model(content_type.decode("latin-1"), field.renamed("other"))
        assert again is not None
        assert again.name == "other"


def read_tokens(data: bytes) -> None:
    """A token file: what it gives is found by what was written, and no error repeats a token."""
    with suppress(UnicodeDecodeError):  # told by who reads the file
        text = data.decode()
        first = [words[0] for line in text.splitlines() if (words := line.split())]
        read, told = _parsed(text)
        assert not [word for word in first if len(word) > 20 and word in str(told)]
        if told is not None:
            raise told
        written = [word for word in first if not word.startswith("#")]
        assert [tokens.find(read, word) for word in written] == list(read.values())


def _parsed(text: str) -> tuple[Mapping[bytes, tokens.Token], tokens.BadTokenFile | None]:
    try:
        return tokens.parse(text), None
    except tokens.BadTokenFile as error:
        return {}, error


def _small_export() -> bytes:
    def member(name: str, content: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
        tally.add(name, len(content), hashlib.sha256(content).hexdigest())

    out, tally = io.BytesIO(), archive.Tally()
    with tarfile.open(fileobj=out, mode="w") as tar:
        begin = archive.Begin(registry_uuid="u", exported_at="", artifacts=False)
        member(archive.BEGIN, seal(begin))
        for path in sorted((GOLDEN / "default").rglob("support*.json")):
            member(path.relative_to(GOLDEN).as_posix(), path.read_bytes())
            break
        end = archive.End(members=tally.members, digest=tally.digest)
        member(archive.END, seal(end))
    return out.getvalue()


_RECORDS = tuple(path.read_bytes() for path in sorted((GOLDEN / "default").glob("*/v1/support*.json")))
_EVALUATIONS = tuple(
    path.read_bytes() for path in sorted((GOLDEN / "default").glob("*/.evaluations/*/*.json"))
)
_POINTER = seal(
    {
        "apiVersion": "lora-fs/v1",
        "kind": "ActivePointer",
        **{"namespace": "default", "model": "tiny", "name": "a1", "generation": 2},
        **{"previous": {"generation": 1, "sum": "0" * 64}, "epoch": 1, "request_id": "r", "token": "t"},
        **{"writer": "w", "updated_at": "", "revision": "v1", "previous_revision": None},
        "canary": {"revision": "v2", "percent": 10},
    }
)
_STATUS = seal(
    ReplicaStatus.model_validate(
        {
            **{"replica": "a", "model": "tiny", "namespaces": ["default"], "counts": {"Ready": 1}},
            "adapters": {
                "a1": {"key": ["default", "tiny", "v1", "a1"], "generation": 1, "phase": "Ready"},
            },
            **{"recent": {"default/tiny/v1/a1": 1}, "conditions": ["NotAdopted: x"]},
        }
    )
)
_LEASE = b"4242\nhost.example\nSoftFileLease\n"
_FORM = (
    b'multipart/form-data; boundary=b\n\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
    b'a1\r\n--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx\r\n--b--\r\n'
)
_CONFIG = json.dumps(good_config() | {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"^q_.*": 8}}).encode()
_JSON = ("null", "-1", "1e999", "9" * 30, '"\\ud800"', "[]", "{}", "[[]]", "true", '""', "NaN", '"../x"')

READERS: Mapping[str, Reader] = {
    "record": Reader(_sealed(Record), (CorruptRecord,), _RECORDS, _JSON),
    "evaluation": Reader(_sealed(Evaluation), (CorruptRecord,), _EVALUATIONS, _JSON),
    "pointer": Reader(_sealed(Pointer), (CorruptRecord,), (_POINTER,), _JSON),
    "head": Reader(read_head, (), (seal(Head(nonce="n", seq=7)),), _JSON),
    "marker": Reader(read_marker, (RegistryLost, FormatTooNew), (seal(Marker(registry_uuid="u")),), _JSON),
    "status": Reader(_sealed(ReplicaStatus), (CorruptRecord,), (_STATUS,), _JSON),
    "lease": Reader(read_lease, (), (_LEASE, b""), ("\n", "0", "-1", "host", "9" * 30)),
    "config": Reader(lambda data: _judge(config=data), (), (_CONFIG,), (*_JSON, '"(a+)+"', '"all-linear"')),
    "weights": Reader(
        read_weights,
        (),
        (safetensors_bytes(good_tensors()), raw_safetensors({"__metadata__": {"format": "pt"}}, b"")),
        (*_JSON, '"data_offsets":[0,8]', '"F4"', '"__metadata__"'),
    ),
    "base-config": Reader(
        read_base_config, (), (json.dumps(BASE_CONFIG).encode(), b'{"text_config": {}}'), _JSON
    ),
    "export": Reader(read_export, (InputError,), (_small_export(),), ("ustar", "\0" * 12, "0000644")),
    "names": Reader(
        read_names,
        (),
        (b"a1.@00000001.json\na1\n.tmp-x\nb.@123456789.json",),
        (".@", "0", "/", ".json"),
    ),
    "tokens": Reader(
        read_tokens,
        (tokens.BadTokenFile,),
        (b"# who\n0123456789abcdef0123 name=ci namespaces=a,b verbs=register,read\nshort\n",),
        ("name=", "namespaces=", "verbs=", "unregister", "#", "\u2028", ","),
    ),
    "body": Reader(
        read_body, (InputError,), (b'application/json\n\n{"model":"a1"}', _FORM), (*_JSON, "\r\n", "--b")
    ),
}

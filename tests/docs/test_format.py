"""``docs/format.md`` is enough to read and write a registry: its examples and rules are tried."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.sidecar.model import AdapterKey, AdapterSpec, FileEntry, Phase, Record
from lora_fs.sidecar.model.status import RECENT
from lora_fs.sidecar.reconcile.catalog import place
from lora_fs.sidecar.reconcile.status_file import HEARTBEAT_S
from lora_fs.sidecar.reconcile.watch.watcher import FOLDER_SCAN_S, SCAN_SHARE
from lora_fs.sidecar.registry.format.ids import int_id, natural_order
from lora_fs.sidecar.registry.format.layout import generation_name, parse_generation
from lora_fs.sidecar.registry.format.sealed import decode, seal, unseal
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.store.quota import WAIT_S, WINDOW_S
from lora_fs.sidecar.registry.store.writer import LEASE_WAIT_S, RACES
from lora_fs.sidecar.registry.view.view import LAG_LOOK_MOST_S, LAG_LOOK_S
from lora_fs.sidecar.registry.volume.atomic import UNLINK_AFTER_S
from lora_fs.sidecar.registry.volume.leases import ABANDONED_S, LEASE_S, lease
from lora_fs.sidecar.registry.volume.mounts import timing_for
from lora_fs.sidecar.registry.volume.permissions import share_file, share_folder
from tests.registry.conftest import write_adapter

ROOT = Path(__file__).parents[2]
GOLDEN = {path.read_text(): path for path in (ROOT / "tests/golden/v1").rglob("*") if path.is_file()}
TEXT = (ROOT / "docs" / "format.md").read_text()
EXAMPLES = re.findall(r"<!-- schema: ([a-z-]+) -->\n```json\n(.*?)\n```", TEXT, re.DOTALL)
examples = pytest.mark.parametrize(
    ("name", "example"), EXAMPLES, ids=[f"{name}-{at}" for at, (name, _) in enumerate(EXAMPLES)]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def canonical(value: Any) -> str:
    """Canonical JSON, written from the page's table alone."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, str):
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
        return '"' + "".join(short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def summed(value: dict[str, Any]) -> str:
    """The ``sum`` that an object has to carry."""
    rest = {key: item for key, item in value.items() if key != "sum"}
    return hashlib.sha256(canonical(rest).encode()).hexdigest()


def record() -> Record:
    """The record that the page shows."""
    (text,) = (example for name, example in EXAMPLES if name == "record")
    return decode(Record, text.encode())


def test_every_json_block_names_its_schema() -> None:
    """None is left unchecked, and each file of the tree has one."""
    assert len(EXAMPLES) == TEXT.count("```json")
    assert {name for name, _ in EXAMPLES} == {
        "record",
        "pointer",
        "quota",
        "marker",
        "head",
        "replica-status",
        "event-list",
        "evaluation",
    }


@examples
def test_the_example_is_valid(name: str, example: str) -> None:
    """Its seal holds and so does its schema."""
    Draft202012Validator(schemas.load(name)).validate(unseal(example.encode()))


@examples
def test_the_example_is_real(name: str, example: str) -> None:
    """It is a file that lora-fs wrote, to the byte."""
    assert f"{example}\n" in GOLDEN


@pytest.mark.parametrize("path", GOLDEN.values(), ids=lambda path: path.name)
def test_the_seal_is_what_the_page_says(path: Path) -> None:
    """Software that knows the page alone gets the same sum for every file."""
    value = json.loads(path.read_bytes())
    assert summed(value) == value["sum"]


@given(st.dictionaries(st.text(), values, max_size=4))
def test_canonical_json_is_what_the_page_says(value: dict[str, Any]) -> None:
    """For any text and any number that JSON can hold."""
    assert json.loads(seal(value))["sum"] == summed(value)


def test_the_digest_is_what_the_page_says() -> None:
    """Of the rows shown, and of others in any order and any letters."""
    (rows,) = re.findall(r"```text\n(\[\[.*\"\]\])\n```", TEXT)
    assert record().spec.digest == "sha256:" + hashlib.sha256(rows.encode()).hexdigest()
    files = [FileEntry(path=name, size_bytes=3, sha256="0" * 64) for name in ("é", "b", "Z")]
    text = ",".join(f'["{name}",3,"{"0" * 64}"]' for name in ("Z", "b", "\\u00e9"))
    assert artifacts.digest_of(files) == "sha256:" + hashlib.sha256(f"[{text}]".encode()).hexdigest()


def test_the_integer_id_is_what_the_page_says() -> None:
    """The record shown has the id of its own registry, the marker shown."""
    (marker,) = (json.loads(example) for name, example in EXAMPLES if name == "marker")
    shown = record()
    text = f"{marker['registry_uuid']}|{'/'.join(shown.key)}|{shown.spec.digest}"
    expected = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    assert expected == int_id(marker["registry_uuid"], AdapterKey(*shown.key), shown.spec.digest)
    assert expected == shown.spec.int_id


def test_the_fingerprint_is_what_the_page_says(tmp_path: Path) -> None:
    """Over name, size and mtime of every entry, a folder and letters of any kind included."""
    folder = write_adapter(tmp_path / "a1")
    (folder / "é").mkdir()
    (folder / "link").symlink_to("nowhere")
    rows = ", ".join(
        f'["{path.name}", {path.lstat().st_size}, {path.lstat().st_mtime_ns}]'
        for path in sorted(folder.iterdir())
    ).replace("é", "\\u00e9")
    assert artifacts.fingerprint(folder) == hashlib.sha256(f"[{rows}]".encode()).hexdigest()[:32]


def test_the_fingerprint_shown_is_of_the_rows_shown() -> None:
    """A vector for other software: the text, and what it comes to."""
    (shown,) = re.findall(r"have the fingerprint `(\w+)`", TEXT)
    (rows,) = re.findall(r"```text\n(\[\[.*, \d{19}\]\])\n```", TEXT)
    assert hashlib.sha256(rows.encode()).hexdigest()[:32] == shown


CANARIES = re.findall(r"^\| `(\S+)`, `(\S+)`, `(\S+)` \| (\d+) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("namespace", "name", "user", "shown"), CANARIES)
def test_a_users_place_is_what_the_page_says(namespace: str, name: str, user: str, shown: str) -> None:
    """A vector for other software: who of a name's users a canary answers."""
    one = record().model_copy(update={"namespace": namespace, "name": name})
    assert place(one, user) == int(shown)


def test_vectors_are_found() -> None:
    """Of canaries, of orders and of modes; none is lost by a change of the page's form."""
    assert (len(CANARIES), len(MODES)) == (4, 5)


def test_natural_order_is_that_of_the_page() -> None:
    """The revisions stand in the page's order, and numbers compare by value."""
    (listed,) = re.findall(r"In this order: (.*?)\.\n", TEXT, re.DOTALL)
    revisions = re.findall(r"`(\S+)`", listed)
    assert len(revisions) == 10
    keys = [natural_order(revision) for revision in revisions]
    assert all(earlier < later for earlier, later in pairwise(keys))
    assert natural_order("v01") == natural_order("v1")


MODES = re.findall(r"^\| `(\d{4})` \| `(\d{4})` \| `(\d{4})` \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("above", "folder", "file"), MODES)
def test_modes_are_those_of_the_page(tmp_path: Path, above: str, folder: str, file: str) -> None:
    """Under a umask of 077, as the page's rows say."""
    parent = tmp_path / "above"
    parent.mkdir()
    parent.chmod(int(above, 8))
    (parent / "folder").mkdir(0o700)
    (parent / "file").touch(0o600)
    share_folder(parent / "folder", parent)
    share_file(parent / "file", parent)
    assert [f"{(parent / name).stat().st_mode & 0o7777:04o}" for name in ("folder", "file")] == [folder, file]


def test_a_lockfile_is_what_the_page_says(tmp_path: Path) -> None:
    """Its first line and the names of the others, in their order."""
    (said,) = re.findall(r"Its content is a line\s(.*?)\. Other", TEXT, re.DOTALL)
    with lease(tmp_path / "x.lock", wait_s=1) as acquired:
        assert acquired
        lines = (tmp_path / "x.lock").read_text().splitlines()
    expected = re.findall(r"`(\S+)`", said)
    assert len(lines) == len(expected)
    assert all(line.startswith(start) for line, start in zip(lines, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("a.@00000001.json", ("a", (1, ""))),
        ("a.@123456789.json", ("a", (123456789, ""))),
        (f"a.@00000002.{'0f' * 16}.json", ("a", (2, "0f" * 16))),
        ("a.@00000000.json", None),
        ("a.@1.json", None),
        ("a.@0123456789.json", None),
        (f"a.@{'9' * 19}.json", None),
        (f"a.@00000002.{'0F' * 16}.json", None),
        (".tmp-a.@00000001.json", None),
        ("-a.@00000001.json", None),
    ],
)
def test_names_have_the_grammar_of_the_page(name: str, parsed: tuple[str, tuple[int, str]] | None) -> None:
    """One spelling a generation; everything else is no generation file."""
    assert parse_generation(name) == parsed
    if parsed is not None:
        assert generation_name(parsed[0], *parsed[1]) == name


def test_times_are_those_of_the_volumes_page() -> None:
    """A replica reads HEAD as often as the page says of a filesystem, and lets a folder settle as long."""
    page = (ROOT / "docs/howto/volumes.md").read_text()
    rows = re.findall(r"^\| (.+) \| ([\d.]+) s \| (\d+) s \| (?:yes|no) \|$", page, re.MULTILINE)
    told = {
        kind: (float(poll), float(settle))
        for kinds, poll, settle in rows
        for kind in re.findall(r"`(\w+)`", kinds) or [kinds]
    }
    timings = {kind: timing_for(kind) for kind in told}
    assert {kind: (timing.poll_s, timing.settle_s) for kind, timing in timings.items()} == told
    assert {"ext4", "nfs", "fuse", "any other"} <= told.keys()


def test_polls_are_those_of_the_page() -> None:
    """A local filesystem is looked at as often as it says, and any other."""
    (local, other) = map(
        float, re.findall(r"(\S+) s apart on a local filesystem, (\S+) s on others", TEXT)[0]
    )
    assert timing_for("ext4").poll_s == local
    assert {timing_for(kind).poll_s for kind in ("nfs4", "fuse.sshfs", "unheard-of")} == {other}


def test_every_phase_is_told() -> None:
    """The page's table of phases has each one that a status may have."""
    (table,) = re.findall(r"^\| `phase` \|.*\n\|---\|---\|\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    told = [phase for row in table.splitlines() for phase in re.findall(r"`([A-Z]\w+)`", row.split("|")[1])]
    assert sorted(told) == sorted(Phase)


def test_every_field_of_a_record_is_told() -> None:
    """Each one is in the page's table, but for those that say where the file lies."""
    (table,) = re.findall(r"^\| `generation`, `previous` \|.*\n(?:\|.*\n)+", TEXT, re.MULTILINE)
    told = set(re.findall(r"`(?:spec\.)?(\w+)`", table))
    place = {"apiVersion", "kind", "namespace", "model", "revision", "name", "spec"}
    assert Record.model_fields.keys() - told == place
    assert AdapterSpec.model_fields.keys() <= told


def test_waits_are_those_of_the_page() -> None:
    """Of leases, of temporary names and of the scans that HEAD does not ask for."""
    assert f"`SoftFileLease` with {LEASE_S:.0f} s" in TEXT
    assert f"finds it empty for {ABANDONED_S:.0f} s" in TEXT
    assert f"longer than {LEASE_WAIT_S} s" in TEXT
    assert f"waits for it up to\n{WAIT_S:.0f} s" in TEXT
    assert f"less than {WINDOW_S:.0f} s away" in TEXT
    assert f"no sooner than {UNLINK_AFTER_S * 1000:.0f} ms" in TEXT
    assert f"at most {RACES} times" in TEXT
    assert f"list again {LAG_LOOK_S:.0f} s after HEAD changed" in TEXT
    assert f"at most {LAG_LOOK_MOST_S:.0f} s, until a minute" in TEXT
    assert {timing_for(kind).lag_s for kind in ("nfs4", "fuse.sshfs", "unheard-of")} == {60.0}
    assert f"folders every {FOLDER_SCAN_S:.0f} s" in TEXT
    assert f"1/{SCAN_SHARE} of" in TEXT
    assert f"every {HEARTBEAT_S:.0f} s; removed" in TEXT
    assert f"the last {RECENT} series" in TEXT

"""S3, as moto speaks it: folders, tars, single objects, and what is said when it does not go."""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import pytest

from lora_fs.sidecar.sources.receive import transfer
from lora_fs.sidecar.sources.receive.spans import Span
from lora_fs.sidecar.sources.remote import bucket
from tests.sources.conftest import CONFIG, WEIGHTS, LoraFs, WebServer, left_in, tar_of
from tests.sources.test_web import record

Put = Callable[[Path, str], None]


@pytest.fixture
def put(s3: Any) -> Put:
    def put(folder: Path, prefix: str) -> None:
        for path in folder.iterdir():
            s3.put_object(Bucket="loras", Key=prefix + path.name, Body=path.read_bytes())

    return put


def test_a_folder(lora_fs: LoraFs, put: Put, adapter: Path, root: Path) -> None:
    """Its adapter, and nothing below it; the pin is over the etags."""
    (adapter / "trainer_state.json").write_text("{}")
    put(adapter, "teams/sql/")
    put(adapter, "teams/sql/checkpoint-1/")
    ran = lora_fs("register", "sql", "s3://loras/teams/sql")
    assert ran.code == 0, ran.err
    placed = root / "default/tiny/v1/sql"
    assert {path.name for path in placed.iterdir()} == {CONFIG, WEIGHTS}
    source = record(lora_fs)["source"]
    assert source["uri"] == "s3://loras/teams/sql"  # type: ignore[index]
    assert str(source["pin"]).startswith("etags:")  # type: ignore[index]
    assert "unchanged" in lora_fs("register", "sql", "s3://loras/teams/sql/").out
    assert left_in(root) == []


def test_the_bytes_are_those_of_the_bucket(lora_fs: LoraFs, put: Put, large: Path) -> None:
    """The hash that was made while they came is the files'."""
    put(large, "large/")
    assert lora_fs("register", "large", "s3://loras/large").code == 0
    files = {one["path"]: one["sha256"] for one in record(lora_fs, "large")["files"]}  # type: ignore[attr-defined]
    assert files == {
        name: hashlib.sha256((large / name).read_bytes()).hexdigest() for name in (CONFIG, WEIGHTS)
    }


def test_in_parallel_where_that_helps(
    lora_fs: LoraFs, put: Put, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halved and halved again, it is the same file."""
    monkeypatch.setattr(transfer, "LEAST_SPLIT_BYTES", 64 << 10)
    monkeypatch.setattr(transfer, "SPLIT_S", 1e6)
    monkeypatch.setattr(transfer, "RATE_S", 0.0)
    monkeypatch.setattr(transfer, "RAISED", 0.0)
    monkeypatch.setattr(transfer, "TICK_S", 0.001)
    monkeypatch.setattr(bucket, "CHUNK_BYTES", 64 << 10)
    spans: list[int] = []
    several = threading.Event()
    begin, keep = transfer._Fetch._begin, transfer._Fetch._keep

    def counted(self: transfer._Fetch, span: Span) -> None:
        spans.append(span.start)
        if len(set(spans)) > 3:
            several.set()
        begin(self, span)

    def held(self: transfer._Fetch, span: Span, fd: int, chunk: bytes) -> bool:
        """The first connection is slow until others help."""
        return keep(self, span, fd, chunk) and (span.end < 1 << 20 or several.wait(20))

    monkeypatch.setattr(transfer._Fetch, "_begin", counted)
    monkeypatch.setattr(transfer._Fetch, "_keep", held)
    put(large, "large/")
    ran = lora_fs("register", "large", "s3://loras/large")
    assert ran.code == 0, ran.err
    assert len(set(spans)) > 3
    (weights,) = [one for one in record(lora_fs, "large")["files"] if one["path"] == WEIGHTS]  # type: ignore[attr-defined]
    assert weights["sha256"] == hashlib.sha256((large / WEIGHTS).read_bytes()).hexdigest()


def test_by_parts_as_any_filesystem_of_fsspec(
    lora_fs: LoraFs, put: Put, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads gs:// reads the same bytes from here."""
    monkeypatch.setattr(bucket.Bucket, "_s3", bucket.Bucket._any)
    put(large, "large/")
    assert lora_fs("register", "large", "s3://loras/large").code == 0
    (weights,) = [one for one in record(lora_fs, "large")["files"] if one["path"] == WEIGHTS]  # type: ignore[attr-defined]
    assert weights["sha256"] == hashlib.sha256((large / WEIGHTS).read_bytes()).hexdigest()


def test_a_tar_and_a_single_object(lora_fs: LoraFs, s3: Any, put: Put, adapter: Path) -> None:
    """As of a web server, a sha256 included."""
    data = tar_of(adapter, "w:gz")
    s3.put_object(Bucket="loras", Key="sql.tgz", Body=data)
    digest = hashlib.sha256(data).hexdigest()
    assert lora_fs("register", "sql", f"s3://loras/sql.tgz#sha256={digest}").code == 0
    assert lora_fs("register", "no", f"s3://loras/sql.tgz#sha256={'0' * 64}").code == 2
    put(adapter, "single/")
    assert "unchanged" not in lora_fs("register", "one", f"s3://loras/single/{WEIGHTS}").out
    assert record(lora_fs, "one")["digest"] == record(lora_fs)["digest"]


def test_an_object_that_is_replaced_meanwhile(
    lora_fs: LoraFs, s3: Any, put: Put, adapter: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is not mixed with the one that was looked at."""
    put(adapter, "sql/")
    run = transfer._Fetch.run

    def replaced(self: transfer._Fetch) -> Any:
        s3.put_object(Bucket="loras", Key=f"sql/{WEIGHTS}", Body=b"another")
        return run(self)

    monkeypatch.setattr(transfer._Fetch, "run", replaced)
    ran = lora_fs("register", "sql", "s3://loras/sql")
    assert (ran.code, "was replaced while it was fetched" in ran.err) == (1, True), ran.err
    assert left_in(root) == []


@pytest.mark.parametrize(
    ("uri", "code", "why"),
    [
        ("s3://loras/nothing-here", 3, "no such object or folder"),
        ("s3://no-such-bucket-4711/a", 3, "no such object or folder"),
        ("s3://loras", 2, "write s3://bucket/folder"),
        ("s3://loras/half", 2, f"{WEIGHTS} is missing; it holds {CONFIG}"),
    ],
)
def test_what_is_not_there(uri: str, code: int, why: str, lora_fs: LoraFs, s3: Any) -> None:
    """Is told in a sentence."""
    s3.put_object(Bucket="loras", Key=f"half/{CONFIG}", Body=b"{}")
    ran = lora_fs("register", "sql", uri)
    assert (ran.code, why in ran.err) == (code, True), ran.err


def test_an_s3_that_does_not_answer(lora_fs: LoraFs, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told as one, without the keys."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    ran = lora_fs("register", "sql", "s3://loras/sql")
    assert (ran.code, "s3 does not answer at http://127.0.0.1:9 (" in ran.err, "hush" in ran.err) == (
        1,
        True,
        False,
    ), ran.err
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("AWS_PROFILE", "nobody", "The config profile (nobody) could not be found"),
        ("AWS_CONFIG_FILE", "broken", "Unable to parse config file: "),
        ("AWS_DEFAULT_REGION", "no region", "Provided region_name 'no region' doesn't match"),
        ("AWS_ENDPOINT_URL_S3", "http:///me", "Invalid endpoint: http:///me"),
        ("AWS_ENDPOINT_URL_S3", "//me:hush@nowhere", "Custom endpoint `//nowhere` was not a valid URI"),
    ],
)
def test_settings_that_are_wrong(
    name: str, value: str, why: str, lora_fs: LoraFs, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are told as they are: to ask again does not help."""
    import s3fs

    if value == "broken":
        (tmp_path / value).write_text("[default\nno")
        value = str(tmp_path / value)
    monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    ran = lora_fs("register", "sql", "s3://loras/sql")
    assert (ran.code, why in ran.err, "hush" in ran.err) == (2, True, False), ran.err
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("mark", ["y", "y/"])
def test_an_object_that_stands_for_the_folder(
    mark: str, lora_fs: LoraFs, s3: Any, put: Put, adapter: Path
) -> None:
    """It has no bytes, and what lies below it is taken; with nothing below, that is said."""
    s3.put_object(Bucket="loras", Key=mark, Body=b"")
    ran = lora_fs("register", "sql", "s3://loras/y/")
    assert (ran.code, "0 bytes" in ran.err or "holds nothing" in ran.err) == (2, True), ran.err
    put(adapter, "y/")
    ran = lora_fs("register", "sql", "s3://loras/y/")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "s3"), ("gs", "gcs")])
def test_without_the_extra_it_is_named(
    scheme: str, extra: str, lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sidecar without s3fs or gcsfs says what to install."""
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name in ("s3fs", "gcsfs"):
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    ran = lora_fs("register", "sql", f"{scheme}://loras/sql")
    assert (ran.code, f"pip install '.[{extra}]' in a clone" in ran.err) == (2, True), ran.err


def test_google_storage(
    lora_fs: LoraFs, web: WebServer, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``gs://`` by gcsfs's own client, from a server that speaks as much of the JSON API as it asks for."""
    import gcsfs

    monkeypatch.setenv("STORAGE_EMULATOR_HOST", web.url)
    gcsfs.GCSFileSystem.clear_instance_cache()
    objects = {f"teams/sql/{path.name}": path.read_bytes() for path in large.iterdir()}
    for key, data in objects.items():
        web.put(f"/download/storage/v1/b/loras/o/{quote(key, safe='')}", data)

    def told(key: str) -> dict[str, Any]:
        etag = hashlib.sha256(objects[key]).hexdigest()[:16]
        return {
            "kind": "storage#object",
            "name": key,
            "bucket": "loras",
            "size": len(objects[key]),
            "etag": etag,
        }

    def api(path: str) -> Any:
        where, _, query = path.partition("?")
        if where == "/storage/v1/b/loras/o":
            (prefix,) = parse_qs(query).get("prefix", [""])
            return {
                "kind": "storage#objects",
                "items": [told(key) for key in objects if key.startswith(prefix)],
            }
        key = unquote(where.removeprefix("/storage/v1/b/loras/o/"))
        return told(key) if where.startswith("/storage/v1/b/") and key in objects else None

    web.api = api
    ran = lora_fs("register", "sql", "gs://loras/teams/sql")
    assert ran.code == 0, ran.err
    files = {one["path"]: one["sha256"] for one in record(lora_fs)["files"]}  # type: ignore[attr-defined]
    assert files == {
        name: hashlib.sha256((large / name).read_bytes()).hexdigest() for name in (CONFIG, WEIGHTS)
    }
    assert str(record(lora_fs)["source"]["pin"]).startswith("etags:")  # type: ignore[index]
    gcsfs.GCSFileSystem.clear_instance_cache()

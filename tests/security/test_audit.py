"""Who did what, when, from where."""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_fs.demo.process import LOCAL
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.sidecar import audit
from lora_fs.sidecar.cli.main import cli
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.trail import ACTS
from lora_fs.sidecar.errors import WaitTimeout
from lora_fs.sidecar.server.middleware.audit import Refused
from lora_fs.sidecar.settings import writer_id
from tests.cli.conftest import LoraFs
from tests.security.conftest import BOARD_A, CI_A, OPERATORS, Sidecar, Tenants, bearer, load

Folder = Callable[[int], str]


def lines(file: Path) -> list[dict[str, Any]]:
    """Every line of an audit."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LORA_FS_AUDIT_FILE", str(tmp_path / "cli-audit"))
    return tmp_path / "cli-audit"


def test_http(sidecar: Sidecar, token_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every load and unload over HTTP is one line with who, what, when, from where and how it ended,
    failed ones included. Refused ones are lines up to a rate. A line has no name if the server did not
    read the body, for want of a token."""
    caplog.set_level(logging.INFO, "lora_fs.audit")
    http = sidecar(token_file)
    http.post("/v1/load_lora_adapter", json=load("team-a/sql"), headers=bearer(CI_A))
    http.post("/v1/load_lora_adapter", json=load("team-b/law"), headers=bearer(CI_A))
    http.post("/v1/unload_lora_adapter", json={"lora_name": "team-a/sql"}, headers=bearer(BOARD_A))
    http.post("/v1/unload_lora_adapter", json={"lora_name": "team-a/none"}, headers=bearer(OPERATORS))
    http.post("/v1/unload_lora_adapter", json={"lora_name": "team-a/sql"})
    http.get("/v1/models", headers=bearer(CI_A))
    told = lines(tmp_path / "audit")
    assert [(one["who"], one["act"], one["outcome"], one["what"].get("name")) for one in told] == [
        ("token:ci-a", "register", "done", "team-a/sql"),
        ("token:ci-a", "register", "denied", "team-b/law"),
        ("token:board-a", "unregister", "denied", "team-a/sql"),
        ("token:operators", "unregister", "failed", "team-a/none"),
        ("anonymous", "unregister", "denied", None),
    ]
    assert {one["from"] for one in told} == {"127.0.0.1"}
    assert "ci-a may not register in namespace team-b" in told[1]["why"]
    first = told[0]["what"]
    assert (first["namespace"], first["source"], first["revision"]) == ("team-a", "/adapters/x", "v1")
    assert first["digest"].startswith("sha256:")
    ago = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(told[0]["at"])
    assert datetime.timedelta() <= ago < datetime.timedelta(minutes=1)
    assert [
        json.loads(record.getMessage()) for record in caplog.records if record.name == "lora_fs.audit"
    ] == told


def test_refusals_without_end(sidecar: Sidecar, token_file: Path, tmp_path: Path) -> None:
    """Of refused calls up to 20 of one address and 100 in all are lines in 10 s. The next line says how many
    were left out, and `/metrics` counts all.
    """
    http, now = sidecar(token_file), [0.0]
    for _ in range(300):
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "x"}).status_code == 401
    assert len(lines(tmp_path / "audit")) == 20
    scraped = [line.split() for line in http.get("/metrics").text.splitlines() if "refused_calls" in line]
    counted = {name: value for name, value in (words[:2] for words in scraped) if name != "#"}
    assert counted["lora_fs_refused_calls_total"] == "300.0"
    assert counted["lora_fs_refused_calls_left_out_total"] == "280.0"
    refused = Refused(lambda: now[0])
    assert [refused.count("a") for _ in range(22)] == [0] * 20 + [None] * 2
    assert [refused.count("b"), refused.count("c")] == [2, 0]
    for number in range(200):
        refused.count(f"address-{number}")
    assert refused.total - refused.left_out == 100
    now[0] = 10.0
    assert refused.count("a") == refused.left_out - 2


def test_an_address_that_a_header_says_is_not_believed(root: Path, tmp_path: Path) -> None:
    """The address in an audit line is the connection's, also one from loopback that a header says otherwise
    of."""
    process = start_sidecar(
        "sidecar",
        "http://127.0.0.1:9",
        log=tmp_path / "sidecar.log",
        env={
            "LORA_FS_ROOT": str(root),
            "LORA_FS_MODEL": "tiny",
            "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
            "LORA_FS_AUDIT_FILE": str(tmp_path / "audit"),
        },
    )
    try:
        process.wait_ready("/health")
        httpx.post(
            f"{process.url}/v1/unload_lora_adapter",
            json={"lora_name": "none"},
            headers={"X-Forwarded-For": "6.6.6.6"},
            **LOCAL,
        )
        (told,) = lines(tmp_path / "audit")
    finally:
        process.stop()
    assert told["from"] == "127.0.0.1"


READS = set("list show get version help status top events wait validate doctor export".split())
READS |= {"sign", "verify", "sidecar", "gateway", "install-plugin", "demo"}


def test_commands(lora_fs: LoraFs, folder: Folder, file: Path) -> None:
    """Every command that changes the registry is one line, done or failed; one that only reads, and a dry
    run, is none."""
    assert {str(name) for name in cli.commands} == READS | ACTS.keys()
    changing = [
        (("register", "a", folder(1)), 0),
        (("register", "a", folder(2)), 0),
        (("promote", "a", "v1"), 0),
        (("rollback", "a"), 0),
        (("promote", "a", "v9"), 3),
        (("register", "b", "https://user:hunter2@127.0.0.1:1/x"), 1),
        (("unregister", "a", "--revision", "v1"), 0),
        (("quota", "--adapters", "0"), 0),
        (("register", "c", folder(3)), 7),
        (("quota", "--remove"), 0),
        (("gc",), 0),
        (("fsck", "--repair"), 0),
        (("import", "nim", str(Path(folder(1)).parent)), None),
    ]
    for words, code in changing:
        assert lora_fs(*words).code in (code, *((0, 1) if code is None else ())), words
    for reads in ("list", "show a", "status", "quota", "fsck", "export x.tar"):
        lora_fs(*reads.split())
    for dry in (f"register d {folder(4)}", "gc", "import archive x.tar"):
        lora_fs(*dry.split(), "--dry-run")
    told = lines(file)
    assert [one["act"] for one in told] == [words[0] for words, _ in changing]
    assert [one["outcome"] for one in told[:-1]] == [
        "failed" if code else "done" for _, code in changing[:-1]
    ]
    assert {one["who"] for one in told} == {writer_id()}
    assert {one["from"] for one in told} == {"cli"}
    first = told[0]["what"]
    assert (first["namespace"], first["model"], first["name"]) == ("default", "tiny", "a")
    assert (first["source"], first["revision"]) == (folder(1), "v1")
    assert told[7]["what"]["adapters"] == 0
    assert "hunter2" not in file.read_text()


def test_what_is_written_is_done(lora_fs: LoraFs, folder: Folder, file: Path) -> None:
    """A change that was written is `done` in the audit, also where the command or call failed afterwards."""
    assert lora_fs("register", "a", folder(1), "--wait", "0.1").code == 6
    (told,) = lines(file)
    assert (told["outcome"], told["what"]["revision"]) == ("done", "v1")
    assert told["why"].startswith("written, and after 0.1 s not followed")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("init", "registry_uuid"),
        ("quota --adapters 3", "updated_at"),
        ("quota --remove", "remove"),
        ("apply -f documents", "written"),
        ("gc", "removed"),
        ("fsck --repair", "mended"),
        ("import archive export.tar", "restored"),
        ("import nim folders", "written"),
    ],
)
def test_what_cannot_be_printed_is_done(
    words: str,
    what: str,
    lora_fs: LoraFs,
    folder: Folder,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A change that was written is `done` in the audit, also where the command or call failed afterwards."""
    monkeypatch.chdir(tmp_path)
    assert lora_fs("register", "a", folder(1)).code == 0
    assert lora_fs("export", "export.tar").code == 0
    documents = [
        f"apiVersion: lora-fs/v1\nkind: LoraAdapter\nmetadata: {{name: {name}}}\nspec: {{source: {source}}}\n"
        for name, source in (("b", folder(2)), ("c", "/nowhere"))
    ]
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "two.yaml").write_text("---\n".join(documents))
    shutil.copytree(folder(3), tmp_path / "folders" / "d")
    root = Path(os.environ["LORA_FS_ROOT"])
    left = root / "default" / "tiny" / ".active" / ".tmp-left"
    left.touch()
    os.utime(left, (1_600_000_000, 1_600_000_000))
    if words.split()[0] in ("init", "import") and "nim" not in words:
        monkeypatch.setenv("LORA_FS_ROOT", str(tmp_path / "fresh"))
    file.unlink()

    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Context, "printed", full)
        assert lora_fs(*words.split()).code != 0
    (told,) = lines(file)
    assert (told["outcome"], "No space" in told["why"]) == ("done", True)
    assert what in told["what"]


def test_what_a_replica_wrote_is_done(
    sidecar: Sidecar, replica: Tenants, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change that was written is `done` in the audit, also where the command or call failed afterwards."""

    async def unload(lora_name: str, *, writer: str) -> None:
        late = WaitTimeout(f"{lora_name} is withdrawn")
        late.wrote = lora_name
        raise late

    monkeypatch.setattr(replica, "unload_adapter", unload)
    name = {"lora_name": "team-a/sql"}
    answer = sidecar(token_file).post("/v1/unload_lora_adapter", json=name, headers=bearer(CI_A))
    assert answer.status_code == 503
    (told,) = lines(tmp_path / "audit")
    assert (told["outcome"], told["why"]) == ("done", "team-a/sql is withdrawn")


def test_the_file(tmp_path: Path) -> None:
    """Writers only append to the audit file, and its owner alone may read it. Each of its lines is one
    JSON object, whatever it reports."""
    file = tmp_path / "audit"
    file.write_text("before\n")
    file.unlink()
    odd = 'a"b\n{"who": "root"}\x1b[31m\u2028é\udcff' + "x" * 5000
    for number in range(3):
        text = audit.line(
            "register", who="me", source="here", outcome="done", what={"name": odd, "n": number}
        )
        audit.write(file, text)
    told = lines(file)
    assert [one["what"]["n"] for one in told] == [0, 1, 2]
    assert told[0]["what"]["name"] == odd.replace("\udcff", r"\udcff")[: audit.MAX_TEXT] + "…"
    assert json.dumps(told, ensure_ascii=False).encode(), "half a surrogate pair is no UTF-8"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_bytes().isascii()


def test_it_cannot_be_written(
    sidecar: Sidecar,
    lora_fs: LoraFs,
    folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An audit file that no writer can write fails no act, and a message says that the line is
    missing."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for bad in (tmp_path, tmp_path / "no" / "audit", fifo, Path("/dev/full")):
        monkeypatch.setenv("LORA_FS_AUDIT_FILE", str(bad))
        ran = lora_fs("register", "a", folder(1))
        assert (ran.code, f"the audit line is not in {bad}" in ran.err) == (0, True)
    (tmp_path / "audit").mkdir()
    assert sidecar(None).post("/v1/load_lora_adapter", json=load("x")).status_code == 200
    assert f"the audit line is not in {tmp_path / 'audit'}" in caplog.text

"""Commands over HTTP: what they print and how they exit is what they do at the volume.

Each side has a volume and a real sidecar of its own before an engine in memory. The one is reached by
``--root``, the other by ``--server``.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from lora_fs.sidecar.cli.backends.client import Client
from lora_fs.sidecar.cli.main import run
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.store import writer
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.cli.conftest import MODEL, Ran, propose
from tests.evaluation.conftest import Replica, data, replica
from tests.reconcile.conftest import FakeEngine
from tests.registry.conftest import write_adapter
from tests.server.conftest import serving

__all__ = ["data", "replica"]  # fixtures

SECRET = "all-of-it-4711"
SAME = """
list
register support ./v1 --dry-run
register support ./v1 --label team=care --wait 60
register support ./v1
register support ./v1 --policy sticky
register support@v1 ./v2
register support ./v2 --no-activate --wait 60
register billing@r1 ./v3 -o name
register other ./v3 --no-activate -o json
register Billing! ./v3
register sql ./v1 -n team-a
register broken ./broken
register broken ./missing
register broken ./v1 --allow nonsense
list
list --no-headers
list -o wide
list -A
list -A -o name
ls 'sup*' -l team=care
list -l team=none
list -l '(('
show support@v1
show billing -o json
get support@v9
get -o name
list -o json
promote support v2 --dry-run
promote support@v2 --wait 60
promote support@v2 v1
promote support v9
promote support v1 --require-evaluation
promote support v1 --require-evaluation --force
promote support
rollback support --wait 60
rollback sql -n team-a
rollback support@v1
rollback support@v7
canary support v2 --percent 5 --wait 60
canary support
canary support v1
canary support --percent 101
canary support --abort
canary support
canary support --finish
unregister support@v1
unregister support
unregister billing@r1 --dry-run
unregister billing --revision r1 --all-revisions
pin billing -o name
pin billing --dry-run
wait billing --for condition=Loaded --timeout 60
wait billing@r1 --for condition=Loaded --timeout 60
unpin billing@r1
set support --ttl 15m --priority 3
set support --ttl soon
set support --keep-revisions 5 --label old- --label new=1
set support --if-generation 1 --revision v1 --priority 4
set support --if-generation 1 --priority 4
set support
set support --policy default --priority 3
status nobody
events nobody
wait support --timeout 60
wait nobody --timeout 1ms
wait billing --for deleted --timeout 1ms
unregister support@v1 --force --wait 60
wait support --timeout 1ms
unregister support --all-revisions --wait 60
wait support --for deleted --timeout 60
unregister nobody
rollback nobody
list -o name
apply -f adapters.yaml --dry-run
apply -f adapters.yaml --wait 60
apply -f adapters.yaml -o json
apply -f adapters.yaml --owner other
apply -f missing.yaml --prune
get applied -o name
""".strip().splitlines()
DOCUMENTS = """
apiVersion: lora-fs/v1
kind: LoraAdapter
metadata: {name: applied, labels: {team: care}}
spec: {source: ./v1, policy: {kind: eager}, keepRevisions: 3}
---
apiVersion: lora-fs/v1
kind: LoraAdapter
metadata: {name: lost}
spec: {source: ./missing}
"""
BY_THE_WAY = (
    (r"\d{4}-\d\d-\d\dT[\d:.+Z-]+", "<time>"),
    (r"sha256:[0-9a-f]{64}", "sha256:<digest>"),
    (r'"(request_id|fencing_token|uid|sum|updated_at|registered_at|writer)": "[^"]*"', r'"\1": "<here>"'),
    (r'"int_id": \d+', '"int_id": 1'),
    (r'"uri": "[^"]*"', '"uri": "<where it came from>"'),
    (r"(source +)(file:\S+|upload:)", r"\1<where it came from>"),
    (r"by \S+, generation", "by <writer>, generation"),
)


@dataclass
class Side:
    """A volume and its sidecar. ``at``: the options by which a command reaches them."""

    root: Path
    url: str
    engine: FakeEngine
    at: tuple[str, ...]
    audit: Path
    call: Callable[..., Ran]

    def __call__(self, line: str | Sequence[str], at: tuple[str, ...] | None = None) -> Ran:
        words = shlex.split(line) if isinstance(line, str) else list(line)
        return self.call(*words, *(self.at if at is None else at))


def plain(ran: Ran, side: Side) -> str:
    """What a command printed and its exit code, without what two volumes never have in common."""
    text = f"{ran.out}\n{ran.err}\n{ran.code}"
    for stands in (str(side.root), side.root.as_posix()):
        text = text.replace(stands, "<root>")
    for pattern, instead in BY_THE_WAY:
        text = re.sub(pattern, instead, text)
    return text


@pytest.fixture
def lora_fs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    for name in ("LORA_FS_ROOT", "LORA_FS_SERVER", "LORA_FS_NAMESPACE", "FORCE_COLOR", "LORA_FS_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LORA_FS_MODEL", MODEL)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    for number in (1, 2, 3):
        write_adapter(tmp_path / f"v{number}", number)
    broken = write_adapter(tmp_path / "broken", 4)
    (broken / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters.yaml").write_text(DOCUMENTS)
    (tmp_path / "token").write_text(f"# mine\n{SECRET}\n")
    (tmp_path / "tokens").write_text(f"{SECRET} name=ops\nreads-7 name=looks namespaces=team-a verbs=read\n")

    def call(*words: str) -> Ran:
        capsys.readouterr()
        code = run(list(words))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@contextmanager
def beginning(tmp_path: Path, name: str, call: Callable[..., Ran], **more: Any) -> Iterator[Side]:
    """A volume of its own and its sidecar, reached by its volume."""
    root, engine, audit = tmp_path / name, FakeEngine(), tmp_path / f"{name}.audit"
    given: dict[str, Any] = {
        "model": MODEL,
        "namespaces": ("default", "team-a"),
        "resync_s": 0.2,
        "replica_id": "pod",
    }
    settings = Settings(root=root, create=True, stage_dir=tmp_path / f"{name}.stage", **given, **more)
    assembly = asyncio.run(assemble(settings, Expectation(model_ids=(MODEL,)), engine))
    app = create_app(
        assembly.replica,
        engine_url="http://127.0.0.1:9",
        admin=Admin(tmp_path / "tokens", ("-",)),
        trail=Trail(audit),
        background=assembly.running,
    )
    with serving(app, assembly.replica) as url:
        yield Side(root, url, engine, ("--root", str(root)), audit, call)


@pytest.fixture
def mounted(tmp_path: Path, lora_fs: Callable[..., Ran]) -> Iterator[Side]:
    with beginning(tmp_path, "mounted", lora_fs) as side:
        yield side


@pytest.fixture
def remote(tmp_path: Path, lora_fs: Callable[..., Ran]) -> Iterator[Side]:
    with beginning(tmp_path, "remote", lora_fs) as side:
        side.at = ("--server", side.url, "--token-file", str(tmp_path / "token"))
        yield side


def test_the_same_session(mounted: Side, remote: Side) -> None:
    """Every command prints the same on both streams and exits alike, with the volume and over HTTP."""
    assert len(SAME) >= 50
    for line in SAME:
        here, there = (plain(side(line), side) for side in (mounted, remote))
        assert there == here, line


def test_an_evaluation(
    mounted: Side, remote: Side, replica: Callable[..., Replica], data: Callable[..., Path]
) -> None:
    """Its gate decides alike, and it is kept where the registry is, for a promotion that asks for it."""
    echo, silent = replica(lambda _, body: str(body["prompt"])), replica(lambda *_: "")
    evaluate = ["evaluate", "support@v2", "--data", str(data()), "--gate", "pass_rate>=0.9", "--url"]
    told = []
    for side in (mounted, remote):
        side("register support ./v1")
        side("register support ./v2 --no-activate")
        lines: list[str | list[str]] = [
            [*evaluate, echo.url, "--dry-run", "-o", "name"],
            "promote support v2 --require-evaluation",
            [*evaluate, silent.url, "-o", "name"],
            "promote support v2 --require-evaluation",
            [*evaluate, echo.url, "-o", "name"],
            "promote support v2 --require-evaluation",
        ]
        ran = [side(line) for line in lines]
        assert [one.code for one in ran] == [0, 5, 5, 5, 0, 0], ran
        told.append([plain(one, side) for one in ran])
    assert told[0] == told[1]


@pytest.mark.parametrize("lost", [1, writer.RACES], ids=["one race", "every race"])
def test_lost_races(mounted: Side, remote: Side, monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """A writer that lost a race tries again; one that loses every race exits 4, also over HTTP."""
    real, left = atomic.publish, 0

    def beaten(path: Path, data: bytes, names: atomic.TemporaryNames) -> bool:
        """Another writer takes the generation just before this one."""
        nonlocal left
        if left:
            left -= 1
            newest = max(path.parent.glob(f"{path.name.partition('.@')[0]}.@*"))
            ours = unseal(data)
            of_its_place = {name: ours[name] for name in ("generation", "previous")}
            path.write_bytes(seal(unseal(newest.read_bytes()) | of_its_place | {"writer": "rival"}))
        return real(path, data, names)

    for side in (mounted, remote):
        side("register support ./v1")
        side("register support ./v2 --no-activate")
    monkeypatch.setattr(atomic, "publish", beaten)
    for line in (
        "set support --priority 3 --policy lazy",
        "canary support v2 --percent 5",
        "promote support v2",
    ):
        ran = []
        for side in (mounted, remote):
            left = lost
            ran.append(side(line))
            assert left == 0, line
        assert [one.code for one in ran] == ([0, 0] if lost == 1 else [4, 4]), (line, ran)
        assert plain(ran[1], remote) == plain(ran[0], mounted)


def test_a_conditional_write_that_is_late(mounted: Side, remote: Side) -> None:
    """A write on a generation that is no longer in force exits 4 and says which one is, also over HTTP."""
    told = []
    for side in (mounted, remote):
        side("register support ./v1")
        assert side("set support --if-generation 1 --revision v1 --priority 4").code == 0
        ran = side("set support --if-generation 1 --revision v1 --priority 5")
        assert (ran.code, ran.out) == (4, "")
        assert side("show support -o json").json["revisions"][0]["spec"]["policy"]["priority"] == 4
        told.append(plain(ran, side))
    assert told[0] == told[1]
    assert "expected generation 1, found 2" in told[0]


def test_completion_asks_the_server(remote: Side, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and revisions are proposed that it has registered, and none that its token may not read."""
    for name, folder in (("support", "v1"), ("support", "v2"), ("billing", "v3"), ("gone", "v1")):
        assert remote(f"register {name} ./{folder}").code == 0
    assert remote("unregister gone").code == 0
    assert propose("show", *remote.at, "") == ["billing", "support"]
    assert propose(*remote.at, "show", "su") == ["support"]
    assert propose("promote", *remote.at, "support", "") == ["v1", "v2"]
    assert propose("show", *remote.at, "-n", "team-a", "") == []
    capsys.readouterr()
    assert propose("show", "--server", remote.url, "") == []
    assert capsys.readouterr().err == ""


def test_completion_waits_little_for_a_server(
    tmp_path: Path, lora_fs: Callable[..., Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that takes the connection and never answers proposes nothing, within 10 s, without a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert propose("show", "--server", f"http://127.0.0.1:{silent.getsockname()[1]}", "s") == []
        assert time.monotonic() - began < 10
    token = ("--token-file", str(tmp_path / "token"))
    assert propose("show", "--server", "http://nowhere.invalid", *token, "s") == []
    assert capsys.readouterr().err == ""


def test_what_replicas_say_is_the_same(remote: Side) -> None:
    """status and events of one sidecar are the same by its volume and over HTTP."""
    at_volume = ("--root", str(remote.root))
    remote("register support ./v1 --policy eager --wait 60")
    remote("register sql ./v2 -n team-a --policy eager --wait 60")
    assert remote("wait support --for condition=Loaded --timeout 60").code == 0
    assert remote("wait sql -n team-a --for condition=Loaded --timeout 60").code == 0
    while not {"default/support@v1", "team-a/sql@v1"} <= set(remote("events -A -o name").out.split()):
        pass  # a sidecar writes its events every few seconds
    age = re.compile(r'\d+ s ago|"seen_s": [\d.]+')
    for line in (
        "status",
        "status support -o name",
        "status support@v1",
        "status -A",
        "status --exit-code",
        "status -n team-a",
        "events",
        "events -A",
        "events support@v1 -o name",
        "list -A -o json",
        "show support -o yaml",
    ):
        ways = [remote(line, at) for at in (at_volume, remote.at)]
        assert len({(age.sub("", ran.out), age.sub("", ran.err), ran.code) for ran in ways}) == 1, line
        assert ways[1].out, line


def test_the_servers_model_is_the_default(remote: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --model the server's own base model is meant; another one is refused by its name."""
    monkeypatch.delenv("LORA_FS_MODEL")
    assert remote("register support ./v1").out == f"registered support@v1 in default/{MODEL}\n"
    ran = remote("list --model other")
    assert (ran.code, "the base model served here is tiny, not 'other'" in ran.err) == (3, True)
    ran = remote("list -n team-z")
    assert (ran.code, "no namespace 'team-z' that you may read is served here" in ran.err) == (3, True)


def test_a_folder_is_sent_whole(remote: Side, tmp_path: Path) -> None:
    """An upload has the digest that its folder has at the volume, and no copy of it stays behind."""
    over = remote("register support ./v1 -o json").json["record"]["spec"]
    at_volume = remote("register other ./v1 -o json", ("--root", str(remote.root))).json["record"]["spec"]
    assert (over["digest"], over["files"]) == (at_volume["digest"], at_volume["files"])
    assert not list(remote.root.rglob(".incoming/*"))
    dry = remote("register third ./v2 --dry-run")
    assert (dry.code, dry.out) == (0, f"would register third@v1 in default/{MODEL}\n")
    assert not list(remote.root.rglob(".incoming/*"))
    assert "third" not in remote("list").out


def test_a_folder_that_cannot_be_served_is_not_sent(remote: Side) -> None:
    """It is refused here: the server is not asked."""
    before = remote.audit.read_text() if remote.audit.exists() else ""
    assert remote("register broken ./broken").code == 5
    assert (remote.audit.read_text() if remote.audit.exists() else "") == before


def test_a_remote_source_is_fetched_by_the_server(
    tmp_path: Path, lora_fs: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server fetches it, and a command that it keeps waiting asks until it is there."""
    go = threading.Event()

    class Slow(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "v1"))

        def do_GET(self) -> None:
            go.wait(60)
            super().do_GET()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as files:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        source = f"http://127.0.0.1:{files.server_port}/adapter_model.safetensors"
        allowed = (f"http://127.0.0.1:{files.server_port}",)
        with beginning(tmp_path, "fetching", lora_fs, allowed_remotes=allowed, hold_timeout_s=0.2) as side:
            monkeypatch.setattr(click, "echo", _freeing(click.echo, go))
            side.at = ("--server", side.url, "--token-file", str(tmp_path / "token"))
            ran = side(["register", "support", source])
            assert (ran.code, ran.out) == (0, f"registered support@v1 in default/{MODEL}\n"), ran.err
            assert "It goes on" in ran.err
            spec = side("show support -o json").json["revisions"][0]["spec"]
            assert spec["source"]["uri"] == source
        files.shutdown()


def _freeing(echo: Callable[..., None], go: threading.Event) -> Callable[..., None]:
    """``echo``, after whose first line on stderr the source answers."""

    def call(*words: Any, **options: Any) -> None:
        echo(*words, **options)
        if options.get("err"):
            go.set()

    return call


def test_the_server_tells_the_audit(remote: Side, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each act is one line of the server's audit, by its own name and the token's; a dry run is none."""
    own = tmp_path / "own.audit"
    monkeypatch.setenv("LORA_FS_AUDIT_FILE", str(own))
    for line in ("register support ./v1", "pin support --dry-run", "pin support", "promote support v9"):
        remote(line)
    told = [json.loads(line) for line in remote.audit.read_text().splitlines()]
    assert [(one["act"], one["outcome"], one["who"]) for one in told] == [
        ("register", "done", "token:ops"),
        ("pin", "done", "token:ops"),
        ("promote", "failed", "token:ops"),
    ]
    assert told[0]["what"]["revision"] == "v1"
    assert not own.exists()
    assert SECRET not in remote.audit.read_text()


def test_tokens(remote: Side, tmp_path: Path) -> None:
    """Who has no token, or one that is not good for it, is told which file was read, never what it holds."""
    remote("register support ./v1")
    bare = ("--server", remote.url)
    ran = remote("promote support v1", bare)
    assert ran.code == 1
    assert "no token was sent: give this command --token-file" in ran.err
    wrong = tmp_path / "wrong"
    wrong.write_text("none-of-them-9\n")
    for line in ("promote support v1", "list"):
        ran = remote(line, (*bare, "--token-file", str(wrong)))
        assert (ran.code, f"the token of {wrong} was sent" in ran.err) == (1, True), ran.err
        assert "none-of-them-9" not in ran.out + ran.err
    wrong.write_text("reads-7\n")
    ran = remote("unregister support", (*bare, "--token-file", str(wrong)))
    assert (ran.code, "the token looks may not unregister" in ran.err) == (1, True)
    assert remote("list", (*bare, "--token-file", str(wrong))).code == 3
    for content, why in (("", "holds 0 tokens"), ("a\nb\n", "holds 2 tokens"), ("ä\n", "no text of ASCII")):
        wrong.write_text(content)
        ran = remote("list", (*bare, "--token-file", str(wrong)))
        assert (ran.code, why in ran.err) == (2, True), ran.err
    ran = remote("list", (*bare, "--token-file", str(tmp_path / "missing")))
    assert (ran.code, "cannot read the token file" in ran.err) == (2, True)


def test_a_token_in_the_clear(
    lora_fs: Callable[..., Ran], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that goes over plain http to another machine is warned of; to this one it is not."""
    Client("http://nowhere.example", tmp_path / "token").close()
    told = capsys.readouterr().err
    assert "goes to nowhere.example in the clear" in told
    assert SECRET not in told
    for url in ("https://nowhere.example", "http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9"):
        Client(url, tmp_path / "token").close()
    Client("http://nowhere.example", None).close()
    assert capsys.readouterr().err == ""


def test_a_redirect_is_not_followed(lora_fs: Callable[..., Ran], tmp_path: Path) -> None:
    """The token goes to the server that was named, and nowhere it points to."""
    asked: list[tuple[str, str | None]] = []

    class Moved(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.headers["Host"], self.headers["X-Lora-Fs-Token"]))
            self.send_response(307)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/elsewhere")  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Moved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        ran = lora_fs("list", "--server", url, "--token-file", str(tmp_path / "token"))
        server.shutdown()
    assert (ran.code, "redirects to http://localhost" in ran.err) == (1, True)
    assert asked == [(url.removeprefix("http://"), SECRET)]


def test_a_server_that_is_not_there(lora_fs: Callable[..., Ran]) -> None:
    """It exits as for a volume that does not answer, and says where it looked."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for line in (["list"], ["promote", "support", "v1"], ["status"]):
            ran = lora_fs(*line, "--server", url)
            assert (ran.code, ran.err.startswith(f"lora-fs: cannot reach {url}")) == (1, True), ran.err


class _Odd(http.server.BaseHTTPRequestHandler):
    """Answers what no sidecar does."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metadata" else 404)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def do_POST(self) -> None:
        self.connection.close()

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server_that_is_no_sidecar(lora_fs: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of another program is one sentence, and a write whose answer is lost may be done."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Odd) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = ("--server", f"http://127.0.0.1:{server.server_port}")
        ran = lora_fs("list", *at)
        assert (ran.code, "knows no such call" in ran.err) == (1, True), ran.err
        ran = lora_fs("promote", "support", "v1", *at)
        assert (ran.code, "look before you repeat it" in ran.err) == (1, True), ran.err
        monkeypatch.delenv("LORA_FS_MODEL")
        ran = lora_fs("list", *at)
        assert (ran.code, "not as a sidecar of lora-fs" in ran.err) == (1, True), ran.err
        server.shutdown()


@pytest.mark.parametrize(
    "line",
    [
        "gc --older-than 48h",
        "fsck",
        "export x.tar",
        "import archive archive.tar",
        "quota",
        "doctor",
        "init",
        "top",
        "sidecar",
    ],
)
def test_commands_that_need_the_volume(lora_fs: Callable[..., Ran], line: str) -> None:
    """They say so under --server, and ask no server."""
    words = shlex.split(line)
    Path("archive.tar").touch()
    ran = lora_fs(*words, "--server", "http://127.0.0.1:9")
    assert ran.code == 2
    assert f"{words[0]} needs the volume, which http://127.0.0.1:9 has" in ran.err


def test_a_volume_or_a_server(
    lora_fs: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at once are refused; an option beats the variable of the other."""
    url, root = "http://127.0.0.1:9", str(tmp_path)
    ran = lora_fs("list", "--root", root, "--server", url)
    assert (ran.code, "--root and --server exclude each other" in ran.err) == (2, True)
    monkeypatch.setenv("LORA_FS_SERVER", url)
    assert lora_fs("list", "--root", root).code == 3
    assert "cannot reach" in lora_fs("list").err
    monkeypatch.setenv("LORA_FS_ROOT", root)
    ran = lora_fs("list")
    assert (ran.code, "both set" in ran.err) == (2, True)
    assert lora_fs("list", "--root", root).code == 3
    assert "cannot reach" in lora_fs("list", "--server", url).err
    ran = lora_fs("list", "--root", root, "--token-file", root)
    assert (ran.code, "give --server, too" in ran.err) == (2, True)
    for odd in ("ftp://x", "http://", "http://u:p@x", "http://x/v1", "x", "http://x:99999", "http://x:y"):
        ran = lora_fs("list", "--server", odd)
        assert (ran.code, f"Error: --server {odd.replace('u:p', '***')}: " in ran.err) == (2, True)
    ran = lora_fs("list", "--server", "http://x/\x7f")
    assert (ran.code, "http://x/\\x7f is no address" in ran.err) == (2, True)
    for option in ("--link", "--lora-downloader-plugin=a.B"):
        ran = lora_fs("register", "a", "./v1", option, "--server", url)
        assert (ran.code, "needs the volume" in ran.err) == (2, True)

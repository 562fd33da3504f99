"""unregister, promote, rollback, list, show: what a name serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest

from lora_fs.sidecar.cli.main import COMMANDS, cli
from lora_fs.sidecar.model import Event, EventList, Phase
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.volume import atomic
from tests.cli.conftest import MODEL, LoraFs

Folder = Callable[[int], str]
Report = Callable[..., None]
AT = "2026-01-01T00:00:00.000+00:00"


@pytest.fixture
def two(lora_fs: LoraFs, folder: Folder) -> LoraFs:
    """``a`` with v1 and v2; it serves v2."""
    lora_fs("register", "a", folder(1), "--label", "team=x", "--policy", "sticky")
    lora_fs("register", "a", folder(2))
    return lora_fs


def serves(lora_fs: LoraFs, name: str = "a") -> str | None:
    """Which revision the name serves."""
    pointer = lora_fs("show", name, "-o", "json").json["pointer"]
    return None if pointer is None else pointer["revision"]


def test_promote_and_roll_back(two: LoraFs) -> None:
    """The name moves to the revision, and back."""
    assert two("promote", "a", "v1").out == "promoted a: serves v1\n"
    assert serves(two) == "v1"
    assert two("rollback", "a").out == "rolled back a: serves v2\n"
    assert serves(two) == "v2"
    assert two("promote", "a", "v1", "-o", "json").json["pointer"]["previous_revision"] == "v2"


def test_promote_what_is_not_there(two: LoraFs) -> None:
    """Not found, with what there is."""
    ran = two("promote", "a", "v9")
    assert ran.code == 3
    assert "v1, v2" in ran.err


def test_roll_back_to_nothing(lora_fs: LoraFs, folder: Folder) -> None:
    """A name that served nothing before says so."""
    lora_fs("register", "a", folder(1))
    assert lora_fs("rollback", "a").code == 2
    assert lora_fs("rollback", "nobody").code == 3


def test_unregister_needs_to_know_which(two: LoraFs) -> None:
    """With several revisions one has to be chosen, or all of them."""
    ran = two("unregister", "a")
    assert ran.code == 2
    assert "--all-revisions" in ran.err
    assert two("unregister", "a", "--revision", "v1").code == 0
    assert serves(two) == "v2"
    assert two("unregister", "a").out == "unregistered a (v2) in default/tiny\n"
    assert two("show", "a").code == 3
    assert two("unregister", "a").code == 3


def test_unregister_all(two: LoraFs) -> None:
    """In JSON each tombstone is told."""
    ran = two("unregister", "a", "--all-revisions", "-o", "json")
    assert [(r["revision"], r["state"]) for r in ran.json["records"]] == [
        ("v1", "deleted"),
        ("v2", "deleted"),
    ]


def test_list(two: LoraFs, folder: Folder) -> None:
    """A row a revision, one line each however long, and the serving one marked."""
    two("register", "b" * 128, folder(3))
    lines = two("list", "-o", "wide").out.splitlines()
    assert lines[0].split()[:3] == ["NAME", "REVISION", "ACTIVE"]
    assert [line.split()[:2] for line in lines[1:]] == [["a", "v1"], ["a", "v2"], ["b" * 128, "v1"]]
    assert "*" in lines[2]
    assert "*" not in lines[1]
    assert two("list", "-o", "name").out.split() == ["a", "b" * 128]


def test_list_of_some(two: LoraFs, folder: Folder) -> None:
    """By a pattern and by labels; a list that leaves all out is not an empty scope."""
    two("register", "b1", folder(3), "--label", "team=y")
    assert two("list", "b*", "-o", "name").out.split() == ["b1"]
    assert two("list", "-l", "team!=y", "-o", "name").out.split() == ["a"]
    assert [row["name"] for row in two("list", "?1", "-l", "team=y", "-o", "json").json] == ["b1"]
    none = two("list", "-l", "team=z")
    assert none.code == 0
    assert "no adapter matches (in default/tiny: 3 revisions)" in none.err
    wrong = two("list", "-l", "team==x==y")
    assert wrong.code == 2
    assert "not a label selector: 'team==x==y'" in wrong.err


def test_show(two: LoraFs) -> None:
    """A page with everything that was registered."""
    page = two("show", "a").out
    assert page.startswith("a in default/tiny serves v2, before that v1\n")
    for words in ("team=x", "sticky", "rank 4", "sha256:", "file://"):
        assert words in page


def test_nothing_is_registered(lora_fs: LoraFs, folder: Folder) -> None:
    """An empty registry lists nothing, and that is no failure."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    assert lora_fs("list", "-o", "json").json == []


def test_a_record_that_cannot_be_read(two: LoraFs, root: Path) -> None:
    """The rest is listed, and it is told which one is not."""
    (record,) = (root / "default" / "tiny" / "v1").glob("a.@*.json")
    record.write_text("garbage")
    ran = two("list", "-o", "json")
    assert [r["revision"] for r in ran.json] == ["v2"]
    assert record.name in ran.err


def test_tenants_are_apart(lora_fs: LoraFs, folder: Folder) -> None:
    """A name in one namespace is unknown in another."""
    lora_fs("--namespace", "team-a", "register", "a", folder(1))
    assert lora_fs("--namespace", "team-a", "list", "-o", "name").out == "a\n"
    assert lora_fs("--namespace", "team-b", "list", "-o", "name").out == ""


NO_NAMES = ["..", "a/b", "%2e", "a\0b", "x" * 5000, "ünï", ""]


@pytest.mark.parametrize("command", ["unregister", "show", "rollback", "promote"])
@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_are_no_names(two: LoraFs, command: str, name: str) -> None:
    """Refused as such before anything is looked for, with a short message."""
    ran = two(command, name, *(["v1"] if command == "promote" else []))
    assert ran.code == 2
    assert "invalid name" in ran.err
    assert len(ran.err) < 400


def test_one_or_all_revisions(two: LoraFs) -> None:
    """Both at once are refused, and nothing is taken away."""
    ran = two("unregister", "a", "--revision", "v1", "--all-revisions")
    assert ran.code == 2
    assert "exclude each other" in ran.err
    assert len(two("list", "-o", "json").json) == 2


def test_show_escapes_what_a_terminal_would_act_on(lora_fs: LoraFs, folder: Folder) -> None:
    """A label is another tenant's text."""
    lora_fs("register", "a", folder(1), "--label", "k=\x1b[2J")
    assert "\x1b" not in lora_fs("show", "a").out
    assert lora_fs("show", "a", "-o", "json").json["revisions"][0]["spec"]["labels"] == {"k": "\x1b[2J"}


def test_tables_are_never_cut(two: LoraFs, monkeypatch: pytest.MonkeyPatch, folder: Folder) -> None:
    """On a narrow terminal, too, every cell can be copied; only a reason is folded."""
    long = "b" * 128
    two("register", long, folder(3))
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert any(line.startswith(f"{long}  v1") for line in two("list").out.splitlines())
    assert "no replica has" in two("status").out
    assert all(line == line.rstrip() for line in two("list", "-o", "wide").out.splitlines())


def test_revisions_are_listed_in_their_order(lora_fs: LoraFs, folder: Folder) -> None:
    """v2 stands before v10."""
    for seed, revision in enumerate(("v10", "v2", "v1", "rc")):
        lora_fs("register", "a", folder(seed), "--revision", revision)
    assert [r["revision"] for r in lora_fs("list", "-o", "json").json] == ["rc", "v1", "v2", "v10"]


MORE = {
    "promote": ("v1",),
    "canary": ("v1", "--percent", "5"),
    "set": ("--priority", "1"),
    "evaluate": ("--data", "cases.jsonl", "--url", "http://127.0.0.1:9"),
    "wait": ("--timeout", "1ms"),
}


@pytest.mark.parametrize("name", ["nobody", "a@v9"])
def test_what_is_not_registered(two: LoraFs, report: Report, tmp_path: Path, name: str) -> None:
    """Every command that takes a NAME, but the one that makes it, exits 3 and says that there is none."""
    (tmp_path / "cases.jsonl").write_text('{"prompt": "hello", "expect": {"exact": "hello"}}\n')
    report("pod", phases={"a": Phase.READY}, revision="v2")
    takes = []
    for command in COMMANDS:
        found = cli.get_command(click.Context(cli), command)
        assert found is not None
        if found.params and (found.params[0].name, found.params[0].metavar) == ("name", None):
            takes.append(command)
    assert {"status", "events", "show", "get", "rollback"} < set(takes)
    for command in takes:
        if command == "register":
            continue
        bare = name.partition("@")[0] if command in ("promote", "canary") else name
        more = MORE.get(command, ())
        more = ("v9", *more[1:]) if command in ("promote", "canary") else more
        ran = two(command, bare, *more)
        assert (ran.code, ran.out) == (3, ""), (command, ran)
        assert bare.partition("@")[0] in ran.err, (command, ran)


def test_what_was_removed_and_is_told_of_still(two: LoraFs, report: Report, root: Path) -> None:
    """Events and a replica's status of a name that is not registered any more are shown."""
    two("unregister", "a", "--all-revisions")
    assert (two("status", "a").code, two("events", "a").code) == (3, 3)
    happened = Event(reason="Loaded", key=("default", MODEL, "v1", "a"), first_at=AT, last_at=AT)
    (root / ".events").mkdir(exist_ok=True)
    lists = EventList(replica="pod", model=MODEL, events=(happened,))
    atomic.replace(root / ".events" / "pod.json", seal(lists))
    report("pod", phases={"a": Phase.DRAINING})
    assert "Loaded" in two("events", "a").out
    assert "Draining" in two("status", "a").out
    assert (two("events", "a@v9").code, two("events", "b").code) == (3, 3)


@pytest.mark.parametrize("words", [("show",), ("get",), ("get", "-o", "yaml"), ("status",)])
def test_one_name_is_read_alone(two: LoraFs, folder: Folder, root: Path, words: tuple[str, ...]) -> None:
    """Who asks for a name waits for no other's record. Another's damage is not told; its own is."""
    two("register", "ab", folder(3))
    command, *options = words
    before = two(command, "a", *options)
    damage(root, "ab")
    assert two(command, "a", *options) == before
    damage(root, "a")
    assert "unreadable" in two(command, "a", *options).err


def damage(root: Path, name: str) -> None:
    """Let the newest record of v1 hold what is no record."""
    *_, newest = sorted((root / "default" / MODEL / "v1").glob(f"{name}.@*.json"))
    newest.write_text("garbage")

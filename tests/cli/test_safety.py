"""What a command refuses, rehearses and reports, so that a script does no harm."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml

from lora_fs.sidecar.cli.main import COMMANDS, cli
from lora_fs.sidecar.cli.trail import ACTS
from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.registry.format.layout import Layout
from tests.cli.conftest import LORA_FS, LoraFs, seen

Folder = Callable[[int], str]
Report = Callable[..., None]


@pytest.fixture
def two(lora_fs: LoraFs, folder: Folder) -> LoraFs:
    """``a`` with v1 and v2, which it serves."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "a", folder(2))
    return lora_fs


def files(root: Path) -> dict[str, bytes]:
    """Every file of the registry."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "line",
    [
        "unregister a --all-revisions",
        "promote a v1",
        "rollback a",
        "canary a v1 --percent 5",
        "pin a",
        "unpin a",
        "set a --policy eager --keep-revisions 3",
        "quota --adapters 5",
        "quota --remove",
        "gc",
        "init",
        "fsck --repair",
    ],
)
def test_a_dry_run_changes_no_file(two: LoraFs, root: Path, line: str) -> None:
    """It exits 0, says what it would do, and writes nothing."""
    before = files(root)
    ran = two(*line.split(), "--dry-run")
    assert ran.code == 0, ran
    assert ran.out
    assert files(root) == before


def test_each_command_that_changes_something_can_be_rehearsed() -> None:
    """Every command takes --dry-run, but those that only read, serve, or write a file that they make."""
    without = {name for name in COMMANDS if "--dry-run" not in options(name)}
    reads = {"validate", "verify", "list", "show", "get", "status", "top", "events", "wait", "doctor"}
    assert without == reads | {"sidecar", "gateway", "demo", "export", "version", "help"}
    assert not without & ACTS.keys()


def options(name: str) -> set[str]:
    """What a command takes, as it is written."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {word for parameter in command.params for word in parameter.opts}


def test_a_rehearsed_repair_mends_nothing(two: LoraFs, root: Path) -> None:
    """It tells what --repair would do, as fsck without it, and exits as that does."""
    Layout(root).head.write_text("damage")
    before = files(root)
    rehearsed, looked = two("fsck", "--repair", "--dry-run"), two("fsck")
    assert (rehearsed.code, rehearsed.out) == (1, looked.out)
    assert "--repair: it is made anew" in looked.out
    assert files(root) == before


@pytest.mark.parametrize("line", ["promote a v9", "unregister b", "canary a v2", "set b --priority 1"])
def test_a_dry_run_fails_as_the_command_would(two: LoraFs, line: str) -> None:
    """The exit code and the message are the same."""
    rehearsed, done = two(*line.split(), "--dry-run"), two(*line.split())
    assert (rehearsed.code, rehearsed.err) == (done.code, done.err)
    assert done.code != 0


def test_a_dry_run_shows_what_would_be_written(two: LoraFs) -> None:
    """The pointer and the records are those that the command writes."""
    rehearsed = two("promote", "a", "v1", "--dry-run", "-o", "json").json["pointer"]
    done = two("promote", "a", "v1", "-o", "json").json["pointer"]
    assert [rehearsed[name] for name in ("revision", "previous_revision", "generation")] == [
        done[name] for name in ("revision", "previous_revision", "generation")
    ]


def test_the_revision_that_a_name_serves(two: LoraFs) -> None:
    """To unregister it while others are registered needs --force: the name would serve nothing."""
    ran = two("unregister", "a", "--revision", "v2")
    assert (ran.code, "--force" in ran.err) == (4, True)
    assert two("show", "a", "-o", "json").json["pointer"]["revision"] == "v2"
    assert two("unregister", "a@v2", "--force").code == 0
    assert two("unregister", "a@v1").code == 0  # the last one is taken with its name


def test_an_export_replaces_no_file(two: LoraFs, tmp_path: Path) -> None:
    """An existing FILE is refused without --force."""
    (tmp_path / "kept").write_text("mine")
    ran = two("export", "kept")
    assert (ran.code, (tmp_path / "kept").read_text()) == (4, "mine")
    assert two("export", "kept", "--force").code == 0


def test_an_export_goes_to_no_terminal(two: LoraFs) -> None:
    """A tar on a terminal is of no use to anybody."""
    ours, theirs = pty.openpty()
    ran = subprocess.run(
        [LORA_FS, "export", "-"], stdout=theirs, stderr=subprocess.PIPE, text=True, check=False, timeout=60
    )
    os.close(theirs)
    os.close(ours)
    assert (ran.returncode, "is a terminal" in ran.stderr) == (2, True)


def test_status_tells_by_its_exit_code(two: LoraFs, report: Report) -> None:
    """With --exit-code it is 1 where something fails, as well as where nobody reports."""
    assert two("status").code == 0
    assert two("status", "--exit-code").code == 1
    report("pod-a", recent=seen(pointer=2, revision="v2"), phases={"a": Phase.READY}, revision="v2")
    assert two("status", "--exit-code").code == 0
    report("pod-a", phases={"a": Phase.FAILED}, revision="v2")
    failing = two("status", "--exit-code")
    assert (failing.code, "failed adapters: 1" in failing.err) == (1, True)
    assert two("status").code == 0


@pytest.mark.parametrize("ailing", [{"age_s": 300}, {"engine": "unknown"}, {"conditions": ("Full: x",)}])
def test_a_replica_that_ails_fails_the_status(two: LoraFs, report: Report, ailing: dict[str, object]) -> None:
    """A stale report, an engine that is down, a condition."""
    report("pod-a", recent=seen(), **ailing)
    assert two("status", "--exit-code").code == 1


def test_a_name_with_its_revision(two: LoraFs) -> None:
    """``NAME@REVISION`` is taken wherever a revision is, and refused with a word where none is."""
    assert two("promote", "a@v1").code == 0
    assert two("show", "a@v1", "-o", "name").out == "a@v1\n"
    assert two("get", "a@v2", "-o", "name").out == "a@v2\n"
    assert [r["revision"] for r in two("set", "a@v2", "--priority", "3", "-o", "json").json["records"]] == [
        "v2"
    ]
    assert two("canary", "a@v2", "--percent", "5").code == 0
    assert two("show", "a@v9").code == 3
    assert two("show", "a@").code == 2
    twice = two("promote", "a@v1", "v2")
    assert (twice.code, "two revisions" in twice.err) == (2, True)
    assert (two("pin", "a").code, two("unpin", "a@v1", "-o", "name").out) == (0, "a@v1\n")
    kinds = [one["spec"]["policy"] for one in two("show", "a", "-o", "json").json["revisions"]]
    assert (kinds[0], kinds[1]["kind"]) == (None, "pinned")


def test_every_name_may_have_its_revision() -> None:
    """Whatever command takes a NAME takes a revision, too."""
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        taken = {parameter.name for parameter in command.params}
        assert "name" not in taken or "revision" in taken, name


def test_a_pattern_with_a_revision(two: LoraFs, folder: Folder) -> None:
    """list and get show that revision alone, of every name that has it."""
    two("register", "b", folder(3))
    for line in ("list *@v1", "get *@v1", "list --revision v1", "get --revision v1"):
        rows = [row.split()[:2] for row in two(*line.split(), "--no-headers").out.splitlines()]
        assert rows == [["a", "v1"], ["b", "v1"]], line


def test_a_rollback_that_is_repeated(two: LoraFs, folder: Folder) -> None:
    """With its revision it changes nothing; without one the name is back where it was."""
    two("register", "a", folder(3), "--no-activate")
    assert two("rollback", "a@v1").out == "rolled back a: serves v1\n"
    assert two("rollback", "a@v1", "-o", "json").json["pointer"]["revision"] == "v1"
    ran = two("rollback", "a@v3")
    assert (ran.code, "a served v2 before v1, not v3: `lora-fs promote a@v3`" in ran.err) == (4, True)
    assert two("rollback", "a", "-o", "name").out == "a@v2\n"


def test_a_revision_is_registered_by_its_full_name(lora_fs: LoraFs, folder: Folder) -> None:
    """``register NAME@REVISION`` is ``--revision``."""
    assert lora_fs("register", "a@r7", folder(1), "-o", "name").out == "a@r7\n"


def test_the_fencing_token_is_named_for_what_it_is(two: LoraFs) -> None:
    """No output has a field ``token``, which people take for a secret."""
    for line in ("list", "show a", "pin a", "promote a v1"):
        for form in ("json", "yaml"):
            text = two(*line.split(), "-o", form).out
            assert "fencing_token" in text
            assert '"token"' not in text
            assert "\n  token:" not in text


def test_every_format_of_every_command() -> None:
    """Each command that prints a result takes -o; one that goes on serving, or prints a page, does not."""
    assert {name for name in COMMANDS if "-o" not in options(name)} == {"sidecar", "gateway", "demo", "help"}


def test_yaml_says_what_json_says(two: LoraFs, report: Report, folder: Folder) -> None:
    """The two are one document, of which YAML may have several in a row."""
    report("pod-a", recent=seen(pointer=2, revision="v2"), phases={"a": Phase.FAILED}, revision="v2")
    seconds = re.compile(r'("?seen_s"?: )[\d.]+')
    looks = ("list", "show a", "status", "top", "events", "quota", "version", "fsck", "gc --dry-run")
    for line in (*looks, f"validate {folder(3)}", "wait nobody --for deleted"):
        forms = [seconds.sub(r"\1 0", two(*line.split(), "-o", form).out) for form in ("yaml", "json")]
        assert list(yaml.safe_load_all(2 * forms[0])) == 2 * [json.loads(forms[1])], line


def test_names_alone(two: LoraFs) -> None:
    """``-o name`` is one name a line, with the revision of what was changed."""
    assert two("status", "-o", "name").out == "a\n"
    assert two("promote", "a", "v1", "-o", "name").out == "a@v1\n"
    assert two("unregister", "a", "--all-revisions", "-o", "name").out == "a@v1\na@v2\n"


@pytest.mark.parametrize("line", ["list", "status", "quota", "get"])
def test_tables_without_headers(two: LoraFs, line: str) -> None:
    """--no-headers leaves the first line out, and nothing else."""
    whole, bare = (two(line, *more).out.splitlines() for more in ([], ["--no-headers"]))
    assert [row.split() for row in bare] == [row.split() for row in whole[1:]]


def test_every_table_may_lack_its_headers() -> None:
    """Each command that prints a table takes --no-headers; each that looks at adapters -A."""
    tables = {"list", "get", "status", "events", "top", "quota", "evaluate", "doctor"}
    assert {name for name in COMMANDS if "--no-headers" in options(name)} == tables
    assert {name for name in COMMANDS if "-A" in options(name)} == tables - {"evaluate", "doctor"}


def test_all_namespaces_at_once(two: LoraFs, folder: Folder, report: Report) -> None:
    """top and quota, too, show each namespace's; a quota is set for one."""
    assert two("register", "b", folder(3), "-n", "team-a").code == 0
    report("pod-a", phases={"default/a": Phase.READY}, namespaces=("default", "team-a"))
    assert two("top", "--once", "-A", "-o", "name").out == "default/a\nteam-a/b\n"
    rows = [line.split()[:4] for line in two("top", "--once", "-A", "--no-headers").out.splitlines()]
    assert rows[2:] == [["team-a/b", "v1", "·", "0"], ["default/a", "v2", "R", "1"]][::-1], rows
    used = {one["namespace"]: one["used"]["adapters"] for one in two("quota", "-A", "-o", "json").json}
    assert used == {"default": 1, "team-a": 1}
    assert {line.split()[0] for line in two("quota", "-A", "--no-headers").out.splitlines()} == used.keys()
    ran = two("quota", "-A", "--adapters", "3")
    assert (ran.code, "only shows" in ran.err) == (2, True)


def test_all_namespaces(two: LoraFs, folder: Folder) -> None:
    """-A shows each namespace's adapters, in a column of its own."""
    assert two("register", "a", folder(3), "-n", "team-a").code == 0
    rows = [line.split()[:3] for line in two("list", "-A", "--no-headers").out.splitlines()]
    assert rows == [["default", "a", "v1"], ["default", "a", "v2"], ["team-a", "a", "v1"]]
    told = two("status", "-A", "-o", "json").json["adapters"]
    assert {row["namespace"] for row in told} == {"default", "team-a"}


def test_other_words(two: LoraFs) -> None:
    """What users of other tools type is understood."""
    assert two("ls", "-o", "name").out == two("get", "-o", "name").out == "a\n"
    assert two("describe", "a").out == two("show", "a").out
    assert two("help", "list").out == two("list", "--help").out
    assert two("version").out.startswith("lora-fs ")
    assert two("help", "lsit").code == 2

"""register and validate, with everything a user may get wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lora_fs.sidecar.cli.backends import volume
from lora_fs.sidecar.cli.declared.documents import DocumentPolicy
from lora_fs.sidecar.registry.lifecycle.acts import Pin, Set
from lora_fs.sidecar.registry.lifecycle.register_as import RegisterAs
from tests.cli.conftest import LoraFs
from tests.registry.conftest import write_adapter
from tests.registry.faults import fail

Folder = Callable[[int], str]

DONE, FAILED, USAGE, NOT_FOUND, CONFLICT, INVALID = 0, 1, 2, 3, 4, 5


def test_the_next_revision(lora_fs: LoraFs, folder: Folder) -> None:
    """Without --revision new bytes are v1, v2 and on, and the name serves the newest."""
    assert lora_fs("register", "a", folder(1)).out == "registered a@v1 in default/tiny\n"
    assert lora_fs("register", "a", folder(2)).out == "registered a@v2 in default/tiny\n"
    assert [(r["revision"], r["active"]) for r in lora_fs("list", "-o", "json").json] == [
        ("v1", False),
        ("v2", True),
    ]


def test_the_same_bytes_again(lora_fs: LoraFs, folder: Folder) -> None:
    """It says so, changes nothing, and that is no failure."""
    lora_fs("register", "a", folder(1))
    before = lora_fs("list", "-o", "json").json
    again = lora_fs("register", "a", folder(1))
    assert (again.code, again.out) == (
        DONE,
        "unchanged: the same bytes are registered as a@v1 in default/tiny\n",
    )
    assert lora_fs("list", "-o", "json").json == before


@pytest.mark.parametrize("loss", ["folder", "file", "end", "link"])
def test_the_same_bytes_again_put_back_what_was_lost(
    lora_fs: LoraFs, folder: Folder, tmp_path: Path, loss: str
) -> None:
    """A folder, a file or the end of one that somebody removed; --dry-run says so and changes nothing."""
    lora_fs("register", "a", folder(1))
    (weights,) = tmp_path.glob("**/v1/a/adapter_model.safetensors")
    whole = weights.read_bytes()
    match loss:
        case "folder":
            shutil.rmtree(weights.parent)
        case "file" | "link":
            weights.unlink()
        case _:
            weights.write_bytes(whole[:-1])
    if loss == "link":
        weights.symlink_to(tmp_path / "elsewhere")
    lost = [path.name for path in weights.parent.glob("*")]
    assert lora_fs("register", "a", folder(1), "--dry-run").out == (
        "would restore lost files of a@v1 in default/tiny\n"
    )
    assert [path.name for path in weights.parent.glob("*")] == lost
    assert lora_fs("register", "a", folder(1)).out == "restored lost files of a@v1 in default/tiny\n"
    assert not weights.is_symlink()
    assert weights.read_bytes() == whole
    assert lora_fs("fsck").code == DONE
    assert lora_fs("register", "a", folder(1)).out.startswith("unchanged")


def test_the_same_bytes_with_another_policy(lora_fs: LoraFs, folder: Folder) -> None:
    """The policy is taken over, and it is said; the revision stays."""
    lora_fs("register", "a", folder(1))
    ran = lora_fs("register", "a", folder(1), "--policy", "pinned")
    assert ran.out == "the same bytes, with a new policy or labels: a@v1 in default/tiny\n"
    (record,) = lora_fs("list", "-o", "json").json
    assert (record["revision"], record["spec"]["policy"]["kind"]) == ("v1", "pinned")


def test_lost_files_and_another_policy_at_once(lora_fs: LoraFs, folder: Folder, tmp_path: Path) -> None:
    """Both are done, and both are said."""
    lora_fs("register", "a", folder(1))
    (weights,) = tmp_path.glob("**/v1/a/adapter_model.safetensors")
    weights.unlink()
    ran = lora_fs("register", "a", folder(1), "--policy", "pinned")
    assert ran.out == "restored lost files of a@v1 in default/tiny, with a new policy or labels\n"
    assert lora_fs("list", "-o", "json").json[0]["spec"]["policy"]["kind"] == "pinned"


def test_a_priority_or_a_ttl_alone(lora_fs: LoraFs, folder: Folder) -> None:
    """It changes the policy of what the name serves: an eager adapter does not become a lazy one."""
    lora_fs("register", "a", folder(1), "--policy", "eager", "--priority", "10")
    lora_fs("register", "a", folder(2), "--priority", "20")
    lora_fs("register", "a", folder(2), "--ttl", "5m")
    lora_fs("register", "b", folder(3), "--priority", "0")
    policies = [record["spec"]["policy"] for record in lora_fs("list", "-o", "json").json]
    assert policies == [
        {"kind": "eager", "ttl_s": 3600, "priority": 10},
        {"kind": "eager", "ttl_s": 300, "priority": 20},
        {"kind": "lazy", "ttl_s": 3600, "priority": 0},
    ]


def test_times_say_their_zone(lora_fs: LoraFs, folder: Folder) -> None:
    """Beside events, which are told in local time, a bare UTC time would be hours off."""
    lora_fs("register", "a", folder(1))
    (record,) = lora_fs("list", "-o", "json").json
    shown = f"{record['updated_at'][:19]}Z"
    assert lora_fs("list", "-o", "wide").out.splitlines()[1].endswith(shown)
    assert f"written    {shown} by" in lora_fs("show", "a").out


def test_the_same_revision_with_other_bytes(lora_fs: LoraFs, folder: Folder) -> None:
    """Revisions never change: refused, with what to do."""
    lora_fs("register", "a", folder(1), "--revision", "r1")
    ran = lora_fs("register", "a", folder(2), "--revision", "r1")
    assert ran.code == CONFLICT
    assert "register a new one" in ran.err


def test_every_option(lora_fs: LoraFs, folder: Folder) -> None:
    """What was asked for is in the record, and -o json tells it."""
    words = "--revision r7 --base-model org/tiny --policy eager --ttl 2h --priority 3"
    words += " --label team=x --label env=prod=1 --no-activate -o json"
    ran = lora_fs("register", "a", folder(1), *words.split())
    assert ran.json["changed"] is True
    record = ran.json["record"]
    assert record["revision"] == "r7"
    assert record["spec"]["base_model"] == "org/tiny"
    assert record["spec"]["policy"] == {"kind": "eager", "ttl_s": 7200, "priority": 3}
    assert record["spec"]["labels"] == {"team": "x", "env": "prod=1"}
    assert lora_fs("list", "-o", "json").json[0]["active"] is False


def test_a_dry_run(lora_fs: LoraFs, folder: Folder) -> None:
    """It says what would be, and the volume is as it was."""
    lora_fs("register", "other", folder(0))
    ran = lora_fs("register", "a", folder(1), "--dry-run")
    assert ran.out == "would register a@v1 in default/tiny\n"
    assert [r["name"] for r in lora_fs("list", "-o", "json").json] == ["other"]


def test_a_dry_run_finds_what_is_wrong(lora_fs: LoraFs, folder: Folder, tmp_path: Path) -> None:
    """An adapter that cannot be served is refused in a dry run too."""
    lora_fs("register", "other", folder(0))
    (tmp_path / "empty").mkdir()
    assert lora_fs("register", "a", "empty", "--dry-run").code == INVALID


def test_a_linked_folder(
    lora_fs: LoraFs, folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only under the root or an allowed source; then nothing is copied."""
    source = folder(1)
    refused = lora_fs("register", "a", source, "--link")
    assert refused.code == USAGE
    assert "LORA_FS_ALLOWED_SOURCES" in refused.err
    monkeypatch.setenv("LORA_FS_ALLOWED_SOURCES", str(Path(source).parent))
    assert lora_fs("register", "a", source, "--link").code == DONE
    assert lora_fs("list", "-o", "json").json[0]["spec"]["path"] == source
    assert not (root / "default" / "tiny" / "v1" / "a").exists()


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "%2e%2e", "a\0b", "x" * 5000, "ünï", "", ".hidden", "-dash", "a b", "tiny"]
)
def test_names_that_are_no_names(lora_fs: LoraFs, folder: Folder, root: Path, name: str) -> None:
    """Each is refused with a short message, and nothing is written."""
    lora_fs("register", "good", folder(0))
    before = sorted(root.rglob("*"))
    ran = lora_fs("register", "--", name, folder(1))
    assert ran.code in (USAGE, CONFLICT), ran
    assert 0 < len(ran.err) < 600
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("option", ["--namespace=../x", "--namespace=a b", "--model=..", "--model=a\0"])
def test_scopes_that_are_no_scopes(lora_fs: LoraFs, folder: Folder, option: str) -> None:
    """The tenant's and the model's names have the same grammar."""
    assert lora_fs(option, "register", "a", folder(1)).code == USAGE


SOURCES = {
    "nothing": (NOT_FOUND, "no such folder"),
    "dangling": (NOT_FOUND, "a link to nowhere"),
    "below-a-file": (NOT_FOUND, "no such folder"),
    "file": (USAGE, "is a file: give the folder"),
    "fifo": (USAGE, "is a FIFO"),
    "socket": (USAGE, "is a socket"),
    "device": (USAGE, "is a device"),
    "loop": (USAGE, "link to itself"),
    "long": (USAGE, "too long"),
    "blank": (USAGE, "empty"),
    "nul": (USAGE, "NUL"),
    "other-scheme": (USAGE, "ftp://"),
    "other-host": (USAGE, "names host elsewhere"),
    "no-url": (USAGE, "http://[source"),
    "empty": (INVALID, "adapter_config.json"),
}


def make_source(what: str, source: Path) -> str:
    """A SOURCE that is no adapter, and how to call it."""
    match what:
        case "file":
            source.write_text("x")
        case "below-a-file":
            source.write_text("x")
            return "source/below"
        case "fifo":
            os.mkfifo(source)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("source")
        case "device":
            return os.devnull
        case "dangling":
            source.symlink_to("nowhere")
        case "loop":
            source.symlink_to("source")
        case "empty":
            source.mkdir()
        case "long" | "blank" | "nul":
            return {"long": "x" * 5000, "blank": "", "nul": "a\0b"}[what]
        case "other-scheme":
            return "ftp://host/source"
        case "other-host":
            return "file://elsewhere/source"
        case "no-url":
            return "http://[source"
    return "source"


@pytest.mark.parametrize("what", SOURCES)
def test_sources_that_are_no_adapters(lora_fs: LoraFs, tmp_path: Path, what: str) -> None:
    """Each is told by what it is, and none is waited for; ``validate`` says the same."""
    source = make_source(what, tmp_path / "source")
    code, words = SOURCES[what]
    for command in (("register", "a"), ("validate",)):
        ran = lora_fs(*command, source)
        assert ran.code == code, ran
        assert words in ran.err
        assert len(ran.err) < 600
        assert ran.out == ""


def test_a_source_that_may_not_be_looked_at(
    lora_fs: LoraFs, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says whose permission is missing; it is no traceback."""
    source, stat = folder(1), Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if str(path) == source:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), source)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    ran = lora_fs("register", "a", source)
    assert ran.code == USAGE
    assert f"{source}: this user may not look there" in ran.err


def test_a_source_by_its_url(lora_fs: LoraFs, folder: Folder) -> None:
    """``file://`` is the same as the path."""
    assert lora_fs("register", "a", f"file://{folder(1)}").code == DONE
    assert lora_fs("register", "a", folder(1)).out.startswith("unchanged")


def test_an_invalid_adapter(lora_fs: LoraFs, folder: Folder) -> None:
    """Every finding names the file and the field, in text and in JSON, and --help is not needed."""
    source = Path(folder(1))
    config = json.loads((source / "adapter_config.json").read_text())
    del config["r"]
    (source / "adapter_config.json").write_text(json.dumps(config))
    for command in (("register", "a", str(source)), ("validate", str(source))):
        ran = lora_fs(*command)
        assert ran.code == INVALID
        assert "adapter_config.json: r:" in ran.err
    ran = lora_fs("validate", str(source), "-o", "json")
    assert ran.code == INVALID
    assert {"adapter_config.json"} == {f["file"] for f in ran.json["findings"] if f["field"] == "r"}
    assert ran.json["ok"] is False


def test_what_refuses_an_adapter_stands_apart_from_warnings(lora_fs: LoraFs, folder: Folder) -> None:
    """Whoever mends an adapter sees which lines he has to mend."""
    source = Path(folder(1))
    config = json.loads((source / "adapter_config.json").read_text())
    del config["r"], config["peft_type"]
    (source / "adapter_config.json").write_text(json.dumps(config))
    ran = lora_fs("validate", str(source))
    assert (ran.code, ran.out.count("warning: "), ran.out.count("[peft-type-missing]")) == (INVALID, 1, 1)
    assert ("[config-field]" in ran.err, "[peft-type-missing]" in ran.err) == (True, False)


def test_a_valid_adapter(lora_fs: LoraFs, folder: Folder) -> None:
    """validate says that it can be served; and its size, as a registration counts it, rank and modules."""
    source = folder(1)
    size = sum(path.stat().st_size for path in Path(source).iterdir())
    ran = lora_fs("validate", source)
    shown = f"{source} can be served: 0.9 kB, rank 4, 1 target module"
    assert (ran.code, ran.out) == (DONE, f"{shown}\n")
    assert lora_fs("validate", source, "-o", "wide").out == f"{shown} (q_proj), alpha 8, float32\n"
    told = lora_fs("validate", source, "-o", "json").json
    assert told == {"ok": True, "findings": [], "size_bytes": size, "rank": 4, "target_modules": ["q_proj"]}
    spec = lora_fs("register", "a", source, "-o", "json").json["record"]["spec"]
    assert spec["size_bytes"] == size


def test_the_size_of_what_cannot_be_read(lora_fs: LoraFs, folder: Folder) -> None:
    """There is none to say where a file is missing."""
    source = Path(folder(1))
    (source / "adapter_config.json").unlink()
    told = lora_fs("validate", str(source), "-o", "json").json
    assert (told["ok"], told["size_bytes"]) == (False, None)


@pytest.mark.parametrize(
    "words",
    [
        "--ttl 0",
        "--ttl soon",
        "--ttl -1",
        "--label x",
        "--label =x",
        "--policy often",
        "--wait -1",
        "--wait nan",
        f"--priority {10**9 + 1}",
        "--label x=\udcff",
        "--base-model \udcff",
    ],
)
def test_options_that_cannot_be_read(lora_fs: LoraFs, folder: Folder, root: Path, words: str) -> None:
    """A usage error that names the option, before anything is copied."""
    before = sorted(root.rglob("*"))
    ran = lora_fs("register", "a", folder(1), *words.split())
    assert ran.code == USAGE
    assert words.split()[0] in ran.err
    assert sorted(root.rglob("*")) == before


def test_a_priority_fits_an_engine(lora_fs: LoraFs, folder: Folder) -> None:
    """vLLM's workers take whole numbers of 64 bits: one greater priority failed each call to them."""
    assert lora_fs("register", "a", folder(1), "--priority", str(-(10**9))).code == DONE
    for line in (f"pin a --priority {10**9 + 1}", f"set a --priority {-(10**9) - 1}"):
        ran = lora_fs(*line.split())
        assert (ran.code, "--priority" in ran.err) == (USAGE, True)
    assert lora_fs("pin", "a", "--priority", str(10**9)).code == DONE
    for made in (
        lambda much: RegisterAs(priority=much),
        lambda much: Pin(priority=much),
        lambda much: Set(priority=much),
        lambda much: DocumentPolicy(priority=much),
    ):
        made(10**9)
        with pytest.raises(ValidationError, match="priority"):
            made(2**64)


@pytest.mark.parametrize("command", ["register a", "validate"])
def test_a_base_config_that_is_not_there(lora_fs: LoraFs, folder: Folder, bare: Path, command: str) -> None:
    """What was asked to be checked against is not left out in silence; nothing is made."""
    for path in ("nowhere", os.devnull):
        ran = lora_fs("--base-config", path, *command.split(), folder(1))
        assert ran.code == USAGE
        assert f"--base-config {path}" in ran.err
    assert not bare.exists()


@pytest.mark.parametrize("command", ["list", "status", "show a", "promote a v1"])
def test_a_base_config_that_no_command_needs(lora_fs: LoraFs, folder: Folder, command: str) -> None:
    """A path that is misspelt is told by every command; a variable, by those that would use it."""
    lora_fs("register", "a", folder(1))
    ran = lora_fs("--base-config", "/nope", *command.split())
    assert (ran.code, "--base-config /nope" in ran.err, ran.out) == (USAGE, True, "")


def test_a_variable_of_a_base_config_that_is_not_there(
    lora_fs: LoraFs, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be that of another container: what is registered is listed all the same."""
    lora_fs("register", "a", folder(1))
    monkeypatch.setenv("LORA_FS_BASE_CONFIG", "/nope")
    assert lora_fs("list").code == 0
    assert lora_fs("validate", folder(1)).code == USAGE


def test_a_root_that_is_a_file(lora_fs: LoraFs, folder: Folder, bare: Path) -> None:
    """A file in its place is no registry, and takes none."""
    bare.write_text("not a folder")
    for code, words in ((NOT_FOUND, ["register", "a", folder(1)]), (FAILED, ["init"])):
        ran = lora_fs(*words)
        assert (ran.code, str(bare) in ran.err) == (code, True)


@pytest.mark.parametrize(("code", "words"), [(errno.EROFS, "read-only"), (errno.ENOSPC, "full")])
def test_a_volume_that_takes_no_write(
    lora_fs: LoraFs, folder: Folder, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    """Exit 1 with one line that says why, whatever was to be written; reading goes on."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "a", folder(2))
    register = f"register b {folder(3)}"
    with monkeypatch.context() as patch:
        for call in ("mkdir", "link", "rename", "replace"):
            fail(patch, call, code, times=1 << 30)
        fail(patch, "open", code, times=1 << 30, when=lambda _, flags, *__, **___: flags & os.O_CREAT)
        for line in (register, "promote a v1", "rollback a", "unregister a --all-revisions"):
            ran = lora_fs(*line.split())
            assert ran.code == FAILED, ran
            assert words in ran.err
            assert len(ran.err.splitlines()) == 1
        assert lora_fs("list", "-o", "name").out == "a\n"
        assert lora_fs("status").code == DONE
        assert words in lora_fs("doctor").out


def test_an_error_nobody_thought_of(lora_fs: LoraFs, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's word is one line with the file it is about."""
    lora_fs("register", "a", folder(1))

    def fail_oddly(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "/some/file")

    monkeypatch.setattr(volume, "RegistryView", fail_oddly)
    ran = lora_fs("list")
    assert (ran.code, ran.err) == (FAILED, "lora-fs: /some/file: Input/output error\n")


def test_the_same_bytes_with_something_new(lora_fs: LoraFs, folder: Folder) -> None:
    """What changes beside the bytes is told: labels, policy, what the name serves."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "a", folder(2))
    assert "would serve v1" in lora_fs("register", "a", folder(1), "--dry-run").out
    assert lora_fs("register", "a", folder(1), "--no-activate").out.startswith("unchanged")
    assert lora_fs("register", "a", folder(2), "--label", "k=v").out == (
        "the same bytes, with a new policy or labels: a@v2 in default/tiny\n"
    )
    assert lora_fs("register", "a", folder(1)).out == (
        "the same bytes: a@v1 in default/tiny; a serves v1 now\n"
    )
    told = lora_fs("register", "a", folder(1), "-o", "json").json
    assert told["changed"] is False
    assert told["pointer"]["revision"] == "v1"


def test_not_activated(lora_fs: LoraFs, folder: Folder) -> None:
    """It says what the plain name serves instead."""
    ran = lora_fs("register", "a", folder(1), "--no-activate")
    assert ran.out == "registered a@v1 in default/tiny (a serves nothing)\n"
    lora_fs("promote", "a", "v1")
    ran = lora_fs("register", "a", folder(2), "--no-activate")
    assert ran.out == "registered a@v2 in default/tiny (a serves v1)\n"


@pytest.mark.parametrize("revision", ["..", "a/b", "%2e", "x" * 5000, "", "é"])
def test_revisions_that_are_no_revisions(lora_fs: LoraFs, folder: Folder, revision: str) -> None:
    """The grammar of names holds for them, in every command that takes one."""
    lora_fs("register", "a", folder(1))
    for words in (
        ["register", "a", folder(2), f"--revision={revision}"],
        ["unregister", "a", f"--revision={revision}"],
        ["promote", "a", revision],
    ):
        ran = lora_fs(*words)
        assert ran.code == USAGE
        assert "invalid revision" in ran.err


def test_a_link_does_not_lead_out(
    lora_fs: LoraFs, folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symlink in an allowed place refers to where it leads, and that is checked."""
    lora_fs("register", "other", folder(0))
    (root / "inside").symlink_to(folder(1))
    assert lora_fs("register", "a", str(root / "inside"), "--link").code == USAGE
    write_adapter(root / "own", 5)
    assert lora_fs("register", "a", str(root / "own"), "--link").code == DONE

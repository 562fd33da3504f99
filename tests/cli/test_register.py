"""register and validate, with everything a user may get wrong."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import LoraFs

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


@pytest.mark.parametrize("what", ["nothing", "file", "fifo", "socket", "dangling", "empty", "unsupported"])
def test_sources_that_are_no_adapters(lora_fs: LoraFs, tmp_path: Path, what: str) -> None:
    """Each is told by its path, and none is waited for."""
    source = tmp_path / "source"
    match what:
        case "file":
            source.write_text("x")
        case "fifo":
            os.mkfifo(source)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("source")
        case "dangling":
            source.symlink_to("nowhere")
        case "empty":
            source.mkdir()
    ran = lora_fs("register", "a", "s3://bucket/x" if what == "unsupported" else "source")
    assert ran.code == {"empty": INVALID, "unsupported": USAGE}.get(what, NOT_FOUND), ran
    assert ("source" in ran.err) or ("s3://" in ran.err)


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


def test_a_valid_adapter(lora_fs: LoraFs, folder: Folder) -> None:
    """validate says that it can be served."""
    ran = lora_fs("validate", folder(1))
    assert (ran.code, "can be served" in ran.out) == (DONE, True)
    assert lora_fs("validate", folder(1), "-o", "json").json["ok"] is True


@pytest.mark.parametrize(
    "words", ["--ttl 0", "--ttl soon", "--ttl -1", "--label x", "--label =x", "--policy often", "--wait -1"]
)
def test_options_that_cannot_be_read(lora_fs: LoraFs, folder: Folder, words: str) -> None:
    """A usage error that names the option."""
    ran = lora_fs("register", "a", folder(1), *words.split())
    assert ran.code == USAGE
    assert words.split()[0] in ran.err


def test_a_root_that_cannot_be_written(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """A file in its place is told with its path."""
    root.write_text("not a folder")
    ran = lora_fs("register", "a", folder(1))
    assert ran.code == FAILED
    assert str(root) in ran.err

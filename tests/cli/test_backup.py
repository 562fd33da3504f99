"""export, import and fsck as a person runs them: what is printed, what is changed, and the exit codes."""

from __future__ import annotations

import errno
import gzip
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from unittest.mock import Mock

import pytest

from tests.cli.conftest import LORA_FS, LoraFs
from tests.registry.conftest import write_adapter
from tests.registry.faults import fail

Folder = Callable[[int], str]


@pytest.fixture
def filled(lora_fs: LoraFs, folder: Folder) -> LoraFs:
    """support with v1 and v2, which it serves."""
    assert lora_fs("register", "support", folder(0), "--label", "team=care").code == 0
    assert lora_fs("register", "support", folder(1)).code == 0
    return lora_fs


def listed(lora_fs: LoraFs) -> list[tuple[str, str, bool]]:
    found = lora_fs("list", "-o", "json").json
    return [(one["name"], one["revision"], one["active"]) for one in found]


BOTH = [("support", "v1", False), ("support", "v2", True)]


def test_lost_and_restored(filled: LoraFs, root: Path, tmp_path: Path) -> None:
    """The volume is gone; the export in an empty folder is the same registry again."""
    done = filled("export", "backup.tar", "-o", "json")
    assert (done.code, done.json["records"], done.json["pointers"], done.json["left_out"]) == (0, 2, 1, [])
    of_one = "exported 2 records, 1 name, no files to records.tar\n"
    assert filled("export", "records.tar", "--no-artifacts").out == of_one
    before = json.loads((root / "lora-fs.json").read_text())
    shutil.rmtree(root)
    dry = filled("import", "archive", "backup.tar", "--dry-run")
    assert dry.code == 0
    assert not root.exists()
    assert "dry run" in dry.out
    done = filled("import", "archive", "backup.tar")
    assert (done.code, done.out.splitlines()[-1]) == (0, "2 restored")
    after = json.loads((root / "lora-fs.json").read_text())
    assert after["registry_uuid"] == before["registry_uuid"]
    assert after["epoch"] > before["epoch"]
    assert listed(filled) == BOTH
    assert filled("fsck").code == 0


def test_what_cannot_be_imported_is_a_line_each(lora_fs: LoraFs, tmp_path: Path) -> None:
    """With all of its findings."""
    (tmp_path / "store" / "cut").mkdir(parents=True)
    ran = lora_fs("import", "nim", "store")
    assert (ran.code, len(ran.out.splitlines()), "\\n" in ran.out) == (1, 2, False)
    assert "cannot be served: - adapter_config.json: is not there" in ran.out


def test_a_clone_is_another_registry(filled: LoraFs, root: Path, tmp_path: Path) -> None:
    """--as-new gives the copy its own identity, and is refused where a registry is."""
    filled("export", "backup.tar")
    assert filled("import", "archive", "backup.tar", "--as-new").code == 4
    other = str(tmp_path / "other")
    assert filled("--root", other, "import", "archive", "backup.tar", "--as-new", "--dry-run").code == 0
    assert not (tmp_path / "other").exists()
    assert filled("--root", other, "import", "archive", "backup.tar", "--as-new").code == 0
    uuids = {
        json.loads((at / "lora-fs.json").read_text())["registry_uuid"] for at in (root, tmp_path / "other")
    }
    assert len(uuids) == 2
    assert [one["name"] for one in filled("--root", other, "list", "-o", "json").json] == ["support"] * 2


@pytest.mark.parametrize("what", ["a record", "a folder", "no files"])
def test_a_dry_run_refuses_what_an_import_refuses(filled: LoraFs, root: Path, what: str) -> None:
    """A foreign record or folder in the way, an archive without files: the same words, nothing written."""
    filled("export", "backup.tar", *(["--no-artifacts"] if what == "no files" else []))
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if what == "a record":
        (root / "default/tiny/v1").mkdir(parents=True)
        (root / "default/tiny/v1/other.@00000001.json").write_text("{}")
    elif what == "a folder":
        write_adapter(root / "default/tiny/v2/support", 9)
    before = sorted(root.rglob("*"))
    dry = filled("import", "archive", "backup.tar", "--dry-run")
    assert sorted(root.rglob("*")) == before
    done = filled("import", "archive", "backup.tar")
    assert (dry.code, dry.err) == (done.code, done.err)
    assert done.code == (1 if what == "no files" else 4)


def test_through_a_pipe(filled: LoraFs, root: Path, tmp_path: Path) -> None:
    """export - writes nothing but the archive to stdout."""
    words = [LORA_FS, "export", "-"]
    done = subprocess.run(words, capture_output=True, check=True)
    (tmp_path / "piped.tar").write_bytes(done.stdout)
    assert done.stderr == b""
    shutil.rmtree(root)
    assert filled("import", "archive", "piped.tar").code == 0
    assert listed(filled) == BOTH


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_from_stdin(
    filled: LoraFs, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """As export - writes it: restored, and nothing of it is left in the temporary folder."""
    exported = subprocess.run([LORA_FS, "export", "-"], capture_output=True, check=True).stdout
    sent = gzip.compress(exported) if packed else exported
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setenv("TMPDIR", str(spool))
    words = [LORA_FS, "import", "archive", "-"]
    shutil.rmtree(root)
    ran = subprocess.run(words, input=sent, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.decode().startswith("restore")
    assert listed(filled) == BOTH
    ran = subprocess.run(words, input=sent[: len(sent) // 2], capture_output=True, check=False)
    assert (ran.returncode, b"stdin is no" in ran.stderr) == (2, True)
    assert list(spool.iterdir()) == []


def test_a_disk_that_is_full(filled: LoraFs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It failed: nothing was wrong with what was asked for."""
    fail(monkeypatch, "fsync", errno.ENOSPC)
    ran = filled("export", "backup.tar")
    assert (ran.code, "No space left" in ran.err) == (1, True)
    monkeypatch.setattr("sys.stdin", Mock(buffer=Mock(read=Mock(side_effect=OSError(errno.ENOSPC, "")))))
    ran = filled("import", "archive", "-")
    assert (ran.code, f"cannot keep stdin in {gettempdir()}" in ran.err) == (1, True), ran.err
    monkeypatch.setattr("sys.stdin", None)
    ran = filled("import", "archive", "-")
    assert (ran.code, "stdin, and that is closed" in ran.err) == (2, True)
    assert filled("export", str(tmp_path / "nowhere" / "backup.tar")).code == 2
    assert list(tmp_path.glob("backup*")) == []


def test_a_registry_takes_no_archive(filled: LoraFs, root: Path, tmp_path: Path) -> None:
    """Exit 4 says what to do instead, and that brings back an adapter withdrawn by mistake."""
    filled("export", "backup.tar")
    assert filled("unregister", "support", "--all-revisions").code == 0
    for more in ([], ["--dry-run"], ["--as-new"]):
        ran = filled("import", "archive", "backup.tar", *more)
        assert (ran.code, "lora-fs register NAME" in ran.err) == (4, True), ran.err
    assert listed(filled) == []
    beside = tmp_path / "beside"
    assert filled("--root", str(beside), "import", "archive", "backup.tar", "--as-new").code == 0
    source = str(beside / "default/tiny/v2/support")
    assert filled("register", "support", source, "--revision", "v2").code == 0
    assert listed(filled) == [("support", "v2", True)]


def test_linked_adapters_are_restored(
    filled: LoraFs, root: Path, tmp_path: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folder is gone, the archive has the files."""
    monkeypatch.setenv("LORA_FS_ALLOWED_SOURCES", str(tmp_path))
    linked = write_adapter(tmp_path / "linked", 5)
    assert filled("register", "linked", str(linked), "--link").code == 0
    filled("export", "backup.tar")
    shutil.rmtree(linked)
    shutil.rmtree(root)
    ran = filled("import", "archive", "backup.tar")
    assert (ran.code, ran.err) == (0, "")
    assert filled("fsck").code == 0


def test_one_scope_alone(filled: LoraFs, tmp_path: Path, folder: Folder) -> None:
    """--scope-only leaves other tenants out; without it they are in."""
    filled("--namespace", "other", "register", "theirs", folder(2))
    assert filled("export", "all.tar", "-o", "json").json["records"] == 3
    assert filled("export", "mine.tar", "--scope-only", "-o", "json").json["records"] == 2
    nobodys = filled("export", "typo.tar", "--scope-only", "-n", "typo")
    assert "nothing is registered in typo/tiny; there is default/tiny" in nobodys.err


def test_an_export_that_lacks_something_says_so(filled: LoraFs, root: Path) -> None:
    """It is written, and the exit code and stderr tell what is not in it."""
    shutil.rmtree(root / "default/tiny/v1/support")
    done = filled("export", "backup.tar")
    assert done.code == 1
    assert "default/tiny/v1/support" in done.err
    assert Path("backup.tar").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["archive", "nothing.tar"], 3, "no such file"),
        (["archive", "text"], 2, "no export"),
        (["gie", "nothing.yaml"], 3, "no such file"),
        (["gie", "text"], 2, "vLLMLoRAConfig"),
        (["nim", "nothing"], 3, "no such folder"),
        (["nim", "empty"], 2, "holds no folder"),
        (["tape", "text"], 2, "archive"),
        (["archive", "text", "--link"], 2, "--link is not for"),
        (["nim", "empty", "--as-new"], 2, "--as-new is not for"),
    ],
)
def test_what_cannot_be_imported_is_told(
    lora_fs: LoraFs, bare: Path, tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    """Each with its documented exit code, and nothing is made."""
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    done = lora_fs("import", *words)
    assert (done.code, says in done.err) == (code, True), done.err
    assert not bare.exists()


GIE = """
apiVersion: v1
kind: ConfigMap
metadata:
  name: dynamic-lora-config
data:
  configmap.yaml: |
    vLLMLoRAConfig:
      name: sql-loras-llama
      port: 8000
      defaultBaseModel: tiny
      ensureExist:
        models:
        - id: support
          source: ./support
        - id: sql
          base-model: org/other
          source: yard1/sql-lora
        - id: gone
          source: yard1/gone
        - id: both
          source: ./support
      ensureNotExist:
        models:
        - id: old
          source: ./old
        - id: both
          source: ./support
"""


def test_a_configmap_of_the_removed_sidecar(
    lora_fs: LoraFs, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to exist is registered for its base model, what is not is withdrawn, each row by itself."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # no hub answers
    (tmp_path / "cm.yaml").write_text(GIE)
    write_adapter(tmp_path / "support", 0)
    write_adapter(tmp_path / "sql", 1)
    lora_fs("register", "old", folder(3))
    words = ["import", "gie", "cm.yaml", "--folder", "yard1/sql-lora=./sql", "-o", "json"]
    dry = lora_fs(*words, "--dry-run")
    assert [one[0] for one in listed(lora_fs)] == ["old"]
    done = lora_fs(*words)
    assert done.code == dry.code == 1
    assert [row["outcome"] for row in done.json["items"]] == [
        "skipped",
        "registered",
        "registered",
        "failed",
        "unregistered",
    ]
    assert done.json["items"] == dry.json["items"]
    assert "--folder yard1/gone=DIR" in done.json["items"][3]["why"]
    assert listed(lora_fs) == [("support", "v1", True)]
    assert [one["name"] for one in lora_fs("--model", "org/other", "list", "-o", "json").json] == ["sql"]
    assert lora_fs("list", "-o", "json").json[0]["origin"] == "import"
    again = lora_fs(*words)
    assert [row["outcome"] for row in again.json["items"]] == [
        "skipped",
        "unchanged",
        "unchanged",
        "failed",
        "unchanged",
    ]


def test_a_flat_store(lora_fs: LoraFs, tmp_path: Path) -> None:
    """Each folder under its name; one that cannot be served is told and stops no other."""
    for number in range(3):
        write_adapter(tmp_path / f"store/lora-{number}", number)
    (tmp_path / "store/bad").mkdir()
    (tmp_path / "store/.cache").mkdir()
    (tmp_path / "store/README").write_text("text")
    done = lora_fs("import", "nim", "store")
    assert done.code == 1
    assert "1 of 4 were not imported" in done.err
    assert "adapter_config.json" in done.out
    assert [one[0] for one in listed(lora_fs)] == ["lora-0", "lora-1", "lora-2"]
    shutil.rmtree(tmp_path / "store/bad")
    assert lora_fs("import", "nim", "store").code == 0


def test_a_dry_run_says_would(lora_fs: LoraFs, tmp_path: Path) -> None:
    """Of each thing that it would do, as ``register`` says; scripts get ``dry_run`` and the outcome."""
    write_adapter(tmp_path / "store/a", 0)
    ran = lora_fs("import", "nim", "store", "--dry-run")
    assert ran.out == ("would register default/tiny: a@v1\n1 would register (dry run: nothing was changed)\n")
    told = lora_fs("import", "nim", "store", "--dry-run", "-o", "json").json
    assert (told["dry_run"], told["items"][0]["outcome"]) == (True, "registered")
    assert lora_fs("import", "nim", "store").out.startswith("registered   default/tiny: a@v1\n1 registered")
    gone = "vLLMLoRAConfig: {ensureNotExist: {models: [{id: a, base-model: tiny}]}}"
    (tmp_path / "cm.yaml").write_text(gone)
    ran = lora_fs("import", "gie", "cm.yaml", "--dry-run")
    assert ran.out.startswith("would unregister default/tiny: a\n")
    assert [one[0] for one in listed(lora_fs)] == ["a"]


def test_lost_files_come_back_with_a_store(lora_fs: LoraFs, root: Path, tmp_path: Path) -> None:
    """And that is told, by nim and by gie, in a dry run as well."""
    write_adapter(tmp_path / "store/a", 0)
    (tmp_path / "cm.yaml").write_text(
        "vLLMLoRAConfig: {ensureExist: {models: [{id: a, base-model: tiny, source: ./store/a}]}}"
    )
    lora_fs("import", "nim", "store")
    for words in (("nim", "store"), ("gie", "cm.yaml")):
        (root / "default/tiny/v1/a/adapter_model.safetensors").unlink()
        for more, did in ((["--dry-run"], "would restore"), ([], "restored    ")):
            ran = lora_fs("import", *words, *more)
            assert ran.out.startswith(f"{did} default/tiny: a@v1: lost files of the same bytes\n")
        assert lora_fs("import", *words).out.startswith("unchanged    default/tiny: a@v1: the same bytes\n")


def test_a_linked_store_stays_where_it_is(
    lora_fs: LoraFs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--link is bound to the folders that may be referred to, as in register."""
    write_adapter(tmp_path / "store/a", 0)
    assert lora_fs("import", "nim", "store", "--link").code == 1
    monkeypatch.setenv("LORA_FS_ALLOWED_SOURCES", str(tmp_path / "store"))
    assert lora_fs("import", "nim", "store", "--link").code == 0
    assert lora_fs("list", "-o", "json").json[0]["spec"]["path"] == str(tmp_path / "store/a")


def test_fsck_finds_and_mends(filled: LoraFs, root: Path) -> None:
    """Exit 1 while something is wrong; --repair mends what it can and says what is left."""
    assert filled("fsck").code == 0
    shutil.rmtree(root / "default/tiny/v1/support")
    (root / ".tmp-left").touch()
    found = filled("fsck", "--older-than", "0", "-o", "json")
    assert found.code == 1
    assert {one["kind"] for one in found.json["findings"]} == {"no-files", "half-upload"}
    assert "--repair" in filled("fsck", "--older-than", "0").out
    assert (root / ".tmp-left").exists()
    mended = filled("fsck", "--older-than", "0", "--repair", "-o", "json")
    assert mended.code == 0
    assert mended.json["ok"]
    assert filled("fsck", "--older-than", "0").code == 0


def test_fsck_of_a_host_whose_clock_is_ahead(
    filled: LoraFs, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volume's clock tells what is old: a copy under way stays."""
    copy = root / "default" / "tiny" / ".incoming" / "copy"
    copy.mkdir(parents=True)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * 24 * 3600.0)
    filled("fsck", "--repair")
    assert copy.is_dir()


def test_fsck_says_what_takes_a_person(filled: LoraFs, root: Path, folder: Folder) -> None:
    """Files that are nowhere else: told with what to do, before and after --repair."""
    for seed in (0, 1):
        shutil.rmtree(folder(seed))
    shutil.rmtree(root / "default/tiny/v1/support")
    done = filled("fsck", "--repair")
    assert done.code == 1
    assert "import an export" in done.out


def test_fsck_tells_of_names_without_a_pointer(
    filled: LoraFs, root: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--no-activate`` makes some, a lost ``.active/`` many: told, and no failure. Damage is a finding."""
    assert filled("fsck", "-o", "json").json["without_pointer"] == []
    assert filled("fsck").out == "2 records, 0 findings, 0 mended\n"
    for seed in range(2, 8):
        assert filled("register", f"try-{seed}", folder(seed), "--no-activate").code == 0
    tried = [f"default/tiny: try-{seed}" for seed in range(2, 8)]
    ran = filled("fsck")
    assert (ran.code, ran.out) == (
        0,
        f"8 records, 0 findings, 0 mended; 6 names without a pointer: {', '.join(tried[:5])} … (served by "
        "their revisions alone, as after `register --no-activate`; if that was not meant: `lora-fs promote "
        "NAME REVISION`)\n",
    )
    pointer = root / "default/tiny/.active/support.@00000002.json"
    good = pointer.read_bytes()
    pointer.write_text("{")
    ran = filled("fsck", "-o", "json")
    assert (ran.code, ran.json["without_pointer"]) == (1, tried)
    pointer.write_bytes(good)
    with monkeypatch.context() as patch:
        fail(patch, "listdir", errno.EACCES, times=1 << 30, when=lambda path: str(path).endswith(".active"))
        ran = filled("fsck", "-o", "json")
        assert (ran.code, ran.json["without_pointer"]) == (1, [])
    shutil.rmtree(root / "default/tiny/.active")
    ran = filled("fsck", "-o", "json")
    assert (ran.code, ran.json["without_pointer"]) == (0, ["default/tiny: support", *tried])
    assert ran.json["ok"] is True
    for name in ("support", "try-2", "try-3", "try-4", "try-5", "try-6"):
        filled("promote", name, "v1")
    assert "; 1 name without a pointer: default/tiny: try-7 (" in filled("fsck").out
    filled("unregister", "try-7")
    assert filled("fsck", "-o", "json").json["without_pointer"] == []


def test_fsck_tells_what_cannot_be_opened(filled: LoraFs, root: Path) -> None:
    """A link where a record belongs is a finding among the others, for people and for scripts."""
    record = root / "default/tiny/v1/support.@00000001.json"
    record.unlink()
    record.symlink_to("/dev/null")
    (root / ".tmp-left").touch()
    found = filled("fsck", "--older-than", "0", "-o", "json")
    assert found.code == 1
    assert {one["kind"]: one["path"] for one in found.json["findings"]} == {
        "unreadable": str(record),
        "half-upload": str(root / ".tmp-left"),
    }

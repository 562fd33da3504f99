"""``lora-fs init``, and every other command on a root without a registry: mistyped, or not mounted."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.cli.main import COMMANDS
from lora_fs.sidecar.errors import RegistryLost
from lora_fs.sidecar.registry.store.marker import read_marker
from lora_fs.sidecar.registry.store.writer import Registry
from tests.cli.conftest import LORA_FS, LoraFs
from tests.cli.test_examples import DOCUMENT
from tests.registry.faults import fail

Folder = Callable[[int], str]

NEED_NONE = {
    "init",
    "validate",
    "sign",
    "verify",
    "sidecar",
    "gateway",
    "demo",
    "install-plugin",
    "version",
    "help",
}
WORDS = {
    "register": "register a ADAPTER",
    "apply": "apply -f DOCUMENTS",
    "unregister": "unregister a",
    "promote": "promote a v1",
    "rollback": "rollback a",
    "canary": "canary a v2",
    "evaluate": "evaluate a@v2 --data CASES --url http://127.0.0.1:9",
    "pin": "pin a",
    "unpin": "unpin a",
    "set": "set a --label k=v",
    "show": "show a",
    "wait": "wait a --timeout 1",
    "quota": "quota --adapters 3",
    "export": "export out.tar",
    "import": "import nim STORE",
}
MORE = (
    "register a ADAPTER --dry-run",
    "register a ADAPTER --dry-run --create",
    "quota --create",
    "import gie CONFIGMAP",
    "import nim STORE --dry-run",
    "fsck --repair",
    "top --once",
)
CONFIGMAP = "vLLMLoRAConfig: {ensureExist: {models: [{id: sql, source: ADAPTER}]}}"


def lines() -> list[str]:
    return [WORDS.get(name, name) for name in COMMANDS if name not in NEED_NONE] + [*MORE]


@pytest.mark.parametrize("there", [True, False], ids=["empty", "mistyped"])
@pytest.mark.parametrize("line", lines())
def test_a_root_without_a_registry(
    lora_fs: LoraFs, bare: Path, folder: Folder, tmp_path: Path, there: bool, line: str
) -> None:
    """Exit 3, the mount and the way out are named, and nothing is written."""
    if there:
        bare.mkdir()
    adapter = folder(1)
    shutil.copytree(adapter, tmp_path / "store/a")
    (tmp_path / "configmap").write_text(CONFIGMAP.replace("ADAPTER", adapter))
    (tmp_path / "documents.yaml").write_text(DOCUMENT.replace("support-lora", adapter))
    (tmp_path / "cases.jsonl").write_text('{"prompt": "a", "expect": {"exact": "b"}}\n')
    places = {
        "CASES": "cases.jsonl",
        "ADAPTER": adapter,
        "STORE": "store",
        "CONFIGMAP": "configmap",
        "DOCUMENTS": "documents.yaml",
    }
    ran = lora_fs(*(places.get(word, word) for word in line.split()))
    assert ran.code == 3, ran
    assert f"{bare} holds no registry" in ran.err
    assert ("it lies on /" in ran.err) is there
    assert f"Is the volume mounted? If this is a new volume: lora-fs init --root {bare}" in ran.err
    assert (list(bare.iterdir()) if there else bare.exists()) in ([], False)


def test_a_root_that_is_a_file(lora_fs: LoraFs, bare: Path) -> None:
    """It is named as such, and nobody is sent to make a registry there."""
    bare.write_text("")
    ran = lora_fs("list")
    assert (ran.code, ran.err) == (
        3,
        f"lora-fs: {bare} is a file, and a registry is a folder: name another root\n",
    )


def test_init(lora_fs: LoraFs, bare: Path, folder: Folder) -> None:
    """It makes a registry, says what kind and where; again it says that there is one, and changes nothing."""
    made = lora_fs("init")
    assert (made.code, made.err) == (0, "")
    assert made.out.startswith(f"made a registry in {bare} (on /")
    assert "tier cas" in made.out
    before = {path: path.read_bytes() for path in bare.rglob("*") if path.is_file()}
    again = lora_fs("init", "--root", str(bare), "-o", "json").json
    assert (again["made"], again["registry_uuid"]) == (False, read_marker(bare).registry_uuid)
    assert lora_fs("init").out.startswith(f"nothing to do: there is a registry in {bare}")
    assert {path: path.read_bytes() for path in bare.rglob("*") if path.is_file()} == before
    assert lora_fs("register", "a", folder(1)).code == 0


def test_a_rehearsal_says_the_mount(lora_fs: LoraFs, bare: Path) -> None:
    """Where the folder is not there yet, the mount is that of the deepest folder above it that is."""
    above = lora_fs("init", "--dry-run", "--root", str(bare.parent)).out
    (mounted,) = re.findall(r"\(on (.*), (.*)\)", above)
    deep = bare / "not/there"
    ran = lora_fs("init", "--dry-run", "--root", str(deep))
    assert ran.out == f"would make a registry in {deep} (on {', '.join(mounted)})\n"
    told = lora_fs("init", "--dry-run", "--root", str(deep), "-o", "json").json
    assert (told["mount"], told["filesystem"]) == mounted
    assert not bare.exists()


@pytest.mark.parametrize("below", ["", "sub/deeper"])
def test_a_rehearsal_refuses_what_init_refuses(lora_fs: LoraFs, bare: Path, below: str) -> None:
    """A file in the way of the folder, or of one above it."""
    bare.write_text("a file")
    said = lora_fs("init", "--dry-run", "--root", str(bare / below))
    assert (said.code, said.out) == (1, "")
    assert "a file or a broken link is in the way of a folder" in said.err
    assert said.err == lora_fs("init", "--root", str(bare / below)).err


@pytest.mark.parametrize("there", [True, False])
def test_a_rehearsal_in_a_folder_that_takes_nothing(
    lora_fs: LoraFs, bare: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """It is refused as ``init`` refuses it. root may write anywhere, so the system's answer is made here."""
    if there:
        bare.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != (bare if there else bare.parent))
    ran = lora_fs("init", "--dry-run")
    assert (ran.code, ran.out) == (1, "")
    assert f"cannot create {bare}: Permission denied" in ran.err


def test_two_at_once(bare: Path) -> None:
    """Of any number that start together one makes it, all name the same registry, and all succeed."""
    words = [LORA_FS, "init", "-o", "json"]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert sum('"made": true' in text for text in told) == 1
    assert all(read_marker(bare).registry_uuid in text for text in told)


@pytest.mark.parametrize("words", ["register a ADAPTER --create", "quota --adapters 3 --create"])
def test_create(lora_fs: LoraFs, bare: Path, folder: Folder, words: str) -> None:
    """``--create`` makes the registry, and says so."""
    ran = lora_fs(*words.replace("ADAPTER", folder(1)).split())
    assert (ran.code, ran.err) == (0, f"lora-fs: {bare} held no registry: made one there\n")
    assert lora_fs("list").code == 0


def test_the_variable(lora_fs: LoraFs, bare: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ``--create`` for each command that puts something in, and for no other one."""
    monkeypatch.setenv("LORA_FS_CREATE", "1")
    for words in ("list", "unregister a", "gc", "quota"):
        assert lora_fs(*words.split()).code == 3
    assert not bare.exists()
    assert lora_fs("register", "a", folder(1)).code == 0


def test_a_read_only_root(
    lora_fs: LoraFs, bare: Path, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``init`` fails and says why; the rest says that there is no registry."""
    adapter = folder(1)
    bare.mkdir()
    fail(monkeypatch, "mkdir", errno.EROFS, times=1 << 30)
    for words in (["init"], ["register", "a", adapter, "--create"]):
        ran = lora_fs(*words)
        assert (ran.code, "read-only" in ran.err) == (1, True), ran
    assert lora_fs("register", "a", adapter).code == 3
    assert os.listdir(bare) == []


def test_a_marker_that_is_gone(lora_fs: LoraFs, root: Path, folder: Folder) -> None:
    """If HEAD names records, no command proposes a new registry: restore the marker."""
    lora_fs("register", "a", folder(1))
    (root / "lora-fs.json").unlink()
    rehearsed = ["init", "--dry-run"]
    for words, code in ((["list"], 3), (["register", "b", folder(2)], 3), (["init"], 1), (rehearsed, 1)):
        ran = lora_fs(*words)
        assert (ran.code, "restore the marker from a backup" in ran.err) == (code, True)
        assert "lora-fs init" not in ran.err


def test_what_is_lost_while_it_is_used(root: Path) -> None:
    """A registry that this process had open is gone: no message proposes to make one."""
    registry = Registry(root)
    shutil.rmtree(root)
    root.mkdir()
    with pytest.raises(RegistryLost, match="still mounted") as told:
        registry.check_writable()
    assert "init" not in str(told.value)

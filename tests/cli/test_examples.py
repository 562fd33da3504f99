"""The examples of the help pages: each parses, and runs as it stands where it needs no engine."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.cli.main import cli
from lora_fs.sidecar.cli.volume import doctor
from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.registry.store import marker
from tests.cli.conftest import LoraFs, parse, seen
from tests.cli.test_doctor import BRIEF
from tests.registry.conftest import write_adapter
from tests.sources.conftest import Hub, hub, web
from tests.trust.conftest import new_authority, new_key

__all__ = ["hub", "web"]  # fixtures

NEEDS_AN_ENGINE = {"sidecar", "demo", "gateway", "evaluate"}
NEEDS_A_SECOND_REVISION = {"promote", "rollback", "status", "events"}
FOLDERS = {"support-lora": 1, "support-lora-2": 2, "billing-lora": 3}
INTERRUPTED = 130
HUB_COMMIT = "a" * 40
DOCUMENT = (
    "apiVersion: lora-fs/v1\nkind: LoraAdapter\nmetadata: {name: support}\nspec: {source: support-lora}\n"
)
CONFIGMAP = "vLLMLoRAConfig: {ensureExist: {models: [{id: sql, source: yard1/sql-lora}]}}"


def examples() -> Iterator[tuple[str, str]]:
    """Every ``lora-fs …`` line of every help page."""
    for name, command in [("", cli), *cli.commands.items()]:
        for line in re.findall(r"^ +(lora-fs .*)$", command.help or "", re.MULTILINE):
            yield name, line


def test_every_command_has_an_example() -> None:
    """Each help page shows how the command is used."""
    assert {name for name, _ in examples()} == {"", *cli.commands}


@pytest.mark.parametrize(("name", "line"), list(examples()))
def test_the_example_parses(name: str, line: str) -> None:
    """Its command and its options exist, and take what it gives them."""
    assert name in ("", parse(shlex.split(line)[1:]).info_name)


def runnable() -> Iterator[tuple[str, str]]:
    """The examples that a machine without an engine can run."""
    return ((name, line) for name, line in examples() if name not in NEEDS_AN_ENGINE)


@pytest.fixture
def shop(lora_fs: LoraFs, tmp_path: Path) -> LoraFs:
    """The folders and files that the examples name, and ``support``, registered."""
    for name, seed in FOLDERS.items():
        write_adapter(tmp_path / name, seed)
    assert lora_fs("register", "support", "./support-lora").code == 0
    assert lora_fs("export", "adapters.tar").code == 0
    write_adapter(tmp_path / "sql-lora", 4)
    write_adapter(tmp_path / "loras/one", 5)
    (tmp_path / "adapters.yaml").write_text(DOCUMENT)
    (tmp_path / "configmap.yaml").write_text(CONFIGMAP)
    key = new_authority().issue("build@acme")
    (tmp_path / "signing.pem").write_bytes(key.pem)
    (tmp_path / "signing.crt").write_bytes(key.certificates or b"")
    return lora_fs


def press_ctrl_c(_: float) -> None:
    """What a sleep becomes when its user is done."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "line"), list(runnable()))
def test_the_example_runs(
    shop: LoraFs,
    report: Callable[..., None],
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    line: str,
) -> None:
    """What a help page proposes works: exit 0 and a result; what watches ends by Ctrl-C alone."""
    hub.repo = "acme/support-lora"
    hub.publish(tmp_path / "support-lora-2", HUB_COMMIT)
    hub.refs["v2"] = HUB_COMMIT
    if name in NEEDS_A_SECOND_REVISION:
        shop("register", "support", "./support-lora-2")
    if name == "canary":
        shop("register", "support", "./support-lora-2", "--no-activate")
        assert shop("canary", "support", "v2").code == 0
    if name == "wait":
        report("pod-a", recent=seen("support"), phases={"support": Phase.READY})
        if "deleted" in line:
            shop("unregister", "support")
            report("pod-a", recent=seen("support", record=2, pointer=2))

    if name == "verify":
        (tmp_path / "signing.pub").write_text((key := new_key()).public)
        (tmp_path / "signing.pem").write_bytes(key.pem)
        (tmp_path / "trust.yaml").write_text("signers: [{name: ops, key: signing.pub}]")
        assert shop("sign", "./support-lora", "--key", "signing.pem").code == 0
    if "--wait" in line:
        every = {f"{there}/support": 99 for there in ("v1", "v2", ".active")}
        report("pod-a", recent={f"default/tiny/{series}": seen for series, seen in every.items()})
    if line.startswith("lora-fs export"):
        (tmp_path / "adapters.tar").unlink()
    if line.startswith("lora-fs import archive"):
        monkeypatch.setenv("LORA_FS_ROOT", str(tmp_path / "restored"))
    if name != "init":
        marker.create(tmp_path / "adapters")
    monkeypatch.setattr(doctor, "QUICK", BRIEF)
    monkeypatch.setattr(doctor, "FULL", BRIEF)
    one_mount = line.replace("/mnt/adapters-again", "/adapters").replace("--every 10m", "--every 0s")
    words = shlex.split(one_mount.replace("/adapters", str(tmp_path / "adapters")))[1:]
    if watches := bool({"--watch", "--follow"} & set(words)):
        monkeypatch.setattr(time, "sleep", press_ctrl_c)
    ran = shop(*words)
    assert ran.code == (INTERRUPTED if watches else 0), ran
    assert ran.out

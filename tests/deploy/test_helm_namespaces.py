"""The chart with several namespaces: each one is cleaned, and commands in the pod work in the first."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.settings import Settings
from tests.cli.conftest import LORA_FS, LoraFs, parse
from tests.cli.conftest import lora_fs as lora_fs
from tests.cli.conftest import root as root
from tests.deploy.test_helm import EVERYTHING, MODES, merged, notes, objects, pod
from tests.deploy.test_kubernetes import Object, environment
from tests.registry.conftest import write_adapter

TENANTS = ["team-a", "team-b", "team-c"]
VALUES: Object = {"namespaces": TENANTS, "gc": {"enabled": True, "olderThan": "0s"}}


def template(given: Object) -> Object:
    """The pods of the CronJob."""
    found: Object = objects(given)["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]
    return found


def ran(given: Object, root: Path) -> subprocess.CompletedProcess[str]:
    """What the CronJob's container does, run on a registry here in the place of its mount."""
    (container,) = template(given)["spec"]["containers"]
    told = {name: entry["value"] for name, entry in environment(container).items()}
    assert told["LORA_FS_ROOT"] == container["volumeMounts"][0]["mountPath"]
    path = f"{Path(LORA_FS).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [*container["command"], *container.get("args", [])],
        env={**os.environ, **told, "LORA_FS_ROOT": str(root), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def withdrawn(lora_fs: LoraFs, root: Path, tmp_path: Path) -> dict[str, Path]:
    """Namespace → the folder of its one adapter, which nobody registers any more."""
    folder = write_adapter(tmp_path / "lora", 1)
    for namespace in TENANTS:
        scope = ("--model", "Qwen/Qwen2.5-7B-Instruct", "-n", namespace)
        for words in (("register", "a", str(folder), "--allow", "base-model"), ("unregister", "a")):
            done = lora_fs(*scope, *words)
            assert done.code == 0, done.err
    model = "Qwen--Qwen2.5-7B-Instruct"
    found = {one: next((root / one / model).rglob("adapter_model.safetensors")).parent for one in TENANTS}
    assert len(set(found.values())) == len(TENANTS)
    return found


def test_gc_collects_every_namespace(withdrawn: dict[str, Path], root: Path) -> None:
    """The CronJob's command removes the files of each tenant, of more than the first or `default`."""
    done = ran(VALUES, root)
    assert done.returncode == 0, done.stderr
    assert [one for one, folder in withdrawn.items() if any(folder.glob("*.safetensors"))] == []


def test_gc_that_fails_in_one_namespace_collects_the_others(withdrawn: dict[str, Path], root: Path) -> None:
    """The Job fails, and says of which namespace; the one before and those behind it are collected."""
    Layout(root).quota("team-b").write_text("{")
    done = ran(VALUES, root)
    assert done.returncode != 0
    assert "team-b" in done.stderr
    left = [one for one, folder in withdrawn.items() if any(folder.glob("*.safetensors"))]
    assert left == ["team-b"]


def test_gc_runs_on_the_claim() -> None:
    """Its volume is the replicas', its bound is the values'; no Service leads to its pods."""
    made, kinds = template(EVERYTHING), objects(EVERYTHING)
    (container,) = made["spec"]["containers"]
    assert f"--older-than {EVERYTHING['gc']['olderThan']}" in " ".join(container["command"])
    (volume,) = made["spec"]["volumes"]
    assert volume in pod(kinds)["volumes"]
    selector = kinds["Deployment"]["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= made["metadata"]["labels"].items()


@pytest.mark.parametrize("mode", MODES)
def test_commands_in_the_pod_work_in_the_first(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As typed there, without `-n`; the replica serves all of them as before."""
    spec = pod(objects(merged(VALUES, {"mode": mode})))
    (container,) = spec["initContainers" if mode == "sidecar" else "containers"]
    for name, entry in environment(container).items():
        if name.startswith("LORA_FS_"):
            monkeypatch.setenv(name, entry.get("value", "demo-0"))
    settings, context = Settings(), parse(["list"])
    assert settings.serves() == tuple(TENANTS)
    assert settings.namespace == "team-a"
    assert context.obj.scope_of_settings().namespace == "team-a"


def test_the_notes_say_where_commands_work(tmp_path: Path) -> None:
    """With several namespaces, of which clients name one; with one there is nothing to choose."""
    told = notes(VALUES, tmp_path / "several")
    assert "in the namespace team-a" in told
    assert "-n NAMESPACE" in told
    assert "NAMESPACE/NAME" in told
    assert "NAMESPACE" not in notes({"namespaces": ["team-a"]}, tmp_path / "one")

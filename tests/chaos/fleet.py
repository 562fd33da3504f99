"""The fleet under test: a plugin and a sidecar on one volume of a fixed size, a gateway before them.

Owns the processes, and the reference answers: what each set of weights says when it is asked alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import Process
from lora_fs.demo.replica import PluginReplica, Replica, SidecarReplica
from lora_fs.demo.sidecar import start_gateway
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume

WEIGHTS = 8  # sets of them
ENGINE_ARGS = ("--max-loras", "4", "--max-cpu-loras", "8")
SETTINGS = {"settle_s": "0.5", "stage_max_bytes": str(4 << 20), "insecure": "loopback"}


@dataclass(frozen=True)
class Fleet:
    """``labels``: by their SHA-256, which weights; ``texts``: by label, their answer."""

    volume: Volume
    plugin: PluginReplica
    sidecar: SidecarReplica
    gateway: Process
    folders: Mapping[str, Path]
    labels: Mapping[str, str]
    texts: Mapping[str, str]

    @property
    def replicas(self) -> tuple[Replica, Replica]:
        """Both."""
        return self.plugin, self.sidecar

    @property
    def urls(self) -> dict[str, str]:
        """Where clients ask."""
        return {"gateway": self.gateway.url, **{one.name: one.url for one in self.replicas}}

    @property
    def processes(self) -> tuple[Process, ...]:
        """The gateway, and each replica's."""
        return self.gateway, *self.plugin.processes, *self.sidecar.processes

    def ended(self) -> list[str]:
        """Which of them do not run, each with the end of its log."""
        return [f"{one.name}:\n{one.log_tail()}" for one in self.processes if not one.alive]

    def log_tails(self) -> list[str]:
        """The end of each one's log."""
        return [f"{one.name}:\n{one.log_tail()}" for one in self.processes]

    def label_of(self, text: str) -> str | None:
        """The weights that answer so, if any do."""
        return next((label for label, said in self.texts.items() if said == text), None)


@contextmanager
def started(
    farm: EngineFarm, model_dir: Path, adapters: Callable[[int], Path], room: Path, run_dir: Path
) -> Iterator[Fleet]:
    """A ready fleet. ``room``: the mounted filesystem that holds the volume."""
    volume = Volume(room / "volume", MODEL_NAME, cwd=model_dir.parent)
    volume.root.mkdir()
    volume.run("init")
    folders = {f"w{seed}": adapters(seed) for seed in range(1, WEIGHTS + 1)}
    common = (farm, model_dir, volume, run_dir)
    plugin = PluginReplica("plugin", *common, engine_args=ENGINE_ARGS, settings=SETTINGS)
    sidecar = SidecarReplica("sidecar", *common, engine_args=ENGINE_ARGS, settings=SETTINGS)
    gateway = start_gateway((one.url for one in (plugin, sidecar)), log=run_dir / "gateway.log")
    try:
        for replica in (plugin, sidecar):
            replica.wait_ready()
        gateway.wait_ready()
        labels, texts = _references(volume, folders, (plugin, sidecar))
        yield Fleet(volume, plugin, sidecar, gateway, folders, labels, texts)
    finally:
        gateway.stop()
        for replica in (plugin, sidecar):
            replica.close()


def _references(
    volume: Volume, folders: Mapping[str, Path], replicas: tuple[Replica, Replica]
) -> tuple[dict[str, str], dict[str, str]]:
    """SHA-256 → label, and label → answer, as both replicas give it alone."""
    labels, texts = dict[str, str](), dict[str, str]()
    for label, folder in folders.items():
        name = f"reference-{label}"
        told = json.loads(volume.run("register", name, str(folder), "--wait", "20", "-o", "json").stdout)
        labels[weights_of(told["record"])] = label
        said = {replica.answer(name) for replica in replicas}
        assert len(said) == 1, f"the replicas answer {label} unlike: {said}"
        texts[label] = said.pop()
        volume.run("unregister", name, "--wait", "20")
    assert len(set(texts.values()) | {replicas[0].answer(MODEL_NAME)}) == len(texts) + 1
    return labels, texts


def weights_of(record: Mapping[str, Any]) -> str:
    """The SHA-256 of a record's weights."""
    files = {one["path"]: one["sha256"] for one in record["spec"]["files"]}
    return str(files["adapter_model.safetensors"])


def ask(client: openai.OpenAI, name: str, prompt: str) -> str:
    """A greedy answer, as the references were taken."""
    told = client.completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0)
    return told.choices[0].text.strip()

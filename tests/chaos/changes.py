"""What operators do to the registry, at random: ``Truth`` learns each change before and after it.

Owns its names alone: one ``Operator`` changes them by command and over HTTP, one ``Dropper`` by files. What
a failed command left is read from the volume before the next one.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lora_fs.demo.process import LOCAL, child_environment
from lora_fs.demo.volume import LORA_FS
from tests.chaos.fleet import Fleet, weights_of
from tests.chaos.truth import ABSENT, Truth

CLEARS_S = 60.0  # a dropped folder is adopted, or withdrawn, within that


@dataclass
class State:
    """What the volume says of a name."""

    active: str | None = None  # a revision
    weights: dict[str, str] = field(default_factory=dict)  # revision → label
    canary: str | None = None

    def said_by(self, revision: str | None) -> set[str]:
        """The label of a revision's weights; empty where there is none."""
        return {label for one, label in self.weights.items() if one == revision}


def read(fleet: Fleet, name: str) -> State | None:
    """None where the volume does not say."""
    ran = fleet.volume.try_run("show", name, "-o", "json")
    if ran.exit_code == 3 and "is not registered" in ran.stderr:
        return State()
    if ran.exit_code != 0:
        return None
    told: dict[str, Any] = json.loads(ran.stdout)
    pointer = told["pointer"] or {}
    weights = {one["revision"]: fleet.labels[weights_of(one)] for one in told["revisions"]}
    active = pointer.get("revision")
    canary = (pointer.get("canary") or {}).get("revision")
    return State(active if active in weights else None, weights, canary if canary in weights else None)


class Changer:
    """One thread that changes names until ``ended``; ``done`` counts what was acknowledged, by kind."""

    def __init__(self, fleet: Fleet, truth: Truth, names: Collection[str], seed: int) -> None:
        self.fleet, self.truth, self.names = fleet, truth, sorted(names)
        self.rng = random.Random(seed)
        self.done, self.failed = Counter[str](), Counter[str]()
        self.resting, self.rests = threading.Event(), threading.Event()
        self.doubtful = set[str]()  # names whose last change failed: the volume alone knows
        self.broken_off = set[str]()  # names of which any change failed or was killed: its copy may stay

    def run(self, ended: threading.Event) -> None:
        """Change one name after the other."""
        while not ended.is_set():
            if self.resting.is_set():
                self.rests.set()
                ended.wait(0.1)
                continue
            self.rests.clear()
            self.change(self.rng.choice(self.names))
            ended.wait(self.rng.uniform(0.1, 1.0))

    def change(self, name: str) -> None:
        """One change, of whatever kind fits."""
        raise NotImplementedError

    def act(self, name: str, what: str, may: Collection[str], do: Callable[[], bool]) -> None:
        """Do it between the truth's two moments."""
        self.truth.begin(name, may, time.monotonic())
        if do():
            self.truth.acknowledge(name, time.monotonic())
            self.done[what] += 1
            self.doubtful.discard(name)
        else:
            self.failed[what] += 1
            self.doubtful.add(name)
            self.broken_off.add(name)


class Operator(Changer):
    """By command, and over HTTP on either replica."""

    def change(self, name: str) -> None:
        """Register, promote, roll back, try, unregister; now and then collect what is old."""
        if self.rng.random() < 0.1:
            collected = self._command("gc", "--older-than", "1m", "--history-older-than", "1m")
            (self.done if collected else self.failed)["gc"] += 1
        state = read(self.fleet, name)
        if state is None:
            return
        acts = ["register", "register", "load over HTTP"]
        if state.active is not None:
            acts += ["unregister"]
        if state.active is not None and len(state.weights) > 1 and state.canary is None:
            acts += ["promote", "promote", "canary", "canary"]
        if state.canary is not None:
            acts = ["finish", "abort", "killed command"]
        elif len(state.weights) > 5:
            acts = ["unregister"]
        self._do(self.rng.choice([*acts, "killed command"]), name, state)

    def _do(self, what: str, name: str, state: State) -> None:
        label = self.rng.choice(sorted(self.fleet.folders))
        folder = str(self.fleet.folders[label])
        other = self.rng.choice(sorted(set(state.weights) - {state.active}) or [""])
        now, tried, share = state.said_by(state.active), state.said_by(state.canary), self.rng.choice("258")
        commands = {
            "register": ({label}, ("register", name, folder)),
            "unregister": ({ABSENT}, ("unregister", name, "--all-revisions")),
            "promote": (state.said_by(other), ("promote", name, other)),
            "canary": (now | state.said_by(other), ("canary", name, other, "--percent", f"{share}0")),
            "finish": (tried, ("canary", name, "--finish")),
            "abort": (now, ("canary", name, "--abort")),
        }
        if what == "load over HTTP":
            self.act(name, what, {label}, lambda: self._load(name, folder))
        elif what == "killed command":
            self.act(name, what, now | tried | {label}, lambda: self._killed("register", name, folder))
        else:
            may, words = commands[what]
            wait = self.rng.choice([(), ("--wait", "20", "--min-replicas", "0")])
            self.act(name, what, may, lambda: self._command(*words, *wait))

    def _command(self, *words: str) -> bool:
        return self.fleet.volume.try_run(*words).exit_code == 0

    def _killed(self, *words: str) -> bool:
        """``kill -9`` it at a random moment; never acknowledged, unless it was faster."""
        env = child_environment(self.fleet.volume.env)
        with subprocess.Popen(
            [LORA_FS, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            try:
                child.wait(self.rng.uniform(0.1, 0.5))
            except subprocess.TimeoutExpired:
                child.kill()
            return False

    def _load(self, name: str, folder: str) -> bool:
        """As any vLLM client does, on a replica or by the gateway's replicas; stock replaces in place."""
        replica = self.rng.choice(self.fleet.replicas)
        asked = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        try:
            told = httpx.post(f"{replica.url}/v1/load_lora_adapter", json=asked, **LOCAL)
        except httpx.HTTPError:
            return False
        return told.status_code == 200


class Dropper(Changer):
    """Folders on the volume: new ones, new files in an old one, and none."""

    def change(self, name: str) -> None:
        """Put a folder there, or its files, or take it away; wait until the volume says so."""
        folder = self.fleet.volume.scope_dir / "v1" / name
        label = self.rng.choice(sorted(self.fleet.folders))
        if folder.exists() and self.rng.random() < 0.3:
            self.act(name, "take a folder away", {ABSENT}, lambda: self._gone(folder, name))
        else:
            what = "change a folder" if folder.exists() else "drop a folder"
            self.act(name, what, {label}, lambda: self._dropped(folder, name, label))

    def _dropped(self, folder: Path, name: str, label: str) -> bool:
        """Copied beside the registry first: a full volume leaves no half of a file."""
        aside = self.fleet.volume.root.parent / "incoming"
        try:
            shutil.copytree(self.fleet.folders[label], aside, dirs_exist_ok=True)
            for made in (folder.parent, folder):  # and no more of them: the volume may be away
                made.mkdir(exist_ok=True)
            for file in aside.iterdir():
                file.replace(folder / file.name)
        except OSError:  # the volume is away, or full
            return False
        return self._settles(name, lambda s: s.active is not None and s.weights[s.active] == label)

    def _gone(self, folder: Path, name: str) -> bool:
        try:
            shutil.rmtree(folder)
        except OSError:
            return False
        return self._settles(name, lambda s: s.active is None)

    def _settles(self, name: str, holds: Callable[[State], bool]) -> bool:
        deadline = time.monotonic() + CLEARS_S
        while time.monotonic() < deadline:
            state = read(self.fleet, name)
            if state is not None and holds(state):
                return True
            time.sleep(0.5)
        return False

"""`lora-fs apply --prune` as a process, killed again and again while replicas serve: nothing is half done."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import yaml

from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.volume import LORA_FS
from lora_fs.sidecar.registry.lifecycle.mending import is_whole
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from tests.gateway.conftest import SCOPE, Stubs
from tests.gateway.test_process import until
from tests.registry.conftest import write_adapter

OLD: Mapping[str, int] = {"s0": 10, "s1": 11, "s2": 12, "s3": 13, "s4": 14, "s5": 15}  # name → its bytes
NEW: Mapping[str, int] = {"s0": 10, "s1": 11, "s2": 22, "s3": 23, "s6": 16, "s7": 17}
GONE = "gone"
# What an answer may be of, in this order.
STEPS = {
    **dict.fromkeys(("s0", "s1"), ("v1",)),
    **dict.fromkeys(("s2", "s3"), ("v1", "v2")),
    **dict.fromkeys(("s4", "s5"), ("v1", GONE)),
    **dict.fromkeys(("s6", "s7"), (GONE, "v1")),
}
KILLED_AFTER = (1, 2, 3, 4)  # generations of a run; all of them are 12
OWNER = ("--prune", "--owner", "team")


def documents(folder: Path, adapters: Mapping[str, int]) -> str:
    """A file of them, and their adapters beside it."""
    texts = []
    for name, seed in adapters.items():
        write_adapter(folder / f"lora-{seed}", seed)
        spec = {"source": f"lora-{seed}"}
        texts.append(
            {"apiVersion": "lora-fs/v1", "kind": "LoraAdapter", "metadata": {"name": name}, "spec": spec}
        )
    (folder / "adapters.yaml").write_text(yaml.safe_dump_all(texts, explicit_start=True))
    return str(folder / "adapters.yaml")


def answer(client: httpx.Client, replica: Process, name: str) -> str:
    """Ask a replica; returns the revision that answered, or that there is none."""
    told = client.post(f"{replica.url}/v1/completions", json={"model": name, "prompt": "x"})
    if told.status_code == httpx.codes.NOT_FOUND:
        return GONE
    assert told.status_code == httpx.codes.OK, f"{name}: {told.status_code} {told.text}"
    namespace, model, revision, plain = told.headers["x-lora-fs-adapter"].split("/")
    assert (namespace, model, plain) == (*SCOPE, name)
    return str(revision)


@contextmanager
def users(fleet: Stubs) -> Iterator[dict[tuple[str, str], list[str]]]:
    """Ask every replica for every name until the block ends; yields what each answered, in order."""
    told: dict[tuple[str, str], list[str]] = {}
    ended, errors = threading.Event(), list[BaseException]()

    def ask(replica: Process) -> None:
        try:
            with httpx.Client(timeout=60) as client:
                while not ended.wait(0.01):
                    for name in STEPS:
                        told.setdefault((replica.name, name), []).append(answer(client, replica, name))
        except BaseException as error:  # a user's error is the test's
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(replica,)) for replica in fleet.sidecars]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert errors == []


def generations(root: Path) -> int:
    """Records and pointers on the volume."""
    return sum(1 for _ in root.glob("*/*/*/*.@*.json"))


def killed(process: subprocess.Popen[str], root: Path, at: int) -> bool:
    """Kill a run once so many generations are on the volume; False if it ended before that."""
    with process:
        until(lambda: process.poll() is not None or generations(root) >= at, 60)
        process.kill()
        process.communicate()
    return process.returncode != 0


def check_whole(registry: Registry) -> None:
    """Whatever a name serves is registered, and its files are those of its record."""
    view = RegistryView(registry, (SCOPE,))
    view.refresh()
    desired = view.desired
    assert desired.problems == {}
    for (_, name), pointer in desired.pointers.items():
        record = next(
            (one for one in desired.records.values() if (one.name, one.revision) == (name, pointer.revision)),
            None,
        )
        assert pointer.revision is None or (record is not None and record.present), name
        assert record is None or not record.present or is_whole(registry.layout, record), name


def test_an_apply_that_is_killed_is_never_half_done(fleet: Stubs, tmp_path: Path) -> None:
    """Each name is as the old documents say or as the new ones do, on every replica, and never goes back.

    The run that nobody kills makes what the new ones say, prunes the rest, and leaves others' adapters.
    """
    env = {"LORA_FS_ROOT": str(fleet.root), "LORA_FS_MODEL": "tiny", "PATH": str(Path(LORA_FS).parent)}
    old, new = tmp_path / "old", tmp_path / "new"

    def start(file: str, *more: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [LORA_FS, "apply", "-f", file, *OWNER, *more]
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)

    def run(file: str, *more: str) -> int:
        with start(file, *more) as process:
            out, err = process.communicate()
        assert process.returncode in (0, 8), out + err
        return process.returncode

    for _ in range(2):
        fleet.add()
    assert run(documents(old, OLD), "--wait", "60s") == 0
    file, kills = documents(new, NEW), 0
    with closing(Registry(fleet.root)) as registry:
        with users(fleet) as told:
            until(lambda: len(told) == len(STEPS) * len(fleet.sidecars), 60)
            for more in KILLED_AFTER:
                kills += killed(start(file), fleet.root, generations(fleet.root) + more)
                check_whole(registry)
            assert run(file, "--wait", "60s") == 0
            until(lambda: all([*answers][-1] == STEPS[key[1]][-1] for key, answers in told.items()), 60)
        check_whole(registry)
    assert kills >= 2, "no run was killed in its middle"
    for (replica, name), answers in told.items():
        seen = tuple(one for at, one in enumerate(answers) if at == 0 or answers[at - 1] != one)
        assert seen in (STEPS[name], STEPS[name][:1], STEPS[name][-1:]), (replica, name, seen)
    assert run(file, "--dry-run") == 0
    with httpx.Client(**LOCAL) as client:
        for sidecar in fleet.sidecars:
            models = {card["id"] for card in client.get(f"{sidecar.url}/v1/models").json()["data"]}
            assert models >= {*NEW, *(f"a{number}" for number in range(8))}
            assert not models & (OLD.keys() - NEW.keys())

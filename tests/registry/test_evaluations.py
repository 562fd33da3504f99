"""Evaluations on a volume: written while gc runs, checked by fsck, exported, removed in the end."""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import GateNotPassed, InputError
from lora_fs.sidecar.model import AdapterKey, Quota, Scope
from lora_fs.sidecar.model.evaluation import Evaluation, Measured
from lora_fs.sidecar.registry.backup import archive, export, restore
from lora_fs.sidecar.registry.format.layout import TEMPORARY, parse_evaluation
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.maintenance import fsck, gc, survey
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.maintenance.repair import mend
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import MakeAdapter, Site
from tests.registry.test_compaction import LONG_AGO_S, compact_whole
from tests.registry.test_operations import put

FORK = multiprocessing.get_context("fork")
WRITES = 400


def evaluation(key: AdapterKey, digest: str = f"sha256:{64 * '0'}") -> Evaluation:
    return Evaluation(
        namespace=key.namespace,
        model=key.model,
        name=key.name,
        data="cases.jsonl",
        data_sha256=64 * "0",
        cases=1,
        concurrency=1,
        measured=Measured(revision=key.revision, digest=digest, figures={"pass_rate": 1.0}),
    )


def evaluated(registry: Registry, scope: Scope, folder: Path, name: str) -> Path:
    """Register an adapter and keep an evaluation of it; returns the evaluation's file."""
    record = put(registry, scope, folder, name=name, revision="v1").record
    evaluations.write(registry, evaluation(record.key, record.spec.digest))
    return registry.layout.evaluation(record.key)


def found(registry: Registry) -> list[fsck.Finding]:
    state = survey.look(registry)
    return [
        one
        for one in fsck.find(registry, state, older_than_s=0.0, hash_files=False)
        if one.kind is fsck.Kind.EVALUATION
    ]


# -- the gate -----------------------------------------------------------------------------------


def test_a_gate_that_comes_while_one_registers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate set between record and pointer leaves the new bytes registered and not serving. HEAD announces
    the record."""
    registry, real, announced = site.registry, Registry.append, list[int]()
    bounds = Quota(namespace="default", require_evaluation="pass_rate>=0.9", writer="test", updated_at="")

    def append(self: Registry, *args: Any, **how: Any) -> Any:
        found = real(self, *args, **how)
        registry.accounts.write(bounds)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "append", append)
        patch.setattr(Registry, "announce", lambda self: announced.append(1))
        with pytest.raises(GateNotPassed, match="a@v2 may not serve a: it was not evaluated"):
            site.put(2)
    assert site.state() == ("v1", {"v1", "v2"})
    assert announced == [1]
    with pytest.raises(GateNotPassed, match="with --no-activate, evaluate it"):
        site.put(3)
    assert site.state() == ("v1", {"v1", "v2"})


# -- gc ------------------------------------------------------------------------------------------


def test_it_goes_after_its_revision(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Once the tombstone is gone, not before; another revision's stays."""
    kept, gone = (evaluated(registry, scope, make_adapter(name), name) for name in ("kept", "gone"))
    release.unregister(registry, scope, "gone", writer="test")
    assert (kept.exists(), gone.exists()) == (True, True)
    compact_whole(registry, scope)
    collect(gc.find(registry, scope, frozenset(), 0.0, history_s=0.0))
    assert (kept.exists(), gone.exists()) == (True, False)


def test_leftovers_go(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """gc removes an evaluation that came after its revision was gone, a dead writer's temporary name and an
    empty folder, once they are old."""
    kept = evaluated(registry, scope, make_adapter(), "a1")
    late = AdapterKey(*scope, "v7", "a1")
    evaluations.write(registry, evaluation(late))
    (kept.parent / ".tmp-of-a-dead-writer").touch()
    (kept.parent.parent / "v8").mkdir()
    os.utime(kept.parent.parent / "v8", (LONG_AGO_S, LONG_AGO_S))
    (kept.parent.parent / "v9").mkdir()
    registry.close()
    young = [item.path.name for item in gc.find(registry, scope, frozenset(), 3600.0)]
    assert young == ["v8"]
    assert len(gc.find(registry, scope, frozenset(), 0.0)) == 3
    assert collect(gc.find(registry, scope, frozenset(), 0.0)) == {}
    assert sorted(kept.parent.parent.rglob("*")) == [
        kept.parent,
        kept,
        kept.parent.parent / "v7",
        kept.parent.parent / "v9",
    ]


def test_registered_again_meanwhile(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """An evaluation whose revision is registered while gc runs stays."""
    key = AdapterKey(*scope, "v1", "a1")
    evaluations.write(registry, evaluation(key))
    going = gc.find(registry, scope, frozenset(), 0.0)
    put(registry, scope, make_adapter(), name="a1", revision="v1")
    assert collect(going) == {}
    assert registry.layout.evaluation(key).exists()


def test_a_folder_that_gc_removes_is_made_anew(
    registry: Registry, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes between the writer's look and its draft, as an old one that is empty may."""
    real, key, gone = make_folder, AdapterKey(*scope, "v1", "a1"), list[Path]()
    registry.layout.evaluations(scope).mkdir(parents=True)

    def make_and_lose(folder: Path, root: Path) -> None:
        real(folder, root=root)
        if not gone:
            folder.rmdir()
            gone.append(folder)

    monkeypatch.setattr(evaluations, "make_folder", make_and_lose)
    evaluations.write(registry, evaluation(key))
    assert gone == [registry.layout.evaluation(key).parent]
    assert registry.layout.evaluation(key).exists()


def _collect_until(root: Path, scope: Scope, over: Path) -> None:
    """gc without end; a temporary name is too young for any real one."""
    registry = Registry(root)
    while not over.exists():
        going = gc.find(registry, scope, frozenset(), 0.0)
        collect(one for one in going if not one.path.name.startswith(TEMPORARY))


def test_written_while_gc_removes_its_folder(registry: Registry, scope: Scope, tmp_path: Path) -> None:
    """Two processes: each write succeeds, whatever gc removes in between; a last gc leaves nothing."""
    over, key = tmp_path / "over", AdapterKey(*scope, "v1", "a1")
    registry.layout.revision(scope, "v1").mkdir(parents=True)
    collector = FORK.Process(target=_collect_until, args=(registry.layout.root, scope, over))
    collector.start()
    try:
        path = registry.layout.evaluation(key)
        for _ in range(WRITES):
            path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                os.utime(path.parent, (LONG_AGO_S, LONG_AGO_S))  # as if the last one had gone long ago
            evaluations.write(registry, evaluation(key))
    finally:
        over.touch()
        collector.join()
    assert collector.exitcode == 0
    collect(gc.find(registry, scope, frozenset(), 0.0))
    assert [path for path in registry.layout.evaluations(scope).rglob("*") if path.is_file()] == []


# -- fsck ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda file: file.write_bytes(b"{}"), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "cannot be read"),
        (
            lambda file: file.write_bytes(file.with_name("b1.json").read_bytes()),
            "evaluation of default/tiny/v1/b1",
        ),
        (lambda file: (file.unlink(), file.mkdir()), "not a regular file"),
    ],
)
def test_a_damaged_one_is_found(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    damage: Callable[[Path], object],
    why: str,
) -> None:
    """fsck names it and says what to do; no repair removes it, since only another evaluation mends it."""
    file = evaluated(registry, scope, make_adapter(), "a1")
    evaluated(registry, scope, make_adapter("b", seed=1), "b1")
    assert found(registry) == []
    damage(file)
    (one,) = found(registry)
    assert (one.path, one.mend) == (file, "")
    assert why in one.text
    assert "`lora-fs evaluate a1@v1` again" in one.text


def test_an_orphan_is_found_and_mended(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """fsck finds an evaluation of what has no record; --repair removes it, and nothing else."""
    kept, late = evaluated(registry, scope, make_adapter(), "a1"), AdapterKey(*scope, "v1", "b1")
    evaluations.write(registry, evaluation(late))
    (one,) = found(registry)
    assert one.path == registry.layout.evaluation(late)
    mended = mend(registry, survey.look(registry), [one], Expectation(("tiny",)), writer="test")
    assert [why for _, why in mended] == [None]
    assert (found(registry), kept.exists(), one.path.exists()) == ([], True, False)


# -- export and import ---------------------------------------------------------------------------


def test_an_export_carries_it(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """A restored registry has it byte for byte; a damaged one is left out and named."""
    file, bad = (evaluated(registry, scope, make_adapter(name), name) for name in ("a1", "b1"))
    bad.write_bytes(b"{}")
    done = export.to_file(registry, registry.scopes(), tmp_path / "e.tar", artifacts=False)
    assert [str(bad) in one for one in done.left_out] == [True]
    target = tmp_path / "restored"
    restore.restore(target, tmp_path / "e.tar", archive.read(tmp_path / "e.tar"))
    restored = Registry(target)
    there = target / file.relative_to(registry.layout.root)
    assert there.read_bytes() == file.read_bytes()
    assert list(target.rglob(".evaluations/*/*")) == [there]
    restored.close()


@pytest.mark.parametrize(
    "place", ["default/tiny/.evaluations/v1/b1.json", "default/tiny/.evaluations/v9/a1.json"]
)
def test_an_export_with_anothers_is_refused(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path, place: str
) -> None:
    """An evaluation in another one's place, or of no revision in the export, refuses the whole of it."""
    evaluated(registry, scope, make_adapter(), "a1")
    export.to_file(registry, registry.scopes(), tmp_path / "e.tar", artifacts=False)
    with tarfile.open(tmp_path / "e.tar") as tar, tarfile.open(tmp_path / "f.tar", "w") as out:
        for member in tar:
            data = tar.extractfile(member)
            assert data is not None
            member.name = place if parse_evaluation(member.name) else member.name
            out.addfile(member, io.BytesIO(data.read()))
    with pytest.raises(InputError, match=r"evaluation|not in the export"):
        archive.read(tmp_path / "f.tar")


@pytest.mark.parametrize(
    "path",
    [
        "default/tiny/.evaluations/v1/a1",
        "default/tiny/.evaluations/v1/.tmp-1.json",
        "default/tiny/.evaluations/a1.json",
        "default/tiny/evaluations/v1/a1.json",
        "../tiny/.evaluations/v1/a1.json",
        "default/tiny/.evaluations/../a1.json",
        "/default/tiny/.evaluations/v1/a1.json",
    ],
)
def test_no_other_path_is_one(path: str) -> None:
    """Whatever leaves its folder, or is no file of an evaluation, is none."""
    assert parse_evaluation(path) is None
    assert parse_evaluation("default/tiny/.evaluations/v1/a1.json") == AdapterKey(
        "default", "tiny", "v1", "a1"
    )

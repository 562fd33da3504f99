"""What a writer does to a volume, one act after the other, and what must hold however it ended."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shutil
import tarfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lora_fs.sidecar.concurrency import Daemons, Result
from lora_fs.sidecar.errors import CorruptRecord, NotFound
from lora_fs.sidecar.model import AdapterKey, Pointer, Scope
from lora_fs.sidecar.reconcile.admin.uploads import Upload, Uploads
from lora_fs.sidecar.registry.drops.adopt import RETRY_S, Adopter
from lora_fs.sidecar.registry.format.layout import Layout, parse_generation
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.lifecycle import artifacts, release
from lora_fs.sidecar.registry.lifecycle.undo import take_back
from lora_fs.sidecar.registry.maintenance import garbage, gc
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import Desired, RegistryView
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.leases import lease
from lora_fs.sidecar.sources.offer import ARCHIVE
from lora_fs.sidecar.validate import Expectation
from tests.crash.tracing import Acknowledged
from tests.registry.conftest import Clock, write_adapter
from tests.registry.faults import without_links
from tests.registry.test_operations import put

SCOPE = Scope("default", "tiny")
LONG_AGO_S = 1_600_000_000  # an mtime that is old by any clock
ACTS = ["register", "register again", "upload", "promote", "unregister", "adopt", "take away", "gc", "undo"]


def collect(registry: Registry) -> None:
    """What ``lora-fs gc`` does."""
    with lease(registry.layout.lease("gc"), wait_s=0) as had:
        if had:
            garbage.collect(gc.find(registry, SCOPE, gc.in_use(registry), 3600.0, history_s=3600.0))


def look_at_folders(registry: Registry, scope: Scope) -> None:
    """What a replica does that comes by, and comes again after the time it leaves to others."""
    clock, view = Clock(), RegistryView(registry, (scope,))
    adopter = Adopter(registry, Expectation(), settle_s=0.0, writer="test", clock=clock)
    for _ in range(4):
        clock.now += RETRY_S
        view.refresh(force=True)
        adopter.step(view.desired)


class AtOnce(Daemons):
    """Makes each call in the caller's thread: no other one is traced."""

    async def run(self, call: Callable[[], Result]) -> Result:
        return call()


def upload(registry: Registry, source: Path) -> None:
    """What a replica does with a tar that a client sends."""
    uploads = Uploads(registry, most_bytes=1 << 20, most_s=60, volume_s=60, _threads=AtOnce(1, "unused"))

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(source, ".")

    async def sent() -> AsyncIterator[tuple[str, bytes]]:
        yield ARCHIVE, packed.getvalue()

    folder = asyncio.run(uploads.receive(AdapterKey(*SCOPE, "v1", "a1"), Upload("a1", sent())))
    with uploads.unpacked(folder) as adapter:
        put(registry, SCOPE, adapter, takes=True)


def age(root: Path) -> None:
    """Let everything on the volume be old."""
    for path in [root, *root.rglob("*")]:
        os.utime(path, (LONG_AGO_S, LONG_AGO_S), follow_symlinks=False)


@dataclass(frozen=True)
class Found:
    """What a fresh reader finds. ``served``: by name, the revision; ``present``: registered ones."""

    served: tuple[tuple[str, str], ...]
    present: frozenset[str]


@dataclass(frozen=True)
class Stage:
    """A volume before an act, and what it is like before and after it.

    ``cautious``: what the act withdraws stays while a half pointer may name it.
    """

    template: Path
    act: Callable[[Registry], object]
    before: Found
    after: Found
    lasting: frozenset[str]
    tier: str
    cautious: bool

    def copy(self, target: Path) -> Path:
        shutil.copytree(self.template, target, copy_function=shutil.copy2)
        return target

    def again(self, root: Path) -> None:
        """The same act by who comes after: a person who repeats the command, a replica that looks."""
        registry = Registry(root)
        try:
            self.act(registry)
        except NotFound:
            pass  # withdrawn already
        finally:
            registry.close()


def desired(root: Path) -> Desired:
    view = RegistryView(Registry(root), (SCOPE,))
    view.refresh()
    return view.desired


def look(root: Path) -> Found:
    """Read the volume anew; what is served must be whole to the byte, unless it was taken away."""
    found = desired(root)
    for _, name, record in found.active():
        if record.origin == "folder" and not Registry(root).layout.artifact(record.key).exists():
            continue
        folder = Registry(root).layout.resolve(record.spec.path)
        entries = artifacts.hash_files(folder, [entry.path for entry in record.spec.files])
        assert artifacts.digest_of(entries) == record.spec.digest, f"{name} is served and is not whole"
    served = sorted((name, record.revision) for _, name, record in found.active())
    present = (str(record.key) for record in found.records.values() if record.present)
    return Found(tuple(served), frozenset(present))


def lasting(root: Path) -> frozenset[str]:
    """Every path that is there once gc finds nothing more where all is old; tokens left out."""
    before: list[str] = []
    while before != (paths := sorted(str(path.relative_to(root)) for path in root.rglob("*"))):
        before = paths
        age(root)
        registry = Registry(root)
        collect(registry)
        registry.close()
    return frozenset(re.sub(r"\.[0-9a-f]{32}\.json$", ".json", path) for path in paths)


def stage(folder: Path, what: str, tier: str = "cas") -> Stage:
    """Prepare a volume for an act, and act on a copy of it to know what it is to become."""
    first, second = write_adapter(folder / "first"), write_adapter(folder / "second", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        if tier == "lww":
            without_links(patch)
        registry = Registry(folder / "template", create=True)
    assert registry.marker.tier == tier
    dropped = registry.layout.artifact(AdapterKey(*SCOPE, "v1", "a1"))
    if what in ("adopt", "take away"):
        write_adapter(dropped)
    elif what not in ("register", "upload"):
        put(registry, SCOPE, first)
    if what in ("promote", "unregister", "gc"):
        put(registry, SCOPE, second)
    # Two loads of the same bytes, of which the later one is undone.
    loads = [put(registry, SCOPE, second, origin="api").made for _ in range(2)] if what == "undo" else []
    for made in loads[1:]:
        take_back(registry, SCOPE, "a1", made, writer="test")
    if what == "take away":
        look_at_folders(registry, SCOPE)
        shutil.rmtree(dropped)
    if what == "gc":
        put(registry, SCOPE, first, name="c1", link=True)
        release.unregister(registry, SCOPE, "c1", writer="test")
        age(folder / "template")
        collect(registry)  # of c1 its tombstones are left, which go now
        release.unregister(registry, SCOPE, "a1", writer="test", revision="v1")
        put(registry, SCOPE, first, name="b1", link=True)
        make_folder(registry.layout.incoming(SCOPE))
        write_adapter(artifacts.new_draft(registry.layout, SCOPE))
        (registry.layout.active(SCOPE) / ".tmp-left").touch()
        registry.layout.lease("adopt-left").touch()
    registry.close()
    if what == "gc":
        age(folder / "template")

    def act(registry: Registry) -> None:
        if what == "register":
            put(registry, SCOPE, first)
        elif what == "register again":
            put(registry, SCOPE, second)
        elif what == "upload":
            upload(registry, first)
        elif what == "promote":
            release.promote(registry, SCOPE, "a1", "v1", writer="test")
        elif what == "unregister":
            release.unregister(registry, SCOPE, "a1", writer="test", all_revisions=True)
        elif what == "gc":
            collect(registry)
        elif what == "undo":
            take_back(registry, SCOPE, "a1", loads[0], writer="test")
        else:
            look_at_folders(registry, SCOPE)

    before = look(folder / "template")
    done = folder / "done"
    shutil.copytree(folder / "template", done, copy_function=shutil.copy2)
    registry = Registry(done)
    act(registry)
    registry.close()
    after = look(done)
    assert (before != after) == (what != "gc")
    cautious = what == "undo" and tier == "lww"
    return Stage(folder / "template", act, before, after, lasting(done), tier, cautious)


def has_half_pointer(root: Path) -> bool:
    """Whether a pointer lies there of which only the name, or not all bytes, were written."""
    for path in Layout(root).active(SCOPE).glob("*.json"):
        try:
            decode(Pointer, path.read_bytes())
        except CorruptRecord:
            return True
    return False


def check(stage: Stage, root: Path, acknowledged: Iterable[Acknowledged], *, ended: bool) -> None:
    """What must hold of a volume on which a writer died or failed, at once and after the next one came.

    Args:
        ended: the act returned, so all of it is promised.
    """
    found, layout = look(root), Registry(root).layout
    if stage.tier == "cas":
        assert desired(root).problems == {}, "a half record can be read"
    assert found.served in (stage.before.served, stage.after.served), "neither the old state nor the new one"
    low, high = sorted((stage.before.present, stage.after.present), key=len)
    assert low <= found.present <= high, "neither the old records nor the new ones"
    registered = {str(AdapterKey(*SCOPE, revision, name)) for name, revision in found.served}
    assert registered <= found.present
    if ended:
        assert found == stage.after, "it was told to be done and is not"
    for series, generation, token in acknowledged:
        folder, name = (root / series).parent, Path(series).name
        suffix = f".{token}" if stage.tier == "lww" else ""
        data = (folder / f"{name}.@{generation:08d}{suffix}.json").read_text()
        assert token in data, f"generation {generation} of {series} was acknowledged and is another's"
    stage.again(root)
    found = look(root)
    if stage.cautious and found.present != stage.after.present:
        assert has_half_pointer(root), "nothing keeps what is withdrawn"
        assert found == replace(stage.after, present=stage.before.present)
        return
    assert found == stage.after, "the next one did not complete it"
    for path in layout.leases.glob("*.lock"):
        if path.stat().st_size:  # an empty one stops nobody, and is removed after ABANDONED_S
            with lease(path, wait_s=2.0) as had:
                assert had, "a dead writer's lease is not taken over"
    lasts, wanted = lasting(root), stage.lasting
    if stage.tier == "lww":  # above a half record the next one is written, and gc then removes the half one
        lasts, wanted = (
            frozenset(path for path in paths if parse_generation(Path(path).name) is None)
            for paths in (lasts, wanted)
        )
    assert not lasts - wanted, f"gc leaves this for ever: {sorted(lasts - wanted)}"
    assert not wanted - lasts, f"this was lost: {sorted(wanted - lasts)}"

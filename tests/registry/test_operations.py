"""Register, unregister, promote and roll back, on a real filesystem."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import (
    Conflict,
    CorruptRecord,
    FormatTooNew,
    InputError,
    InvalidAdapter,
    InvalidName,
    NotFound,
    Taken,
    VolumeUnavailable,
)
from lora_fs.sidecar.model import AdapterKey, Policy, Scope
from lora_fs.sidecar.registry.format.layout import Generation, generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import artifacts, ingest, release
from lora_fs.sidecar.registry.lifecycle.acts import By, Unregister
from lora_fs.sidecar.registry.lifecycle.copying import Copy
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.validate import Expectation, validate
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.faults import fail, full_below

WEIGHTS = "adapter_model.safetensors"


def put(registry: Registry, scope: Scope, source: Path, name: str = "a1", **more: object) -> Registered:
    wanted = Registration(name, source, source.as_uri(), **more)  # type: ignore[arg-type]
    return ingest.register(registry, scope, wanted, Expectation(), writer="test")


def served(registry: Registry, scope: Scope) -> dict[str, str]:
    """What a fresh reader finds: name → active revision."""
    view = RegistryView(registry, (scope,))
    view.refresh()
    return {name: record.revision for _, name, record in view.desired.active()}


def test_registered_is_served_to_a_fresh_reader(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A reader that starts after register finds the name and its first revision, v1."""
    put(registry, scope, make_adapter())
    assert served(registry, scope) == {"a1": "v1"}


@pytest.mark.parametrize(
    ("elsewhere", "generation"),
    [
        (AdapterKey("default", "tiny", "v1", "a1"), Generation(2, "")),
        (AdapterKey("default", "tiny", "v1", "a1"), Generation(1, "00000000")),
        (AdapterKey("default", "tiny", "v1", "a2"), Generation(1, "")),
        (AdapterKey("default", "tiny", "v2", "a1"), Generation(1, "")),
        (AdapterKey("default", "other", "v1", "a1"), Generation(1, "")),
        (AdapterKey("other", "tiny", "v1", "a1"), Generation(1, "")),
    ],
    ids=["generation", "token", "name", "revision", "model", "namespace"],
)
def test_a_record_is_read_only_where_it_was_written(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, elsewhere: AdapterKey, generation: Generation
) -> None:
    """A copy of its file under another name is damaged there, though its seal holds."""
    put(registry, scope, make_adapter())
    written = registry.records(AdapterKey(*scope, "v1", "a1")).file(Generation(1, ""))
    series = registry.records(elsewhere)
    series.folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(written, series.file(generation))
    with pytest.raises(CorruptRecord, match="holds"):
        registry.read(series, generation)


def test_same_bytes_change_nothing(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Registering the same bytes again writes no generation."""
    put(registry, scope, make_adapter())
    assert not put(registry, scope, make_adapter()).changed


def test_a_newer_writers_revision_keeps_its_name(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """A withdrawal of all that one of them refuses withdraws nothing: neither the others nor the name."""
    put(registry, scope, make_adapter())
    second = put(registry, scope, write_adapter(tmp_path / "second", 2)).record
    path = registry.records(second.key).folder / generation_name("a1", 2)
    path.write_bytes(seal({"apiVersion": "lora-fs/v2", "shape": "another"}))
    with pytest.raises(FormatTooNew, match=r"lora-fs/v2.*upgrade"):
        release.unregister(registry, scope, "a1", all_revisions=True, writer="test")
    assert served(registry, scope) == {"a1": "v2"}
    assert release.present_revisions(registry, scope, "a1").keys() == {"v1", "v2"}


def test_work_on_one_revision_looks_at_no_other(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 5,000 revisions a promotion does not cost 5,000 listings, and none that fails stops it."""
    for number in (1, 2, 3):
        put(registry, scope, make_adapter(f"source-{number}", number))
    another = registry.layout.revision(scope, "v1")
    fail(monkeypatch, "listdir", errno.EIO, times=9, when=lambda folder: Path(folder) == another)
    release.promote(registry, scope, "a1", "v2", writer="test")
    release.rollback(registry, scope, "a1", writer="test")
    Unregister(revision="v2").do(registry, scope, "a1", By("test", Policy()))
    with pytest.raises(VolumeUnavailable):  # only its refusal names the others
        release.promote(registry, scope, "a1", "v2", writer="test")


def test_a_revision_that_somebody_made_and_did_not_sync(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that synced the scope for one revision syncs it for the next one, whose maker was killed."""
    put(registry, scope, make_adapter())
    registry.layout.revision(scope, "v2").mkdir()
    synced: list[Path] = []
    monkeypatch.setattr(atomic, "sync_names", synced.append)
    put(registry, scope, make_adapter("second", 2), revision="v2")
    assert registry.layout.scope(scope) in synced


def test_a_revision_never_changes(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """The same revision with other bytes is refused and the first bytes stay."""
    put(registry, scope, make_adapter(), revision="r1")
    with pytest.raises(Conflict, match="other bytes"):
        put(registry, scope, make_adapter(seed=1), revision="r1")
    assert served(registry, scope) == {"a1": "r1"}


def test_next_revision_promote_and_rollback(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """New bytes are v2 and active; rollback serves v1 again; promote serves v2 again."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    assert served(registry, scope) == {"a1": "v2"}
    release.rollback(registry, scope, "a1", writer="test")
    assert served(registry, scope) == {"a1": "v1"}
    release.promote(registry, scope, "a1", "v2", writer="test")
    assert served(registry, scope) == {"a1": "v2"}


def test_unregister_asks_which_of_several(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """With two revisions nothing is removed until one, or all, are named."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    with pytest.raises(InputError, match="2 revisions"):
        release.unregister(registry, scope, "a1", writer="test")
    release.unregister(registry, scope, "a1", writer="test", all_revisions=True)
    assert served(registry, scope) == {}
    pointer = release.active(registry, scope, "a1")
    assert pointer is not None
    assert (pointer.revision, pointer.previous_revision) == (None, None)
    with pytest.raises(NotFound):
        release.unregister(registry, scope, "a1", writer="test")


def test_the_loser_of_a_race_takes_the_next_revision(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Five registers that name no revision and copy at once: five revisions. One that names its is told."""
    sources = [make_adapter(f"source-{seed}", seed) for seed in range(7)]
    with placed_together(5), ThreadPoolExecutor(5) as threads:
        done = list(threads.map(lambda source: put(registry, scope, source), sources[:5]))
    assert sorted(one.record.revision for one in done) == ["v1", "v2", "v3", "v4", "v5"]
    with placed_together(2), ThreadPoolExecutor(2) as threads:
        racing = [threads.submit(put, registry, scope, source, revision="v9") for source in sources[5:]]
    assert [type(one.exception()) for one in racing if one.exception()] == [Taken]


@contextmanager
def placed_together(writers: int) -> Iterator[None]:
    """The first copy of each writer is given its name when all have one."""
    gate, place, waited = threading.Barrier(writers, timeout=30), Copy.place, threading.local()

    def wait(copy: Copy, incoming: Path, **more: bool) -> None:
        if not hasattr(waited, "once"):
            waited.once = gate.wait()
        place(copy, incoming, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copy, "place", wait)
        yield


def test_a_race_that_is_lost_for_ever_ends(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take every next revision: it is told so, not that a revision nobody named has other bytes."""
    monkeypatch.setattr(ingest, "RACES", 3)

    def taken(copy: Copy, *_: object, **__: object) -> None:
        tried.append(copy.key.revision)
        write_adapter(copy.target, len(tried))
        raise Taken("holds other bytes")

    tried: list[str] = []
    monkeypatch.setattr(Copy, "place", taken)
    with pytest.raises(Conflict, match="3 revisions of a1 were taken"):
        put(registry, scope, make_adapter())
    assert tried == ["v1", "v2", "v3"]


@pytest.mark.parametrize("last", [9, 18, 60])
def test_the_next_revision_of_a_long_number(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, last: int
) -> None:
    """One more than the greatest, however many digits it has."""
    put(registry, scope, make_adapter(), revision=f"v{'9' * last}")
    for seed in (1, 2):
        number = 10**last + seed - 1
        assert put(registry, scope, make_adapter(seed=seed)).record.revision == f"v{number}"


def test_head_that_cannot_be_written(
    registry: Registry,
    scope: Scope,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was written is said to be seen later; where the same bytes are there, nothing was."""
    fail(monkeypatch, "replace", errno.ENOSPC, times=1 << 30)
    put(registry, scope, make_adapter())
    assert caplog.text.count("next scan only") == 1
    put(registry, scope, make_adapter())
    assert caplog.text.count("next scan only") == 1
    put(registry, scope, make_adapter(), labels={"team": "care"})
    assert caplog.text.count("next scan only") == 2


@pytest.mark.parametrize("name", ["..", "a/b", "%2e", "a\0b", "x" * 5000, "é", "", ".hidden"])
def test_bad_names_are_refused(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, name: str
) -> None:
    """No name outside the grammar reaches a path."""
    with pytest.raises(InvalidName):
        put(registry, scope, make_adapter(), name=name)
    assert served(registry, scope) == {}


def test_a_truncated_adapter_is_refused(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Truncated weights are refused with the file's name and nothing is written."""
    source = make_adapter()
    weights = source / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        put(registry, scope, source)
    assert not registry.layout.scope(scope).exists()


def test_a_dry_run_of_the_same_bytes_changes_nothing(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """It tells what would be restored and amended; no file comes back, and the record stays."""
    source = make_adapter()
    record = put(registry, scope, source).record
    weights = registry.layout.artifact(record.key) / "adapter_model.safetensors"
    weights.unlink()
    wanted = Registration("a1", source, source.as_uri(), labels={"team": "sql"})
    told = ingest.register(registry, scope, wanted, Expectation(), writer="test", dry_run=True)
    assert (told.changed, told.amended, told.restored, told.record) == (False, True, True, record)
    assert not weights.exists()
    assert registry.latest(registry.records(record.key))[1] == record
    done = ingest.register(registry, scope, wanted, Expectation(), writer="test")
    assert (done.changed, done.restored, done.record.generation) == (False, True, 2)
    assert weights.exists()


def test_what_was_allowed_once_stays_allowed(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """The same bytes again take over what is allowed anew, and lose nothing where nothing is said of it."""
    source = make_adapter()
    wanted = Registration("a1", source, source.as_uri())
    allowed = []
    for allow in ((), ("dora",), (), ("pickle",)):
        expectation = Expectation(allow=frozenset(allow))
        again = ingest.register(registry, scope, wanted, expectation, writer="test")
        allowed.append((again.record.spec.allowed, again.record.generation))
    assert allowed == [((), 1), (("dora",), 2), (("dora",), 2), (("pickle",), 3)]


def test_a_copy_that_was_lost_is_made_again(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Registering the same bytes again puts back an artifact that somebody deleted."""
    record = put(registry, scope, make_adapter()).record
    artifact = registry.layout.artifact(record.key)
    shutil.rmtree(artifact)
    assert not put(registry, scope, make_adapter()).changed
    assert sorted(os.listdir(artifact)) == ["adapter_config.json", "adapter_model.safetensors"]


def test_unregister_takes_back_no_promotion(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v2 promoted while v1 is unregistered stays served: only a pointer to v1 is withdrawn."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1), activate=False)
    real = release.active

    def overtaken(*args: object) -> object:
        pointer = real(*args)  # type: ignore[arg-type]
        monkeypatch.undo()
        release.promote(registry, scope, "a1", "v2", writer="another")
        return pointer

    monkeypatch.setattr(release, "active", overtaken)
    release.unregister(registry, scope, "a1", revision="v1", writer="test")
    assert served(registry, scope) == {"a1": "v2"}


@pytest.mark.parametrize("call", ["open", "fsync", "rename", "mkdir"])
def test_a_copy_that_fails_is_told(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whichever call fails on the copy's folder it is VolumeUnavailable, and nothing is registered."""
    source = make_adapter()
    incoming = str(registry.layout.incoming(scope))

    def on_the_copy(target: Path | int, *_: object, **__: object) -> bool:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        return path.startswith(incoming) and (call != "fsync" or Path(path).is_dir())

    with monkeypatch.context() as patch:
        fail(patch, call, errno.EIO, when=on_the_copy)
        with pytest.raises(VolumeUnavailable):
            put(registry, scope, source)
    assert served(registry, scope) == {}
    put(registry, scope, source)
    assert served(registry, scope) == {"a1": "v1"}


def test_what_is_no_text_is_refused(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """A label, or a linked path, of bytes that are not UTF-8 is bad input and not an internal error."""
    with pytest.raises(InputError, match="UTF-8"):
        put(registry, scope, make_adapter(), labels={"team": "\udcff"})
    with pytest.raises(InputError, match="UTF-8"):
        put(registry, scope, make_adapter("source-\udcff"), link=True)
    assert served(registry, scope) == {}


def before_append(patch: pytest.MonkeyPatch, act: Callable[[], object], *, to: str) -> None:
    """Let ``act`` come in once, right before the write of a record or a pointer."""
    real = Registry.append

    def overtaken(self: Registry, series: Series[Body], *args: Any, **kwargs: Any) -> Body:
        if series.kind.__name__ == to:
            patch.undo()
            act()
        return real(self, series, *args, **kwargs)

    patch.setattr(Registry, "append", overtaken)


def test_of_two_that_want_a_new_name_one_is_told(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds the name taken at the last moment withdraws what it wrote, and serves nothing."""
    mine, theirs = make_adapter("mine"), make_adapter("theirs", seed=1)
    before_append(monkeypatch, lambda: put(registry, scope, theirs, revision="r1"), to="Pointer")
    with pytest.raises(Conflict, match="already been loaded"):
        put(registry, scope, mine, must_be_new=True)
    assert served(registry, scope) == {"a1": "r1"}
    assert set(release.present_revisions(registry, scope, "a1")) == {"r1"}


@pytest.mark.parametrize("name", ["a1", "b1"])
def test_a_revision_that_the_volume_takes_for_another_is_refused(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Upper and lower case are one there. In the other's folder no reader finds its record."""
    put(registry, scope, make_adapter())
    registry.layout.revision(scope, "V1").symlink_to("v1")
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: [one for one in listed(folder) if one != "V1"])
    with pytest.raises(Conflict, match="V1 is v1 on this volume"):
        put(registry, scope, make_adapter(), name=name, revision="V1")
    assert served(registry, scope) == {"a1": "v1"}


def test_revisions_that_differ_by_case_alone_are_two(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """On a volume that tells them apart."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(), revision="V1")
    assert served(registry, scope) == {"a1": "V1"}


def test_a_register_that_ended_before_its_pointer_is_repeated(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is recorded and not served is new; of a repeat's, nothing is withdrawn."""

    def full() -> None:
        raise VolumeUnavailable("no space left on device")

    mine, theirs = make_adapter("mine"), make_adapter("theirs", seed=1)
    before_append(monkeypatch, full, to="Pointer")
    with pytest.raises(VolumeUnavailable):
        put(registry, scope, mine, must_be_new=True)
    assert served(registry, scope) == {}
    before_append(monkeypatch, lambda: put(registry, scope, theirs, revision="r1"), to="Pointer")
    with pytest.raises(Conflict, match="already been loaded"):
        put(registry, scope, mine, must_be_new=True)
    assert served(registry, scope) == {"a1": "r1"}
    release.unregister(registry, scope, "a1", revision="r1", writer="another")
    again = put(registry, scope, mine, must_be_new=True)
    assert (again.changed, served(registry, scope)) == (False, {"a1": "v1"})
    with pytest.raises(Conflict, match="already been loaded"):
        put(registry, scope, mine, must_be_new=True)


def test_withdrawn_while_registered_again(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label put on a revision that is withdrawn at that moment does not bring it back."""
    put(registry, scope, make_adapter())

    def withdraw() -> None:
        release.unregister(registry, scope, "a1", writer="another")

    before_append(monkeypatch, withdraw, to="Record")
    with pytest.raises(Conflict, match="withdrawn meanwhile"):
        put(registry, scope, make_adapter(), labels={"team": "a"})
    assert served(registry, scope) == {}


@pytest.mark.parametrize("replaced", [True, False])
def test_what_was_validated_is_what_is_recorded(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path, replaced: bool
) -> None:
    """A source that is rewritten while it is read: rank, digest and files on record are of the same bytes."""
    source, other = make_adapter(), write_adapter(tmp_path / "other", 1, rank=64)

    def rewrite(_: int) -> None:
        for name in ("adapter_config.json", WEIGHTS):
            if replaced:
                shutil.copy(other / name, tmp_path / "draft")
                os.replace(tmp_path / "draft", source / name)
            else:
                shutil.copyfile(other / name, source / name)

    wanted, expectation = Registration("a1", source, source.as_uri()), Expectation(max_rank=16)
    done = ingest.register(registry, scope, wanted, expectation, writer="test", progress=rewrite)
    held = registry.layout.artifact(done.record.key)
    report = validate(held, expectation)
    assert report.ok
    assert report.shape == done.record.spec.lora
    names = [entry.path for entry in done.record.spec.files]
    assert artifacts.digest_of(artifacts.hash_files(held, names)) == done.record.spec.digest
    assert os.listdir(registry.layout.incoming(scope)) == []


def test_a_linked_source_that_changes_is_not_registered(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """What is recorded of a folder that stays where it is was judged there, or nothing is recorded."""
    source = make_adapter()
    wanted = Registration("a1", source, source.as_uri(), link=True)

    def rewrite(_: int) -> None:
        write_adapter(source, seed=1, rank=64)

    expectation = Expectation(max_rank=16)
    with pytest.raises(VolumeUnavailable, match="changed while it was read"):
        ingest.register(registry, scope, wanted, expectation, writer="test", progress=rewrite)
    assert release.present_revisions(registry, scope, "a1") == {}


def test_a_linked_path_that_cannot_be_told_is_not_recorded(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link when Python looked at it, gone when it read where the link leads."""
    source = make_adapter()

    def changed(path: object, **_: bool) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(os.path, "realpath", changed)
    with pytest.raises(VolumeUnavailable, match="cannot tell where"):
        put(registry, scope, source, link=True)
    monkeypatch.undo()
    assert release.present_revisions(registry, scope, "a1") == {}


def test_the_same_bytes_keep_an_operators_labels(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Labels that are named again are set; the rest stays as an operator left it."""
    put(registry, scope, make_adapter(), labels={"team": "sql", "tier": "gold"}, policy=Policy(priority=7))
    again = put(registry, scope, make_adapter(), labels={"tier": "iron"}).record
    assert again.spec.labels == {"team": "sql", "tier": "iron"}
    assert again.spec.policy == Policy(priority=7)


@pytest.mark.parametrize("link", [True, False])
def test_a_withdrawn_revision_never_changes(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, link: bool
) -> None:
    """Its name stays bound to its bytes, though it was unregistered and its files are gone."""
    key = put(registry, scope, make_adapter(), revision="r1").record.key
    release.unregister(registry, scope, "a1", writer="test")
    shutil.rmtree(registry.layout.artifact(key))
    with pytest.raises(Conflict, match="revisions never change"):
        put(registry, scope, make_adapter("other", seed=1), revision="r1", link=link)
    assert put(registry, scope, make_adapter(), revision="r1").record.generation == 3
    assert served(registry, scope) == {"a1": "r1"}


@pytest.mark.parametrize("sync", [True, False])
def test_a_full_registry_is_told_as_what_it_is(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, sync: bool
) -> None:
    """The error has the path that did not take the bytes, not the one that they came from."""
    source = make_adapter()
    incoming = registry.layout.incoming(scope)
    with pytest.MonkeyPatch.context() as patch:
        if sync:
            fail(
                patch,
                "fsync",
                errno.ENOSPC,
                when=lambda at: f"{incoming}/" in os.readlink(f"/proc/self/fd/{at}"),
            )
        else:
            full_below(patch, registry.layout.root)
        with pytest.raises(VolumeUnavailable, match="the volume is full") as told:
            put(registry, scope, source)
    assert str(told.value).startswith(f"cannot write {incoming}/")
    assert str(source) not in str(told.value)
    assert isinstance(told.value.__cause__, OSError)
    assert served(registry, scope) == {}
    put(registry, scope, source)
    assert served(registry, scope) == {"a1": "v1"}


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    """To set this process's, which is given back."""
    before = os.umask(0)
    os.umask(before)
    yield os.umask
    os.umask(before)


def modes_below(root: Path) -> dict[str, int]:
    """Of every folder and file but locks."""
    found = (path for path in [root, *root.rglob("*")] if path.suffix != ".lock")
    return {str(path.relative_to(root)): stat.S_IMODE(path.stat().st_mode) for path in found}


@pytest.mark.parametrize(
    ("root", "folders", "files"),
    [(0o755, 0o755, 0o644), (0o2775, 0o2775, 0o644), (0o700, 0o700, 0o600), (0o2770, 0o2770, 0o640)],
)
@pytest.mark.parametrize("mask", [0o022, 0o077])
@pytest.mark.parametrize("takes", [False, True])
def test_who_may_read_the_root_may_read_what_is_registered(
    tmp_path: Path,
    scope: Scope,
    make_adapter: MakeAdapter,
    umask: Callable[[int], int],
    root: int,
    folders: int,
    files: int,
    mask: int,
    takes: bool,
) -> None:
    """Whatever the umask of who registers; and who may write in the root may write in its folders."""
    home, source = tmp_path / "root", make_adapter()
    home.mkdir()
    home.chmod(root)
    umask(mask)
    registry = Registry(home, create=True)
    if takes:
        incoming = registry.layout.incoming(scope) / "came"
        make_folder(incoming.parent)
        shutil.copytree(source, incoming)
        source = incoming
        for path in (incoming, *incoming.iterdir()):
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~mask)
    put(registry, scope, source, takes=takes)
    registry.close()
    for name, mode in modes_below(home).items():
        if (home / name).is_dir():
            assert mode & folders == folders, f"{name}: {mode:o}"
        else:
            assert mode & files == files, f"{name}: {mode:o}"
            assert not mode & 0o022, f"{name}: {mode:o}"


def test_a_root_that_is_made_is_as_private_as_its_maker_wants(
    tmp_path: Path, umask: Callable[[int], int]
) -> None:
    """The folder above says nothing of who may read a registry; the registry does, of what is in it."""
    tmp_path.chmod(0o755)
    umask(0o077)
    Registry(tmp_path / "made" / "root", create=True).close()
    modes = modes_below(tmp_path / "made")
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes

"""Folder drops: adopted when whole and still, withdrawn when taken away, never followed elsewhere."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from lora_fs.sidecar.errors import Conflict, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Quota, Scope
from lora_fs.sidecar.registry.drops import adopt, seen, transfer_markers
from lora_fs.sidecar.registry.drops.adopt import RETRY_S, Adopter
from lora_fs.sidecar.registry.drops.candidates import COPIED_S, Candidate
from lora_fs.sidecar.registry.format.ids import natural_order
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.lifecycle import artifacts, copying, ingest, release
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import Desired, RegistryView
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.validate import Expectation, looks_preallocated, validate
from tests.registry.conftest import Clock, MakeAdapter, write_adapter
from tests.registry.faults import before_the_record, fail, without_links
from tests.registry.test_lock import left_by_another_host
from tests.registry.test_operations import before_append, put

SETTLE_S = 2.0
WEIGHTS = "adapter_model.safetensors"


class Site:
    """A registry, a view of it and an adopter, on a clock the test moves."""

    def __init__(self, registry: Registry, scope: Scope) -> None:
        self.registry, self.scope, self.clock = registry, scope, Clock()
        self.view = RegistryView(registry, (scope,))
        self.adopter = Adopter(registry, Expectation(), settle_s=SETTLE_S, writer="t", clock=self.clock)
        self.folder = self.at("v1", "dropped")

    def at(self, revision: str, name: str) -> Path:
        return self.registry.layout.revision(self.scope, revision) / name

    def step(self, seconds: float = 0.0) -> dict[str, str]:
        """Let time pass and look once; returns name → active revision."""
        self.clock.now += seconds
        self.view.refresh(force=True)
        self.adopter.step(self.view.desired)
        self.view.refresh(force=True)
        return {name: record.revision for _, name, record in self.view.desired.active()}

    def settle(self) -> dict[str, str]:
        """Look, wait for as long as a folder must hold still, and look again."""
        self.step()
        return self.step(SETTLE_S + adopt.FULL_LOOK_S)

    def generation(self, revision: str = "v1", name: str = "dropped") -> int:
        return self.view.desired.records[AdapterKey(*self.scope, revision, name)].generation

    def refusal(self, name: str = "dropped", revision: str = "v1") -> str:
        return self.adopter.refusals().get(AdapterKey(*self.scope, revision, name), "")


@pytest.fixture
def site(registry: Registry, scope: Scope) -> Site:
    return Site(registry, scope)


def test_a_half_copied_folder_waits(site: Site) -> None:
    """Half a copy is not adopted however long it lies there; the whole one is, after settling."""
    write_adapter(site.folder)
    weights = site.folder / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert site.step() == {}
    assert site.step(COPIED_S - 1) == {}
    assert site.refusal()
    assert site.adopter.waiting(), "the copy may go on"
    assert site.step(1) == {}
    assert not site.adopter.waiting()
    weights.write_bytes(whole)
    assert site.step(0.1) == {}
    assert site.adopter.waiting()
    assert site.step(1) == {}
    assert site.step(1) == {"dropped": "v1"}
    assert not site.adopter.waiting()
    assert site.adopter.refusals() == {}


def test_a_folder_that_is_listed_no_more_is_not_opened(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS would hide the same name for half a minute once it comes again."""
    write_adapter(site.folder)
    site.step()
    assert site.adopter.waiting()
    shutil.rmtree(site.folder)
    monkeypatch.setattr(artifacts, "look", pytest.fail)
    site.step()
    assert not site.adopter.waiting()


def test_a_namespace_that_requires_evaluations(site: Site) -> None:
    """A dropped folder is registered there and not activated, however often it is looked at."""
    namespace = site.scope.namespace
    bounds = {"namespace": namespace, "writer": "t", "updated_at": "", "require_evaluation": "pass_rate>=0.9"}
    site.registry.accounts.write(Quota.model_validate(bounds))
    write_adapter(site.folder)
    assert site.settle() == {}
    assert site.step(100) == {}
    assert site.generation() == 1
    assert site.adopter.refusals() == {}


@pytest.mark.parametrize("how", ["served", "tried", "before"])
def test_changed_files_do_not_pass_the_gate_of_those_before(site: Site, how: str) -> None:
    """What the name serves, tries, or goes back to stays as it was evaluated, until the old files return."""
    write_adapter(site.folder)
    assert site.settle() == {"dropped": "v1"}
    revision = "v2" if how == "tried" else "v1"
    bounds = {"namespace": site.scope.namespace, "writer": "t", "updated_at": ""}
    site.registry.accounts.write(Quota.model_validate({**bounds, "require_evaluation": "pass_rate>=0.9"}))
    serves = {"dropped": "v1"}
    if how != "served":
        write_adapter(site.at("v2", "dropped"), seed=2)
        assert site.settle() == serves
        if how == "tried":
            release.set_canary(site.registry, site.scope, "dropped", "v2", 10, writer="t")
        else:
            release.promote(site.registry, site.scope, "dropped", "v2", writer="t")
            serves = {"dropped": "v2"}
    known = site.at(revision, "dropped")
    write_adapter(known, seed=3)
    assert site.settle() == serves
    assert site.step(100) == serves
    assert site.generation(revision) == 1
    assert "GateNotPassed" in site.refusal(revision=revision)
    write_adapter(known, seed=2 if how == "tried" else 0)
    assert site.settle() == serves
    assert site.adopter.refusals() == {}


def test_a_growing_file_is_still_being_copied(site: Site) -> None:
    """As long as sizes or times change the settle time begins again."""
    write_adapter(site.folder)
    with (site.folder / "training.log").open("ab") as growing:
        for _ in range(5):
            growing.write(b"more")
            growing.flush()
            assert site.step(SETTLE_S - 0.1) == {}
    assert site.step(SETTLE_S - 0.1) == {}
    assert site.step(0.2) == {"dropped": "v1"}


def test_a_copy_whose_register_ended_before_its_record(site: Site, make_adapter: MakeAdapter) -> None:
    """Nobody dropped it: it is told and not adopted, and the same register completes it, as it was asked."""
    put(site.registry, site.scope, make_adapter())
    second, labels = make_adapter("second", 1), {"team": "care"}
    with before_the_record():
        put(site.registry, site.scope, second, activate=False, labels=labels)
    assert (site.at("v2", "a1") / WEIGHTS).exists()
    assert site.settle() == {"a1": "v1"}
    assert "Unfinished" in site.refusal("a1", "v2")
    done = put(site.registry, site.scope, second, activate=False, labels=labels)
    assert (done.changed, done.record.revision, done.record.spec.labels) == (True, "v2", labels)
    assert site.settle() == {"a1": "v1"}
    assert site.refusal("a1", "v2") == ""
    assert sorted(os.listdir(site.at("v2", "a1"))) == ["adapter_config.json", WEIGHTS]


@pytest.mark.parametrize("mark", ["_READY", "SHA256SUMS"])
def test_a_marked_folder_need_not_settle(site: Site, mark: str) -> None:
    """Whoever marks it says that it is whole: it is adopted at the first look."""
    (write_adapter(site.folder) / mark).touch()
    assert site.step() == {"dropped": "v1"}


def test_marked_and_not_whole(site: Site) -> None:
    """A mark does not make half a file whole."""
    (write_adapter(site.folder) / "_READY").touch()
    with (site.folder / WEIGHTS).open("r+b") as weights:
        weights.truncate(200)
    assert site.settle() == {}
    assert site.refusal()


def test_a_preallocated_copy_is_not_whole(site: Site) -> None:
    """The full size with zeros at the end is an unfinished copy, and adopted once its bytes came."""
    write_adapter(site.folder)
    weights = site.folder / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert site.settle() == {}
    assert "NotWhole" in site.refusal()
    weights.write_bytes(whole)
    assert site.settle() == {"dropped": "v1"}


@pytest.mark.parametrize("missing", ["adapter_config.json", WEIGHTS])
def test_a_missing_file_is_named(site: Site, missing: str) -> None:
    """Without its config or its weights a folder is refused by that file's name, until it comes."""
    write_adapter(site.folder)
    held = (site.folder / missing).rename(site.registry.layout.root / "held")
    assert site.settle() == {}
    assert missing in site.refusal()
    held.rename(site.folder / missing)
    assert site.settle() == {"dropped": "v1"}


def test_dotfiles_and_subfolders_do_no_harm(site: Site) -> None:
    """Checkpoints, hidden files and notes lie beside the adapter and are not looked into."""
    write_adapter(site.folder)
    (site.folder / "checkpoint-1" / "deep").mkdir(parents=True)
    (site.folder / ".cache").mkdir()
    (site.folder / ".DS_Store").write_bytes(b"\0")
    site.at("v1", ".hidden").mkdir()
    site.at("v1", "README.md").write_text("notes")
    (site.registry.layout.scope(site.scope) / "notes.txt").write_text("not a revision")
    assert site.settle() == {"dropped": "v1"}
    assert site.adopter.refusals() == {}


@pytest.mark.parametrize("kind", ["fifo", "socket", "symlink", "folder"])
def test_what_is_no_file_in_a_folder(site: Site, kind: str, tmp_path: Path) -> None:
    """In the weights' place it never blocks, is refused, and a good folder beside it is adopted."""
    weights = write_adapter(site.folder) / WEIGHTS
    weights.rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(weights)
    elif kind == "socket":
        here = os.open(site.folder, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{here}/{WEIGHTS}")
        os.close(here)
    elif kind == "symlink":
        weights.symlink_to(tmp_path / "elsewhere")
    else:
        weights.mkdir()
    write_adapter(site.at("v1", "good"))
    assert site.settle() == {"good": "v1"}
    assert site.refusal()


def test_a_link_is_no_drop(site: Site, make_adapter: MakeAdapter) -> None:
    """A symlink where a folder is expected is told and not followed; nor is a loop."""
    site.folder.parent.mkdir(parents=True)
    site.folder.symlink_to(make_adapter())
    site.at("v1", "loop").symlink_to(site.folder.parent)
    assert site.settle() == {}
    assert "SymbolicLink" in site.refusal()
    assert "SymbolicLink" in site.refusal("loop")


def test_taken_away_once_is_nothing_twice_is_withdrawn(site: Site) -> None:
    """One look that misses the folder may be the volume's; two in a row withdraw the name."""
    write_adapter(site.folder)
    site.settle()
    away = site.folder.rename(site.registry.layout.root / "away")
    assert site.step(1) == {"dropped": "v1"}
    assert site.adopter.waiting()
    away.rename(site.folder)
    assert site.step(1) == {"dropped": "v1"}
    site.folder.rename(away)
    assert site.step(1) == {"dropped": "v1"}
    assert site.step(1) == {}
    assert not site.adopter.waiting()


def test_a_frozen_look_does_not_count(site: Site) -> None:
    """Of two looks that miss a folder the first does not count if the volume was in doubt between."""
    write_adapter(site.folder)
    site.settle()
    shutil.rmtree(site.folder)
    site.step(1)
    site.adopter.step(Desired(frozen="in doubt"))
    assert site.step(1) == {"dropped": "v1"}
    assert site.step(1) == {}


def test_a_vanished_revision_is_not_withdrawn(site: Site) -> None:
    """Records that went with their folder are absence, and absence withdraws nothing, however often."""
    write_adapter(site.folder)
    site.settle()
    shutil.rmtree(site.folder.parent)
    for _ in range(4):
        assert site.step(1) == {"dropped": "v1"}
        assert not site.adopter.waiting()


def test_only_what_a_folder_registered_is_withdrawn(site: Site, make_adapter: MakeAdapter) -> None:
    """A folder of a registered adapter that is gone is damage, which others report: no tombstone."""
    put(site.registry, site.scope, make_adapter(), name="registered")
    shutil.rmtree(site.at("v1", "registered"))
    site.step(1)
    assert site.step(1) == {"registered": "v1"}


def test_a_withdrawn_name_waits_for_another_folder(site: Site) -> None:
    """Unregistered with its folder left in place, it comes back only when the folder changes."""
    write_adapter(site.folder)
    site.settle()
    release.unregister(site.registry, site.scope, "dropped", writer="test")
    assert site.settle() == {}
    assert site.settle() == {}
    write_adapter(site.folder, seed=1)
    assert site.settle() == {"dropped": "v1"}


def test_a_withdrawn_registration_leaves_no_drop(site: Site, make_adapter: MakeAdapter) -> None:
    """What an unregistered adapter left for gc is not adopted as if somebody had dropped it."""
    put(site.registry, site.scope, make_adapter(), name="dropped")
    release.unregister(site.registry, site.scope, "dropped", writer="test")
    assert site.settle() == {}
    assert site.settle() == {}
    assert not site.adopter.waiting()


def test_changed_in_place_is_adopted_anew(site: Site) -> None:
    """A dropped folder with other bytes is the next generation, with another digest and id."""
    write_adapter(site.folder)
    site.settle()
    before = site.view.desired.records[AdapterKey(*site.scope, "v1", "dropped")]
    write_adapter(site.folder, seed=1)
    assert site.settle() == {"dropped": "v1"}
    after = site.view.desired.records[before.key]
    assert (before.generation, after.generation) == (1, 2)
    assert before.spec.digest != after.spec.digest
    assert before.spec.int_id != after.spec.int_id
    assert before.uid == after.uid


def test_touched_is_read_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes under another time are known again afterwards, and not hashed for ever."""
    write_adapter(site.folder)
    site.settle()
    digest = site.view.desired.records[AdapterKey(*site.scope, "v1", "dropped")].spec.digest
    os.utime(site.folder / WEIGHTS, (1, 1))
    site.settle()
    record = site.view.desired.records[AdapterKey(*site.scope, "v1", "dropped")]
    assert record.spec.digest == digest
    monkeypatch.setattr(ingest, "register", pytest.fail)
    site.settle()
    assert not site.adopter.waiting()


def test_a_registered_folder_is_left_alone(site: Site, make_adapter: MakeAdapter) -> None:
    """Changed bytes of a registered adapter are its digest's business: nothing is adopted."""
    put(site.registry, site.scope, make_adapter(), name="dropped")
    write_adapter(site.folder, seed=1)
    assert site.settle() == {"dropped": "v1"}
    assert site.generation() == 1


def test_the_greatest_revision_is_active(site: Site) -> None:
    """Of several revisions dropped at once v10 serves, whatever order they are listed in."""
    for revision in ("v2", "v10", "v9", "v1"):
        write_adapter(site.at(revision, "dropped"), seed=len(revision))
    assert site.settle() == {"dropped": "v10"}


def test_two_adopters_at_once(site: Site) -> None:
    """Both see the same folder and try: one generation, one pointer, and both know it."""
    write_adapter(site.folder)
    other = Site(site.registry, site.scope)
    for one in (site, other):
        one.step()
        one.clock.now += SETTLE_S
    for one in (site, other):  # neither sees what the other does before it acts
        one.adopter.step(one.view.desired)
    for one in (site, other):
        assert one.step() == {"dropped": "v1"}
        assert one.generation() == 1
        assert not one.adopter.waiting()


def test_a_later_revision_that_another_adopts_meanwhile(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two revisions dropped together the name serves the later one, whichever replica reads longer."""
    for number in (1, 2):
        write_adapter(site.at(f"v{number}", "dropped"), number)
    other = Site(site.registry, site.scope)
    before_append(monkeypatch, other.settle, to="Record")
    assert site.settle() == {"dropped": "v2"}
    assert other.step() == {"dropped": "v2"}


def test_another_adopter_at_work_is_waited_for(site: Site) -> None:
    """While the lease is another's nothing is done; if its holder has died it is taken over in time."""
    write_adapter(site.folder)
    scope = site.scope
    path = site.registry.layout.lease(f"adopt-{scope.namespace}--{scope.model}--v1--dropped")
    left_by_another_host(path)
    assert site.settle() == {}
    assert not site.adopter.waiting()
    path.unlink()
    assert site.step(adopt.RETRY_S) == {"dropped": "v1"}


def test_a_volume_that_takes_no_lockfile(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease only saves work: a folder is adopted without one, or the status has the volume's reason."""
    leases = site.registry.layout.leases
    for left in leases.iterdir():
        left.unlink()
    leases.rmdir()
    leases.touch()
    write_adapter(site.folder)
    with monkeypatch.context() as patch:
        fail(patch, "link", errno.ENOSPC, times=1 << 30)
        assert site.settle() == {}
        assert "the volume is full" in site.refusal()
    assert site.step(adopt.RETRY_S) == {"dropped": "v1"}
    site.registry.accounts.write(Quota(namespace="default", adapters=9, writer="t", updated_at=""))
    write_adapter(site.at("v1", "second"), seed=1)
    assert site.settle() == {"dropped": "v1", "second": "v1"}


def test_a_mount_without_writes_leaves_it_to_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica on it adopts nothing, and complains of nothing."""
    write_adapter(site.folder)
    monkeypatch.setattr(adopt, "is_read_only", lambda _: True)
    with monkeypatch.context() as patch:
        fail(patch, "open", errno.EROFS, times=1 << 30, when=lambda path, *_, **__: ".leases" in str(path))
        assert site.settle() == {}
        assert site.refusal() == ""
    assert site.step(adopt.RETRY_S) == {"dropped": "v1"}


def test_what_an_adopter_left_inactive_is_activated(site: Site) -> None:
    """Killed between record and pointer: the next adopter finds a name without pointer and gives it one."""
    write_adapter(site.folder)
    site.settle()
    shutil.rmtree(site.registry.layout.active(site.scope))
    fresh = Site(site.registry, site.scope)
    assert fresh.step() == {"dropped": "v1"}


def vanish_before_reading(site: Site, patch: pytest.MonkeyPatch) -> None:
    def gone(folder: Path, folder_fd: int) -> bool:
        shutil.rmtree(folder)
        return looks_preallocated(folder, folder_fd)

    patch.setattr(copying, "looks_preallocated", gone)


def vanish_while_hashed(site: Site, patch: pytest.MonkeyPatch) -> None:
    def gone(folder: Path, *args: Any, **more: Any) -> object:
        report = validate(folder, *args, **more)
        shutil.rmtree(folder)
        return report

    patch.setattr(copying, "validate", gone)


def fail_while_hashed(site: Site, patch: pytest.MonkeyPatch) -> None:
    fail(patch, "fsync", errno.EIO, times=1 << 30)


@pytest.mark.parametrize("trouble", [vanish_before_reading, vanish_while_hashed, fail_while_hashed])
def test_trouble_in_the_middle_writes_nothing(
    site: Site, trouble: Callable[[Site, pytest.MonkeyPatch], None]
) -> None:
    """A folder that goes, or a volume that fails, between the look and the record: none is written."""
    write_adapter(site.folder)
    with pytest.MonkeyPatch.context() as patch:
        trouble(site, patch)
        assert site.settle() == {}
    assert site.view.desired.records == {}
    write_adapter(site.folder)
    site.step(adopt.RETRY_S)
    assert site.settle() == {"dropped": "v1"}


def test_a_withdrawal_that_fails_is_tried_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that is read-only for a while keeps the name, without a hurry, and then lets it go."""
    write_adapter(site.folder)
    site.settle()
    shutil.rmtree(site.folder)
    with monkeypatch.context() as patch:
        fail(patch, "link", errno.EROFS, times=1 << 30)
        for _ in range(4):
            assert site.step(1) == {"dropped": "v1"}
        assert not site.adopter.waiting()
    site.step(1)
    assert site.step(1) == {}


def test_an_unforeseen_failure_of_a_withdrawal_is_tried_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher goes on after it, and nothing in the scope has to change first."""
    write_adapter(site.folder)
    site.settle()
    shutil.rmtree(site.folder)
    site.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(release, "unregister", Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            site.step(1)
    assert site.step(1) == {}


def test_records_of_commands_are_gone_through_once(
    site: Site, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked through again when something changes in their scope."""
    looked = Mock(wraps=seen.may_be_a_drop)
    monkeypatch.setattr(seen, "may_be_a_drop", looked)
    monkeypatch.setattr(atomic, "UNLINK_AFTER_S", 0.0)  # else a draft's name may go between two listings
    for name in ("a1", "a2", "a3"):
        put(site.registry, site.scope, make_adapter(), name=name)
    site.step(1)
    assert looked.call_count == 3
    site.step(adopt.FULL_LOOK_S)
    assert looked.call_count == 3
    write_adapter(site.folder)
    assert site.settle() == {"a1": "v1", "a2": "v1", "a3": "v1", "dropped": "v1"}


def test_the_base_model_s_name_is_refused(site: Site) -> None:
    """A folder named like the base model is told to be a conflict."""
    write_adapter(site.at("v1", "tiny"))
    assert site.settle() == {}
    assert Conflict.__name__ in site.refusal("tiny")


@pytest.mark.parametrize("marked", [False, True])
def test_many_folders_do_not_hide_other_changes(
    site: Site, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    """A step ends after ADOPTING_S and says that it waits; the next one goes on, and all are adopted."""
    names = [f"many-{number:02d}" for number in range(20)]
    for name in names:
        folder = write_adapter(site.at("v1", name))
        if marked:
            (folder / "_READY").touch()
    if not marked:
        site.step()
        site.clock.now += SETTLE_S
    real = ingest.register

    def slow(*args: object, **kwargs: object) -> object:
        site.clock.now += adopt.ADOPTING_S / 4
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ingest, "register", slow)
    steps = 0
    while len(site.step()) < len(names):
        assert site.adopter.waiting()
        steps += 1
    assert 2 <= steps <= 5


def test_looks_grow_with_the_folders_and_not_with_their_square(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose time is used up looks at no further folder that waits."""
    look, register = artifacts.look, ingest.register
    looks: list[Any] = []

    def counted(*folder: Any) -> object:
        looks.append(folder)
        return look(*folder)

    def slow(*args: Any, **kwargs: Any) -> object:
        site.clock.now += 2 * adopt.ADOPTING_S
        return register(*args, **kwargs)

    monkeypatch.setattr(adopt, "ADOPTING_S", 1 / 1024)  # no look at all folders comes between
    monkeypatch.setattr(artifacts, "look", counted)
    monkeypatch.setattr(ingest, "register", slow)

    def looks_at(count: int, revision: str) -> int:
        for number in range(count):
            write_adapter(site.at(revision, f"{revision}-{number:02d}"))
        adopted = len(site.step()) + count
        site.clock.now += SETTLE_S
        looks.clear()
        while len(site.step()) < adopted:
            pass
        return len(looks)

    assert looks_at(40, "v2") < 2.2 * looks_at(20, "v1")


def test_natural_order() -> None:
    """v10 comes after v9."""
    assert natural_order("v10") > natural_order("v9")
    assert sorted(["r2", "r10", "r1b", "r1a"], key=natural_order) == ["r1a", "r1b", "r2", "r10"]


def test_a_record_ends_the_settling(site: Site) -> None:
    """A settling folder that somebody registers is no candidate any more: nothing is waited for."""
    write_adapter(site.folder)
    site.step()
    assert site.adopter.waiting()
    put(site.registry, site.scope, site.folder, name="dropped", revision="v1")
    assert site.step(0.1) == {"dropped": "v1"}
    assert not site.adopter.waiting()
    site.settle()
    assert site.generation() == 1


def test_nothing_is_awaited_of_a_frozen_volume(site: Site) -> None:
    """While absence is not believed nobody comes back soon; afterwards the folder settles on."""
    write_adapter(site.folder)
    site.step()
    site.adopter.step(Desired(frozen="in doubt"))
    assert not site.adopter.waiting()
    assert site.settle() == {"dropped": "v1"}


def test_a_folder_put_back_is_adopted_again(site: Site) -> None:
    """Taken away, withdrawn, and put back with the same bytes and times: it is a drop like any other."""
    write_adapter(site.folder)
    site.settle()
    away = site.folder.rename(site.registry.layout.root / "away")
    site.step(1)
    assert site.step(1) == {}
    away.rename(site.folder)
    assert site.settle() == {"dropped": "v1"}
    assert site.generation() == 3


def test_a_listing_that_lies_withdraws_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that listings hide is looked for by its name before it is given up."""
    write_adapter(site.folder)
    site.settle()
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [n for n in listdir(path) if n != site.folder.name])
    site.step(1)
    for _ in range(4):
        assert site.step(1) == {"dropped": "v1"}
        assert not site.adopter.waiting()
    monkeypatch.undo()
    site.step(1)
    shutil.rmtree(site.folder)
    site.step(1)
    assert site.adopter.waiting()  # it was seen, so it is missing once, and is looked for soon
    assert site.step(1) == {}


@pytest.mark.parametrize("moved", [False, True])
def test_a_pointer_that_failed_is_written_later(site: Site, moved: bool) -> None:
    """The volume failed between record and pointer: the name follows, unless a person moved it since."""
    write_adapter(site.folder)
    site.settle()
    write_adapter(site.at("v2", "dropped"), seed=1)
    active = str(site.registry.layout.active(site.scope))
    with pytest.MonkeyPatch.context() as patch:
        to_pointer = lambda _, path: str(path).startswith(active)  # noqa: E731
        fail(patch, "link", errno.ENOSPC, times=1 << 30, when=to_pointer)
        assert site.settle() == {"dropped": "v1"}
        assert site.generation("v2") == 1
        assert not site.adopter.waiting()
        assert site.step(adopt.RETRY_S) == {"dropped": "v1"}
    if moved:
        release.promote(site.registry, site.scope, "dropped", "v2", writer="test")
        release.rollback(site.registry, site.scope, "dropped", writer="test")
    assert site.step(adopt.RETRY_S) == {"dropped": "v1" if moved else "v2"}
    assert site.step(adopt.FULL_LOOK_S) == {"dropped": "v1" if moved else "v2"}
    assert not site.adopter.waiting()


def test_an_earlier_revision_whose_pointer_failed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name serves the later one, also once the volume takes pointers again."""

    def full() -> None:
        raise VolumeUnavailable("no space left on device")

    write_adapter(site.at("v2", "dropped"), seed=1)
    site.settle()
    write_adapter(site.folder)
    before_append(monkeypatch, full, to="Pointer")
    assert site.settle() == {"dropped": "v2"}
    assert site.generation("v1") == 1
    assert site.step(adopt.RETRY_S) == {"dropped": "v2"}
    assert site.adopter.refusals() == {}


def test_the_refused_starve_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many refused folders, whose looks take longer than a step, do not keep a good one from adoption."""
    for number in range(30):
        write_adapter(site.at("v1", f"bad-{number}"))
        (site.at("v1", f"bad-{number}") / WEIGHTS).unlink()
    site.settle()
    real = artifacts.look

    def slow(*folder: Any) -> object:
        site.clock.now += adopt.ADOPTING_S / 10
        return real(*folder)

    monkeypatch.setattr(artifacts, "look", slow)
    write_adapter(site.folder)
    assert site.settle() == {"dropped": "v1"}


def test_a_corrected_mode_is_noticed(
    registry: Registry, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused because it might not be read, a folder is tried again though none of its files changed."""
    write_adapter(registry.layout.artifact(AdapterKey(*scope, "v1", "a1")))
    clock, view = Clock(), RegistryView(registry, (scope,))
    adopter = Adopter(registry, Expectation(), settle_s=0.0, writer="test", clock=clock)
    with monkeypatch.context() as patch:
        fail(
            patch,
            "open",
            errno.EACCES,
            times=1 << 30,
            when=lambda path, *_, **__: "adapter_config" in str(path),
        )
        view.refresh(force=True)
        assert not adopter.step(view.desired)
        (why,) = adopter.refusals().values()
        assert "permission" in why
        assert not adopter.waiting()
    clock.now += RETRY_S
    assert adopter.step(view.desired)
    assert adopter.refusals() == {}


def test_refusals_are_told_while_folders_come(site: Site) -> None:
    """Whoever asks is another thread than the one that looks, and is answered all the same."""

    class Refused:
        """A folder that is read of at the moment in which another one comes."""

        @property
        def refused(self) -> str:
            site.adopter._candidates[other] = Candidate("", 0.0, "NotWhole")
            return "NotWhole"

    one, other = (AdapterKey(*site.scope, "v1", name) for name in ("one", "other"))
    site.adopter._candidates[one] = cast("Candidate", Refused())
    assert site.adopter.refusals() == {one: "NotWhole"}
    assert site.adopter.refusals() == {one: "NotWhole", other: "NotWhole"}


def damage(folder: Path) -> None:
    """What a disk that lost its end leaves of every record there."""
    for record in folder.glob("*.@*.json"):
        record.write_bytes(b"")


def test_a_damaged_record_is_no_drop(site: Site, make_adapter: MakeAdapter) -> None:
    """Its files are not adopted and its name is not moved to them, until the record can be read."""
    put(site.registry, site.scope, make_adapter(), name="prod", revision="v1")
    put(site.registry, site.scope, make_adapter("second", 1), name="prod", revision="v2", activate=False)
    record = site.at("v2", "prod.@00000001.json")
    whole = record.read_bytes()
    damage(record.parent)
    late = Site(site.registry, site.scope)
    for _ in range(3):
        assert late.settle() == {"prod": "v1"}
        assert "RecordUnreadable" in late.refusal("prod", "v2")
        assert not late.adopter.waiting()
    record.write_bytes(whole)
    assert late.settle() == {"prod": "v1"}
    assert late.adopter.refusals() == {}
    assert late.generation("v2", "prod") == 1


def test_a_damaged_tombstone_is_no_drop(site: Site, make_adapter: MakeAdapter) -> None:
    """What was withdrawn stays so, though none of its records can be read; readable again, it still does."""
    put(site.registry, site.scope, make_adapter(), name="prod")
    release.unregister(site.registry, site.scope, "prod", writer="test")
    folder = site.at("v1", "prod").parent
    kept = {path: path.read_bytes() for path in folder.glob("*.json")}
    damage(folder)
    late = Site(site.registry, site.scope)
    assert late.settle() == {}
    assert "RecordUnreadable" in late.refusal("prod")
    for path, data in kept.items():
        path.write_bytes(data)
    assert late.settle() == {}
    assert late.adopter.refusals() == {}


@pytest.mark.parametrize("backwards", [False, True])
def test_revisions_that_came_together_are_adopted_in_their_order(
    site: Site, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    """However the filesystem lists them: a rollback goes to the one before."""
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: sorted(real(folder), reverse=backwards))
    for number in (1, 2, 10):
        write_adapter(site.at(f"v{number}", "dropped"), number)
    assert site.settle() == {"dropped": "v10"}
    release.rollback(site.registry, site.scope, "dropped", writer="a person")
    assert site.step() == {"dropped": "v2"}


def test_a_damaged_pointer_is_no_missing_one(site: Site) -> None:
    """A replica that starts with an unreadable pointer does not guess which revision it named."""
    for number in (1, 2):
        write_adapter(site.at(f"v{number}", "dropped"), number)
    assert site.settle() == {"dropped": "v2"}
    release.rollback(site.registry, site.scope, "dropped", writer="a person")
    assert site.step() == {"dropped": "v1"}
    pointers = site.registry.layout.active(site.scope)
    for superseded in (1, 2):
        (pointers / generation_name("dropped", superseded)).unlink()  # as gc does
    damage(pointers)
    fresh = Site(site.registry, site.scope)
    assert fresh.settle() == {}
    assert [path.name for path in pointers.glob("dropped.@*")] == [generation_name("dropped", 3)]
    assert site.step() == {"dropped": "v1"}, "what was read before stays in force"


def test_a_record_not_read_yet_is_waited_for(site: Site, make_adapter: MakeAdapter) -> None:
    """Listed, and neither known nor a problem: nothing is adopted, and nothing is told."""
    put(site.registry, site.scope, make_adapter(), name="prod")
    site.view.refresh(force=True)
    listed = Desired(listings=site.view.desired.listings)
    for _ in range(2):
        site.clock.now += SETTLE_S + adopt.FULL_LOOK_S
        assert not site.adopter.step(listed)
    assert site.adopter.refusals() == {}
    assert site.settle() == {"prod": "v1"}
    assert site.generation("v1", "prod") == 1


def test_a_record_that_no_listing_had(site: Site, make_adapter: MakeAdapter) -> None:
    """A registration that was never announced is found before its folder is adopted."""
    write_adapter(site.folder)
    site.step()
    before = site.view.desired
    put(site.registry, site.scope, site.folder, name="dropped", revision="v1", activate=False)
    site.clock.now += SETTLE_S
    assert not site.adopter.step(before)
    assert site.adopter.refusals() == {}
    assert site.settle() == {}
    assert site.view.desired.records[AdapterKey(*site.scope, "v1", "dropped")].origin == "register"
    assert not site.adopter.waiting()


def test_half_a_record_without_links(tmp_path: Path, scope: Scope) -> None:
    """There a killed adopter leaves one, or half a pointer: the next completes it.

    Beside a record it does not, if the name serves something.
    """
    with pytest.MonkeyPatch.context() as patch:
        without_links(patch)
        site = Site(Registry(tmp_path / "lww", create=True), scope)
    write_adapter(site.folder)
    (site.folder.parent / f"dropped.@00000001.{'a' * 32}.json").write_bytes(b'{"half')
    assert site.settle() == {"dropped": "v1"}
    for pointer in site.registry.layout.active(scope).glob("dropped.@*"):
        pointer.write_bytes(b'{"half')
    site = Site(site.registry, scope)
    assert site.settle() == {"dropped": "v1"}
    write_adapter(site.at("v2", "dropped"), seed=1)
    (site.at("v2", "dropped").parent / f"dropped.@00000001.{'a' * 32}.json").write_bytes(b'{"half')
    assert site.settle() == {"dropped": "v1"}
    assert "RecordUnreadable" in site.refusal("dropped", "v2")


PARTS = [
    ".adapter_config.json.Xy12Ab",
    f".{WEIGHTS}.a0B1c2",
    f"{WEIGHTS}.6eF5b5dA",
    f"{WEIGHTS}.part",
    f"{WEIGHTS}.1a2b3c4d.partial",
    "x.incomplete",
    "x.filepart",
    "x.crdownload",
    "x.aria2",
    "x.tmp",
    "x_.gstmp",
    ".~tmp~",
    ".rsync-partial",
    ".cache/huggingface/download/x.incomplete",
    ".huggingface/download/x.incomplete",
]


@pytest.mark.parametrize("part", PARTS)
def test_an_update_under_way_is_not_adopted(site: Site, part: str) -> None:
    """The new config beside the old weights, and what a transfer leaves: told by its name until that goes."""
    write_adapter(site.folder)
    site.settle()
    left = site.folder / part
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"half")
    write_adapter(site.folder, seed=1)
    assert site.step() == {"dropped": "v1"}
    assert site.refusal() == ""
    for _ in range(2):
        site.settle()
        assert site.generation() == 1
        assert site.refusal().startswith("Unfinished: ")
        assert part in site.refusal()
        assert site.adopter.waiting()
    assert site.step(COPIED_S) == {"dropped": "v1"}
    assert not site.adopter.waiting()
    left.unlink()
    site.settle()
    assert site.generation() == 2
    assert site.adopter.refusals() == {}


@pytest.mark.parametrize(
    "name",
    [
        ".adapter_config.json.swp",
        "partial.txt",
        f"{WEIGHTS}.sha256",
        ".cache/huggingface/download/x.metadata",
    ],
)
def test_other_names_are_no_transfer(site: Site, name: str) -> None:
    """What looks like one from afar, or what a client leaves that is done, keeps nothing from adoption."""
    write_adapter(site.folder)
    (site.folder / name).parent.mkdir(parents=True, exist_ok=True)
    (site.folder / name).touch()
    assert site.settle() == {"dropped": "v1"}


@pytest.mark.parametrize("mark", sorted(transfer_markers.READY_MARKS))
def test_a_mark_overrides_what_a_transfer_left(site: Site, mark: str) -> None:
    """Whoever marks the folder knows better than a name in it."""
    write_adapter(site.folder)
    (site.folder / f"{WEIGHTS}.part").touch()
    (site.folder / mark).touch()
    assert site.step() == {"dropped": "v1"}


def test_a_hub_s_cache_is_not_followed_elsewhere(site: Site, tmp_path: Path) -> None:
    """A link in its place leads to others' names: they are not read, and the folder is adopted."""
    write_adapter(site.folder)
    (tmp_path / "huggingface/download").mkdir(parents=True)
    (tmp_path / "huggingface/download/secret.incomplete").touch()
    (site.folder / ".cache").symlink_to(tmp_path)
    assert site.settle() == {"dropped": "v1"}


def test_a_part_s_name_is_made_fit_to_be_shown(site: Site) -> None:
    """It may be no text, and longer than a terminal."""
    write_adapter(site.folder)
    (site.folder / os.fsdecode(b"\xff\x1b[2J" + b"a" * 200 + b".part")).touch()
    site.settle()
    assert site.refusal().isprintable()
    assert site.refusal().isascii()
    assert len(site.refusal()) < 250


def unreadable(site: Site, patch: pytest.MonkeyPatch) -> None:
    fail(patch, "open", errno.EACCES, times=1 << 30, when=lambda path, *_, **__: path == site.folder)


def unreadable_cache(site: Site, patch: pytest.MonkeyPatch) -> None:
    (site.folder / ".cache").mkdir()
    fail(patch, "open", errno.EACCES, times=1 << 30, when=lambda path, *_, **__: path == ".cache")


def unwritable(site: Site, patch: pytest.MonkeyPatch) -> None:
    fail(patch, "link", errno.EACCES, times=1 << 30)


@pytest.mark.parametrize("trouble", [unreadable, unreadable_cache, unwritable])
def test_what_the_volume_refuses_is_told(
    site: Site,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[Site, pytest.MonkeyPatch], None],
) -> None:
    """A folder that may not be read, or beside which none may write: a condition while it lasts, one line."""
    write_adapter(site.folder)
    with pytest.MonkeyPatch.context() as patch:
        trouble(site, patch)
        for _ in range(3):
            assert site.settle() == {}
            assert site.refusal().startswith("VolumeUnavailable: ")
            assert "ermission denied" in site.refusal()
            assert not site.adopter.waiting()
            site.clock.now += RETRY_S
            assert site.adopter.waiting()
    assert len([line for line in caplog.messages if "adoption of" in line]) == 1
    assert site.settle() == {"dropped": "v1"}
    assert site.adopter.refusals() == {}


def test_a_pointer_that_fails_is_told_once(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Of what a killed adopter left, too: registered, and why the name does not serve it."""
    write_adapter(site.folder)
    site.settle()
    shutil.rmtree(site.registry.layout.active(site.scope))
    late = Site(site.registry, site.scope)
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, "link", errno.ENOSPC, times=1 << 30)
        for _ in range(3):
            assert late.settle() == {}
            assert "registered and not active" in late.refusal()
    assert len([line for line in caplog.messages if "not active" in line]) == 1
    assert late.step(RETRY_S) == {"dropped": "v1"}
    assert late.adopter.refusals() == {}

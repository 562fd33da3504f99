"""A flat store named by NIM_PEFT_SOURCE: what lies there is served, without a change to its layout."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lora_fs.sidecar.model import STORE_STATE, AdapterKey, Quota, Scope
from lora_fs.sidecar.reconcile.watch.flat_store import FlatStore
from lora_fs.sidecar.registry.drops.candidates import QUOTA_RETRY_S, RETRY_S
from lora_fs.sidecar.registry.lifecycle import amend, artifacts, copying, ingest, release
from lora_fs.sidecar.registry.maintenance import gc
from lora_fs.sidecar.registry.maintenance.garbage import What, collect
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.fuzz.test_hostile_folders import swapped_at_open
from tests.registry.conftest import Clock, write_adapter
from tests.registry.test_growth import calls_of
from tests.registry.test_view import names

SCOPE = Scope("default", "tiny")
SETTLE_S = 2.0
WEIGHTS = "adapter_model.safetensors"


class Site:
    """A store, a registry, and two replicas that watch both."""

    def __init__(self, folder: Path) -> None:
        self.store, self.clock = folder / "nim", Clock()
        self.store.mkdir()
        self.registry = Registry(folder / "root", create=True)
        self.view = RegistryView(self.registry, (SCOPE,))
        self.replicas = [self.replica(f"r{number}") for number in range(2)]

    def replica(self, name: str) -> FlatStore:
        return FlatStore(
            self.registry,
            SCOPE,
            self.store,
            Expectation(("tiny",)),
            settle_s=SETTLE_S,
            refresh_s=30.0,
            writer=name,
            desired=lambda: self.view.desired,
            changed=lambda: None,
            clock=self.clock,
        )

    def rounds(self, count: int = 3) -> list[str]:
        """Every replica looks, again and again; returns what is served then."""
        for _ in range(count):
            for one in self.replicas:
                one.step()
                self.view.refresh()
            self.clock.now += SETTLE_S
        return names(self.view)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_namespace_that_requires_evaluations(site: Site) -> None:
    """Each state of a folder is a revision, and none serves by itself. All go with the folder."""
    bounds = {"namespace": SCOPE.namespace, "writer": "t", "updated_at": ""}
    site.registry.accounts.write(Quota.model_validate({**bounds, "require_evaluation": "pass_rate>=0.9"}))

    def present() -> list[str]:
        return sorted(one.revision for one in site.view.desired.records.values() if one.present)

    for seed in range(2):
        write_adapter(site.store / "a", seed=seed)
        assert site.rounds() == []
    assert present() == ["v1", "v2"]
    assert [one.conditions() for one in site.replicas] == [(), ()]
    write_adapter(site.store / "b")
    shutil.rmtree(site.store / "a")
    site.rounds()
    assert {one.name for one in site.view.desired.records.values() if one.present} == {"b"}


def test_a_store_is_served_as_it_lies_there(site: Site) -> None:
    """Its folders are names; each is registered once, whoever looks, and nothing is written to it."""
    for number in range(3):
        write_adapter(site.store / f"a{number}", seed=number)
    (site.store / "README.md").write_text("not a folder")
    (site.store / ".cache").mkdir()
    before = sorted(os.walk(site.store))
    assert site.rounds() == ["a0", "a1", "a2"]
    assert sorted(os.walk(site.store)) == before
    assert {record.generation for record in site.view.desired.records.values()} == {1}
    assert {record.origin for record in site.view.desired.records.values()} == {"import"}


def test_a_report_costs_the_same_however_many_folders_are_refused(site: Site) -> None:
    """Each probe of readiness asks for it, on the event loop. It names the first 20."""
    flat, counts = site.replicas[0], []
    for number in range(80):
        (site.store / f"a{number:02d}").mkdir()
        (site.store / f"a{number:02d}/adapter_config.json").write_text("{}")
        if number + 1 in (40, 80):
            site.rounds()
            counts.append(calls_of(flat.conditions))
    assert [f"/a{number:02d}: " in told for number, told in enumerate(flat.conditions())] == [True] * 20
    assert counts[0] == counts[1], counts


def test_a_folder_that_is_being_written_waits(site: Site) -> None:
    """As long as its files change it is left alone."""
    write_adapter(site.store / "a0")
    for number in range(4):
        (site.store / "a0/adapter_config.json.part").write_text("x" * (number + 1))
        assert site.rounds(1) == []
    (site.store / "a0/adapter_config.json.part").unlink()
    assert site.rounds() == ["a0"]


def test_new_bytes_are_the_next_revision(site: Site) -> None:
    """And what a person rolls back stays so: a state of a folder is registered once."""
    write_adapter(site.store / "a0", seed=0)
    site.rounds()
    write_adapter(site.store / "a0", seed=1)
    site.rounds()
    assert [record.revision for _, _, record in site.view.desired.active()] == ["v2"]
    release.rollback(site.registry, SCOPE, "a0", writer="person")
    site.rounds()
    assert [record.revision for _, _, record in site.view.desired.active()] == ["v1"]


def collected(site: Site) -> list[str]:
    """What repeated runs of gc remove of the history, whatever its age."""
    found = []
    for _ in range(4):
        garbage = gc.find(site.registry, SCOPE, frozenset(), 0.0, history_s=0.0)
        found += [one.path.name for one in garbage if one.what is What.HISTORY]
        collect(garbage)
    site.view.refresh(force=True)
    return found


def test_gc_forgets_no_withdrawal_of_a_folder_that_lies_there(site: Site) -> None:
    """A person withdrew it, and its tombstone is old: it stays withdrawn until its files change, or go."""
    for number in range(2):
        write_adapter(site.store / f"a{number}", seed=number)
    assert site.rounds() == ["a0", "a1"]
    release.unregister(site.registry, SCOPE, "a0", writer="person", all_revisions=True)
    collected(site)
    assert site.rounds() == ["a1"]
    write_adapter(site.store / "a0", seed=7)
    assert site.rounds() == ["a0", "a1"]
    assert "a0.@00000003.json" in collected(site)
    release.unregister(site.registry, SCOPE, "a0", writer="person", all_revisions=True)
    shutil.rmtree(site.store / "a0")
    assert site.rounds() == ["a1"]
    collected(site)
    assert not list(site.registry.layout.root.glob("default/*/*/a0*"))
    assert site.rounds() == ["a1"]


def test_taken_away_is_withdrawn_and_back_is_back(site: Site, tmp_path: Path) -> None:
    """Also when it comes back exactly as it was, as by a `mv` and a `mv` back."""
    for number in range(2):
        write_adapter(site.store / f"a{number}", seed=number)
    site.rounds()
    (site.store / "a1").rename(tmp_path / "away")
    assert site.rounds() == ["a0"]
    (tmp_path / "away").rename(site.store / "a1")
    assert site.rounds() == ["a0", "a1"]


def test_what_a_person_withdrew_stays_withdrawn(site: Site) -> None:
    """Until its folder changes."""
    write_adapter(site.store / "a0", seed=0)
    site.rounds()
    release.unregister(site.registry, SCOPE, "a0", writer="person", all_revisions=True)
    assert site.rounds() == []
    write_adapter(site.store / "a0", seed=1)
    assert site.rounds() == ["a0"]


def test_an_unmounted_store_withdraws_nothing(site: Site) -> None:
    """Not there, or empty, or most of it gone at once: unknown, and said."""
    for number in range(8):
        write_adapter(site.store / f"a{number}", seed=number)
    everything = site.rounds()
    shutil.rmtree(site.store)
    assert site.rounds() == everything
    site.store.mkdir()
    assert site.rounds() == everything
    assert "holds no folder" in site.replicas[0].conditions()[0]
    write_adapter(site.store / "a0", seed=0)
    assert site.rounds() == everything
    assert "7 of 8 adapters went" in site.replicas[0].conditions()[0]


def test_what_came_otherwise_is_left_alone(site: Site, tmp_path: Path) -> None:
    """A name that serves another's revision is not withdrawn with its folder."""
    write_adapter(site.store / "a0", seed=0)
    write_adapter(site.store / "b0", seed=5)
    site.rounds()
    other = write_adapter(tmp_path / "other", seed=9)
    from tests.registry.test_operations import put

    put(site.registry, SCOPE, other, name="a0")
    shutil.rmtree(site.store / "a0")
    assert site.rounds() == ["a0", "b0"]


@pytest.mark.parametrize("name", ["half", "..bad name", "tiny"])
def test_one_bad_folder_stops_no_other(site: Site, name: str) -> None:
    """No weights, a name that is none, the base model's name: refused with the reason, until it changes."""
    write_adapter(site.store / "a0")
    write_adapter(site.store / name.lstrip("."))
    if name == "half":
        (site.store / name / "adapter_model.safetensors").unlink()
    assert site.rounds() == ["a0"]
    (told,) = site.replicas[0].conditions()
    assert told.startswith("NotAdopted: ")
    assert name.lstrip(".") in told


def test_nims_own_variables_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its deployments set them; ours come first."""
    monkeypatch.setenv("NIM_PEFT_SOURCE", "/home/nvs/loras")
    monkeypatch.setenv("NIM_PEFT_REFRESH_INTERVAL", "600")
    settings = Settings()
    assert (str(settings.nim_source), settings.nim_refresh_s) == ("/home/nvs/loras", 600.0)
    monkeypatch.setenv("LORA_FS_NIM_SOURCE", "/ours")
    assert str(Settings().nim_source) == "/ours"


def test_the_label_says_where_it_came_from(site: Site) -> None:
    """People see it in `lora-fs show`."""
    write_adapter(site.store / "a0")
    site.rounds()
    (record,) = site.view.desired.records.values()
    assert len(record.spec.labels[STORE_STATE]) == 32
    assert record.spec.source.uri == (site.store / "a0").as_uri()


@pytest.mark.parametrize("dies", [False, True])
def test_back_after_a_restart_is_back(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Replicas that were not there know that it was taken away, also where one died while withdrawing."""
    for number in range(2):
        write_adapter(site.store / f"a{number}", seed=number)
    site.rounds()
    (site.store / "a1").rename(tmp_path / "away")
    if dies:
        with monkeypatch.context() as patch:
            patch.setattr(release, "unregister", Mock(side_effect=SystemExit))
            with pytest.raises(SystemExit):
                site.rounds()
    else:
        assert site.rounds() == ["a0"]
    site.replicas = [site.replica("new")]
    assert site.rounds() == ["a0"]
    (tmp_path / "away").rename(site.store / "a1")
    assert site.rounds() == ["a0", "a1"]
    release.unregister(site.registry, SCOPE, "a1", writer="person", all_revisions=True)
    assert site.rounds() == ["a0"]


def test_a_touched_folder_keeps_what_people_said(site: Site) -> None:
    """The same bytes with other times: an operator's labels stay, and so does a rollback."""
    for seed in range(2):
        write_adapter(site.store / "a0", seed=seed)
        site.rounds()
    key = AdapterKey(*SCOPE, "v2", "a0")
    amend.amend(site.registry, SCOPE, "a0", [amend.with_labels({"team": "sql"})], writer="person")
    release.rollback(site.registry, SCOPE, "a0", writer="person")
    os.utime(site.store / "a0/adapter_config.json", (1, 1))
    site.rounds()
    assert site.view.desired.records[key].spec.labels["team"] == "sql"
    assert [record.revision for _, _, record in site.view.desired.active()] == ["v1"]
    generation = site.view.desired.records[key].generation
    site.rounds()
    assert site.view.desired.records[key].generation == generation


def test_a_folder_that_cannot_be_listed_stops_no_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported and tried again; the folders behind it are adopted, and those taken away withdrawn."""
    for number in range(3):
        write_adapter(site.store / f"a{number}", seed=number)
    real, closed = os.open, str(site.store / "a0")

    def denied(path: Any, *args: Any, **more: Any) -> int:
        if str(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        assert site.rounds() == ["a1", "a2"]
        assert f"NotAdopted: {closed}: VolumeUnavailable: " in site.replicas[0].conditions()[0]
        shutil.rmtree(site.store / "a2")
        assert site.rounds() == ["a1"]
    site.clock.now += RETRY_S
    assert site.rounds() == ["a0", "a1"]


def test_a_folder_beyond_the_quota_is_adopted_when_there_is_room(site: Site) -> None:
    """A quota that was raised is seen without a change to the files."""
    write_adapter(site.store / "a0", seed=0)
    write_adapter(site.store / "a1", seed=1)
    site.registry.accounts.write(Quota(namespace="default", adapters=1, writer="person", updated_at=""))
    assert site.rounds() == ["a0"]
    assert "OverQuota" in site.replicas[0].conditions()[0]
    site.registry.accounts.write(Quota(namespace="default", adapters=2, writer="person", updated_at=""))
    site.clock.now += QUOTA_RETRY_S
    assert site.rounds() == ["a0", "a1"]


def test_a_symlink_and_a_transfer_are_told_of(site: Site, tmp_path: Path) -> None:
    """As of a dropped folder: neither is adopted, and neither in silence."""
    write_adapter(site.store / "a0")
    (site.store / "a1").symlink_to(write_adapter(tmp_path / "other", seed=1))
    write_adapter(site.store / "a2", seed=2)
    (site.store / "a2/.adapter_model.safetensors.x8Kd2q").write_text("rsync")
    assert site.rounds() == ["a0"]
    told = site.replicas[0].conditions()
    assert [one.split(": ")[2] for one in told] == ["SymbolicLink", "Unfinished"]


@pytest.mark.parametrize("number", range(1, 6))
def test_a_folder_that_is_a_link_at_the_moment_it_is_opened(site: Site, tmp_path: Path, number: int) -> None:
    """What lies behind the link is never read for the folder, which is registered as what it is."""
    secret, mine = write_adapter(tmp_path / "secret", seed=99), write_adapter(site.store / "mine", seed=1)
    own = artifacts.digest_of(artifacts.hash_files(mine, ["adapter_config.json", WEIGHTS]))
    with swapped_at_open(mine, secret, number) as opened:
        site.rounds()
    assert len(opened) >= number
    site.clock.now += RETRY_S
    assert site.rounds() == ["mine"]
    assert {record.spec.digest for record in site.view.desired.records.values()} == {own}


def test_a_folder_that_changes_while_it_is_read_is_not_registered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may be of two states; it is registered once it held still again."""
    write_adapter(site.store / "a0", seed=0)
    real, changed = copying.judged, list[Path]()

    def judged(*args: Any, **more: Any) -> Any:
        if not changed:
            changed.append(write_adapter(site.store / "a0", seed=1))
        return real(*args, **more)

    monkeypatch.setattr(ingest, "judged", judged)
    assert site.rounds(2) == []
    assert changed
    site.clock.now += RETRY_S
    assert site.rounds() == ["a0"]
    assert [record.revision for record in site.view.desired.records.values()] == ["v1"]

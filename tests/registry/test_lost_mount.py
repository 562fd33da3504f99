"""A mount lost at any call of a writer: nothing begins in the folder where it was, and nothing is lost."""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import LoraFsError, RegistryLost, TemporaryError
from lora_fs.sidecar.model import AdapterKey, Quota
from lora_fs.sidecar.registry.backup import export
from lora_fs.sidecar.registry.format.layout import LEASES
from lora_fs.sidecar.registry.store import evaluations, head, writer
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView
from lora_fs.sidecar.registry.volume import atomic, leases
from tests.crash import acts
from tests.crash.acts import ACTS, SCOPE, Stage
from tests.registry.conftest import MakeAdapter
from tests.registry.faults import CALLS
from tests.registry.test_evaluations import evaluation
from tests.registry.test_operations import put

SHORT = 30  # calls of an act in short mode

modes = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["short", "long"]
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause of a writer that looks again."""
    monkeypatch.setattr(atomic, "UNLINK_AFTER_S", 0.0)
    monkeypatch.setattr(atomic, "READ_BACK_S", (0.0,))
    monkeypatch.setattr(head, "CHECK_AFTER_S", 0.0)
    monkeypatch.setattr(leases, "ABANDONED_S", 0.0)
    monkeypatch.setattr(writer, "LEASE_WAIT_S", 0.02)


class Mount:
    """A folder that another one, empty, takes the place of, as where a volume was unmounted."""

    def __init__(self, root: Path) -> None:
        self.root, self.away, self.empty = root, root.with_name("away"), root.with_name("empty")
        self.lost = False

    def lose(self) -> None:
        self.root.rename(self.away)
        self.root.mkdir()
        self.lost = True

    def back(self) -> list[str]:
        """Mount it again; returns what lies in the folder below."""
        self.root.rename(self.empty)
        self.away.rename(self.root)
        return sorted(str(path.relative_to(self.empty)) for path in self.empty.rglob("*"))


def calls_of(act: Callable[[], object], mount: Mount | None = None, lost_at: int = 0) -> int:
    """Run ``act``, and lose the mount before its call on files of that number; returns how many it made."""
    this, made = threading.get_ident(), 0

    def counted(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += threading.get_ident() == this
        if mount is not None and made == lost_at and not mount.lost:
            mount.lose()
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for call in CALLS:
            patch.setattr(os, call, partial(counted, getattr(os, call)))
        act()
    return made


def each_call(folder: Path, staged: Stage, act: Callable[[Registry], object], every: bool) -> Iterator[Path]:
    """Lose the mount at each call of the act in turn, or at some; yields the volume, mounted again."""
    registry = Registry(staged.copy(folder / "undisturbed"))
    made = calls_of(partial(act, registry))
    registry.close()
    assert made > SHORT
    for number in range(1, made + 1) if every else sorted({1 + made * n // SHORT for n in range(SHORT)}):
        (folder / str(number)).mkdir()
        root = staged.copy(folder / str(number) / "root")
        registry, mount = Registry(root), Mount(root)
        try:
            calls_of(partial(act, registry), mount, number)
        except (TemporaryError, RegistryLost):
            assert mount.lost
        except LoraFsError as error:
            error.add_note(f"lost at call {number}")
            raise
        below = mount.back()
        registry.close()
        for lock in (root / LEASES).glob("*.lock"):
            lock.unlink()  # as after LEASE_S: its holder could not release it
        # filelock makes the folder of a lockfile, and a look before it leaves a moment.
        assert not [one for one in below if not one.startswith(LEASES)], f"lost at call {number}: {below}"
        yield root


@pytest.fixture(params=ACTS)
def staged(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    return acts.stage(tmp_path / "stage", request.param)


@modes
def test_no_registry_begins_where_one_was(staged: Stage, tmp_path: Path, every: bool) -> None:
    """Old or new when it is mounted again, and never told to be absent; the next one completes it."""
    for root in each_call(tmp_path, staged, staged.act, every):
        assert acts.look(root).served in (staged.before.served, staged.after.served)
        staged.again(root)
        assert acts.look(root) == staged.after


@modes
def test_nor_by_what_is_beside_the_records(tmp_path: Path, every: bool) -> None:
    """A quota and an evaluation lie in folders of their own."""

    def both(registry: Registry) -> None:
        registry.accounts.write(Quota(namespace="default", keep_revisions=3, writer="test", updated_at=""))
        evaluations.write(registry, evaluation(AdapterKey(*SCOPE, "v1", "a1")))

    staged = acts.stage(tmp_path / "stage", "register again")
    for root in each_call(tmp_path, staged, both, every):
        both(Registry(root))
        assert Registry(root).accounts.quota("default") is not None


@pytest.mark.parametrize("first", [True, False], ids=["first look", "later look"])
def test_a_reader_takes_no_lost_volume_for_an_empty_one(tmp_path: Path, first: bool) -> None:
    """Lost at any call of a look: it fails, or what is desired is as before."""
    staged = acts.stage(tmp_path / "stage", "promote")
    for number in range(1, sys.maxsize):
        (tmp_path / str(number)).mkdir()
        root = staged.copy(tmp_path / str(number) / "root")
        mount, view, failed = Mount(root), RegistryView(Registry(root), (SCOPE,)), False
        if not first:
            view.refresh()
        try:
            made = calls_of(partial(view.refresh, force=True), mount, number)
        except (TemporaryError, RegistryLost):
            failed = True
        served = [(name, record.revision) for _, name, record in view.desired.active()]
        assert (failed and first) or served == [("a1", "v2")], f"lost at call {number}"
        if not mount.lost:
            assert made < number
            return


def test_away_for_one_listing(
    registry: Registry, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume that is back when its marker is looked at has no empty folder, and no empty backup."""
    put(registry, SCOPE, make_adapter())
    real, looks = os.listdir, [0, 0]

    def listed(folder: Path) -> list[str]:
        looks[1] += 1
        if looks[0] != looks[1]:
            return real(folder)
        if folder == registry.layout.root:
            return []
        raise FileNotFoundError(errno.ENOENT, "an empty mount point has no such folder", str(folder))

    monkeypatch.setattr(os, "listdir", listed)
    while looks[0] <= looks[1]:
        looks[:] = looks[0] + 1, 0
        done = export.write(registry, registry.scopes(), io.BytesIO(), artifacts=True)
        assert (done.records, done.pointers, done.adapters) == (1, 1, 1), f"listing {looks[0]}"

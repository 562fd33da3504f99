"""A source that is held open: what lies on its way, and what the volume answers."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import LoraFsError, VolumeUnavailable
from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.artifacts import SymbolicLink
from lora_fs.sidecar.registry.lifecycle.copying import Held
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.registry import faults
from tests.registry.conftest import write_adapter


@pytest.fixture
def passage() -> Iterator[Path]:
    """A folder that may be passed and not listed, with an empty adapter in it; root is nobody meanwhile."""
    with tempfile.TemporaryDirectory() as made:
        top, me = Path(made).resolve(), os.geteuid()
        (top / "a1").mkdir()
        top.chmod(0o311)
        try:
            if me == 0:
                os.seteuid(65534)
            yield top
        finally:
            os.seteuid(me)
            top.chmod(0o700)


def test_a_folder_on_the_way_need_not_be_listable(passage: Path) -> None:
    """A source is opened below a folder that may only be passed, as a shared scratch's top often is."""
    with pytest.raises(PermissionError):
        os.listdir(passage)

    with Held.opened(passage / "a1", "a1", follow=False) as held:
        assert held.fingerprint is not None


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_volume_that_does_not_answer_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A volume that answers neither an open nor a look for links is unavailable, and nothing else."""
    (tmp_path / "a1").mkdir()
    faults.fail(monkeypatch, "open", code, when=lambda path, *_, **__: str(path).endswith("a1"), times=9)
    for call in ("lstat", "stat"):
        faults.fail(monkeypatch, call, code, when=lambda path, *_, **__: str(path).endswith("a1"), times=9)

    with (
        pytest.raises(VolumeUnavailable, match="cannot open"),
        Held.opened(tmp_path / "a1", "", follow=False),
    ):
        pass


def _fifo(place: Path) -> None:
    os.mkfifo(place)


def _link(place: Path) -> None:
    place.symlink_to(place.parent)


@pytest.mark.parametrize(("put", "refusal"), [(_fifo, VolumeUnavailable), (_link, SymbolicLink)])
def test_what_is_no_folder_is_refused_at_once(
    tmp_path: Path, put: Callable[[Path], None], refusal: type[LoraFsError]
) -> None:
    """A FIFO or a link in a source's place, or on its way, is refused, and no handle stays open."""
    put(tmp_path / "a1")
    before = os.listdir("/proc/self/fd")

    for source in (tmp_path / "a1", tmp_path / "a1" / "b"):
        with pytest.raises(refusal), Held.opened(source, "a1", follow=False):
            pass

    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("proc", [True, False])
def test_a_folder_behind_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proc: bool
) -> None:
    """A folder is not opened behind a link, and is opened without one, also where no /proc says its path."""
    (tmp_path / "real" / "a1").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    if not proc:
        faults.fail(monkeypatch, "readlink", errno.ENOENT, times=9)

    with Held.opened(tmp_path / "real" / "a1", "a1", follow=False) as held:
        assert held.fingerprint is not None
    with pytest.raises(SymbolicLink), Held.opened(tmp_path / "link" / "a1", "a1", follow=False):
        pass


def test_a_close_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was wanted of a source is read by then."""
    (tmp_path / "a1").mkdir()
    close = os.close

    def failing(handle: int) -> None:
        close(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", failing)
    with Held.opened(tmp_path / "a1", "a1", follow=False):
        pass


def test_a_link_to_its_own_place_is_registered(registry: Registry, scope: Scope, tmp_path: Path) -> None:
    """A folder in its place is registered there, too, where the caller names it by a link elsewhere."""
    home = write_adapter(registry.layout.artifact(AdapterKey(*scope, "v1", "a1")))
    alias = tmp_path / "elsewhere" / str(scope) / "v1" / "a1"
    alias.parent.mkdir(parents=True)
    alias.symlink_to(home)

    wanted = Registration("a1", alias, alias.as_uri(), revision="v1")
    done = ingest.register(registry, scope, wanted, Expectation(), writer="test")

    assert (done.changed, done.record.spec.path) == (True, f"{scope}/v1/a1")

"""What processes that share a stage folder know of each other, whatever becomes of the file they lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.reconcile.stage import lock as locking
from lora_fs.sidecar.reconcile.stage.lock import FILE, FolderLock

COPY, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def here(tmp_path: Path) -> Iterator[FolderLock]:
    """A process that shares the folder. Another object has its own open file, as another process does."""
    lock = FolderLock(tmp_path)
    lock.open("prod/base")
    yield lock
    lock.close()


@pytest.fixture
def there(tmp_path: Path) -> Iterator[FolderLock]:
    lock = FolderLock(tmp_path)
    yield lock
    lock.close()


def test_a_lock_file_that_is_made_anew_says_whose_the_folder_is(
    here: FolderLock, there: FolderLock, tmp_path: Path
) -> None:
    """A process that comes later shares the folder if it has the same owner, and not otherwise."""
    (tmp_path / FILE).unlink()
    with here.room():
        pass
    there.open("prod/base")
    there.close()
    with pytest.raises(InputError, match="in use for prod/base"):
        there.open("staging/base")


@pytest.mark.parametrize(
    "owner", ["/root, base of " + ", ".join(f"tenant-{n}" for n in range(999)), "\udcff"]
)
def test_an_owner_of_any_text(tmp_path: Path, owner: str) -> None:
    """Of many namespaces, and of a root whose name is no UTF-8."""
    locks = [FolderLock(tmp_path) for _ in range(2)]
    for lock in locks:
        lock.open(owner)
    for lock in locks:
        lock.close()


def test_a_lock_file_that_is_made_anew_keeps_who_makes_a_copy(
    here: FolderLock, there: FolderLock, tmp_path: Path
) -> None:
    """Nobody takes a copy that is being made for what a dead process left."""
    there.open("prod/base")
    assert here.make(COPY)
    (tmp_path / FILE).unlink()
    for lock in (here, there):
        with lock.room():
            pass
    assert there.is_made(COPY)
    here.made(COPY)
    assert not there.is_made(COPY)


def test_who_hangs_with_the_room_is_not_waited_for_for_ever(
    here: FolderLock, there: FolderLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or another thread of this one; and who was closed meanwhile gets nothing."""
    monkeypatch.setattr(locking, "ROOM_S", 0.05)
    there.open("prod/base")
    with there.room():
        for waiter in (here, there):
            with pytest.raises(OSError, match="busy"), waiter.room():
                pass
    with here.room():
        pass
    here.close()
    with pytest.raises(OSError, match="shutdown"), here.room():
        pass


def test_who_uses_a_copy_waits_for_its_removal(here: FolderLock) -> None:
    """Whoever removes it, this process as well: the copy is not looked for while it still lies there."""
    settled = threading.Event()

    def look() -> None:
        here.settle(COPY)
        settled.set()

    with here.removing(COPY) as alone:
        assert alone
        here.use({COPY})
        looking = threading.Thread(target=look)
        looking.start()
        assert not settled.wait(0.3)
    looking.join(5)
    assert settled.is_set()


def test_who_no_longer_uses_a_copy_waits_for_nothing(here: FolderLock, there: FolderLock) -> None:
    """It keeps no lock either: another process may remove the copy."""
    there.open("prod/base")
    with there.removing(COPY):
        here.use({COPY})
        looking = threading.Thread(target=here.settle, args=(COPY,))
        looking.start()
        here.use({OTHER})
    looking.join(5)
    assert not looking.is_alive()
    with there.removing(COPY) as alone:
        assert alone


def test_a_copy_is_the_same_wherever_a_process_has_the_folder(here: FolderLock, there: FolderLock) -> None:
    """Two containers may mount it elsewhere. Another name of the same bytes is another copy, as are other
    bytes of the same name."""
    there.open("prod/base")
    here.use({f"/stage/{COPY}/sql"})
    for copy, is_free in ((f"{COPY}/sql", False), (f"{COPY}/chat", True), (f"{OTHER}/sql", True)):
        with there.removing(f"/mnt/stage/{copy}") as alone:
            assert alone is is_free

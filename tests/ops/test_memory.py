"""Memory for slabs: large pages, one piece touched ahead, and everything given back."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch

from lora_fs.kernels.memory import host as memory
from lora_fs.kernels.memory.host import HUGE_PAGE_BYTES, HostMemory

SIZE = 3 * HUGE_PAGE_BYTES + 4096


def mappings() -> dict[range, dict[str, set[str]]]:
    """This process's memory, and what the kernel tells of each piece."""
    found: dict[range, dict[str, set[str]]] = {}
    here = range(0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first.endswith(":"):
            found[here][first[:-1]] = set(rest)
        else:
            here = range(*(int(end, 16) for end in first.split("-")))
            found[here] = {}
    return found


def mapping_of(data: torch.Tensor) -> dict[str, set[str]]:
    (told,) = [told for where, told in mappings().items() if data.data_ptr() in where]
    return told


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PAUSE_S", 0)


def test_it_is_in_huge_pages_and_goes_back_to_the_system() -> None:
    """A mapping of its own, which the kernel may fill with large pages, ends with its tensor."""
    data = HostMemory().empty(SIZE // 4, torch.float32)
    assert data.nbytes == SIZE
    address = data.data_ptr()
    assert "hg" in mapping_of(data)["VmFlags"], "madvise(MADV_HUGEPAGE)"
    del data
    assert not any(address in where for where in mappings())


def test_a_small_piece_is_of_the_heap() -> None:
    """A mapping for each of many small adapters would cost more than it gives; nothing is kept for them."""
    host = HostMemory()
    host.prepare(HUGE_PAGE_BYTES - 4, SIZE)
    assert host._spare is None
    assert host.empty(10, torch.bfloat16).shape == (10,)


@pytest.mark.parametrize("wanted", [SIZE, HUGE_PAGE_BYTES, 2 * SIZE])
def test_what_lies_ready_is_what_the_next_gets(wanted: int) -> None:
    """Touched before it is asked for, whatever its size; the next after it is new."""
    host = HostMemory()
    host.prepare(SIZE, SIZE)
    data = host.empty(wanted // 2, torch.bfloat16)
    assert data.nbytes == wanted
    told = mapping_of(data)
    resident_kib = int(next(iter(told["Rss"] - {"kB"})))
    assert resident_kib * 1024 >= min(wanted, SIZE), "it is touched"
    data.fill_(1.5)
    other = host.empty(wanted // 2, torch.bfloat16)
    assert not other.any(), "memory of its own, and the system's zeros"
    assert bool((data == 1.5).all())


def test_who_asks_meanwhile_does_not_wait_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what is touched so far, and the touching ends."""
    host, touched, go_on = HostMemory(), threading.Event(), threading.Event()

    def pause(_: float) -> None:
        touched.set()
        assert go_on.wait(10)

    monkeypatch.setattr("time.sleep", pause)
    thread = threading.Thread(target=host.prepare, args=(SIZE, SIZE))
    thread.start()
    assert touched.wait(10)
    data = host.empty(SIZE // 4, torch.float32).fill_(0.1)  # whose bytes are all others than zero
    go_on.set()
    thread.join(10)
    assert not thread.is_alive()
    assert data.nbytes == SIZE
    assert bool((data == torch.tensor(0.1)).all()), "nobody touches what is somebody's"
    assert host._spare is None


def test_what_lies_ready_can_be_given_back() -> None:
    host = HostMemory()
    host.prepare(SIZE, SIZE)
    address = torch.frombuffer(host._spare, dtype=torch.uint8).data_ptr()
    assert any(address in where for where in mappings())
    host.drop()
    assert not any(address in where for where in mappings())


@pytest.mark.parametrize(("size", "room", "kept"), [(4096, SIZE, True), (4096, SIZE - 1, False)])
def test_what_lies_ready_takes_no_more_than_there_is_room_for(size: int, room: int, kept: bool) -> None:
    """Small adapters, which do not use it, fill the budget: it goes when the two would be over it."""
    host = HostMemory()
    host.prepare(SIZE, SIZE)
    host.prepare(size, room)
    assert (host._spare is not None) is kept


def test_nothing_is_made_ready_where_there_is_no_room() -> None:
    host = HostMemory()
    host.prepare(SIZE, SIZE - 1)
    assert host._spare is None


@pytest.mark.parametrize(("pages", "pause_s"), [(4, 0.05), (40, 0.025)])
def test_it_lasts_no_longer_than_a_process_may_wait_at_its_end(
    monkeypatch: pytest.MonkeyPatch, pages: int, pause_s: float
) -> None:
    """A large piece is touched without long pauses, a small one with them."""
    pauses: list[float] = []
    monkeypatch.setattr(memory, "PAUSE_S", 0.05)
    monkeypatch.setattr("time.sleep", pauses.append)
    HostMemory().prepare(pages * HUGE_PAGE_BYTES, pages * HUGE_PAGE_BYTES)
    assert pauses == [pause_s] * pages


def test_what_cannot_grow_is_taken_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a system has no way to move a mapping."""

    class Fixed(mmap.mmap):
        def resize(self, _: int) -> None:
            raise SystemError("mmap: resizing not available--no mremap()")

    monkeypatch.setattr(mmap, "mmap", Fixed)
    host = HostMemory()
    host.prepare(HUGE_PAGE_BYTES, SIZE)
    assert host.empty(SIZE // 4, torch.float32).nbytes == SIZE

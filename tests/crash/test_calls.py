"""What a registration asks of a volume, counted by strace: its calls, its reads, its listings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.format.layout import MARKER
from lora_fs.sidecar.registry.store.writer import Registry
from tests.crash import tracing
from tests.registry.conftest import write_adapter
from tests.registry.test_operations import put

SCOPE = Scope("default", "tiny")
MOST_CALLS = 127  # what the order of steps before this one took in a scope that is there
MOST_READ = 1.05  # times the source's bytes
LOCAL = ("close(", "lseek(", "ioctl(", "fcntl(")  # no server is asked for these
READS = re.compile(r"(?:read|pread64|preadv2?|copy_file_range|sendfile)\((.*)\) = ([0-9]+)")

pytestmark = pytest.mark.usefixtures("at_once")


def traced(root: Path, source: Path, scratch: Path, name: str = "new") -> tuple[str, ...]:
    """The calls of one registration."""
    options = ["-e", f"trace={tracing.TRACED},copy_file_range,sendfile"]
    outcome = tracing.run(root, lambda registry: put(registry, SCOPE, source, name), scratch, options)
    assert outcome.raised is None
    return outcome.trace


def on_the_volume(root: Path, trace: tuple[str, ...]) -> list[str]:
    """The calls that a network filesystem may have to ask its server about."""
    calls = [point.text for point in tracing.points(root, trace)]
    return [call for call in calls if not call.startswith(LOCAL) and "AT_EMPTY_PATH" not in call]


def read_of(folder: Path, trace: tuple[str, ...]) -> int:
    """The bytes that were read of a folder's files."""
    found = (READS.match(line) for line in trace)
    return sum(int(one[2]) for one in found if one is not None and f"<{folder}/" in one[1])


@pytest.mark.parametrize("what", ["an empty registry", "a new name", "the next revision"])
def test_calls_are_bounded(scratch: Path, what: str) -> None:
    """Of one registration, the marker is read once, and a server is asked no more often than before."""
    root, source = scratch / "root", write_adapter(scratch / "source", 1)
    registry = Registry(root, create=True)
    if what != "an empty registry":
        put(registry, SCOPE, write_adapter(scratch / "first"), "new" if "revision" in what else "other")
    registry.close()
    trace = traced(root, source, scratch)
    calls = on_the_volume(root, trace)
    assert len(calls) <= MOST_CALLS
    assert sum(MARKER in call and call.startswith("openat(") for call in calls) == 1
    print(f"{what}: {len(calls)} calls")


@pytest.mark.parametrize("again", [False, True])
def test_the_source_is_read_once(scratch: Path, again: bool) -> None:
    """Of an adapter of 4 MB, also where the name serves another revision of the same size."""
    root, source = scratch / "root", write_adapter(scratch / "source", 1, rank=32_768)
    registry = Registry(root, create=True)
    if again:
        put(registry, SCOPE, write_adapter(scratch / "first", rank=32_768), "new")
    registry.close()
    size = sum(path.stat().st_size for path in source.iterdir())
    read = read_of(source, traced(root, source, scratch))
    assert size <= read <= MOST_READ * size


def test_names_of_other_revisions_cost_no_call(scratch: Path) -> None:
    """A scope of 200 names asks a server as often as one of 2 names in as many revisions."""
    counts = []
    for number in (2, 200):
        root, source = scratch / f"root-{number}", write_adapter(scratch / "source", 1)
        registry = Registry(root, create=True)
        first = write_adapter(scratch / "first")
        for each in range(number):
            put(registry, SCOPE, first, f"other-{each}", revision=f"v{each % 2}")
        registry.close()
        counts.append(len(on_the_volume(root, traced(root, source, scratch))))
    assert counts[0] <= counts[1] <= counts[0] + 4  # a listing of more names takes one more call

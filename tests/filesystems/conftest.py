"""Each real filesystem, up once for all tests of it; what does not run here is told, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.conformance import QUICK, Verdict, examine
from tests.filesystems.rigs import REQUIRED, RIGS, Mounted, mounted, required, why_not

_not_run: dict[str, str] = {}


def skip_or_fail(name: str) -> None:
    """Skip a test of a filesystem that cannot run here; fail it where the filesystem is required."""
    reason = why_not(name)
    if reason is None:
        return
    if name in required():
        pytest.fail(f"{name} is in {REQUIRED} and cannot run: {reason}", pytrace=False)
    _not_run[name] = reason
    pytest.skip(f"{name} cannot run here: {reason}")


@pytest.fixture(scope="session", params=RIGS)
def volume(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """Two mounts of a real filesystem."""
    name: str = request.param
    skip_or_fail(name)
    folder: Path = tmp_path_factory.mktemp(name)
    with mounted(name, folder) as up:
        yield up


@pytest.fixture(scope="session")
def verdict(volume: Mounted) -> Verdict:
    """What the conformance suite finds on the two mounts as they come."""
    return volume.run(examine, *volume.pair(), QUICK)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which filesystems did not run, so that nobody takes silence for a pass."""
    for name, reason in _not_run.items():
        terminalreporter.write_line(f"filesystem NOT RUN: {name}: {reason}")

"""Which tests share a process where several run side by side (`make test`)."""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# What boots engines or mounts filesystems for all the tests of its folder; engines one folder at a time.
TOGETHER = {"tests/e2e": "engines", "tests/engine": "engines", "tests/filesystems": "filesystems"}


class ByFixtures(LoadScopeScheduling):  # type: ignore[misc]
    """A folder's tests, or a file's, go to one process: fixtures of a session are made there alone."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return TOGETHER.get("/".join(file.split("/")[:2]), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFixtures:
    """Instead of ``--dist``."""
    return ByFixtures(config, log)

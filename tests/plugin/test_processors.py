"""Where steps run is read as vLLM writes it, and who keeps off runs nowhere else than there was."""

from __future__ import annotations

import os
import threading

import pytest
from vllm.utils.ompmultiprocessing import OMPProcessManager

from lora_fs.worker_patch import processors

ALL = frozenset(os.sched_getaffinity(0))


@pytest.mark.parametrize("openmp", ["iomp", "gomp", "another"])
@pytest.mark.parametrize("bound", [[0], [1, 2, 13]], ids=str)
def test_what_vllm_writes_is_read(openmp: str, bound: list[int]) -> None:
    manager = OMPProcessManager.__new__(OMPProcessManager)
    manager.skip_setup, manager.cpu_lists = False, [[99], bound]
    manager.use_iomp, manager.use_gomp = openmp == "iomp", openmp == "gomp"
    assert not processors.of_steps()
    with manager.configure_omp_envs(rank=1, local_rank=1):
        assert processors.of_steps() == set(bound)
    assert not processors.of_steps()


@pytest.mark.parametrize(
    "environ",
    [{}, {"OMP_PLACES": "cores"}, {"GOMP_CPU_AFFINITY": "0-3:2"}, {"KMP_AFFINITY": "compact,1,0"}],
    ids=str,
)
def test_a_binding_that_is_not_vllms_is_none(environ: dict[str, str]) -> None:
    """An operator's own may say anything; nothing is guessed from it."""
    assert processors.of_steps(environ) == frozenset()


def after_keeping_off(steps: set[int], like: int) -> set[int]:
    found: list[set[int]] = []

    def run() -> None:
        processors.keep_off(steps, like)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_who_keeps_off_runs_elsewhere() -> None:
    first = min(ALL)
    assert after_keeping_off({first}, os.getpid()) == (ALL - {first} or ALL)
    assert os.sched_getaffinity(0) == ALL


def test_where_steps_run_everywhere_so_does_the_rest() -> None:
    assert after_keeping_off(set(ALL), os.getpid()) == ALL


def test_a_process_that_is_gone_changes_nothing() -> None:
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    assert after_keeping_off({min(ALL)}, gone) == ALL

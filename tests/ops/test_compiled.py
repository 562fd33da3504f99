"""What the compiler makes of every shipped configuration, on sm_90 and sm_80, with or without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lora_fs.kernels.gpu.configs import SHRINK_WAVES

# Of an H100, for one block; and of an A100.
SHARED_LIMIT = 227 * 1024
SHARED_LIMIT_80 = 163 * 1024
HALF = ("bfloat16", "float16")


def compile_for(capability: int, cache: Path) -> list[dict[str, Any]]:
    spec = find_spec("triton")
    binaries = Path(spec.origin if spec and spec.origin else "").parent / "backends/nvidia/bin"
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not (binaries / name).exists()]
    if missing:
        pytest.skip(f"this installation of Triton comes without {', '.join(missing)}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    answer = subprocess.run(
        [sys.executable, Path(__file__).with_name("compiled.py"), str(capability)],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found: list[dict[str, Any]] = json.loads(answer.stdout)
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compile_for(90, tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def kernels(compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernels that compute, without those that fill vLLM's stacks."""
    return [kernel for kernel in compiled if "ROWS" in kernel]


def regular(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of layers whose rows are whole vectors."""
    return [kernel for kernel in kernels if "odd" not in kernel["name"]]


def decoding(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [kernel for kernel in regular(kernels) if kernel["ROWS"] == 16]


def test_nothing_spills(compiled: list[dict[str, Any]]) -> None:
    """No configuration keeps anything on a stack."""
    assert {kernel["name"]: kernel["stack"] for kernel in compiled if kernel["stack"]} == {}
    assert not [kernel["name"] for kernel in compiled if {"STL", "LDL"} & kinds(kernel)]
    assert sum("scatter" in kernel["name"] for kernel in compiled) == 4


def test_an_a100_has_room_for_each(tmp_path: Path) -> None:
    """On sm_80 nothing spills, tiles fit, loads are vectors, and a decoding shrink's programs run at once."""
    compiled = compile_for(80, tmp_path)
    assert {kernel["name"]: kernel["stack"] for kernel in compiled if kernel["stack"]} == {}
    assert not [
        kernel["name"] for kernel in compiled if {"STL", "LDL", "ATOM", "ATOMG", "RED"} & kinds(kernel)
    ]
    assert {kernel["name"] for kernel in compiled if kernel["shared"] > SHARED_LIMIT_80} == set()
    kernels = regular([kernel for kernel in compiled if "ROWS" in kernel])
    of_rows = [kernel for kernel in kernels if "embedding" not in kernel["name"]]
    assert {kernel["name"]: narrow(kernel) for kernel in of_rows if narrow(kernel)} == {}
    shrinks = [kernel for kernel in decoding(kernels) if kernel["name"].startswith("shrink")]
    assert shrinks
    assert {kernel["name"] for kernel in shrinks if resident(kernel) < SHRINK_WAVES} == set()


def test_a_decoding_shrinks_programs_run_at_once(kernels: list[dict[str, Any]]) -> None:
    """Registers leave room on a processor for all the programs that a shrink starts for it."""
    shrinks = [kernel for kernel in decoding(kernels) if kernel["name"].startswith("shrink")]
    room = {kernel["name"]: resident(kernel) for kernel in shrinks}
    assert room
    assert {name: programs for name, programs in room.items() if programs < SHRINK_WAVES} == {}


def test_only_an_early_launch_asks_for_one(kernels: list[dict[str, Any]]) -> None:
    """Not every device's launches know of it: HIP's do not."""
    early = {kernel["name"] for kernel in kernels if "early" in kernel["name"] and kernel["EARLY"]}
    asked = {kernel["name"] for kernel in kernels if "launch_pdl" in kernel}
    assert asked == {name for name in early if name.startswith("expand")}
    assert asked


def test_shared_memory_leaves_room_for_two(kernels: list[dict[str, Any]]) -> None:
    """Every tile fits; in a decoding step at least four programs share a processor."""
    assert {kernel["name"] for kernel in kernels if kernel["shared"] > SHARED_LIMIT} == set()
    assert {kernel["name"] for kernel in decoding(kernels) if kernel["shared"] > SHARED_LIMIT // 4} == set()


def test_decoding_loads_vectors(kernels: list[dict[str, Any]]) -> None:
    """x, A, B and y are read 16 bytes at a time, and half types never one by one."""
    for kernel in decoding(kernels):
        wide = {"LDG 128", "LDGSTS 128"} & set(kernel["operations"])
        assert wide, kernel["name"]
        # The z of an embedding is a row of A, of any rank.
        if "embedding" not in kernel["name"]:
            assert narrow(kernel) == set(), kernel["name"]


def test_large_tiles_load_vectors_too(kernels: list[dict[str, Any]]) -> None:
    """No row mask of a large tile narrows a load of half types."""
    large = [kernel for kernel in kernels if kernel["ROWS"] > 16]
    assert large
    assert {kernel["name"]: narrow(kernel) for kernel in large if narrow(kernel)} == {}


def test_outputs_are_stored_as_vectors(kernels: list[dict[str, Any]]) -> None:
    """Every store of y is 16 bytes."""
    stores = {
        operation
        for kernel in regular(kernels)
        if kernel["name"].startswith("expand_kernel")
        for operation in kernel["operations"]
        if operation.startswith("STG")
    }
    assert stores == {"STG 128"}


def test_a_slot_is_filled_by_vectors(compiled: list[dict[str, Any]]) -> None:
    """Where rows are whole vectors, 16 bytes at a time; the other way stands beside it."""
    for kernel in compiled:
        if kernel["name"].startswith("scatter_kernel"):
            assert {"LDG 128", "STG 128"} <= kernel["operations"].keys(), kernel["name"]


def test_half_types_use_the_tensor_cores(kernels: list[dict[str, Any]]) -> None:
    """Small tiles multiply with HMMA, large ones with Hopper's own HGMMA."""
    for kernel in kernels:
        if any(half in kernel["name"] for half in HALF):
            assert ("HMMA" if kernel["ROWS"] == 16 else "HGMMA") in kernel["operations"], kernel["name"]


def test_nothing_is_atomic(kernels: list[dict[str, Any]]) -> None:
    """Sums are made in one order, so that two runs agree to the bit."""
    assert not [kernel["name"] for kernel in kernels if {"ATOM", "ATOMG", "RED"} & kinds(kernel)]


def test_only_an_early_expand_waits_for_the_shrink(kernels: list[dict[str, Any]]) -> None:
    """Before it reads the planes, and before it ends."""
    waiting = [kernel for kernel in kernels if "ACQBULK" in kernel["operations"]]
    assert [kernel["name"].split()[0] for kernel in waiting] == ["expand_kernel"]
    assert waiting[0]["name"].endswith("early")
    assert waiting[0]["operations"]["ACQBULK"] == 2


def resident(kernel: dict[str, Any]) -> int:
    """The programs that one processor of an H100 holds by registers, which a warp takes 256 at a time."""
    of_warp = -(-kernel["registers"] * 32 // 256) * 256
    return int(65536 // 4 // of_warp * 4 // kernel["num_warps"])


def kinds(kernel: dict[str, Any]) -> set[str]:
    return {operation.split()[0] for operation in kernel["operations"]}


def narrow(kernel: dict[str, Any]) -> set[str]:
    """Loads and stores of less than 32 bits."""
    short = (" U8", " S8", " U16", " S16")
    return {operation for operation in kernel["operations"] if operation.endswith(short)}

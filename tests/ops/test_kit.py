"""The kit for a machine with a GPU, rehearsed without one: packed, run from elsewhere, a part at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACK = Path(__file__).parents[2] / "benchmarks" / "gpu" / "pack.sh"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit") / "packed"
    subprocess.run([PACK, folder], check=True, capture_output=True)
    return folder


def run(kit: Path, out: Path, python: str) -> tuple[int, list[list[str]]]:
    """The rehearsal's exit status, and of each part its name, exit status and seconds."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    done = subprocess.run(
        [kit / "run", "--rehearse", out.name],
        cwd=out.parent,
        env={**env, "PYTHON": python},
        capture_output=True,
        check=False,
    )
    return done.returncode, [line.split("\t") for line in (out / "parts.tsv").read_text().splitlines()]


def test_each_part_of_the_kit_runs_from_where_it_was_packed(kit: Path, tmp_path: Path) -> None:
    """The tests in Triton's interpreter, and the predictions, from another folder."""
    out = tmp_path / "out"
    status, parts = run(kit, out, sys.executable)
    assert (status, [part[:2] for part in parts]) == (0, [["tests", "0"], ["rows", "0"]]), [
        log.read_text()[-2000:] for log in out.glob("*.log")
    ]
    assert " passed" in (out / "tests.log").read_text()
    assert (out / "rows.log").read_text().startswith("Predicted, not measured.")


def test_a_part_that_fails_leaves_the_others_theirs(kit: Path, tmp_path: Path) -> None:
    """The next one runs all the same, and the kit's exit status says that one failed."""
    status, parts = run(kit, tmp_path / "out", "/bin/false")
    assert (status, [part[:2] for part in parts]) == (1, [["tests", "1"], ["rows", "1"]])


def test_a_kit_goes_into_no_folder_that_is_there(kit: Path) -> None:
    """What lies there is nobody's to mix with."""
    again = subprocess.run([PACK, kit], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "name a new folder" in again.stderr


def test_a_peers_wheel_gives_its_kernels_alone(tmp_path: Path) -> None:
    """The files of its LoRA operations, and stand-ins for what those import."""
    wheel = tmp_path / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in ("sglang/__init__.py", "sglang/srt/server.py", "sglang/srt/lora/dense/runner.py"):
            files.writestr(name, "raise ImportError\n")
        files.writestr("sglang/srt/lora/dense/plan.py", "from sglang.srt.utils import get_device_name\n")
    subprocess.run([PACK, tmp_path / "packed", wheel.name], check=True, capture_output=True, cwd=tmp_path)
    peers = tmp_path / "packed" / "peers"
    found = {str(path.relative_to(peers)) for path in peers.rglob("*.py")}
    assert {"sglang/srt/lora/dense/plan.py", "sglang/srt/lora/dense/runner.py"} < found
    assert not {"sglang/__init__.py", "sglang/srt/server.py"} & found
    env = {**os.environ, "PYTHONPATH": str(peers)}
    subprocess.run([sys.executable, "-c", "import sglang.srt.lora.dense.plan"], check=True, env=env)

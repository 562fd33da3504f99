"""The demo is true: every step of it holds on this machine."""

from __future__ import annotations

import re
import signal
import subprocess
from itertools import takewhile
from pathlib import Path

import pytest

from lora_fs.demo.process import child_environment
from lora_fs.demo.volume import LORA_FS

# 50 s where nothing else runs; 280 were too few beside a load of 16.
pytestmark = pytest.mark.timeout(960)


def mind_ctrl_c() -> None:
    """In the demo's process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


@pytest.mark.parametrize(
    ("options", "steps"), [((), 14), pytest.param(("--sidecar",), 13, marks=pytest.mark.long)]
)
def test_the_demo_holds_and_what_it_keeps_can_be_asked(
    model_dir: Path, options: tuple[str, ...], steps: int
) -> None:
    """It says that each step held, and how to go on: exports and requests that work as they are printed.

    Ctrl-C ends it with exit code 0, and leaves only what its next run can use.
    """
    work_dir = model_dir.parent
    with subprocess.Popen(
        [LORA_FS, "demo", *options, "--dir", str(work_dir), "--keep"],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment({}),
        preexec_fn=mind_ctrl_c,
    ) as demo:
        try:
            assert demo.stdout is not None
            told = "".join(takewhile(lambda line: line != "   Ctrl-C ends it.\n", demo.stdout))
            assert f"All {steps} steps held" in told, told
            typed = re.findall(r"^   \$ (.*)$", told.partition("Both replicas stay up")[2], re.MULTILINE)
            assert [line.split()[0].rpartition("/")[2] for line in typed] == [
                *["export"] * 2,
                "lora-fs",
                *["curl"] * 4,
            ]
            script = "\n".join(["set -e", *(f"{line} --fail" if "curl" in line else line for line in typed)])
            ran = subprocess.run(
                ["bash", "-c", script], capture_output=True, text=True, check=False, timeout=300
            )
            assert ran.returncode == 0, ran.stderr
            assert re.search(r"^support +v1 ", ran.stdout, re.MULTILINE)
            assert ran.stdout.count('"choices"') == 2
        finally:
            demo.send_signal(signal.SIGINT)
    assert demo.returncode == 0
    assert not list(work_dir.glob("run-*"))

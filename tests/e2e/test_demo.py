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

DEMO_S = 900  # 50 s where nothing else runs; 280 were too few beside a load of 16
pytestmark = pytest.mark.timeout(DEMO_S + 60)


def test_the_demo_ends_with_success(model_dir: Path) -> None:
    """``lora-fs demo`` exits 0, says so, and leaves only what its next run can use."""
    work_dir = model_dir.parent
    ran = subprocess.run(
        [LORA_FS, "demo", "--dir", str(work_dir)],
        capture_output=True,
        text=True,
        env=child_environment({}),
        timeout=DEMO_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "All 14 steps held" in ran.stdout
    assert not list(work_dir.glob("run-*"))


def test_what_is_kept_can_be_asked(model_dir: Path) -> None:
    """With sidecars the story holds as well. ``--keep`` ends it with exports and requests that work as they
    are printed, until Ctrl-C, and with the same exit code.
    """
    work_dir = model_dir.parent
    command = [LORA_FS, "demo", "--sidecar", "--dir", str(work_dir), "--keep"]

    def mind_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it

    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment({}),
        preexec_fn=mind_ctrl_c,
    ) as demo:
        try:
            assert demo.stdout is not None
            told = "".join(takewhile(lambda line: line != "   Ctrl-C ends it.\n", demo.stdout))
            assert "All 13 steps held" in told
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

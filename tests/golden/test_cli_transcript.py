"""A session at the command line, as it was printed: what changes here changes for scripts and habits.

``LORA_FS_GOLDEN=1`` writes the file anew; read its diff.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.model import Phase
from tests.cli.conftest import LoraFs, folder, lora_fs, report, root, seen
from tests.registry.conftest import write_adapter

__all__ = ["folder", "lora_fs", "report", "root"]  # fixtures

GOLDEN = Path(__file__).parent / "cli" / "transcript.txt"
COMMANDS = """
version
help lsit
lsit
list
init
init --dry-run -o yaml
validate ./v1 -n team-a
validate ./missing
register support ./v1 --dry-run
register support ./v1 --label team=care
register support ./v1
register support@v1 ./v2
register support ./v2 --no-activate --wait 50ms
register billing@r1 ./v3 -o name
register Billing! ./v3
register sql ./v1 -n team-a
list
list --no-headers
list -A
list -A -o name
ls 'sup*' -l team=care
list -l team=none
show support@v1
get support@v9
get -o name
promote support v2 --dry-run
promote support@v2
promote support@v2 v1
promote support
rollback support
canary support v2 --percent 5
unregister support@v1
unregister support
unregister billing@r1 --dry-run
pin billing -o name
set support --ttl 15m --priority 3
set support --ttl soon
quota --bytes 5GB --adapters 10
quota --no-headers -n team-a
gc --older-than 48
gc --older-than 48h
status
status --exit-code
status support -o name
wait billing --timeout 1ms
events
fsck --quick
unregister support --all-revisions
list -n team-z
"""
VOLATILE = (
    (r"\d{4}-\d\d-\d\dT[\d:.+Z-]+", "<time>"),
    (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22,}", "<uuid>"),
    (r"\(on /[^)]*\)", "(on <mount>)"),
    (r"it lies on /\S* \([^)]*\)", "it lies on <mount>"),
    (r"(?m)^(mount|filesystem|registry_uuid): .*$", r"\1: <here>"),
    (r"sha256:[0-9a-f]{64}", "sha256:<digest>"),
    (r"\S+@\S+:\d+, generation", "<writer>, generation"),
    (r"Python [\d.]+", "Python <version>"),
    (r"lora-fs \d[^ ]*", "lora-fs <version>"),
    (r"\d+ s ago", "<n> s ago"),
    (r"(in the last minute +)\d+", r"\1<n>"),
)


@pytest.fixture
def session(lora_fs: LoraFs, report: Callable[..., None], tmp_path: Path) -> LoraFs:
    """Three adapters' folders, and a replica that has seen nothing of ``billing``."""
    for number in (1, 2, 3):
        write_adapter(tmp_path / f"v{number}", number)
    return lora_fs


def typed(session: LoraFs, line: str, places: dict[str, str]) -> str:
    """A command line with what it printed and its exit code, as a terminal shows them."""
    ran = session(*shlex.split(line))
    text = ran.out + ran.err + (f"[exit {ran.code}]\n" if ran.code else "")
    for place, name in places.items():
        text = text.replace(place, name)
    for pattern, stands in VOLATILE:
        text = re.sub(pattern, stands, text)
    return f"$ lora-fs {line}\n{text}"


def test_the_transcript(
    session: LoraFs, report: Callable[..., None], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command prints, on both streams, and exits as the file says."""
    monkeypatch.setenv("COLUMNS", "100")
    places = {str(root): "/adapters", str(tmp_path): "/home"}
    parts = []
    for line in COMMANDS.strip().splitlines():
        if line == "status":
            report("pod-a", recent=seen("support"), phases={"support": Phase.FAILED})
        parts.append(typed(session, line, places))
    text = "\n".join(parts)
    if os.environ.get("LORA_FS_GOLDEN"):
        GOLDEN.write_text(text)
    assert len(parts) >= 40
    assert text == GOLDEN.read_text()

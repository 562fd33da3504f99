"""The tutorials by the letter: each command of both pages is typed, and prints what the page shows.

What a page starts by vLLM's command is forked from the pre-imported vLLM, with the page's own variables and
options. Ports are free ones. All else is a command in bash.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import Process, child_environment, free_port
from lora_fs.demo.volume import LORA_FS
from lora_fs.demo.waiting import wait_until
from tests.docs.blocks import ROOT, Command, blocks, commands
from tests.docs.reader import shows

PAGES = [ROOT / "docs/tutorials" / name for name in ("first-fleet.md", "first-canary.md")]
SERVES = "vllm.entrypoints.openai.api_server"


class Desk:
    """A reader's terminals: what was exported, and the server of each port."""

    def __init__(self, folder: Path, farm: EngineFarm) -> None:
        self._folder, self._farm = folder, farm
        self._env = {"PATH": f"{Path(LORA_FS).parent}{os.pathsep}{os.environ['PATH']}"}
        self._ports: dict[str, int] = {}
        self._lines: dict[str, str] = {}
        self._servers: dict[str, Process] = {}

    def bash(self, line: str) -> tuple[int, str]:
        """Type one line; its exit code and what it prints."""
        here = re.sub(r"\b800\d\b", lambda port: str(self._port(port[0])), line)
        ran = subprocess.run(
            ["bash", "-c", here],
            cwd=self._folder,
            env=child_environment(self._env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return ran.returncode, ran.stdout

    def export(self, line: str) -> None:
        """Keep the variables for all that follows."""
        for name, value in self._assigned(shlex.split(line)[1:]):
            self._env[name] = value

    def serve(self, line: str) -> None:
        """Start what the line starts, with its variables and its options; wait until it is ready."""
        words = shlex.split(line)
        options = words[words.index(SERVES) + 1 :]
        port, model = (options[options.index(name) + 1] for name in ("--port", "--model"))
        own = dict(self._assigned(word for word in words[: words.index("python")]))
        given = {name: value for name, value in self._env.items() if name.startswith(("LORA_FS", "VLLM"))}
        here = {port: str(self._port(port)), model: str(self._folder / model)}
        self._servers[port] = self._farm.start(
            own["LORA_FS_REPLICA_ID"],
            self._folder / model,
            port=self._port(port),
            args=[here.get(option, option) for option in options],
            env=given | own,
        )
        self._lines[port] = line
        self._servers[port].wait_ready("/readyz")

    def again(self, port: str) -> None:
        """Type the command that started a server once more."""
        self.serve(self._lines[port])

    def interrupt(self, port: str) -> None:
        """Press Ctrl-C in a server's terminal, and wait until it has ended."""
        os.kill(self._servers[port].pid, signal.SIGINT)
        assert self._servers[port].wait_ended(timeout_s=120)
        self._servers[port].kill()  # what it left

    def close(self) -> None:
        """End every server."""
        for server in self._servers.values():
            server.kill()

    def _port(self, port: str) -> int:
        return self._ports.setdefault(port, free_port())

    def _assigned(self, words: Iterator[str] | list[str]) -> Iterator[tuple[str, str]]:
        """``NAME=value`` by ``NAME=value``, ``$PWD`` put in."""
        for word in words:
            name, _, value = word.partition("=")
            yield name, value.replace("$PWD", str(self._folder))


def typed(desk: Desk, command: Command) -> str:
    """Type a command of a page; what it prints, which is what the page shows."""
    line = command.text
    if line.startswith("export "):
        desk.export(line)
        return ""
    if SERVES in line:
        desk.serve(line)
        return ""
    code, out = desk.bash(line)
    if line == "lora-fs status":  # a report follows within a moment, and readers type slowly

        def told() -> bool:
            return all(shows(shown, desk.bash(line)[1]) for shown in command.prints)

        wait_until(f"{command.block}: status shows {command.prints}", told, timeout_s=120)
        return out
    assert code == 0, f"{command.block}: $ {line}\nends with {code}\n{out}"
    for shown in command.prints:
        assert shows(shown, out), f"{command.block}: $ {line}\nprints no line like\n{shown}\nbut\n{out}"
    return out


@pytest.fixture
def desk(tmp_path: Path, farm: EngineFarm) -> Iterator[Desk]:
    """As it is before the first page."""
    desk = Desk(tmp_path, farm)
    yield desk
    desk.close()


def test_the_tutorials_can_be_typed(desk: Desk) -> None:
    """Both, one after the other; all replicas that a page asks for one adapter give one answer."""
    answers: dict[str, set[str]] = {}
    for block in (block for page in PAGES for block in blocks(page)):
        event, _, port = (block.mark or "").partition(": ")
        if event == "Ctrl-C":
            desk.interrupt(port)
        elif event == "again":
            desk.again(port)
        for command in commands(block):
            out = typed(desk, command)
            if "/v1/completions" in command.text and "curl -sf " in command.text:
                asked = re.findall(r'"model": "([^"]+)"', command.text)[0]
                answers.setdefault(asked, set()).add(json.loads(out)["choices"][0]["text"])
    assert {name: len(said) for name, said in answers.items()} == {
        "support": 1,
        "billing": 1,
        "support@v2": 1,
    }
    assert len(set.union(*answers.values())) == 3

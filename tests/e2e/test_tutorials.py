"""The tutorials by the letter: each command of the pages is typed, and prints what the page shows.

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

PAGES = [ROOT / f"docs/tutorials/first-{subject}.md" for subject in ("fleet", "canary", "release", "rl-run")]
SERVES = "vllm.entrypoints.openai.api_server"


class Desk:
    """A reader's terminals: what was exported, and the server of each port."""

    def __init__(self, folder: Path, farm: EngineFarm) -> None:
        self._folder, self._farm = folder, farm
        self._env = {"PATH": f"{Path(LORA_FS).parent}{os.pathsep}{os.environ['PATH']}"}
        self._ports: dict[str, int] = {}
        self._lines: dict[str, str] = {}
        self._servers: dict[str, Process] = {}
        self._terminals: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "examples").symlink_to(ROOT / "examples")

    def bash(self, line: str) -> tuple[int, str]:
        """Type one line; its exit code and what it prints."""
        ran = subprocess.run(
            ["bash", "-c", self._here(line)],
            cwd=self._folder,
            env=child_environment(self._env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return ran.returncode, ran.stdout

    def leave_running(self, line: str, terminal: str) -> None:
        """Type a line that does not end, in a terminal of its own."""
        self._terminals[terminal] = subprocess.Popen(
            ["bash", "-c", self._here(line)],
            cwd=self._folder,
            env=child_environment(self._env),
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

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

    def again(self, ports: str) -> None:
        """Type the commands that started these servers once more."""
        for port in ports.split():
            self.serve(self._lines[port])

    def interrupt(self, terminals: str) -> None:
        """Press Ctrl-C in these terminals, a server's by its port; wait until what ran there has ended."""
        for terminal in terminals.split():
            if terminal in self._terminals:
                self._end(self._terminals.pop(terminal))
                continue
            os.kill(self._servers[terminal].pid, signal.SIGINT)
            assert self._servers[terminal].wait_ended(timeout_s=120)
            self._servers[terminal].kill()  # what it left

    def close(self) -> None:
        """End all that runs."""
        for terminal in self._terminals.values():
            self._end(terminal)
        for server in self._servers.values():
            server.kill()

    @staticmethod
    def _end(terminal: subprocess.Popen[bytes]) -> None:
        os.killpg(terminal.pid, signal.SIGTERM)  # bash ignores SIGINT without a terminal
        terminal.wait(60)

    def _here(self, line: str) -> str:
        return re.sub(r"\b800\d\b", lambda port: str(self._port(port[0])), line)

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
    # A replica reports within a moment, a gateway starts in a second, and readers type slowly.
    if line == "lora-fs status" or line.endswith("/health"):

        def told() -> bool:
            return all(shows(shown, desk.bash(line)[1], numbers=True) for shown in command.prints)

        wait_until(f"{command.block}: {line} shows {command.prints}", told, timeout_s=120)
        return ""
    code, out = desk.bash(line)
    assert code == 0, f"{command.block}: $ {line}\nends with {code}\n{out}"
    for shown in command.prints:
        assert shows(shown, out, numbers=True), (
            f"{command.block}: $ {line}\nprints no line like\n{shown}\nbut\n{out}"
        )
    return out


@pytest.fixture
def desk(tmp_path: Path, farm: EngineFarm) -> Iterator[Desk]:
    """As it is before the first page."""
    desk = Desk(tmp_path, farm)
    yield desk
    desk.close()


@pytest.mark.timeout(1800)  # four pages: 190 s alone, over 600 s beside other work
def test_the_tutorials_can_be_typed(desk: Desk) -> None:
    """All, one after the other; all replicas that a page asks for one adapter give one answer."""
    answers: dict[str, set[str]] = {}
    rewards: dict[str, float] = {}
    for block in (block for page in PAGES for block in blocks(page)):
        event, _, where = (block.mark or "").partition(": ")
        if event == "Ctrl-C":
            desk.interrupt(where)
        elif event == "again":
            desk.again(where)
        for command in commands(block):
            if event == "terminal":
                desk.leave_running(command.text, where)
                continue
            out = typed(desk, command)
            if "/v1/completions" in command.text and "curl -sf " in command.text:
                asked = re.findall(r'"model": "([^"]+)"', command.text)[0]
                answers.setdefault(asked, set()).add(json.loads(out)["choices"][0]["text"])
            found = re.findall(r"(policy-v\d+): reward (\S+);", out)
            rewards |= {policy: float(reward) for policy, reward in found}
    named = ["support", "billing", "support@v2", "policy-v12", "policy-v15"]
    assert {name: len(said) for name, said in answers.items()} == dict.fromkeys(named, 1)
    assert len(set.union(*(answers[name] for name in named[:4]))) == 4
    assert list(rewards) == [f"policy-v{number}" for number in range(15)]
    assert rewards["policy-v11"] > 1.5 * rewards["policy-v0"], rewards

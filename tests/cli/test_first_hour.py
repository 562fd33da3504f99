"""What a new operator runs into in the first hour, and what is said then."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import aiohttp
import httpx
import pytest

from lora_fs.demo.process import LOCAL, free_port
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.engine.vllm_http import VllmHttp
from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.sidecar.model import Phase
from tests.cli.conftest import LORA_FS, LoraFs

Folder = Callable[[int], str]
Report = Callable[..., None]
PLACES = ("--root", "--stage-dir", "--token-file", "--allowed-source")  # "" would be the working directory
REFUSED = "^no engine answers at http://127.0.0.1:9: Connection refused$"


def test_both_settings_are_asked_for_at_once(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not one after the other."""
    monkeypatch.delenv("LORA_FS_ROOT")
    monkeypatch.delenv("LORA_FS_MODEL")
    asked = lora_fs("status")
    assert asked.code == 2
    assert "LORA_FS_MODEL" in asked.err
    assert "LORA_FS_ROOT" in asked.err


@pytest.mark.parametrize("command", ["list", "status"])
def test_another_model_is_not_an_empty_registry(lora_fs: LoraFs, folder: Folder, command: str) -> None:
    """A name that is misspelt is answered with those that there are; scripts get what they got."""
    assert lora_fs("register", "a", folder(1)).code == 0
    ran = lora_fs("--model", "tinny", command)
    assert ran.code == 0
    assert ran.err == "lora-fs: nothing is registered in default/tinny; there is default/tiny\n"
    assert lora_fs("--model", "tinny", command, "-o", "json").err == ""


def test_a_replicas_trouble_takes_one_line(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """Findings have a line each where there is room for them; a table has none."""
    lora_fs("register", "a", folder(1))
    report("r0", phases={"a": Phase.READY}, conditions=("NotAdopted: x cannot be served:\n  - weights: cut",))
    (told,) = (line for line in lora_fs("status").out.splitlines() if "NotAdopted" in line)
    assert "cannot be served: - weights: cut" in told


def test_an_engine_that_is_not_there_is_told_so() -> None:
    """By its address and the system's own word, not by a client library's."""

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await VllmHttp(session, "http://127.0.0.1:9", timeout_s=5).loaded()

    with pytest.raises(EngineUnavailable, match=REFUSED):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--port", "99999", "less than or equal to 65535"),
        ("--max-loaded", "0", "greater than or equal to 1"),
        ("--engine", "localhost:8000", "http://HOST:PORT"),
        ("--engine", "http://localhost:8000/v1", "without /v1"),
        ("--engine", "http://:8000", "http://HOST:PORT"),
        ("--engine", "http://localhost:99999", "from 1 to 65535"),
        ("--engine", "http://localhost:0", "from 1 to 65535"),
        ("--engine", "http://localhost:http", "from 1 to 65535"),
        *((option, "", "is a variable unset?") for option in PLACES),
    ],
)
def test_a_sidecars_option_that_cannot_be(lora_fs: LoraFs, option: str, value: str, why: str) -> None:
    """It is a usage error that tells the value, not a traceback, and not an engine waited for."""
    ran = lora_fs("sidecar", option, value)
    assert (ran.code, value in ran.err, why in ran.err) == (2, True, True), ran.err


def test_a_port_in_use(root: Path, tmp_path: Path) -> None:
    """It failed: 3 would say that there is no registry."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = ["--host", "127.0.0.1", "--port", str(taken.getsockname()[1])]
        words = [LORA_FS, "sidecar", "--stage-dir", str(tmp_path / "stage"), *where]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{where[-1]}" in done.stderr
    assert "listening on port" not in done.stderr


def test_a_token_file_that_cannot_be_used(root: Path, tmp_path: Path) -> None:
    """It is told when the sidecar starts, lets nobody in, and no token is told with it."""
    file, log, port = tmp_path / "tokens", tmp_path / "log", free_port()
    file.write_text("s3cr3t verbs=all\n")
    words = [LORA_FS, "sidecar", "--stage-dir", str(tmp_path / "stage"), "--token-file", str(file)]
    words += ["--host", "127.0.0.1", "--port", str(port), "--engine", "http://127.0.0.1:9"]
    url, call = f"http://127.0.0.1:{port}", {"lora_name": "a", "lora_path": str(root)}
    with log.open("w") as told, httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        process = subprocess.Popen(words, stderr=told)
        try:
            wait_until("it is told", lambda: "AdminToken" in log.read_text(), timeout_s=60)
            conditions = http.get("/readyz").json()["conditions"]
            answer = http.post("/v1/load_lora_adapter", json=call, headers={"X-Lora-Fs-Token": "s3cr3t"})
        finally:
            process.terminate()
            process.wait(60)
    (condition,) = (one for one in conditions if one.startswith("AdminToken"))
    assert condition.startswith(f"AdminToken: {file}: the token file ")
    assert answer.status_code == 503
    assert condition in log.read_text()
    assert "s3cr3t" not in log.read_text() + condition + answer.text


@pytest.mark.parametrize("insecure", [False, True])
def test_without_a_token_file(lora_fs: LoraFs, root: Path, tmp_path: Path, insecure: bool) -> None:
    """The sidecar starts and lists. It refuses to change adapters, unless it was started with --insecure. Its
    log, its readiness, status and doctor say which; it is no trouble of the replica's."""
    log, port = tmp_path / "log", free_port()
    words = [LORA_FS, "sidecar", "--stage-dir", str(tmp_path / "stage"), "--host", "127.0.0.1"]
    words += ["--port", str(port), "--engine", "http://127.0.0.1:9", *(["--insecure"] if insecure else [])]
    url, call = f"http://127.0.0.1:{port}", {"lora_name": "none"}
    with log.open("w") as told, httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        process = subprocess.Popen(words, stderr=told)
        try:
            wait_until("it listens", lambda: "listening on port" in log.read_text(), timeout_s=60)
            wait_until("it has read", lambda: http.get("/v1/lora_adapters").is_success, timeout_s=60)
            answer = http.post("/v1/unload_lora_adapter", json=call)
            ready = http.get("/readyz").json()
            reports = root / ".replicas"
            wait_until("it has reported", lambda: any(reports.glob("*.json")), timeout_s=60)
            shown, checked = lora_fs("status").out, lora_fs("doctor").out
        finally:
            process.terminate()
            process.wait(60)
    assert (answer.status_code, "--insecure" in answer.text) == ((404, False) if insecure else (403, True))
    if not insecure:  # the command's own --token-file is another one
        assert "start the sidecar with --token-file or LORA_FS_TOKEN_FILE" in answer.text
    assert ready["changed_by"] == ("loopback" if insecure else "nobody")
    assert not [one for one in ready["conditions"] if "token" in one]
    assert [("has no token file" in text) for text in (shown, checked)] == [not insecure] * 2
    line = "callers on this machine change adapters without a token" if insecure else "no token file: calls"
    assert log.read_text().count(line) == 1


def test_two_sidecars_of_one_id(root: Path, tmp_path: Path) -> None:
    """Both serve, and both tell it: each overwrites what the other reports. The one that goes on reports."""
    ports = [free_port() for _ in range(2)]
    with ExitStack() as running:

        def conditions(port: int) -> list[str]:
            with suppress(httpx.TransportError):
                told = httpx.get(f"http://127.0.0.1:{port}/readyz", **LOCAL).json()["conditions"]
                return [one for one in told if "another process writes" in one]
            return []

        processes = []
        for port in ports:
            words = [LORA_FS, "sidecar", "--stage-dir", str(tmp_path / "stage"), "--replica-id", "pod"]
            words += ["--host", "127.0.0.1", "--port", str(port), "--engine", "http://127.0.0.1:9"]
            processes.append(process := subprocess.Popen(words, stderr=subprocess.DEVNULL))
            running.callback(process.wait, 60)
            running.callback(process.terminate)
        wait_until("both tell it", lambda: all(map(conditions, ports)), timeout_s=90)
        assert all("StatusNotWritten" in one and "--replica-id" in one for one in conditions(ports[0]))
        processes[0].terminate()
        processes[0].wait(60)
        report = root / ".replicas" / "pod.json"
        wait_until("the other reports", report.exists, timeout_s=60)
        assert json.loads(report.read_text())["replica"] == "pod"
    assert not report.exists()


def test_a_stage_folder_in_the_registry(root: Path) -> None:
    """Every replica would stage there, and each remove what the others need."""
    words = [LORA_FS, "sidecar", "--port", str(free_port()), "--stage-dir", str(root / "stage")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "local to this replica" in done.stderr) == (2, True), done.stderr

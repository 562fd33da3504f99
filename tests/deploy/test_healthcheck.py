"""The health checks of the image and of an engine in its pod, run for real against a small server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.deploy import test_kubernetes
from tests.deploy.test_kubernetes import Object

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"


@contextmanager
def answering(status: int) -> Iterator[int]:
    """Serve ``status`` on every path; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output clean."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def of_the_image() -> list[str]:
    """The command of HEALTHCHECK."""
    (line,) = [
        line.partition("CMD ")[2]
        for line in DOCKERFILE.read_text().splitlines()
        if line.lstrip().startswith("CMD [") and "/health" in line
    ]
    command: list[str] = json.loads(line)
    return command


def of_the_engine(pod: Object) -> list[str]:
    """The command of both probes of an engine that listens inside its pod only."""
    (engine,) = pod["containers"]
    startup, liveness = (engine[f"{name}Probe"]["exec"]["command"] for name in ("startup", "liveness"))
    assert startup == liveness
    command: list[str] = startup
    return command


COMMANDS = {
    "image": of_the_image(),
    "manifest": of_the_engine(test_kubernetes.POD),
}


def check(command: list[str], port: int) -> int:
    """Run it against this port, as the kubelet or Docker does; return its exit code."""
    environment = {"LORA_FS_PORT": str(port), "http_proxy": "http://127.0.0.1:9", "PATH": "/usr/bin:/bin"}
    here = [word.replace("/127.0.0.1/8000 ", f"/127.0.0.1/{port} ") for word in command]
    return subprocess.run(here, env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize("which", COMMANDS)
def test_no_interpreter_starts_for_a_check(which: str) -> None:
    """A Python takes 100 ms of a core to start, at every probe of every replica."""
    assert COMMANDS[which][0] == "bash"
    assert "python" not in " ".join(COMMANDS[which])


@pytest.mark.parametrize("which", COMMANDS)
@pytest.mark.parametrize(("status", "code"), [(200, 0), (500, 1), (503, 1)])
def test_exit_code_follows_the_answer(which: str, status: int, code: int) -> None:
    """Healthy is 0 and an HTTP error is 1, whatever proxy the environment names.

    The image is a gateway's, too, which answers 503 while no replica is ready: a restart would help nobody.
    """
    with answering(status) as port:
        assert check(COMMANDS[which], port) == (0 if (which, status) == ("image", 503) else code)


@pytest.mark.parametrize("which", COMMANDS)
def test_no_server_is_unhealthy(which: str) -> None:
    """A port where nobody listens is a failure."""
    assert check(COMMANDS[which], 1) == 1

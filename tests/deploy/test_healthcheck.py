"""The image's health check, run for real against a small server on loopback."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

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


def check(port: int) -> int:
    """Run the command of HEALTHCHECK; return its exit code."""
    (line,) = [
        line.partition("CMD ")[2]
        for line in DOCKERFILE.read_text().splitlines()
        if line.lstrip().startswith("CMD [") and "/health" in line
    ]
    command = json.loads(line)
    assert "python" not in " ".join(command), "an interpreter starts every 10 s"
    environment = {"LORA_FS_PORT": str(port), "http_proxy": "http://127.0.0.1:9", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


@pytest.mark.parametrize(("status", "code"), [(200, 0), (500, 1), (503, 1)])
def test_exit_code_follows_the_answer(status: int, code: int) -> None:
    """Healthy is 0 and an HTTP error is 1, whatever proxy the environment names."""
    with answering(status) as port:
        assert check(port) == code


def test_no_server_is_unhealthy() -> None:
    """Nobody listening is a failure."""
    assert check(1) == 1

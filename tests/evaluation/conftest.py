"""An OpenAI address whose answers the test decides, over a real socket; and data files."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

# Given the model and the request: the text, a choice or an error of a stream, a status to refuse with, or
# None to hang up in the middle.
Answers = Callable[[str, dict[str, Any]], str | dict[str, Any] | int | None]


class Replica:
    """Answers as a vLLM streams.

    Attributes:
        seen: the models that were asked, in order. headers: of each answer.
    """

    def __init__(self, answers: Answers) -> None:
        self.answers, self.seen, self.headers = answers, list[str](), dict[str, str]()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1  # what is flushed is one packet

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                replica.seen.append(body["model"])
                answer = replica.answers(body["model"], body)
                if isinstance(answer, int):
                    self.send_error(answer, "no")
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                for name, value in replica.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                chat = self.path.endswith("/chat/completions")
                piece = answer if answer is not None else "half"
                plain = {"delta": {"content": piece}} if chat else {"text": piece}
                choice = answer if isinstance(answer, dict) else plain
                self._chunk(f"data: {json.dumps(choice if 'error' in choice else {'choices': [choice]})}\n\n")
                if answer is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                usage = {"choices": [], "usage": {"completion_tokens": 5}}
                self._chunk(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n")
                self._chunk("")

            def _chunk(self, text: str) -> None:
                data = text.encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
                self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def replica() -> Iterator[Callable[[Answers], Replica]]:
    """``replica(answers)``."""
    started: list[Replica] = []

    def start(answers: Answers) -> Replica:
        started.append(Replica(answers))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    """``data(*lines)``: a file of cases; without lines 20 that want their prompt back."""

    def write(*lines: object) -> Path:
        cases = lines or [
            {"id": f"c{n}", "prompt": f"say {n}", "expect": {"exact": f"say {n}"}} for n in range(20)
        ]
        path = tmp_path / "cases.jsonl"
        texts = (line if isinstance(line, str) else json.dumps(line) for line in cases)
        path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return path

    return write

"""A bystander: a stream on one adapter that goes on while others are treated badly.

It asks for the same long answer over and over, token by token, so that it is always in the
engine's batch, and remembers what it was told and how long it waited. What the machine took away,
from this process or from the engine's, is no wait for a token.
"""

from __future__ import annotations

import json
import threading
import time
from types import TracebackType
from typing import Self

import httpx

from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.replica import PROMPT
from tests.engine.heartbeat import Heartbeat

TOKENS = 120
FIRST_TOKEN_LIMIT_S = 60.0
LAST_ANSWER_LIMIT_S = 60.0
# Beyond what the machine took. It was 0.07 s, and 0.15 s beside four workers and two busy loops on two cores.
GAP_LIMIT_S = 0.5


class Broken(Exception):
    """The stream ended before its answer did."""


class Stream:
    """Streams ``model``'s answer, first alone, then in a thread until the block ends.

    Attributes:
        expected: the answer of the undisturbed engine.
        texts: the whole answers since then.
        broke: why there is no further answer, if there is none.
        longest_gap_s: the longest wait for a token since the thread began, without what the machine took.

    Args:
        engine: whose process is looked at, to tell the one from the other; None looks at this one alone.
    """

    def __init__(self, url: str, model: str, *, tokens: int = TOKENS, engine: Process | None = None) -> None:
        self.model, self._tokens = model, tokens
        self._http = httpx.Client(base_url=url, **LOCAL | {"timeout": LAST_ANSWER_LIMIT_S})
        self._told = threading.Condition()
        self._stopping = False
        self._count, self._last = 0, time.monotonic()
        self.expected = ""
        self.texts: list[str] = []
        self.broke: str | None = None
        self.longest_gap_s = 0.0
        self._heartbeat, self._lost_s = Heartbeat(engine), 0.0
        self._thread = threading.Thread(target=self._run, name=f"stream of {model}", daemon=True)

    def __enter__(self) -> Self:
        self.expected = self._ask()
        self._heartbeat.start()
        self._count, self._last, self.longest_gap_s = 0, time.monotonic(), 0.0
        self._lost_s = self._heartbeat.lost_s()
        self._thread.start()
        self.wait_tokens(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the present answer end, if it does, and ask for no other."""
        self._stopping = True
        self._thread.join(LAST_ANSWER_LIMIT_S)
        self._heartbeat.stop()
        self._http.close()

    def wait_tokens(self, count: int, *, limit_s: float = FIRST_TOKEN_LIMIT_S) -> None:
        """Wait for ``count`` more tokens."""
        with self._told:
            target = self._count + count
            self._told.wait_for(lambda: self._count >= target or self.broke is not None, limit_s)
            assert self._count >= target, self.broke or f"no {count} tokens in {limit_s} s"

    def wait_broken(self, *, limit_s: float) -> bool:
        """Wait until the stream is broken; False if it is not."""
        with self._told:
            return self._told.wait_for(lambda: self.broke is not None, limit_s)

    def wait_still(self, for_s: float, *, limit_s: float) -> bool:
        """Wait until no token has come for ``for_s``; False if they keep coming."""
        deadline = time.monotonic() + limit_s
        with self._told:
            while self.broke is None and time.monotonic() < deadline:
                left_s = self._last + for_s - time.monotonic()
                if left_s <= 0:
                    return True
                self._told.wait(left_s)
        return False

    def check_unharmed(self, *, steady: bool = True) -> None:
        """After ``stop``: every answer was whole and the undisturbed one, and none stood still.

        Args:
            steady: False where the engine's own steps may take long. Triton's interpreter is slow. Two
                tensor-parallel workers and the core wait for one another in busy loops: beside others on two
                cores a step takes seconds.
        """
        assert not self._thread.is_alive(), "the stream did not end"
        assert self.broke is None
        assert self.texts
        assert set(self.texts) == {self.expected}
        assert not steady or self.longest_gap_s < GAP_LIMIT_S

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.texts.append(self._ask())
        except (httpx.HTTPError, Broken) as error:
            with self._told:
                self.broke = f"{type(error).__name__}: {error}"
                self._told.notify_all()

    def _ask(self) -> str:
        body = {
            "model": self.model,
            "prompt": PROMPT,
            "max_tokens": self._tokens,
            "temperature": 0,
            "stream": True,
        }
        pieces: list[str] = []
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise Broken(response.read().decode())
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return "".join(pieces)
                if line:
                    pieces.append(self._piece(line))
        raise Broken("no end")

    def _piece(self, line: str) -> str:
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise Broken(str(event["error"]))
        with self._told:
            lost_s = self._heartbeat.lost_s(looks=time.monotonic() - self._last > GAP_LIMIT_S / 2)
            now = time.monotonic()  # after it: the heartbeat may have kept this thread waiting
            self.longest_gap_s = max(self.longest_gap_s, now - self._last - (lost_s - self._lost_s))
            self._count, self._last, self._lost_s = self._count + 1, now, lost_s
            self._told.notify_all()
        text: str = event["choices"][0]["text"]
        return text

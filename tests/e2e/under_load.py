"""Clients that ask a replica without a pause while it answers, and keep every answer; what held when.

An answer is judged by what may have been so between a request's first byte and its last: which vLLM served,
and which revision. While one is replaced by another both may.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Generic, Self, TypeVar

import httpx

from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import PROMPT, Replica

T = TypeVar("T")
LIMIT_S = 120.0
BACKOFF_S = 0.5


class History(Generic[T]):
    """What held when."""

    def __init__(self, first: T) -> None:
        self._spans = [(first, 0.0, float("inf"))]

    @contextmanager
    def replaced(self, by: T) -> Iterator[None]:
        """From the block's begin ``by`` may hold, to its end what held before may."""
        self._spans.append((by, time.monotonic(), float("inf")))
        yield
        before, since, _ = self._spans[-2]
        self._spans[-2] = (before, since, time.monotonic())

    def during(self, began: float, ended: float) -> Sequence[T]:
        """What may have held at some moment between two."""
        return [value for value, since, until in self._spans if since <= ended and began <= until]


@dataclass(frozen=True, slots=True)
class Told:
    """An answer. ``status`` is None where none came whole, and ``text`` says why."""

    replica: str
    name: str
    status: int | None
    text: str
    began: float
    ended: float


class Clients:
    """Ask one replica for each name in turn, from several threads, until the block ends."""

    def __init__(self, replica: Replica, names: Sequence[str], *, threads: int = 2) -> None:
        self.told: list[Told] = []
        self._replica, self._url, self._names = replica.name, replica.url, names
        self._ended = threading.Event()
        self._more = threading.Condition()
        self._threads = [threading.Thread(target=self._ask_all) for _ in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def wait_each(self, of: Callable[[Told], bool]) -> None:
        """Wait until every name was asked for once more, with an answer of which ``of`` holds."""
        since = time.monotonic()

        def answered() -> bool:
            fresh = {told.name for told in self.told if told.began > since and of(told)}
            return fresh == set(self._names)

        with self._more:
            assert self._more.wait_for(answered, LIMIT_S), self.told[-len(self._names) :]

    def _ask_all(self) -> None:
        with httpx.Client(base_url=self._url, **LOCAL | {"timeout": LIMIT_S}) as http:
            for name in cycle(self._names):
                if self._ended.is_set():
                    return
                told = _ask(http, self._replica, name)
                with self._more:
                    self.told.append(told)
                    self._more.notify_all()
                if told.status in (None, 503):
                    self._ended.wait(
                        BACKOFF_S
                    )  # as a client does: the replica that starts needs the processor


def _ask(http: httpx.Client, replica: str, name: str) -> Told:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    began = time.monotonic()
    try:
        answer = http.post("/v1/completions", json=body)
    except httpx.TransportError as error:
        return Told(replica, name, None, repr(error), began, time.monotonic())
    if answer.status_code != 200:
        return Told(replica, name, answer.status_code, answer.text, began, time.monotonic())
    text = answer.json()["choices"][0]["text"].strip()
    return Told(replica, name, answer.status_code, text, began, time.monotonic())

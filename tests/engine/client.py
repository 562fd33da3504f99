"""A client of one engine's port that takes every answer, a broken connection included."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.replica import PROMPT

# More than a KV block of tokens: what is computed for it once is used again.
LONG_PROMPT = "river garden stone amber autumn kettle " * 30
LIMIT_S = 60.0
# What a machine takes to compute is no promise of ours: as long as pytest's own, so that a thread ends, too.
COMPUTED_LIMIT_S = 300.0
STARTS_S = 180.0  # of one that is forked
PROBE_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        status: the HTTP status; None if there was no answer, and ``body`` says why.
        took_s: seconds until it was whole.
        retry_after: the header, if there is one.
    """

    status: int | None
    body: str
    took_s: float
    retry_after: str | None = None

    @property
    def text(self) -> str:
        """The completion's text; the whole answer fails the test if it is no completion."""
        assert self.status == 200, self
        text: str = json.loads(self.body)["choices"][0]["text"]
        return text

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose shape has to be vLLM's."""
        assert self.status is not None, self
        assert self.status >= 400, self
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}, self
        assert error["code"] == self.status
        assert (self.status == 503) == (self.retry_after is not None), self
        return error


class Client:
    """Asks one engine. Usable from many threads at once."""

    def __init__(self, engine: Process) -> None:
        self.engine, self.url = engine, engine.url
        # An error of its own makes vLLM close the connection: a kept one may be gone when it is used.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=engine.url, limits=limits, **LOCAL | {"timeout": LIMIT_S})

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def complete(
        self, model: str, *, prompt: str = PROMPT, max_tokens: int = 8, limit_s: float = LIMIT_S
    ) -> Answer:
        """Complete ``prompt`` greedily: equal weights give equal text."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return self.post("/v1/completions", body, limit_s=limit_s)

    def complete_all(self, models: Iterable[str], *, max_tokens: int = 8) -> list[Answer]:
        """The same, all at once; answers in the order of ``models``."""
        models = list(models)
        with ThreadPoolExecutor(len(models)) as threads:
            return list(threads.map(lambda model: self.complete(model, max_tokens=max_tokens), models))

    def logprobs(self, model: str, *, echo: bool = True) -> list[float]:
        """The four best log-probabilities of each of eight tokens, and before them of the prompt's."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "logprobs": 4, "temperature": 0}
        body["echo"] = echo
        answer = self.post("/v1/completions", body, limit_s=COMPUTED_LIMIT_S)
        assert answer.status == 200, answer
        told = json.loads(answer.body)["choices"][0]["logprobs"]
        return [value for best in told["top_logprobs"] if best for value in sorted(best.values())[-4:]]

    def prompt_logprobs(self, model: str, tokens: list[int]) -> list[float]:
        """The log-probability of each of a prompt's tokens but the first."""
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        answer = self.post("/v1/completions", body, limit_s=COMPUTED_LIMIT_S)
        assert answer.status == 200, answer
        told = json.loads(answer.body)["choices"][0]["prompt_logprobs"]
        return [best[str(token)]["logprob"] for token, best in zip(tokens[1:], told[1:], strict=True)]

    def logprobs_of_all(self, models: Iterable[str], *, echo: bool = True) -> list[list[float]]:
        """The same, all at once."""
        models = list(models)
        with ThreadPoolExecutor(len(models)) as threads:
            return list(threads.map(lambda model: self.logprobs(model, echo=echo), models))

    def load(self, name: str, path: object, *, limit_s: float = LIMIT_S, **more: object) -> Answer:
        """``POST /v1/load_lora_adapter``."""
        body = {"lora_name": name, "lora_path": str(path), **more}
        return self.post("/v1/load_lora_adapter", body, limit_s=limit_s)

    def unload(self, name: str) -> Answer:
        """``POST /v1/unload_lora_adapter``."""
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def names(self) -> set[str]:
        """What ``/v1/models`` lists."""
        return {card["id"] for card in self.get_json("/v1/models")["data"]}

    def get_json(self, path: str) -> Any:
        """The body of ``GET path``, which has to be there."""
        return self._http.get(path).raise_for_status().json()

    def metrics(self) -> str:
        """What ``/metrics`` says."""
        return self._http.get("/metrics").raise_for_status().text

    def metric(self, name: str) -> float:
        """The sum of a metric's series in ``/metrics``."""
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.metrics(), re.MULTILINE)
        assert values, f"there is no metric {name}"
        return sum(map(float, values))

    def resident(self) -> set[str]:
        """The adapters that ``/metrics`` says are in the engine's memory."""
        loaded = r'^vllm:lora_adapter_loaded{adapter_name="([^"]+)"'
        return set(re.findall(loaded, self.metrics(), re.MULTILINE))

    def healthy(self) -> bool:
        """Whether ``/health`` answers 200, soon."""
        try:
            return self._http.get("/health", timeout=PROBE_LIMIT_S).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def post(
        self,
        path: str,
        body: Mapping[str, object],
        headers: dict[str, str] | None = None,
        *,
        method: str = "POST",
        limit_s: float = LIMIT_S,
    ) -> Answer:
        """Any call with a body of JSON."""
        began = time.monotonic()
        try:
            response = self._http.request(method, path, json=body, headers=headers, timeout=limit_s)
        except httpx.TransportError as error:
            return Answer(None, f"{type(error).__name__}: {error}", time.monotonic() - began)
        took_s = time.monotonic() - began
        return Answer(response.status_code, response.text, took_s, response.headers.get("retry-after"))


@contextmanager
def owned(engine: Process, ready: str = "/health", *, starts_s: float = STARTS_S) -> Iterator[Client]:
    """Ask an engine once ``ready`` answers; it ends with the block, whatever state it is in."""
    client = Client(engine)
    try:
        engine.wait_ready(ready, timeout_s=starts_s)
        yield client
    finally:
        client.close()
        engine.kill()

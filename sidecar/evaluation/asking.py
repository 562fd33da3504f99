"""Asks an OpenAI address for one answer, streamed, and times it.

A replica that is away is no fault of the revision: ``ReplicaAway`` says to ask again. What the replica says
of the request is: ``Refused``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_fs.sidecar.engine.vllm_http import not_there
from lora_fs.sidecar.errors import TemporaryError
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.evaluation.cases import Case
from lora_fs.sidecar.evaluation.patience import Patience
from lora_fs.sidecar.model import AdapterKey

ANSWER_S: Final = 300.0  # between two pieces of an answer
CONNECT_S: Final = 5.0
END_S: Final = 1.0  # from ``[DONE]`` to the end of the body
MOST_ANSWER_CHARS: Final = 4 << 20
MOST_LIKELY: Final = 20
ADAPTER: Final = "x-lora-fs-adapter"  # of an answer: ``server.middleware.answers``
AWAY: Final = frozenset({429, 502, 503, 504})


class ReplicaAway(TemporaryError):
    """Nobody answered, or the answer broke off: the revision's quality is unknown."""


class Refused(Exception):
    """The replica answered with an error. ``status``: of HTTP, or 200 for one inside a stream."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(slots=True)
class Answer:
    """An answer, and its times.

    Attributes:
        likely: log-probabilities of likely first tokens, if requested.
        ttft_ms: from the request to the first piece of text.
        tokens_per_s: after the first token; None if all text came at once.
        adapter: the adapter that answered, if the address is a replica's or a gateway's.
    """

    text: str = ""
    likely: dict[str, float] = field(default_factory=dict)
    ttft_ms: float | None = None
    tokens_per_s: float | None = None
    adapter: str | None = None


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)  # ignores unknown fields


class _Delta(_Part):
    content: str | None = None


class _Likely(_Part):
    token: str
    logprob: float


class _Token(_Part):
    top_logprobs: list[_Likely] | None = None


class _Logprobs(_Part):
    """Of each token of an event: a completion has ``top_logprobs``, a chat ``content``."""

    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_Token] | None = None


class _Choice(_Part):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Any = None
    logprobs: _Logprobs | None = None


class _Usage(_Part):
    completion_tokens: int | None = Field(None, le=1 << 32)


class _Event(_Part):
    error: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


async def find_model(
    asker: Asker, key: AdapterKey, patience: Patience, told: Callable[[ReplicaAway], None]
) -> str:
    """Return the name under which a revision answers: its own, or with the namespace before it.

    Args:
        told: called once, if the replica is away.
    Raises:
        Refused: neither does, or another adapter answers to it.
        ReplicaAway: nobody answers, for longer than the patience.
    """
    while True:
        try:
            return await _first(asker, key)
        except ReplicaAway as error:
            if patience.away_since is None:
                told(error)
            if patience.is_used_up():
                raise
        except Refused as error:
            if patience.away_since is None or not patience.doubts(error.status):
                raise
        await patience.pause()


async def _first(asker: Asker, key: AdapterKey) -> str:
    plain = f"{key.name}@{key.revision}"
    names = (plain, f"{key.namespace}/{plain}")
    probe = Case.model_validate({"prompt": "a", "max_tokens": 1, "expect": {"exact": "a"}})
    for name in names:
        try:
            answer = await asker.ask(name, probe)
            if answer.adapter not in (None, str(key)):
                raise Refused(404, f"{name} is {answer.adapter} there, not {key}")
        except Refused as error:
            if error.status != 404 or name == names[-1]:
                raise
        else:
            return name
    raise AssertionError("unreachable")


class Asker:
    """Sends requests to one address, such as ``http://gateway:8001``; ``/v1`` at its end changes nothing."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self.url = session, url.rstrip("/").removesuffix("/v1")

    async def ask(self, model: str, case: Case) -> Answer:
        """Ask for one answer; raises ReplicaAway and Refused."""
        path, body = _request(model, case)
        answer, began = Answer(), time.perf_counter()
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_S, sock_read=ANSWER_S)
        try:
            async with self._session.post(f"{self.url}{path}", json=body, timeout=timeout) as response:
                if response.status in AWAY:
                    raise ReplicaAway(f"{self.url} answers {response.status}: {await _reason(response)}")
                if response.status != 200:
                    raise Refused(response.status, await _reason(response))
                answer.adapter = response.headers.get(ADAPTER)
                await _read(response, answer, began)
                await _end(response)
        except aiohttp.http_exceptions.LineTooLong as error:
            raise Refused(200, "an event of the answer is too long") from error
        except aiohttp.ClientConnectorError as error:
            raise ReplicaAway(str(not_there(self.url, error))) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ReplicaAway(f"{self.url}: {str(error) or type(error).__name__}") from error
        return answer


def _request(model: str, case: Case) -> tuple[str, dict[str, Any]]:
    choosing = case.expect is not None and case.expect.choices is not None
    body: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "seed": 0,
        "max_tokens": 1 if choosing else case.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if case.prompt is not None:
        return "/v1/completions", {
            **body,
            "prompt": case.prompt,
            **({"logprobs": MOST_LIKELY} if choosing else {}),
        }
    messages = [one.model_dump() for one in case.messages or ()]
    more = {"logprobs": True, "top_logprobs": MOST_LIKELY} if choosing else {}
    return "/v1/chat/completions", {**body, "messages": messages, **more}


async def _read(response: aiohttp.ClientResponse, answer: Answer, began: float) -> None:
    """Read the events to ``[DONE]``; without it the answer broke off."""
    tokens, first, last, parts, length = 0, None, began, list[str](), 0
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = _event(data)
        if event.error is not None:
            raise _failure(event.error)
        now = time.perf_counter()
        for choice in event.choices or ():
            piece = choice.text or (choice.delta is not None and choice.delta.content) or ""
            last = now if piece else last
            if first is None and (piece or choice.finish_reason):
                first = now
                answer.likely.update(_likely(choice.logprobs))
            parts.append(piece)
            length += len(piece)
        if length > MOST_ANSWER_CHARS:
            raise Refused(200, f"the answer is longer than {MOST_ANSWER_CHARS} characters")
        tokens = (event.usage and event.usage.completion_tokens) or tokens
    else:
        raise ReplicaAway("the answer broke off")
    answer.text = "".join(parts)
    if first is not None:
        answer.ttft_ms = (first - began) * 1_000
        if tokens > 1 and last > first:
            answer.tokens_per_s = (tokens - 1) / (last - first)


async def _end(response: aiohttp.ClientResponse) -> None:
    """Read to the end of the body: only then does the next request take this connection."""
    with suppress(TimeoutError, aiohttp.ClientError):  # the answer is whole
        async with asyncio.timeout(END_S):
            async for _ in response.content.iter_any():
                pass


def _event(data: bytes) -> _Event:
    try:
        return _Event.model_validate_json(data)
    except ValidationError as error:
        raise ReplicaAway(f"no answer of an OpenAI API: {shown(str(data[:100]))}") from error


def _failure(error: Any) -> Exception:
    message, code = (error.get("message"), error.get("code")) if isinstance(error, dict) else (error, None)
    told = shown(str(message)[:500])
    return ReplicaAway(told) if code in (500, *AWAY) else Refused(200, told)


def _likely(logprobs: _Logprobs | None) -> dict[str, float]:
    """Log-probabilities of the first token."""
    if logprobs is None:
        return {}
    if logprobs.top_logprobs:
        return logprobs.top_logprobs[0] or {}
    first = logprobs.content[0] if logprobs.content else _Token()
    return {one.token: one.logprob for one in first.top_logprobs or ()}


async def _reason(response: aiohttp.ClientResponse) -> str:
    text = (await response.content.read(2_000)).decode(errors="replace")
    return shown(text)

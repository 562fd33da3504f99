"""A stock vLLM over HTTP: its model list, its routes to load and unload, its activity metric.

It wants ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`` and says so when they
are missing. Source: vllm/entrypoints/serve/lora, 0.32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlencode

import aiohttp

from lora_fs.sidecar.engine.activity import ADAPTERS, Looks, read_activity
from lora_fs.sidecar.engine.protocol import Activity, Facts, Loaded
from lora_fs.sidecar.errors import EngineGone, EngineRejected, EngineUnavailable, NameTaken
from lora_fs.sidecar.model import Policy, Record, public_of

_NO_RUNTIME_UPDATING = (
    "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True: "
    "it has no route to load adapters"
)

_VERSION_CHARACTERS = 80
# The second of each is the Rust front end's, 0.33.
_IS_LOADED = ("has already been loaded", "is already loaded")
_IS_NOT_THERE = ("cannot be found", "does not exist")
TOP = 5  # of the likeliest next tokens: every vLLM gives as many
_ALL_EXPERTS = "experts"  # the name of a layer's experts where they are one tensor
_ENGINE_DEAD = "EngineCore encountered an issue"


class VllmHttp:
    """The client. ``session`` belongs to the caller and outlives this.

    ``learn`` gets the cards of the base model at each look, before any load.
    """

    rereads, is_own = True, False

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        timeout_s: float,
        api_key: str | None = None,
        list_timeout_s: float = 10.0,
        learn: Callable[[Sequence[Mapping[str, Any]]], Awaitable[None]] | None = None,
    ) -> None:
        self._session = session
        self._url = url
        self._change = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5)
        self._list = aiohttp.ClientTimeout(total=list_timeout_s, sock_connect=5)
        self._learn = learn
        self._base: str | None = None  # a name of its base model
        self._can_load = False
        self._facts = Facts()
        self._looks = Looks(self._metrics)
        # Else vLLM compresses parts of its metrics, on the event loop of its streams.
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def loaded(self) -> Loaded:
        status, text = await self._call("GET", "/v1/models", None, self._list)
        if status != 200:
            raise EngineUnavailable(f"{self._url}/v1/models answered {status}: {text[:200]}")
        try:
            cards = [card for card in json.loads(text)["data"] if isinstance(card["id"], str)]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineUnavailable(f"{self._url}/v1/models is not a model list: {error}") from error
        adapters = {card["id"]: card for card in cards if card.get("parent")}
        bases = tuple(card for card in cards if not card.get("parent"))
        self._base = next((str(card["id"]) for card in bases), None)
        await self._look_for_routes()
        if self._learn is not None:
            await self._learn(bases)
        return Loaded(
            base_cards=bases,
            adapters={name: str(card.get("root") or "") for name, card in adapters.items()},
            cards=adapters,
            cannot_load=None
            if self._can_load
            else f"the engine at {self._url} cannot load adapters: {_NO_RUNTIME_UPDATING}",
            facts=self._facts,
        )

    async def version(self) -> str | None:
        """Return the version that ``/version`` answers."""
        status, text = await self._call("GET", "/version", None, self._list)
        if status >= 500:
            raise EngineUnavailable(f"{self._url}/version answered {status}: {text[:200]}")
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(text)["version"]
            return said[:_VERSION_CHARACTERS] if status == 200 and isinstance(said, str) else None
        return None

    async def _look_for_routes(self) -> None:
        """Ask until the engine has the route to load adapters. A GET of it changes nothing."""
        if not self._can_load:
            status, text = await self._call("GET", "/v1/load_lora_adapter", None, self._list)
            self._can_load = not (status == 404 and '"detail"' in text)

    async def holds_most(self) -> int | None:
        """``--max-cpu-loras``, or else ``--max-loras``, which is never more.

        vLLM tells the first in its development mode alone. Its metrics tell the second after its first
        step: if there was none, this asks for one token of the base model (0.32).
        """
        status, text = await self._call("GET", "/server_info?config_format=json", None, self._list)
        lora, model = _sections(text if status == 200 else "", "lora_config", "model_config")
        dtype = str(model.get("dtype", "")).removeprefix("torch.")
        self._facts = Facts(_positive(lora.get("max_lora_rank")), dtype or None)
        if (keeps := _positive(lora.get("max_cpu_loras"))) is not None:
            return keeps
        metrics = await self._metrics()
        if ADAPTERS in metrics and read_activity(metrics).max_loras is None and self._base is not None:
            body = {"model": self._base, "prompt": [0], "max_tokens": 1}
            with suppress(EngineUnavailable):  # its first request for an adapter does as well
                await self._call("POST", "/v1/completions", body, self._list)
            metrics = await self._metrics()
        return read_activity(metrics).max_loras

    async def activity(self) -> Activity:
        return await self._looks.activity()

    async def _metrics(self, *names: str) -> str:
        """The text of its metrics, or of these alone; empty if it has no such route, or gives no part.

        Only behind the slash is the application that gives parts (0.26 to 0.33).
        """
        parts = "/?" + urlencode([("name[]", name) for name in names]) if names else ""
        status, text = await self._call("GET", f"/metrics{parts}", None, self._list)
        if status == 404 or (names and 400 <= status < 500):
            return ""
        if status != 200:
            raise EngineUnavailable(f"{self._url}/metrics answered {status}: {text[:200]}")
        return text

    def prefer(self, policies: Mapping[str, Policy]) -> None:
        """A stock vLLM takes no such advice."""

    async def next_logprobs(self, name: str | None, prompt: str) -> tuple[float, ...] | None:
        """Return those of the likeliest next tokens, of an adapter or the base model; None if it gives none.

        Those of the prompt's own tokens end an engine (0.32 on a CPU) whose adapters have an ``lm_head``.

        Raises EngineUnavailable: it did not answer, or has no such adapter.
        """
        if (model := name or self._base) is None:
            raise EngineUnavailable(f"{self._url} has not told its base model's name")
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": TOP}
        body["return_tokens_as_token_ids"] = True  # two tokens may have one text
        status, text = await self._call("POST", "/v1/completions", body, self._list)
        if status >= 500 or (status == 404 and '"detail"' not in text):
            raise EngineUnavailable(f"{self._url}/v1/completions answered {status}: {text[:200]}")
        try:
            likeliest = json.loads(text)["choices"][0]["logprobs"]["top_logprobs"][0]
            return tuple(sorted(map(float, likeliest.values()), reverse=True)[:TOP])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None

    async def load(self, name: str, path: str, record: Record, *, spare: bool = False) -> None:
        body: dict[str, Any] = {"lora_name": name, "lora_path": path}
        if _ALL_EXPERTS in record.spec.lora.target_modules:
            body["is_3d_lora_weight"] = True  # vLLM asks its clients for what the files say
        status, text = await self._call("POST", "/v1/load_lora_adapter", body, self._change)
        if status == 200:
            return
        if status == 400 and any(said in text for said in _IS_LOADED):
            there = (await self.loaded()).adapters.get(name)
            if there == path:
                return
            reason = "it holds other bytes under that name"
            what = f"cannot load {public_of(name)}: {reason}"
            raise NameTaken(what, reason=reason, status=status, path=there)
        # vLLM's message names its files. A client sees the message, and has no use for a path of this pod.
        raise self._refused("load", name, status, text.replace(path, "its staged copy"))

    async def unload(self, name: str) -> None:
        body = {"lora_name": name}
        status, text = await self._call("POST", "/v1/unload_lora_adapter", body, self._change)
        if status == 200 or (status == 404 and any(said in text for said in _IS_NOT_THERE)):
            return
        raise self._refused("unload", name, status, text)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: aiohttp.ClientTimeout
    ) -> tuple[int, str]:
        try:
            async with self._session.request(
                method, self._url + path, json=body, timeout=timeout, headers=self._headers
            ) as answer:
                return answer.status, await answer.text(errors="replace")
        except TimeoutError as error:
            raise EngineUnavailable(f"{self._url}{path} did not answer in {timeout.total} s") from error
        except aiohttp.ClientConnectorError as error:
            raise not_there(self._url, error) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self._url}{path}: {error}") from error

    def _refused(self, act: str, name: str, status: int, text: str) -> EngineRejected | EngineUnavailable:
        what, text = f"{act} {public_of(name)}", text.replace(name, public_of(name))
        if status == 404 and '"detail"' in text:
            self._can_load = False  # it is another engine than before: the next look says so
            return EngineRejected(f"cannot {what}: {_NO_RUNTIME_UPDATING}", reason=_NO_RUNTIME_UPDATING)
        reason, is_vllms = text[:500], False
        try:
            answer = json.loads(text)
            reason, is_vllms = str(answer["error"]["message"])[:500], True
        except (ValueError, KeyError, TypeError):
            pass  # not vLLM's error shape: its text is the reason
        # 500 is how vLLM answers whatever is wrong with an adapter, too, and that its engine is dead.
        refuses = status == 500 and is_vllms and not reason.startswith(_ENGINE_DEAD)
        if status >= 500 and not refuses:
            return EngineUnavailable(f"engine cannot {what} now ({status}): {reason}")
        return EngineRejected(f"the engine refused to {what}: {reason}", reason=reason, status=status)


def _sections(server_info: str, *names: str) -> Iterator[Mapping[str, Any]]:
    """Yield parts of the configuration in ``/server_info``; one that is not there is empty."""
    try:
        config = json.loads(server_info)["vllm_config"]
    except (ValueError, KeyError, TypeError):
        config = {}
    for name in names:
        found = config.get(name) if isinstance(config, dict) else None
        yield found if isinstance(found, dict) else {}


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def not_there(url: str, error: aiohttp.ClientConnectorError) -> EngineGone:
    """Return the error for an engine that takes no connection, in the system's words or in TLS's."""
    number = error.os_error.errno or 0
    is_tls = isinstance(error, aiohttp.ClientSSLError)  # its numbers are OpenSSL's
    why = os.strerror(number) if number > 0 and not is_tls else error.os_error.strerror
    return EngineGone(f"no engine answers at {url}: {why}")

"""The engine behind this API server, as the reconciler needs one: ``worker.rpc`` over vLLM's own call.

The engine's name identifies a load of this server. Integer ids are the records', so that two
API servers of one engine name the same adapter alike. The worker *holds* an
adapter with requests in flight, for ``LINGER_S`` longer than the last of them. So a busy one costs no calls.
An engine that serves nobody waits for a load, so that nothing takes the interpreter from it. An adapter is
loaded when every worker of every engine has it. If only some have it, they drop it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from typing import Any

import vllm
from prometheus_client import REGISTRY
from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from lora_fs.sidecar.engine.protocol import Activity, Facts, Loaded
from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, NoSpareRoom
from lora_fs.sidecar.model import Policy, PolicyKind, Record, public_of
from lora_fs.worker_patch import processors
from lora_fs.worker_patch.api.calls import Answer, admission, ask_all, end_of, heard, request_for
from lora_fs.worker_patch.api.ending import Ending
from lora_fs.worker_patch.api.metrics import queue_of
from lora_fs.worker_patch.notices import Listener, Waiting

LINGER_S = 5.0
TARGETS_MOST = 64  # of an adapter with more the worker reserves room for the whole
UNHEARD_S = 1.0  # before another look at a load whose workers say when it ends
LOOK_S = 0.001  # else before the first look, longer and longer before the next
LOOK_MOST_S = 0.005
ALONE_S = 0.01  # for so long an engine that serves nobody waits for a load at each look
FULL_S = 0.1
FULL_WAIT_S = 10.0


class InProcess:
    """Implements ``engine.protocol.Engine``.

    Attributes:
        requests: the engine's name → the request that vLLM gets for it.
        seen: each worker's answer to the last ``sync``, and its ``engine``, by vLLM's number.
    """

    def __init__(
        self,
        client: EngineClient,
        models: OpenAIServingModels,
        user: str,
        *,
        timeout_s: float,
        ending: Ending | None = None,
        facts: Facts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._models, self._user = client, models, user
        self._ending, self._facts = ending or Ending(), facts or Facts()
        self._timeout_s, self._clock = timeout_s, clock
        self._sequence = self._serving = 0
        self._loading: Counter[int] = Counter()
        # Else others' requests are unknown: another API server's, or of engines that step with this one.
        parallel = client.vllm_config.parallel_config
        self._only = parallel._api_process_count == 1 and not parallel.local_engines_only
        self._in_flight: Counter[int] = Counter()
        self._held: dict[int, float] = {}  # id → when its last request ended
        self._policies: Mapping[str, Policy] = {}
        self.requests: dict[str, LoRARequest] = {}
        self.seen: list[Answer] = []
        self._steps_on: set[int] = set()
        self._answering: dict[asyncio.Timeout, tuple[int, str | None]] = {}  # adapter, why it is lost
        self._blank_runs: Counter[int] = Counter()  # of each adapter, as far as this server was notified

    # -- what the reconciler asks ----------------------------------------------------------------

    is_own, rereads = True, False  # its worker reads a copy once; what fails there is a failed load

    async def version(self) -> str | None:
        return str(vllm.__version__)

    async def holds_most(self) -> int | None:
        """Its own bound, in bytes, makes room by itself."""
        return None

    async def loaded(self) -> Loaded:
        everywhere = await self._sync(LINGER_S)
        self.requests = {n: r for n, r in self.requests.items() if r.lora_int_id in everywhere}
        self._held = {adapter: at for adapter, at in self._held.items() if adapter in everywhere}
        await self._give_up_strays()
        listed = await self._models.registry.show_available_models()
        bases = [card.model_dump() for card in listed.data]
        static = self._models.lora_requests.static
        cards = {
            name: {**bases[0], "id": name, "root": request.lora_path, "parent": bases[0]["id"]}
            for name, request in static.items()
        }
        paths = {name: request.lora_path for name, request in {**static, **self.requests}.items()}
        in_slots = {adapter for adapter, one in self._resident() if one["level"] == "gpu"}
        tiers = {n: "gpu" if r.lora_int_id in in_slots else "host" for n, r in self.requests.items()}
        return Loaded(base_cards=tuple(bases), adapters=paths, cards=cards, tiers=tiers, facts=self._facts)

    async def activity(self) -> Activity:
        slots = min((worker["slots"] for worker in self.seen), default=None)
        # With several API servers the gauges are files that a scrape merges.
        return Activity(max_loras=slots, queue=queue_of(REGISTRY) if self._only else None)

    def prefer(self, policies: Mapping[str, Policy]) -> None:
        self._policies = policies  # the next sync tells them

    async def load(self, name: str, path: str, record: Record, *, spare: bool = False) -> None:
        spec = record.spec
        policy, targets = spec.policy, spec.lora.target_modules
        ask = {
            "id": spec.int_id,
            "name": public_of(name),  # for people: its metrics, its messages
            "path": path,
            "size_bytes": spec.size_bytes,
            "dtype": spec.lora.dtype,
            "rank": spec.lora.rank,
            "target_modules": [*targets] if len(targets) <= TARGETS_MOST else [],
            "priority": policy.priority if policy is not None else 0,
            "pinned": policy is not None and policy.kind is PolicyKind.PINNED,
            "spare": spare,
        }
        self._loading[spec.int_id] += 1
        blank_runs = self._blank_runs[spec.int_id]
        try:
            with self._listener.of(spec.int_id) as waiting:
                await self._load(public_of(name), ask, waiting)
        finally:
            self._loading -= Counter([spec.int_id])
        self.requests[name] = request_for(name, spec.int_id, path, self._blank_runs)
        if blank_runs == self._blank_runs[spec.int_id]:  # else the next request asks whether it is there
            self._held[spec.int_id] = self._clock()

    async def _load(self, name: str, ask: Answer, waiting: Waiting) -> None:
        """Ask, and ask again when the workers say that their loads ended, until each has it."""
        started, again, look_s = self._clock(), True, LOOK_S
        admit: Answer | None = None
        while True:
            wait_s = ALONE_S if self._only and not self._serving and self._loading.total() == 1 else 0
            answers = await self._call("load", **ask, again=again, admit=admit, wait_s=wait_s)
            states = {answer["state"]: answer["reason"] for answer in answers}
            waited_s = self._clock() - started
            if "failed" in states:
                reason = states["failed"].replace(ask["path"], "its staged copy")
                if len(answers) > 1:  # another worker has it, or will; or keeps its room for it
                    await self._give_up(ask["id"])
                raise EngineRejected(f"the engine cannot load {name}: {reason}", reason=reason)
            if states.keys() == {"ready"}:
                return
            again = "full" in states
            if again and ask["spare"]:
                await self._give_up(ask["id"])
                raise NoSpareRoom(f"no room in host memory for {name}: {states['full']}")
            if waited_s > (min(FULL_WAIT_S, self._timeout_s) if again else self._timeout_s):
                await self._give_up(ask["id"])
                if again:
                    raise EngineUnavailable(f"no room in host memory for {name}: {states['full']}")
                raise EngineUnavailable(f"the engine has not loaded {name} in {waited_s:.0f} s")
            if again:
                await self._sync(0)  # what nobody uses now makes room
            under_way = [answer for answer in answers if answer["state"] == "loading"]
            if not again and all(answer["notifies"] for answer in under_way):
                await waiting.until([end_of(answer) for answer in under_way], UNHEARD_S)
                admit = admission(heard(answer, waiting) for answer in answers)
                continue
            admit = None
            await asyncio.sleep(FULL_S if again else look_s)
            look_s = min(1.5 * look_s, LOOK_MOST_S)

    async def _give_up(self, adapter: int) -> None:
        """Want an adapter no more whose load may end yet, unless by another name."""
        if self._loading[adapter] == 1 and not self._wanted(adapter):
            with suppress(EngineUnavailable):
                await self._call("drop", id=adapter)

    async def _give_up_strays(self) -> None:
        """Want no more what a worker keeps for this server, and nobody here knows of.

        A worker lost it or ran it blank, or the call that gave it up did not come through. Or a step read it
        for nobody: its name went under a request. The only server knows that no other has one.
        """
        kept = {adapter for adapter, one in self._resident() if self._user in one["users"]}
        kept.update(adapter for adapter, one in self._resident() if self._only and not one["users"])
        kept.update(int(adapter) for worker in self.seen for adapter in worker["blank"])
        for adapter in kept - self._known():
            if adapter not in self._known():  # nor since the last call
                with suppress(EngineUnavailable):
                    await self._call("drop", id=adapter)

    def _resident(self) -> Iterator[tuple[int, Answer]]:
        """Each adapter of each worker, as the last ``sync`` saw it."""
        for worker in self.seen:
            yield from ((int(adapter), one) for adapter, one in worker["resident"].items())

    def _known(self) -> set[int]:
        """The adapters that somebody here wants or uses."""
        requests = (*self.requests.values(), *self._models.lora_requests.static.values())
        return {request.lora_int_id for request in requests}.union(self._loading, self._in_flight)

    async def unload(self, name: str) -> None:
        request = self.requests.pop(name, None)
        if request is None or self._wanted(request.lora_int_id):
            return
        self._held.pop(request.lora_int_id, None)
        await self._call("drop", id=request.lora_int_id)

    def _wanted(self, adapter: int) -> bool:
        return any(request.lora_int_id == adapter for request in self.requests.values())

    # -- what the gate asks ----------------------------------------------------------------------

    @property
    def ends(self) -> bool:
        """Whether vLLM has begun to shut the engine down; requests under way may go on for a while yet."""
        of_client = getattr(getattr(self._client, "engine_core", None), "_finalizer", None)
        return of_client is not None and not of_client.alive

    def of_vllm(self, name: str | None) -> LoRARequest | None:
        """Return the request of the adapter that vLLM was started with under a name; None: there is none."""
        return self._models.lora_requests.static.get(name)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request that vLLM has, whatever its model."""
        self._serving += 1
        try:
            yield
        finally:
            self._serving -= 1

    @contextmanager
    def using(self, request: LoRARequest) -> Iterator[None]:
        """Count a request in flight: its adapter stays held."""
        adapter = request.lora_int_id
        self._in_flight[adapter] += 1
        try:
            yield
        finally:
            self._in_flight[adapter] -= 1
            if not self._in_flight[adapter]:
                del self._in_flight[adapter]
            if adapter in self._held:
                self._held[adapter] = self._clock()

    @asynccontextmanager
    async def answering(self, request: LoRARequest) -> AsyncIterator[None]:
        """End the context if a worker runs this adapter without its weights, whatever the others do.

        Raises:
            EngineUnavailable: says why; answers since then are not the adapter's.
        """
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._answering[wait] = request.lora_int_id, None
                yield
        except TimeoutError as error:
            _, reason = self._answering[wait]
            if reason is None or not wait.expired():
                raise
            told = f"a worker of the engine lost {public_of(request.lora_name)}: {reason}"
            raise EngineUnavailable(told) from error
        finally:
            del self._answering[wait]

    def _lost(self, adapter: int, reason: str) -> None:
        self._held.pop(adapter, None)  # the next request asks whether it is there
        self._blank_runs[adapter] += 1
        for name, old in [(n, r) for n, r in self.requests.items() if r.lora_int_id == adapter]:
            self.requests[name] = request_for(name, adapter, old.lora_path, self._blank_runs)
        for wait, lost in self._answering.items():
            if lost == (adapter, None):
                self._answering[wait] = adapter, reason
                wait.reschedule(asyncio.get_running_loop().time())

    async def hold(self, request: LoRARequest) -> bool:
        """Keep its adapter in host memory; False if it is not there any more. Call inside ``using``."""
        adapter = request.lora_int_id
        if adapter in self._held:
            return True
        blank_runs = self._blank_runs[adapter]
        answers = await self._call("hold", id=adapter)
        if not all(answer["held"] for answer in answers):
            disagree = len({(a["engine"], a["held"]) for a in answers}) > len({a["engine"] for a in answers})
            if disagree and not self._loading[adapter]:  # one rank lost it: all begin anew, and agree again
                await self._call("drop", id=adapter)
            return False
        if blank_runs == self._blank_runs[adapter]:  # else a step ran it blank since
            self._held[adapter] = self._clock()
        return adapter in self._held

    async def _sync(self, linger_s: float) -> set[int]:
        """Send the worker the holds: every adapter used in the last ``linger_s``; see what is where.

        Returns the adapters that every worker has, of every engine that this server asks.
        """
        for adapter, at in list(self._held.items()):
            if adapter not in self._in_flight and self._clock() - at >= linger_s:
                del self._held[adapter]
        policies = {
            str(request.lora_int_id): [policy.priority, policy.kind is PolicyKind.PINNED]
            for name, policy in self._policies.items()
            if (request := self.requests.get(name)) is not None
        }
        # A load that has ended in the worker is held there before its answer is here.
        holds = [*self._held.keys() | self._in_flight.keys() | self._loading.keys()]
        self.seen = answers = await self._call("sync", holds=holds, policies=policies)
        for answer in answers:  # of which no notice came, as from another machine
            for adapter, reason in answer["blank"].items():
                self._lost(int(adapter), reason)
        self._steps_on = {processor for answer in answers for processor in answer["processors"]}
        return set.intersection(*({int(adapter) for adapter in answer["resident"]} for answer in answers))

    def step_aside(self) -> None:
        """Keep the calling thread off the processors that the engine's steps are bound to."""
        if self._steps_on:
            processors.keep_off(self._steps_on, like=os.getpid())

    # -- the call --------------------------------------------------------------------------------

    @cached_property
    def _listener(self) -> Listener:
        return Listener(self._lost, beside=envs.VLLM_RPC_BASE_PATH)  # where vLLM's own are

    async def _call(self, call: str, **ask: Any) -> list[Answer]:
        self._sequence += 1
        ask |= {"user": self._user, "sequence": self._sequence, "notices": self._listener.path}
        try:
            # vLLM fails the calls that come after an engine's death, and none that waits for its answer then.
            async with self._ending.waiting(late=True), asyncio.timeout(self._timeout_s):
                answers = await ask_all(self._client, call, ask)
        except TimeoutError as error:
            raise EngineUnavailable(f"the engine did not answer in {self._timeout_s:.0f} s") from error
        except Exception as error:
            raise EngineUnavailable(f"the engine did not do it ({call}): {error}") from error
        for answer in answers:
            if "error" in answer:
                raise EngineUnavailable(f"the engine did not do it ({call}): {answer['error']}")
        return answers

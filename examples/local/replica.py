"""One replica as in a pod: a vLLM with lora-fs's plugin in it, or a stock one with a sidecar beside it.

Owns how the demo and the tests run a replica and ask it: on ports it keeps, over HTTP, by
the ``openai`` client. Its processes can die alone and be started again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import httpx
import openai

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from lora_fs.demo.process import LOCAL, Process, free_port
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import Volume
from lora_fs.sidecar.model import public_of

PROMPT = "hello world"


def openai_client(url: str, timeout: float = 600) -> openai.OpenAI:
    """Return OpenAI's client of a replica or a gateway: it takes the first answer."""
    http = openai.DefaultHttpxClient(**LOCAL | {"timeout": timeout})
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, http_client=http)


class Replica(ABC):
    """What clients ask at ``url``.

    Args:
        name: the replica's id, and the name of its folder and logs.
        farm: forks the engine.
        model_dir: the base model.
        volume: the shared folder.
        run_dir: gets the replica's own folder: its logs and staged adapters.
        engine_args: more vLLM arguments.
        settings: more of lora-fs's, by their names: ``{"settle_s": "0.5"}``.
    """

    engine: Process
    engine_env: ClassVar[Mapping[str, str]] = {}
    """More of the engine's environment; a kind of its own overrides it."""

    def __init__(
        self,
        name: str,
        farm: EngineFarm,
        model_dir: Path,
        volume: Volume,
        run_dir: Path,
        *,
        engine_args: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.volume = name, volume
        self._farm, self._model_dir, self._dir = farm, model_dir, run_dir / name
        self._engine_args = engine_args
        self._engine_port = free_port()
        self.engine_url = f"http://127.0.0.1:{self._engine_port}"
        self.url = self._address()
        self.stage_dir = self._dir / "stage"
        given = {
            "replica_id": name,
            "stage_dir": str(self.stage_dir),
            "allowed_sources": str(volume.cwd),
            **(settings or {}),
        }
        self._env = {**volume.env, **{f"LORA_FS_{key.upper()}": value for key, value in given.items()}}
        self._dir.mkdir(parents=True)
        self.start()
        self.http = httpx.Client(base_url=self.url, **LOCAL)
        self.openai = openai_client(self.url)

    def _address(self) -> str:
        """Where clients ask: the engine itself."""
        return self.engine_url

    @abstractmethod
    def start(self) -> None:
        """Start what is not running, on the ports it had."""

    @abstractmethod
    def start_engine(self) -> None:
        """Fork the engine, on the port it had."""

    def move(self, farm: EngineFarm) -> None:
        """From its next start on its engine is another farm's: of another vLLM."""
        self._farm = farm

    @property
    @abstractmethod
    def processes(self) -> tuple[Process, ...]:
        """The engine, and what runs beside it."""

    def wait_ready(self, *, timeout_s: float = 180) -> None:
        """Wait until it can serve."""
        for process in self.processes[:-1]:
            process.wait_ready(timeout_s=timeout_s)
        self.processes[-1].wait_ready("/readyz", timeout_s=timeout_s)

    def kill(self) -> None:
        """``kill -9`` everything."""
        for process in reversed(self.processes):
            process.kill()

    def close(self) -> None:
        """End everything, close the clients."""
        self.http.close()
        self.openai.close()
        self.kill()

    def names(self) -> set[str]:
        """What ``/v1/models`` lists."""
        return {card.id for card in self.openai.models.list()}

    def answer(self, model: str, prompt: str = PROMPT) -> str:
        """Complete ``prompt`` greedily: equal weights give equal text."""
        completion = self.openai.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
        return completion.choices[0].text.strip()

    @abstractmethod
    def engine_names(self) -> set[str]:
        """What the engine itself holds, by the names that clients know."""


class PluginReplica(Replica):
    """A vLLM that serves from the volume itself."""

    def start(self) -> None:
        self.start_engine()

    def start_engine(self) -> None:
        self.engine = self._farm.start(
            f"engine-{self.name}",
            self._model_dir,
            port=self._engine_port,
            args=self._engine_args,
            env={**PLUGIN_ENV, **self._env, **self.engine_env},
        )

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.engine,)

    def engine_names(self) -> set[str]:
        listed = self.http.get("/v1/lora_adapters").raise_for_status()
        return {one["name"] for one in listed.json()["data"] if one["residency"]}


class SidecarReplica(Replica):
    """A stock vLLM, and a sidecar that clients ask instead."""

    sidecar: Process

    def _address(self) -> str:
        self._sidecar_port = free_port()
        return f"http://127.0.0.1:{self._sidecar_port}"

    def start(self) -> None:
        self.start_engine()
        self.start_sidecar()

    def start_engine(self) -> None:
        self.engine = self._farm.start(
            f"engine-{self.name}",
            self._model_dir,
            port=self._engine_port,
            args=self._engine_args,
            env=self.engine_env,
        )

    def start_sidecar(self) -> None:
        """Start ``lora-fs sidecar``, on the port it had."""
        self.sidecar = start_sidecar(
            f"sidecar-{self.name}",
            self.engine_url,
            log=self._dir / "sidecar.log",
            env=self._env,
            port=self._sidecar_port,
        )

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.engine, self.sidecar)

    def close(self) -> None:
        """As the base class; the sidecar is stopped as a pod's end does it."""
        self.sidecar.stop()
        super().close()

    def engine_names(self) -> set[str]:
        listed = httpx.get(f"{self.engine_url}/v1/models", **LOCAL).raise_for_status()
        return {public_of(card["id"]) for card in listed.json()["data"]}


class TellingReplica(SidecarReplica):
    """Its engine answers ``/server_info``: what it was started with."""

    engine_env: ClassVar[Mapping[str, str]] = {"VLLM_SERVER_DEV_MODE": "1"}

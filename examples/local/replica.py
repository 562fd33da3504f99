"""One replica as in a pod: an engine and its sidecar, each a process that can die alone.

Owns how the demo and the tests run a replica and ask it: on ports it keeps, over HTTP, by
the ``openai`` client.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import openai

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.volume import LORA_FS, Volume

PROMPT = "hello world"


class Replica:
    """An engine and a sidecar that keep their ports, so that either can die and come back.

    Args:
        name: the replica's id, and the name of its folder and logs.
        farm: forks the engine.
        model_dir: the base model.
        volume: the shared folder.
        run_dir: gets the replica's own folder: its logs and staged adapters.
        engine_args: more vLLM arguments.
        sidecar_args: more arguments of ``lora-fs sidecar``.
    """

    def __init__(
        self,
        name: str,
        farm: EngineFarm,
        model_dir: Path,
        volume: Volume,
        run_dir: Path,
        *,
        engine_args: Sequence[str] = (),
        sidecar_args: Sequence[str] = (),
    ) -> None:
        self.name, self.volume = name, volume
        self._farm, self._model_dir, self._dir = farm, model_dir, run_dir / name
        self._engine_args, self._sidecar_args = engine_args, sidecar_args
        self._engine_port, self._sidecar_port = free_port(), free_port()
        self.engine_url = f"http://127.0.0.1:{self._engine_port}"
        self.url = f"http://127.0.0.1:{self._sidecar_port}"
        self.start_engine()
        self.start_sidecar()
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def start_engine(self) -> None:
        """Fork the engine, on the port it had."""
        self.engine: Process = self._farm.start(
            f"engine-{self.name}", self._model_dir, port=self._engine_port, args=self._engine_args
        )

    def start_sidecar(self) -> None:
        """Start ``lora-fs sidecar``, on the port it had."""
        options = {
            "--engine": self.engine_url,
            "--host": "127.0.0.1",
            "--port": str(self._sidecar_port),
            "--replica-id": self.name,
            "--stage-dir": str(self._dir / "stage"),
            "--allowed-source": str(self.volume.cwd),
        }
        arguments = [part for option in options.items() for part in option]
        self.sidecar: Process = spawn(
            f"sidecar-{self.name}",
            [LORA_FS, "sidecar", *arguments, *self._sidecar_args],
            log=self._dir / "sidecar.log",
            url=self.url,
            env=self.volume.env,
        )

    def wait_ready(self, *, timeout_s: float = 60) -> None:
        """Wait for the engine, then for the sidecar to say that it can serve."""
        self.engine.wait_ready(timeout_s=timeout_s)
        self.sidecar.wait_ready("/readyz", timeout_s=timeout_s)

    def kill(self) -> None:
        """``kill -9`` both."""
        self.sidecar.kill()
        self.engine.kill()

    def close(self) -> None:
        """Stop the sidecar as a pod's end does, end the engine, close the clients."""
        self.http.close()
        self.openai.close()
        self.sidecar.stop()
        self.engine.kill()

    def names(self) -> set[str]:
        """What ``/v1/models`` lists."""
        return {card.id for card in self.openai.models.list()}

    def answer(self, model: str, prompt: str = PROMPT) -> str:
        """Complete ``prompt`` greedily: equal weights give equal text."""
        completion = self.openai.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0)
        return completion.choices[0].text.strip()

    def engine_names(self) -> set[str]:
        """What the engine itself lists, behind the sidecar's back."""
        listed = httpx.get(f"{self.engine_url}/v1/models", trust_env=False).raise_for_status()
        return {card["id"] for card in listed.json()["data"]}

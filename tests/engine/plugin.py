"""An engine with lora-fs's plugin on a registry of its own, and what every row asks of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until
from tests.engine.client import Answer, Client, owned
from tests.engine.stream import Stream

BYSTANDER = "bystander"
BOUND_S = 15.0
FOLLOWED_S = 60.0


class Plugin:
    """One replica.

    Attributes:
        client: asks the engine.
        sources: what ``load_lora_adapter`` may register from, besides the folder of adapters.
        stage: the copies that the engine was given.
    """

    def __init__(self, volume: Volume, client: Client, sources: Path, stage: Path) -> None:
        self.volume, self.client, self.sources, self.stage = volume, client, sources, stage
        self.revision_dir = volume.scope_dir / "v1"

    def register(self, name: str, folder: Path, *options: str) -> None:
        """By the command, until the engine's process has seen it; nothing is loaded."""
        self.volume.run("register", name, str(folder), "--wait", "20", *options)

    def load(self, name: str, folder: Path) -> None:
        """By ``load_lora_adapter``."""
        answer = self.client.load(name, folder)
        assert answer.status == 200, answer

    def wait_listed(self, name: str) -> None:
        """Wait until ``/v1/models`` lists it."""
        wait_until(f"{name} is listed", lambda: name in self.client.names(), timeout_s=FOLLOWED_S)

    def wait_delisted(self, name: str) -> None:
        """Wait until ``/v1/models`` does not list it."""
        wait_until(f"{name} is gone", lambda: name not in self.client.names(), timeout_s=FOLLOWED_S)

    def wait_condition(self, *words: str) -> None:
        """Wait until one condition of ``/readyz`` has all ``words`` in it."""

        def told() -> bool:
            conditions = self.client.get_json("/readyz")["conditions"]
            return any(all(word in condition for word in words) for condition in conditions)

        wait_until(f"{words} are told", told, timeout_s=FOLLOWED_S)

    def residency(self) -> dict[str, Path]:
        """The adapters in the engine's memory, and the copies they were read from."""
        listed = self.client.get_json("/v1/lora_adapters")["data"]
        return {
            adapter["name"]: Path(adapter["residency"]["path"])
            for adapter in listed
            if adapter["residency"] is not None
        }

    def host_loads_and_evictions(self) -> tuple[float, float]:
        """Since the engine's start, as of the replica's last pass."""
        return self.client.metric("lora_fs_host_loads_total"), self.client.metric(
            "lora_fs_cpu_evictions_total"
        )

    @contextmanager
    def unharmed(self, *, steady: bool = True) -> Iterator[Stream]:
        """Stream from the bystander; nothing may happen to it or to the engine in this block.

        Args:
            steady: as ``Stream.check_unharmed``.
        """
        with Stream(self.client.url, BYSTANDER, engine=self.client.engine) as stream:
            yield stream
        stream.check_unharmed(steady=steady)
        assert self.client.healthy()
        assert self.client.metric("lora_fs_blank_runs_total") == 0


@contextmanager
def plugin_engine(
    name: str, farm: EngineFarm, model_dir: Path, folder: Path, *arguments: str, **settings: str
) -> Iterator[Plugin]:
    """An engine on an empty registry below ``folder``, with the bystander loaded.

    Args:
        arguments: more of vLLM's.
        settings: more of lora-fs's, by their variables' names.
    """
    adapters, sources, stage, elsewhere = (
        model_dir.parent / "adapters",
        folder / "sources",
        folder / "stage",
        folder / "elsewhere",
    )
    for made in (folder / "root", sources, elsewhere):
        made.mkdir()
    # From a folder where the base model does not lie, the command cannot look at it.
    volume = Volume(folder / "root", MODEL_NAME, cwd=elsewhere)
    volume.run("init")
    env = {
        **volume.env,
        **PLUGIN_ENV,
        "LORA_FS_REPLICA_ID": name,
        "LORA_FS_STAGE_DIR": str(stage),
        "LORA_FS_SETTLE_S": "0.5",
        "LORA_FS_ALLOWED_SOURCES": f"{sources},{adapters}",
        **settings,
    }
    with owned(farm.start(f"plugin-{name}", model_dir, args=arguments, env=env), "/readyz") as client:
        plugin = Plugin(volume, client, sources, stage)
        plugin.load(BYSTANDER, adapters / "a15")
        yield plugin


def check_refused(answer: Answer, status: int, says: str) -> None:
    """An error of that status, in time, whose message has ``says`` in it."""
    error = answer.error
    assert error["code"] == status, error
    assert says in error["message"], error
    assert answer.took_s < BOUND_S

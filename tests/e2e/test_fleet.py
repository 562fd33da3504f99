"""What a real engine says of its limits decides what is registered: rank 16 where it takes rank 8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import SidecarReplica, TellingReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Ran, Volume
from lora_fs.demo.waiting import wait_until

WHY = "low cannot serve it: adapter_config.json"


SEED_OF = {8: 1, 16: 2}  # the ranks alternate


@pytest.fixture(scope="module")
def replica(
    farm: EngineFarm, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarReplica]:
    """A fleet of one, whose status file has its limits."""
    work = tmp_path_factory.mktemp("fleet")
    volume = Volume(work / "volume", MODEL_NAME, cwd=model_dir.parent)
    volume.root.mkdir()
    volume.run("init")
    one = TellingReplica(
        "low",
        farm,
        model_dir,
        volume,
        work,
        engine_args=("--max-lora-rank", "8"),
        settings={"insecure": "loopback"},
    )
    with closing(one):
        one.wait_ready()
        yield one


@pytest.fixture(params=["volume", "server"])
def register(
    replica: SidecarReplica, adapters: Callable[[int], Path], request: pytest.FixtureRequest
) -> Callable[..., Ran]:
    """``register(rank, *words)``: by the volume, or by the replica's server."""
    by = request.param

    def told() -> bool:
        return '"max_lora_rank": 8' in replica.volume.run("status", "-o", "json").stdout

    def run(rank: int, *words: str) -> Ran:
        # An engine that is late with an answer has no known rank until its next one.
        wait_until("the status file has the engine's rank", told, timeout_s=60)
        server = ("--server", replica.url) if by == "server" else ("--root", str(replica.volume.root))
        folder = str(adapters(SEED_OF[rank]))
        return replica.volume.try_run("register", f"{by}-{rank}", folder, *words, *server)

    return run


def test_a_rank_that_the_only_engine_does_not_take(
    replica: SidecarReplica, register: Callable[..., Ran]
) -> None:
    """It is refused with the reason, --force registers it, and a rank that fits needs no force."""
    before = replica.volume.run("list", "-o", "name").stdout
    refused = register(16)
    assert refused.exit_code == 5
    assert WHY in refused.stderr
    assert "rank-too-high" in refused.stderr
    assert "--force" in refused.stderr
    assert replica.volume.run("list", "-o", "name").stdout == before
    forced = register(16, "--force")
    assert forced.exit_code == 0, forced.stderr
    assert WHY in forced.stdout
    assert register(8).exit_code == 0

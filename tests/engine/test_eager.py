"""More eager adapters than host memory holds: those that fit stay, and an idle engine rests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.waiting import wait_until
from tests.engine.plugin import FOLLOWED_S, Plugin, plugin_engine

HOST_BYTES = 145_000  # four of rank 4, of which the bystander is one
SEEDS = (0, 3, 6, 9, 12)  # of rank 4
NAMES = tuple(f"eager-{seed}" for seed in SEEDS)
PASSES = 5


def told(plugin: Plugin) -> dict[str, tuple[str, str]]:
    """Phase and reason of each."""
    listed = plugin.client.get_json("/v1/lora_adapters")["data"]
    status = {adapter["name"]: adapter["status"] for adapter in listed}
    return {name: (status[name]["phase"], status[name]["reason"]) for name in NAMES if name in status}


def test_nobody_makes_room_for_what_nobody_asks_for(
    farm: EngineFarm,
    model_dir: Path,
    tmp_path: Path,
    adapters: Callable[[int], Path],
    right: Callable[[int], str],
) -> None:
    """Those of the greatest priority are there; another comes when a request asks for it."""
    with plugin_engine("eager", farm, model_dir, tmp_path, LORA_FS_HOST_BYTES=str(HOST_BYTES)) as plugin:
        for seed, name in zip(SEEDS, NAMES, strict=True):
            options = ("--policy", "eager", "--priority", str(99 - seed))
            plugin.volume.run("register", name, str(adapters(seed)), *options)
        fits, pending = ("Ready", "Loaded"), ("Pending", "NoSpareRoom")
        wanted = dict(zip(NAMES, [fits] * 3 + [pending] * 2, strict=True))
        wait_until("three are there", lambda: told(plugin) == wanted, timeout_s=FOLLOWED_S)
        before = plugin.client.metric("lora_fs_pass_seconds_count")
        wait_until(
            "it was thought of again",
            lambda: plugin.client.metric("lora_fs_pass_seconds_count") >= before + PASSES,
            timeout_s=10 * FOLLOWED_S,
        )
        assert plugin.host_loads_and_evictions() == (4, 0)
        assert told(plugin) == wanted
        assert plugin.client.complete(NAMES[4]).text == right(SEEDS[4])
        assert plugin.client.metric("lora_fs_load_failures_total") == 0

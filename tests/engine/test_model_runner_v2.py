"""vLLM's Model Runner V2, which it takes by default where there is a GPU: the same answers, and no death.

Its bookkeeping has 32 bits for an adapter's integer id, and a record's has 63.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lora_fs.demo.engine
from lora_fs.demo.engine import ENGINE_ENV, EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from tests.engine.plugin import plugin_engine

HERE = Path(__file__).parent
ADAPTERS = 4
STEPS = 50
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@pytest.fixture(scope="module")
def v2_farm(work_dir: Path) -> Iterator[EngineFarm]:
    """Forks engines of that kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_fs.demo.engine, "ENGINE_ENV", {**ENGINE_ENV, **V2})
        patch.setattr(lora_fs.demo.engine, "_ZYGOTE", HERE / "zygote_v2.py")
        farm = EngineFarm(work_dir / "v2-engines")
    with farm:
        yield farm


@pytest.mark.parametrize(("kernels", "how"), [("auto", ["--async-scheduling"]), ("off", [])])
def test_it_says_what_v1_says(
    v2_farm: EngineFarm,
    model_dir: Path,
    tmp_path: Path,
    adapters: Callable[[int], Path],
    right: Callable[[int], str],
    kernels: str,
    how: list[str],
) -> None:
    """More adapters than slots, one after the other and at once, with lora-fs's kernels and with vLLM's.

    And one that loads for as long as the test says, while a stream goes on. One of them schedules ahead.
    How long the stream waits for a token is not judged: Triton's interpreter runs V2's own kernels.
    """
    (faults := tmp_path / "faults").mkdir()
    settings = {"LORA_FS_KERNELS": kernels, "FAULTS": str(faults)}
    with plugin_engine(f"v2-{kernels}", v2_farm, model_dir, tmp_path, *how, **settings) as plugin:
        client, names = plugin.client, [f"a{seed}" for seed in range(ADAPTERS)]
        assert "Using V2 Model Runner" in client.engine.log_text()
        assert ("ASYNC SCHEDULER" in client.engine.log_text()) == bool(how)
        base = client.complete(MODEL_NAME).text
        for seed, name in enumerate(names):
            plugin.register(name, adapters(seed))
        wanted = [right(seed) for seed in range(ADAPTERS)]
        with plugin.unharmed(steady=False):
            assert [client.complete(name).text for name in names] == wanted
            # With vLLM's own kernels on a CPU a row of the base model has the delta of its batch's last slot.
            beside = [] if kernels == "off" else [MODEL_NAME]
            answers = client.complete_all([*names, *beside, *names])
        assert [answer.text for answer in answers] == [*wanted, *[base for _ in beside], *wanted]
        plugin.register("slow", adapters(ADAPTERS))
        (faults / "slow-0").touch()
        with plugin.unharmed(steady=False) as stream, ThreadPoolExecutor(1) as one:
            waiting = one.submit(client.complete, "slow")
            stream.wait_tokens(STEPS)
            assert not waiting.done()
            (faults / "slow-0").unlink()
            assert waiting.result().text == right(ADAPTERS)

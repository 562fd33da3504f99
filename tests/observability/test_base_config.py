"""A sidecar process says whether adapters are compared with the base model, and stays ready."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import Volume
from lora_fs.sidecar.registry.store.writer import Registry
from tests.server.conftest import serving
from tests.validate.conftest import BASE_CONFIG, HIDDEN, RANK, Draft
from tests.validate.test_base import add


@contextmanager
def sidecar(folder: Path, root: str, config: Mapping[str, object]) -> Iterator[Process]:
    """One that is ready, on an empty volume; its engine calls its model ``root``.

    Args:
        config: of the model that lies in ``folder / "model"``.
    """
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "root": root}]})

    given = {"LORA_FS_ROOT": str(folder / "volume"), "LORA_FS_STAGE_DIR": str(folder / "stage")}
    given |= {"LORA_FS_MODEL": "tiny", "LORA_FS_ALLOWED_SOURCES": str(folder)}
    with (
        closing(Registry(folder / "volume", create=True)),
        serving(Starlette(routes=[Route("/v1/models", models)])) as url,
    ):
        process = start_sidecar("sidecar", url, log=folder / "sidecar.log", env=given)
        try:
            process.wait_ready("/readyz")
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("here", [False, True])
def test_readyz_says_that_nothing_is_compared(tmp_path: Path, here: bool) -> None:
    """Unless the config of what the engine calls its model lies on this machine."""
    with sidecar(tmp_path, str(tmp_path / "model") if here else "acme/not-here", BASE_CONFIG) as process:
        answer = httpx.get(f"{process.url}/readyz", **LOCAL)
    told = [one for one in answer.json()["conditions"] if one.startswith("BaseConfigUnknown: ")]
    assert (answer.status_code, len(told)) == (200, 0 if here else 1)
    assert all("acme/not-here" in one for one in told)


def test_a_stock_engine_gets_no_experts_by_a_name_it_does_not_know(tmp_path: Path) -> None:
    """vLLM would leave them out without a word: loads and requests get the reason and the cure."""
    draft = Draft(tmp_path / "adapter")
    for module in ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts.base_layer"):
        add(draft, module, (RANK, HIDDEN), (HIDDEN, RANK))
    source = str(draft.write())
    with sidecar(tmp_path, str(tmp_path / "model"), {"model_type": "mixtral"}) as process:
        load = {"lora_name": "loaded", "lora_path": source}
        Volume(tmp_path / "volume", "tiny", cwd=tmp_path).run(
            "register", "registered", source, "--wait", "20"
        )
        for route, body in (
            ("/v1/load_lora_adapter", load),
            ("/v1/completions", {"model": "registered", "prompt": "hello"}),
        ):
            answer = httpx.post(f"{process.url}{route}", json=body, **LOCAL)
            assert answer.status_code == 400, answer.text
            assert "serve it with lora-fs's plugin" in answer.text

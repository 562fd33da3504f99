"""A sidecar process says whether adapters are compared with the base model, and stays ready."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lora_fs.demo.process import LOCAL
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.sidecar.registry.store.writer import Registry
from tests.server.conftest import serving
from tests.validate.conftest import BASE_CONFIG


@pytest.mark.parametrize("here", [False, True])
def test_readyz_says_that_nothing_is_compared(tmp_path: Path, here: bool) -> None:
    """Unless the config of what the engine calls its model lies on this machine."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BASE_CONFIG))
    card = {"id": "tiny", "root": str(tmp_path / "model") if here else "acme/not-here"}

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [card]})

    env = {"ROOT": "volume", "STAGE_DIR": "stage"}
    with (
        closing(Registry(tmp_path / "volume", create=True)),
        serving(Starlette(routes=[Route("/v1/models", models)])) as url,
    ):
        given = {f"LORA_FS_{name}": str(tmp_path / value) for name, value in env.items()}
        given["LORA_FS_MODEL"] = "tiny"
        sidecar = start_sidecar("sidecar", url, log=tmp_path / "sidecar.log", env=given)
        try:
            sidecar.wait_ready("/readyz")
            answer = httpx.get(f"{sidecar.url}/readyz", **LOCAL)
        finally:
            sidecar.kill()
    told = [one for one in answer.json()["conditions"] if one.startswith("BaseConfigUnknown: ")]
    assert (answer.status_code, len(told)) == (200, 0 if here else 1)
    assert all("acme/not-here" in one for one in told)

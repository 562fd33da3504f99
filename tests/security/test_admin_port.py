"""Operations on a port of their own."""

from __future__ import annotations

from pathlib import Path

import httpx

from lora_fs.demo.process import free_port
from lora_fs.demo.sidecar import start_sidecar
from tests.security.conftest import load

CHANGES = {
    "/v1/load_lora_adapter": load("x"),
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/loras": {"lora_name": "x", "source": {"uri": "file:///x"}},
    "/adapters": {"name": "x", "src": "/x"},
    "/pause": {},
    "/resume": {},
}
READS = ("/", "/metrics", "/readyz", "/v1/dashboard", "/dashboard/app.js", "/v1/events", "/v1/lora_adapters")


def test_operations(root: Path, tmp_path: Path) -> None:
    """With `LORA_FS_ADMIN_PORT` that port alone answers the calls that change or pause something, the
    dashboard, `/metrics` and `/readyz`. It answers no inference."""
    admin_port = free_port()
    process = start_sidecar(
        "sidecar",
        "http://127.0.0.1:9",
        log=tmp_path / "sidecar.log",
        env={
            "LORA_FS_ROOT": str(root),
            "LORA_FS_MODEL": "tiny",
            "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
            "LORA_FS_ADMIN_PORT": str(admin_port),
        },
    )
    with (
        httpx.Client(base_url=process.url, trust_env=False, timeout=60) as main,
        httpx.Client(base_url=f"http://127.0.0.1:{admin_port}", trust_env=False, timeout=60) as admin,
    ):
        try:
            process.wait_ready("/health")
            for path in READS:
                assert main.get(path).status_code == 404, path
                assert admin.get(path).status_code in (200, 204, 503), (path, admin.get(path).text)
            for path, body in CHANGES.items():
                answers = [http.post(path, json=body) for http in (main, admin)]
                told = [f"port {admin_port}" in answer.text for answer in answers]
                assert told == [True, False], path
            assert [http.get("/health").status_code for http in (main, admin)] == [200, 200]
            prompt = {"model": "x", "prompt": "x"}
            answers = [http.post("/v1/completions", json=prompt) for http in (main, admin)]
            assert ["LORA_FS_PORT" in answer.text for answer in answers] == [False, True]
        finally:
            process.stop()

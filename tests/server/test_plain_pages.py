"""The engine's own pages, which the sidecar asks for beside the requests that it forwards."""

from __future__ import annotations

import httpx

from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.proxy.upstream import Upstream
from tests.server.conftest import FakeEngine, FakeReplica, serving


def test_a_saturated_engine_still_answers_its_own_pages(engine: FakeEngine, engine_url: str) -> None:
    """With every connection for requests in use, a page comes at once: a scrape keeps the engine's series."""
    admin = Admin(None, insecure="loopback")
    app = create_app(FakeReplica(), engine_url=engine_url, admin=admin, upstream=Upstream(connections=1))
    body = {"model": "tiny", "stream": True}
    with (
        serving(app) as url,
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        chunks = stream.iter_raw()
        assert next(chunks) == b"data: one\n\n"  # it takes the only connection until ``go``
        page = client.get("/server_info")
        assert (page.status_code, page.json()) == (200, {"path": "/server_info"}), page.text
        client.get("/metrics").raise_for_status()
        assert engine.paths == [b"/server_info", b"/metrics"]
        engine.go.set()
        assert b"".join(chunks) == b"data: [DONE]\n\n"

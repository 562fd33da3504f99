"""Every route that changes something asks for a token, whoever adds one."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from fastapi.routing import APIRoute

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from tests.security.conftest import Tenants
from tests.server.conftest import serving

READS = {"GET", "HEAD"}


def test_no_route_changes_anything_without_a_token(replica: Tenants, token_file: Path) -> None:
    """With a token file every route that changes something, whoever adds it, answers 401 to a caller
    without a token of it."""
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(token_file))
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    changing = {(method, route.path) for route in routes for method in route.methods - READS}
    assert ("POST", "/v1/loras") in changing
    with serving(app) as url:
        for method, path in sorted(changing):
            answer = httpx.request(method, url + re.sub(r"{.*?}", "x", path), **LOCAL)
            assert answer.status_code == 401, (method, path)
    assert replica.writers == []

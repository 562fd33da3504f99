"""What a browser is made to send by a page of somebody else."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from tests.reconcile.test_plan import RECORD
from tests.security.conftest import OPERATORS, Sidecar, Tenants, bearer, load
from tests.server.conftest import serving


def changed(http: httpx.Client, headers: dict[str, str]) -> set[int]:
    """What the calls that change something are answered."""
    path, uri = load("x")["lora_path"], RECORD.spec.source.uri
    answers = [
        http.post("/v1/load_lora_adapter", json=load("team-a/new"), headers=headers),
        http.post("/v1/loras", json={"lora_name": "team-a/new", "source": {"uri": uri}}, headers=headers),
        http.post("/adapters", json={"name": "team-a/new", "src": path}, headers=headers),
        http.post(
            "/v1/lora_adapters?name=team-a/new",
            files={"weights": ("adapter_config.json", b"{}")},
            headers=headers,
        ),
        http.post("/v1/unload_lora_adapter", json={"lora_name": "team-a/sql"}, headers=headers),
        http.delete("/v1/loras/team-a/sql", headers=headers),
        http.delete("/adapters/team-a/sql", headers=headers),
    ]
    return {answer.status_code for answer in answers}


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_page_of_another_site(
    sidecar: Sidecar, replica: Tenants, token_file: Path, with_tokens: bool
) -> None:
    """A request from a web page of another site, by its `Origin` or `Sec-Fetch-Site`, registers and
    unregisters nothing. It gets 403, with a good token, too."""
    http = sidecar(token_file if with_tokens else None)
    own = str(http.base_url).rstrip("/")
    who = bearer(OPERATORS) if with_tokens else {}
    for foreign in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://[::1"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": own},
    ):
        assert changed(http, who | foreign) == {403}, foreign
    assert replica.writers == []
    for same in (
        {"Origin": own},
        {"Sec-Fetch-Site": "same-origin", "Origin": own},
        {"Sec-Fetch-Site": "none"},
    ):
        assert changed(http, who | same) <= {200, 201}, same


def test_a_name_that_leads_here(
    sidecar: Sidecar, replica: Tenants, token_file: Path, engine_url: str
) -> None:
    """Without a token file a request whose `Host` is no address, no name inside a network and none of
    `LORA_FS_ALLOWED_HOSTS` registers and unregisters nothing: 403."""
    http = sidecar(None)
    for host in ("evil.example", "evil.example:8001", "127.0.0.1.evil.example", "svc.evil.example"):
        assert changed(http, {"Host": host}) == {403}, host
    assert replica.writers == []
    for host in ("localhost:8001", "10.0.0.7", "[::1]:8001", "lora-fs", "lora-fs.models.svc.cluster.local"):
        assert changed(http, {"Host": host}) <= {200, 201}, host
    assert changed(sidecar(token_file), {"Host": "models.example.com", **bearer(OPERATORS)}) <= {200, 201}
    known = Admin(None, hosts=("models.example.com",), insecure="loopback")
    app = create_app(replica, engine_url=engine_url, admin=known)
    with serving(app) as url, httpx.Client(base_url=url, **LOCAL) as named:
        page = {"Origin": "https://models.example.com", "Sec-Fetch-Site": "cross-site"}
        assert changed(named, {"Host": "Models.example.com.:8001", **page}) <= {200, 201}
        assert changed(named, {"Host": "other.example.com"}) == {403}


def test_what_a_browser_makes_of_it(sidecar: Sidecar) -> None:
    """No browser guesses the type of an answer, and no cache keeps JSON."""
    http = sidecar(None)
    for path in ("/v1/models", "/v1/lora_adapters", "/readyz", "/metrics", "/", "/v1/none", "/metadata"):
        answer = http.get(path)
        assert answer.headers["x-content-type-options"] == "nosniff", path
        if answer.headers["content-type"].startswith("application/json"):
            assert answer.headers["cache-control"] == "no-store", path

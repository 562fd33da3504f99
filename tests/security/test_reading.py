"""Who may list and use the adapters of which namespace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

import tests.plugin.conftest  # noqa: F401  # vLLM, without the warnings of its import
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.worker_patch.api.asked import asked
from lora_fs.worker_patch.api.gate import Behind, Gate
from tests.plugin.test_gate import FakeEngine as GateEngine
from tests.reconcile.conftest import FakeEngine as InMemory
from tests.registry.conftest import write_adapter
from tests.security.conftest import CI_A, OPERATORS, TOKENS, Sidecar, Tenants, bearer
from tests.server.conftest import FakeEngine, tenants


def names(http: httpx.Client, headers: dict[str, str] | None = None) -> set[str]:
    """Every adapter that the lists name for a caller: the same in all of them."""
    cards = {card["id"] for card in http.get("/v1/models", headers=headers).json()["data"]} - {"tiny"}
    ours = {one["name"] for one in http.get("/v1/lora_adapters", headers=headers).json()["data"]}
    dynamo = {one["lora_id"] for one in http.get("/v1/list_lora_adapters", headers=headers).json()["loras"]}
    ids = set(http.get("/v1/loras", headers=headers).json()["loras"])
    metadata = http.get("/metadata", headers=headers)
    loaded = set(metadata.json()["lora"]["loaded_loras"])
    events = {"/".join(one["key"][::3]) for one in http.get("/v1/events", headers=headers).json()["data"]}
    one_by_one = {
        name
        for name in ("team-a/sql", "team-b/law")
        if http.get(f"/v1/models/{name}", headers=headers).status_code == 200
    }
    assert cards == ours == dynamo == ids == loaded == events == one_by_one
    for hidden in {"team-a/sql", "team-b/law"} - cards:  # in any field: a name, or a part of one
        assert not {hidden, *hidden.split("/")} & words(metadata.json())
    return cards


def words(told: object) -> set[str]:
    """Every text in a JSON document, and each part of one between slashes and at signs."""
    if isinstance(told, dict):
        return set[str]().union(*(words(one) for pair in told.items() for one in pair))
    if isinstance(told, list):
        return set[str]().union(*map(words, told))
    return {told, *re.split("[/@]", told)} if isinstance(told, str) else set()


def test_lists(sidecar: Sidecar, token_file: Path) -> None:
    """Names of namespaces that a caller may not read are in none of `/v1/models`, `/v1/lora_adapters`,
    `/v1/list_lora_adapters`, `/v1/loras`, `/v1/events`, `/v1/dashboard` and `/metadata`."""
    http = sidecar(token_file, ("-",))  # the dashboard's are in tests/dashboard/test_board.py
    assert names(http) == set()
    assert names(http, bearer("the-engines-key")) == set()
    assert names(http, bearer(CI_A)) == {"team-a/sql"}
    assert names(http, {"X-Lora-Fs-Token": CI_A}) == {"team-a/sql"}
    assert names(http, bearer(OPERATORS)) == {"team-a/sql", "team-b/law"}
    assert http.get("/v1/models", headers={"X-Lora-Fs-Token": "none"}).status_code == 401


def test_a_token_only_adds(sidecar: Sidecar, token_file: Path) -> None:
    """A token adds to what is public, and takes nothing away."""
    http = sidecar(token_file, ("team-b",))
    assert names(http) == {"team-b/law"}
    assert names(http, bearer(CI_A)) == names(http, bearer(OPERATORS)) == {"team-a/sql", "team-b/law"}
    assert names(sidecar(token_file), bearer(CI_A)) == {"team-a/sql", "team-b/law"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_use(sidecar: Sidecar, token_file: Path, engine: FakeEngine, replica: Tenants) -> None:
    """A request for an adapter that its sender may not read gets the 404 of a name that does not exist. The
    plugin answers the same.
    """
    http = sidecar(token_file, ("-",))
    told = []
    for name in ("team-b/law", "team-b/nothing"):
        answer = http.post("/v1/completions", json={"model": name}, headers=bearer(CI_A))
        told.append((answer.status_code, answer.text.replace(name, "NAME")))
    assert told[0] == told[1]
    assert (told[0][0], engine.bodies) == (404, [])
    assert http.post("/v1/completions", json={"model": "team-a/sql"}, headers=bearer(CI_A)).status_code == 200

    async def vllm(scope: Scope, receive: Receive, send: Send) -> None:
        now = asked.get()
        await JSONResponse({"asked": now and now.name})(scope, receive, send)

    plugin_engine: Any = GateEngine()
    plugin_engine.requests = dict.fromkeys(replica.names, plugin_engine.requests["sql"])
    behind = Behind(replica, plugin_engine, 5.0, Admin(token_file, ("-",)))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(Gate(vllm, lambda: behind))
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm") as plugin:
        for name, token, seen in (
            ("team-a/sql", CI_A, "team-a/sql"),
            ("team-b/law", CI_A, None),
            ("team-b/law", OPERATORS, "team-b/law"),
            ("team-a/sql", "the-engines-key", None),
        ):
            answer = await plugin.post("/v1/completions", json={"model": name}, headers=bearer(token))
            assert answer.json()["asked"] == seen, (name, token)
        wrong = {"X-Lora-Fs-Token": "wrong"}
        answer = await plugin.post("/v1/completions", json={"model": "team-a/sql"}, headers=wrong)
        assert answer.status_code == 401
    for tokens in (TOKENS, "no token file ::\n"):
        token_file.write_text(tokens)
        http = sidecar(token_file, ("-",))
        for headers in (wrong, bearer("wrong"), {}):
            for ask in (used, shown, in_detail):  # tests/plugin/test_gate.py has the plugin's
                answers = [ask(http, name, headers) for name in ("team-b/law", "team-b/nothing")]
                alike = {(one.status_code, one.text.replace("nothing", "law")) for one in answers}
                assert len(alike) == 1, (alike, headers)


def used(http: httpx.Client, name: str, headers: dict[str, str]) -> httpx.Response:
    return http.post("/v1/completions", json={"model": name}, headers=headers)


def shown(http: httpx.Client, name: str, headers: dict[str, str]) -> httpx.Response:
    return http.get(f"/v1/models/{name}", headers=headers)


def in_detail(http: httpx.Client, name: str, headers: dict[str, str]) -> httpx.Response:
    return http.get(f"/v1/dashboard/adapters/{name}", headers=headers)


def test_an_adapter_from_elsewhere(tmp_path: Path, token_file: Path, engine_url: str) -> None:
    """Only callers who may read its namespace see or use an adapter in the engine that this sidecar did
    not load. A restart with another stage folder leaves such adapters."""
    held, admin, admitted = (
        InMemory({"static": "/models/static"}),
        Admin(token_file, ("-",)),
        bearer(OPERATORS),
    )
    source = str(write_adapter(tmp_path / "sources" / "a"))
    with tenants(tmp_path, admin, held) as http:
        body = {"lora_name": "team-b/law", "lora_path": source}
        assert http.post("/v1/load_lora_adapter", json=body, headers=admitted).status_code == 200
    (by_bytes,) = held.adapters.keys() - {"static"}  # no client's name for it
    elsewhere = held.adapters[by_bytes]
    held.adapters |= dict.fromkeys(("team-b/law", "team-b/law@v1", "law"), elsewhere)
    held.adapters["team-b/unknown"] = "/elsewhere"
    hidden = held.adapters.keys() - {"static", by_bytes}

    def listed(headers: dict[str, str]) -> set[str]:
        return {card["id"] for card in http.get("/v1/models", headers=headers).json()["data"]} - {"tiny"}

    def in_metadata(headers: dict[str, str]) -> set[str]:
        told = words(http.get("/metadata", headers=headers).json())
        return told & {one for name in (*hidden, by_bytes) for one in (name, name.rpartition("/")[2])}

    with tenants(tmp_path, Admin(token_file, ("-",)), held, "another-stage", engine_url) as http:
        assert any(http.get("/readyz").status_code == 200 for _ in range(2_000))
        for withdrawn in (False, True):
            if withdrawn:
                body = {"lora_name": "team-b/law"}
                http.post("/v1/unload_lora_adapter", json=body, headers=admitted).raise_for_status()
            for headers in ({}, bearer("the-engines-key"), bearer(CI_A)):
                assert listed(headers) == {"static"}
                assert in_metadata(headers) == set()
                told = http.get("/metadata", headers=headers).json()["model"]["served_names"]
                assert told == ["tiny", "static"]
                for ask in (used, shown):
                    asked = (*hidden, by_bytes, "team-b/nothing")
                    answers = [(name, ask(http, name, headers)) for name in asked]
                    alike = {(one.status_code, one.text.replace(name, "NAME")) for name, one in answers}
                    assert [status for status, _ in alike] == [404], (alike, headers)
            assert listed(admitted) == {"static", *hidden}
            for ask in (used, shown):
                assert {ask(http, name, admitted).status_code for name in hidden} == {200}
                assert ask(http, "static", {}).status_code == 200
                assert ask(http, by_bytes, admitted).status_code == 404
    assert held.adapters["team-b/law"] == elsewhere


BODY = json.dumps({"model": "team-b/law"})
FORM = "multipart/form-data; boundary=x"


def part(*header: str, value: str = "team-b/law") -> bytes:
    """A form of one part."""
    return "\r\n".join(("--x", *header, "", value, "--x--", "")).encode()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json", BODY.encode("utf-16")),
        ("application/json", BODY.encode("utf-16-le")),
        ("application/json", BODY.encode("utf-32")),
        ("application/json", b"\xef\xbb\xbf" + BODY.encode()),
        ("application/json", b'{"model": "tiny", "model": "team-b/law"}'),
        ("application/json", b'{"model": "team-b/law", "metadata": ' + b"[" * 1_490 + b"]" * 1_490 + b"}"),
        ("text/plain", BODY.encode()),
        ("application/x-www-form-urlencoded", b"model=team-b/law"),
        (FORM, part('Content-Disposition: form-data; name="model"')),
        (FORM, part('content-disposition:form-data; filename="a"; name="model"')),
        (FORM, part("Content-Type: text/plain", 'Content-Disposition: form-data; name="mod\\el"')),
        (FORM, part("Content-Disposition: form-data; name*=utf-8''m%6fdel")),
        (FORM, part("Content-Disposition: form-data;", ' name="model"')),
        (FORM, part('Content-Disposition: form-data; name="file"; filename="a"; name="model"')),
        (f"{FORM}; charset=utf-7", part('Content-Disposition: form-data; name="+AG0-odel"')),
        (
            f"{FORM}; charset=utf-7",
            part('Content-Disposition: form-data; name="model"', value="+AHQ-eam-b/law"),
        ),
        (f"{FORM}; Charset*=utf-7", part('Content-Disposition: form-data; name="file"')),
        (
            "multipart/form-data; charset=cp037; boundary=x",
            part('Content-Disposition: form-data; name="file"'),
        ),
        (f"{FORM}; boundary=y", part('Content-Disposition: form-data; name="file"')),
        (
            FORM,
            part('Content-Disposition: form-data; name="model"', value="tiny")[:-6]
            + part('Content-Disposition: form-data; name="model"'),
        ),
    ],
)
def test_bodies_that_hide_it(
    sidecar: Sidecar, token_file: Path, engine: FakeEngine, kind: str, body: bytes
) -> None:
    """A body in another encoding, or a form that hides its model from the sidecar, does not get past that."""
    http = sidecar(token_file, ("-",))
    headers = {"content-type": kind, **bearer(CI_A)}
    answer = http.post("/v1/audio/transcriptions", content=body, headers=headers)
    assert answer.status_code in (400, 404)
    assert engine.paths == []


def test_what_does_not_say_what_it_is(sidecar: Sidecar, token_file: Path, engine: FakeEngine) -> None:
    """A server refuses a request with two `Content-Type` headers. Where reading is restricted it also
    refuses a form that names no model."""
    http = sidecar(token_file, ("-",))
    who, kinds = ("authorization", f"Bearer {CI_A}"), ["application/json", FORM]
    own = BODY.replace("team-b/law", "team-a/sql").encode()
    for body in (own, part('Content-Disposition: form-data; name="model"', value="team-a/sql")):
        for order in (kinds, kinds[::-1]):
            headers = [*(("content-type", kind) for kind in order), who]
            answer = http.post("/v1/audio/transcriptions", content=body, headers=headers)
            assert (answer.status_code, "Content-Type" in answer.text) == (400, True)
    for body in (part('Content-Disposition: form-data; name="file"; filename="a"'), b"--x--\r\n", b"x"):
        headers = [("content-type", FORM), who]
        assert http.post("/v1/audio/transcriptions", content=body, headers=headers).status_code == 400
    assert engine.paths == []


def test_sums(sidecar: Sidecar, token_file: Path) -> None:
    """Only callers who may read every namespace see hits, misses, loads, requests in flight, their history
    and the engine's queue. `/metadata` counts what its caller may read."""
    http = sidecar(token_file, ("-",))

    def told(headers: dict[str, str]) -> tuple[bool, bool, bool, int, int | None]:
        board = http.get("/v1/dashboard", params={"wait_s": 5}, headers=headers).json()
        (replica,) = board["replicas"].values()
        metadata = http.get("/metadata", headers=headers).json()
        capacity = metadata["lora"]["lora_capacity"]
        counts = bool(board["history"]), bool(replica["figures"]), metadata["queue"] is not None
        return *counts, capacity["loaded_count"], capacity["available_slots"]

    assert told(bearer(OPERATORS)) == (True, True, True, 2, 2)
    assert told(bearer(CI_A)) == (False, False, False, 1, None)
    assert told({}) == (False, False, False, 0, None)

"""Who may register and unregister over HTTP."""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
import time
import timeit
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

import tests.plugin.conftest  # noqa: F401  # vLLM, without the warnings of its import
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware import access, tokens
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.tokens import BadTokenFile, Token, digest_of, find, parse
from lora_fs.sidecar.server.routes import dynamo, lora
from lora_fs.sidecar.settings import Insecure
from lora_fs.worker_patch.api.gate import Behind, Gate
from tests.plugin.test_gate import FakeEngine as GateEngine
from tests.reconcile.test_plan import RECORD
from tests.security.conftest import BOARD_A, CI_A, OPERATORS, TOKENS, Sidecar, Tenants, bearer, load
from tests.server.conftest import FakeEngine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def status(http: httpx.Client | TestClient, act: str, name: str, token: str | None) -> int:
    """What a load or unload of a name is answered, by vLLM's call, Dynamo's and SageMaker's."""
    headers = bearer(token) if token is not None else {}
    if act == "load":
        vllm = http.post("/v1/load_lora_adapter", json=load(name), headers=headers)
        body = {"lora_name": name, "source": {"uri": RECORD.spec.source.uri}}
        dynamo = http.post("/v1/loras", json=body, headers=headers)
        body = {"name": name, "src": load(name)["lora_path"]}
        sagemaker = http.post("/adapters", json=body, headers=headers)
    else:
        vllm = http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=headers)
        dynamo = http.delete(f"/v1/loras/{name}", headers=headers)
        sagemaker = http.delete(f"/adapters/{name}", headers=headers)
    assert vllm.status_code == dynamo.status_code == sagemaker.status_code
    return vllm.status_code


def asks(app: ASGIApp, address: str) -> TestClient:
    """A client whose connections have this address."""
    return TestClient(app, client=(address, 50_000))


def test_no_token_file(replica: Tenants, engine_url: str) -> None:
    """Without a token file no call over HTTP registers or unregisters, not from loopback either. Each
    gets 403, which says what to do. Lists and models answer as before."""
    http = asks(create_app(replica, engine_url=engine_url, admin=Admin(None)), "127.0.0.1")
    for act in ("load", "unload"):
        for token in (None, OPERATORS):
            assert status(http, act, "team-a/sql", token) == 403
    sent = http.post("/v1/lora_adapters?name=team-a/new", files={"weights": ("adapter_config.json", b"{}")})
    error = sent.json()["error"]
    assert (sent.status_code, error["type"]) == (403, "PermissionDeniedError")
    assert all(
        word in error["message"] for word in ("LORA_FS_TOKEN_FILE", "--insecure", "LORA_FS_INSECURE=1")
    )
    assert (replica.writers, replica.uploaded) == ([], [])
    listed = {card["id"] for card in http.get("/v1/models").json()["data"]}
    assert {"team-a/sql", "team-b/law"} <= listed


def test_insecure(replica: Tenants, engine_url: str) -> None:
    """With `LORA_FS_INSECURE=1` and no token file, a caller on loopback registers and unregisters without
    a token. Other callers get 403, and so does a request with a header that a proxy writes."""
    app = create_app(replica, engine_url=engine_url, admin=Admin(None, insecure="loopback"))
    here = asks(app, "127.0.0.1")
    assert status(here, "load", "team-a/new", None) == status(here, "unload", "team-b/law", None) == 200
    assert len(replica.writers) == 6
    for header in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP", "X-Forwarded-Proto"):
        here.headers = httpx.Headers({header: "127.0.0.1"})
        assert status(here, "load", "team-a/new", None) == 403, header
    for address in ("10.0.0.7", "fd00::7"):
        afar = asks(app, address)
        for headers in ({}, {"Host": "127.0.0.1"}, {"X-Forwarded-For": "127.0.0.1"}):
            afar.headers = httpx.Headers(headers)
            assert {status(afar, act, "team-a/sql", None) for act in ("load", "unload")} == {403}
        assert "LORA_FS_TOKEN_FILE" in afar.delete("/adapters/team-a/sql").json()["error"]["message"]
        assert afar.get("/v1/models").status_code == 200
    assert len(replica.writers) == 6


def test_insecure_to_all(replica: Tenants, engine_url: str) -> None:
    """With `LORA_FS_INSECURE=any` and no token file, anybody who reaches the port registers and
    unregisters, but not a page of another site."""
    app = create_app(replica, engine_url=engine_url, admin=Admin(None, insecure="any"))
    afar = asks(app, "10.0.0.7")
    assert status(afar, "load", "team-a/new", None) == status(afar, "unload", "team-b/law", None) == 200
    afar.headers = httpx.Headers({"Origin": "https://evil.example"})
    assert status(afar, "load", "team-a/new", None) == 403


def test_insecure_with_tokens(replica: Tenants, engine_url: str, token_file: Path) -> None:
    """With a token file `LORA_FS_INSECURE` changes nothing."""
    app = create_app(replica, engine_url=engine_url, admin=Admin(token_file, insecure="loopback"))
    assert [status(asks(app, "127.0.0.1"), "load", "team-a/sql", one) for one in (None, CI_A)] == [401, 200]
    assert status(asks(app, "10.0.0.7"), "load", "team-a/sql", CI_A) == 200


@pytest.mark.parametrize("insecure", ["off", "loopback", "any"])
def test_the_engines_key(replica: Tenants, engine_url: str, insecure: Insecure) -> None:
    """Without a token file the plugin lets callers who show vLLM's own key (`--api-key`) register and
    unregister, by every route, and nobody else."""
    admin = Admin(None, insecure=insecure)
    admin.keys = frozenset({digest_of("vllms-key"), digest_of("another")})
    app = create_app(replica, engine_url=engine_url, admin=admin)
    for http in (asks(app, "127.0.0.1"), asks(app, "10.0.0.7")):
        for act in ("load", "unload"):
            assert [status(http, act, "team-a/sql", one) for one in ("vllms-key", "another")] == [200, 200]
            assert [status(http, act, "team-a/sql", one) for one in (None, "vllms-ke", "x")] == [401] * 3


def test_a_token_is_needed(sidecar: Sidecar, token_file: Path) -> None:
    """With a token file a load or unload without a token of it gets 401. One with a token that is not
    good for it gets 403."""
    http = sidecar(token_file)
    for act in ("load", "unload"):
        for wrong in (None, "all", OPERATORS[:-1], OPERATORS + "x", "#", "name=operators"):
            assert status(http, act, "team-a/sql", wrong) == 401, wrong
        assert status(http, act, "team-a/sql", BOARD_A) == 403
        assert status(http, act, "team-a/sql", OPERATORS) == 200
    answer = http.post("/v1/load_lora_adapter", json=load("x"))
    assert (answer.headers["www-authenticate"], answer.json()["error"]["type"]) == (
        "Bearer",
        "AuthenticationError",
    )


@pytest.mark.anyio
@pytest.mark.parametrize("plugin", [False, True])
async def test_before_the_body(token_file: Path, replica: Tenants, plugin: bool) -> None:
    """A load or unload without a token of the file gets 401 before the server reads any of its body. With
    one, or where none is necessary, a body of more than 1 MiB gets 413 as soon as that much has
    arrived."""

    async def asked(
        path: str, file: Path | None, token: str | None, address: str = "127.0.0.1"
    ) -> tuple[int, int]:
        """The status, and how many pieces of 64 KiB of an endless body were taken."""
        admin, taken, told = Admin(file, ("-",), insecure="loopback"), 0, []
        app: ASGIApp
        if plugin:
            vllm = FastAPI()
            trail = Trail(None)
            routers = (
                lora.router(replica, admin, trail),
                dynamo.router(replica, admin, trail, hold_timeout_s=5.0),
            )
            vllm.router.routes.extend(route for router in routers for route in router.routes)
            behind = Behind(replica, GateEngine(), 5.0, admin)  # type: ignore[arg-type]
            app = Gate(vllm, lambda: behind)
        else:
            app = create_app(replica, engine_url="http://127.0.0.1:9", admin=admin)
        sent = [(b"content-type", b"application/json")]
        sent += [(b"authorization", f"Bearer {token}".encode())] if token is not None else []
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": sent}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "client": (address, 1)}

        async def receive() -> Message:
            nonlocal taken
            taken += 1
            assert taken < 100
            return {"type": "http.request", "body": b" " * (64 << 10), "more_body": True}

        async def send(message: Message) -> None:
            told.append(message)

        await app(scope, receive, send)
        return told[0]["status"], taken

    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/loras"):
        for wrong in (None, "none-of-them-99"):
            assert await asked(path, token_file, wrong) == (401, 0)
        assert await asked(path, token_file, OPERATORS) == await asked(path, None, None) == (413, 17)
        assert await asked(path, None, None, "10.0.0.7") == (403, 0)


def test_a_token_of_a_namespace(sidecar: Sidecar, token_file: Path, replica: Tenants) -> None:
    """A token with `namespaces=` registers, unregisters and reads there and nowhere else."""
    http = sidecar(token_file, ("-",))
    for act in ("load", "unload"):
        assert status(http, act, "team-a/sql", CI_A) == 200
        assert status(http, act, "team-b/law", CI_A) == 403
    assert status(http, "load", "plain", CI_A) == 200  # of the first one that is served
    assert status(http, "load", "team-c/x", CI_A) == 200  # the replica says that it is not served
    assert {writer.partition("@")[0] for writer in replica.writers} == {"http:ci-a"}
    listed = http.get("/v1/lora_adapters", headers=bearer(CI_A)).json()["data"]
    assert [one["name"] for one in listed] == ["team-a/sql"]


def test_a_token_of_a_verb(sidecar: Sidecar, tmp_path: Path) -> None:
    """A token with `verbs=` does nothing else."""
    file = tmp_path / "tokens"
    for verb in ("register", "unregister", "read"):
        file.write_text(f"one verbs={verb}\n")
        http = sidecar(file, ("-",))
        assert status(http, "load", "team-a/sql", "one") == (200 if verb == "register" else 403)
        assert status(http, "unload", "team-a/sql", "one") == (200 if verb == "unregister" else 403)
        listed = http.get("/v1/lora_adapters", headers=bearer("one")).json()["data"]
        assert len(listed) == (2 if verb == "read" else 0)


def test_rotation(sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that you add to the file or remove from it takes effect at the next admin call, and for
    reading within a second. You restart nothing."""
    assert access.FRESH_S <= 1
    monkeypatch.setattr(access, "FRESH_S", 0)
    file = tmp_path / "tokens"
    file.write_text("old-one\n")
    http = sidecar(file, ("-",))
    assert [status(http, "load", "x", token) for token in ("old-one", "new-one")] == [200, 401]
    file.write_text("new-one\n")
    assert [status(http, "load", "x", token) for token in ("old-one", "new-one")] == [401, 200]
    names = [len(http.get("/v1/models", headers=bearer(t)).json()["data"]) for t in ("old-one", "new-one")]
    assert names == [1, 3]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 401),
        ("# nobody\n\n", 401),
        (None, 503),
        ("one two\n", 503),
        ("one rights=all\n", 503),
        ("one namespaces=a/b\n", 503),
        ("one namespaces=\n", 503),
        ("one verbs=write\n", 503),
        ("one name=a name=b\n", 503),
        ("one\none name=again\n", 503),
        ("\u00e9\n", 503),
    ],
)
def test_a_file_that_is_none(sidecar: Sidecar, tmp_path: Path, text: str | None, code: int) -> None:
    """An empty token file lets nobody in. With one that is missing or not valid, admin calls get 503."""
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    answer = sidecar(file).post("/v1/load_lora_adapter", json=load("x"), headers=bearer("one"))
    assert answer.status_code == code
    assert "one" not in answer.json()["error"]["message"].replace("one token", "")


def test_how_long_a_look_up_takes() -> None:
    """The server finds a token by its SHA-256. The time depends neither on how much of it was right nor
    on the number of tokens."""
    few, many = (
        parse("".join(f"token-{number} name=n{number}\n" for number in range(count))) for count in (1, 10_000)
    )

    def took_s(known: Any) -> float:
        return min(timeit.repeat(lambda: find(known, "token-0"), number=100, repeat=20))

    assert find(many, "token-9999") is not None
    assert [find(many, wrong) for wrong in ("token-10000", "token-", "")] == [None] * 3
    assert took_s(many) < 10 * took_s(few)


def test_tokens_are_not_told(
    sidecar: Sidecar, token_file: Path, tmp_path: Path, replica: Tenants, caplog: pytest.LogCaptureFixture
) -> None:
    """No token is in a log, an error, an audit line, a record or a status file."""
    caplog.set_level(logging.DEBUG)
    http, told = sidecar(token_file, ("-",)), []
    for token in (OPERATORS, CI_A, BOARD_A, "none-of-them-99"):
        for act in ("load", "unload"):
            for name in ("team-a/sql", "team-b/law"):
                body = load(name) if act == "load" else {"lora_name": name}
                told.append(http.post(f"/v1/{act}_lora_adapter", json=body, headers=bearer(token)).text)
        told.append(http.get("/v1/models", headers=bearer(token)).text)
        told.append(http.get("/v1/lora_adapters", headers={"X-Lora-Fs-Token": token}).text)
    told += [repr(known) for known in parse(TOKENS).values()]
    for text in (f"{OPERATORS} {CI_A}", f"{OPERATORS} name=/", f"{OPERATORS}\n{OPERATORS}"):
        with pytest.raises(BadTokenFile) as refused:
            parse(text)
        told.append(str(refused.value))
    told += [record.getMessage() for record in caplog.records]
    told += [(tmp_path / "audit").read_text(), *replica.writers]
    for secret in (OPERATORS, CI_A, BOARD_A, "none-of-them-99"):
        assert not [text for text in told if secret in text]
    assert '"who": "token:ci-a"' in (tmp_path / "audit").read_text()
    assert not {"secret", "token", "value"} & set(Token.__dataclass_fields__)


@pytest.fixture
def passed_on(engine: FakeEngine) -> list[tuple[str | None, str | None]]:
    """What the engine gets of the two headers, request by request to ``/v1/seen``."""
    seen = []

    async def anything(request: Request) -> JSONResponse:
        seen.append((request.headers.get("authorization"), request.headers.get("x-lora-fs-token")))
        return JSONResponse({})

    engine.app.router.routes.insert(0, Route("/v1/seen", anything))
    return seen


def test_the_engine_gets_no_token(sidecar: Sidecar, token_file: Path, passed_on: list[object]) -> None:
    """No `Authorization` of a client goes on to the engine, whatever is in it: the sidecar sends the engine's
    own key, if it knows one."""
    schemes = (
        "Bearer %s",
        "bearer  %s",
        "Bearer %s,",
        "Token token=%s",
        "%s",
        "Basic x %s",
        "x " * 16 + "%s",
    )
    basic = base64.b64encode(f"x:{OPERATORS}".encode()).decode()
    sent = [*(scheme % OPERATORS for scheme in schemes), f"Basic {basic}", "Bearer sk-anything"]
    for file in (token_file, None):
        http = sidecar(file)
        for one in sent:
            assert http.get("/v1/seen", headers={"Authorization": one}).status_code == 200
        assert passed_on == [(None, None)] * len(sent)
        passed_on.clear()
    http = sidecar(token_file, engine_key="sk-engine")
    for headers in (bearer(CI_A), bearer("sk-engine"), {**bearer("x"), "X-Lora-Fs-Token": CI_A}):
        assert http.get("/v1/seen", headers=headers).status_code == 200
    assert passed_on == [("Bearer sk-engine", None)] * 3


def test_who_may_use_an_engine_with_a_key(
    sidecar: Sidecar, token_file: Path, passed_on: list[object]
) -> None:
    """Where the engine has a key, a client shows that key or a token of the file to use it, and gets 401
    otherwise."""
    for file in (token_file, None):
        http = sidecar(file, engine_key="sk-engine")
        for wrong in ({}, bearer("sk-engin"), bearer("sk-engine,"), {"Authorization": "Basic sk-engine"}):
            answer = http.get("/v1/seen", headers=wrong)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
    assert passed_on == []


def test_what_is_no_file(
    sidecar: Sidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_on: list[object]
) -> None:
    """A FIFO in the token file's place, or a file that hangs, delays no request that needs no token by a
    second. A good file takes effect at the next call after the hanging reads have ended.
    """
    file, more, real = tmp_path / "tokens", access.AT_ONCE + 2, tokens._contents
    file.write_text(OPERATORS)
    over, began = threading.Event(), time.monotonic

    def hangs(path: Path) -> bytes:
        over.wait(60)
        return real(path)

    def needs_none(http: httpx.Client) -> None:
        for _ in range(more):
            at = began()
            http.get("/v1/seen", headers=bearer("the-engines-key"))
            assert began() - at < 1

    http = sidecar(file)
    needs_none(http)
    file.unlink()
    os.mkfifo(file)
    monkeypatch.setattr(access, "FRESH_S", 0)
    needs_none(http)
    assert [status(http, "load", "x", OPERATORS) for _ in range(more)] == [503] * more
    needs_none(unread := sidecar(file))
    file.unlink()
    file.write_text(OPERATORS)
    assert [status(one, "load", "x", OPERATORS) for one in (http, unread)] == [200, 200]
    monkeypatch.setattr(tokens, "_contents", hangs)
    try:
        needs_none(http)
        needs_none(unread := sidecar(file))
    finally:
        over.set()
    assert [status(one, "load", "x", OPERATORS) for one in (http, unread)] == [200, 200]
    assert passed_on == [(None, None)] * (5 * more)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/%6coad_lora_adapter",
        "/v1/x/%2e%2e/load_lora_adapter",
        "/v1//unload_lora_adapter",
    ],
)
def test_no_way_past(sidecar: Sidecar, token_file: Path, engine: FakeEngine, path: str) -> None:
    """No client reaches the engine's own load and unload through the sidecar, however it spells the
    path."""
    http = sidecar(token_file)
    answer = http.post(httpx.URL(str(http.base_url)).copy_with(raw_path=path.encode()), json=load("x"))
    assert answer.status_code in (400, 401)
    assert (engine.paths, engine.bodies) == ([], [])
    assert json.loads(answer.text)["error"]

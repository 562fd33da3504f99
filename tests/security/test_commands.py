"""lora-fs's own calls, which its command line makes with ``--server``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from lora_fs.sidecar.registry.lifecycle.acts import ACTS
from lora_fs.sidecar.server.middleware.access import Admin
from tests.registry.conftest import write_adapter
from tests.security.conftest import BOARD_A, CI_A, OPERATORS, bearer
from tests.server.conftest import tenants

BODIES: dict[str, dict[str, Any]] = {
    "promote": {"revision": "v1"},
    "canary": {"end": "abort"},
    "set": {"priority": 1},
    "evaluate": {
        "evaluation": {
            "namespace": "team-a",
            "model": "tiny",
            "name": "law",
            "data": "cases.jsonl",
            "data_sha256": 64 * "0",
            "cases": 1,
            "concurrency": 1,
            "measured": {"revision": "v1", "digest": f"sha256:{64 * '0'}", "figures": {"pass_rate": 1}},
        }
    },
    "load": {"revision": "v1"},
    "undo": {"revision": "v1"},
    "register": {"source": "file:///adapters"},
}
FILES = ("adapter_config.json", "adapter_model.safetensors")


def at(namespace: str, name: str, act: str = "") -> str:
    return f"/v1/lora_adapters/{namespace}/tiny/{name}{act and '/'}{act}"


def changes(http: httpx.Client) -> list[str]:
    """Every last part of a path at which one name is changed, as the server's own document lists them."""
    paths = http.get("/openapi.json").json()["paths"]
    of_name = "/v1/lora_adapters/{namespace}/{model}/{name}/"
    return [path.removeprefix(of_name) for path in paths if path.startswith(of_name)]


def upload(http: httpx.Client, namespace: str, name: str, folder: Path, token: str) -> httpx.Response:
    files = {file: (file, (folder / file).read_bytes()) for file in FILES}
    return http.post(at(namespace, name, "upload"), files=files, headers=bearer(token))


def test_own_calls(tmp_path: Path, token_file: Path) -> None:
    """No command over HTTP changes or reads anything outside the namespaces of its token. Without a token
    it gets 401."""
    folder = write_adapter(tmp_path / "lora")
    with tenants(tmp_path, Admin(token_file, ("-",))) as http:
        assert upload(http, "team-a", "sql", folder, CI_A).status_code == 200
        assert upload(http, "team-b", "law", folder, OPERATORS).status_code == 200
        assert upload(http, "team-b", "law", folder, CI_A).status_code == 403
        assert upload(http, "team-a", "sql", folder, BOARD_A).status_code == 403
        acts = changes(http)
        assert {kind.word for kind in ACTS} | {"load", "undo", "register", "upload"} == set(acts)
        for act in acts:
            if act == "upload":
                continue
            body = BODIES.get(act, {})
            refused = ((None, "team-b", 401), (CI_A, "team-b", 403), (BOARD_A, "team-a", 403))
            for token, namespace, status in refused:
                headers = bearer(token) if token is not None else {}
                answer = http.post(at(namespace, "law", act), json=body, headers=headers)
                assert answer.status_code == status, (act, token, answer.text)
        assert http.get(at("team-b", "law"), headers=bearer(OPERATORS)).json()["pointer"]["generation"] == 1
        for path in (at("team-b", "law"), at("team-b", "none"), "/v1/lora_adapters/team-b/tiny"):
            answers = [
                http.get(path.replace("team-b", namespace), headers=bearer(CI_A))
                for namespace in ("team-b", "team-z")
            ]
            assert [one.status_code for one in answers] == [404, 404]
            assert len({one.text.replace("team-z", "team-b") for one in answers}) == 1
        for name in ("team-a/sql", "team-b/law"):  # no engine answers: a report counts the requests
            assert http.post("/v1/completions", json={"model": name}, headers=bearer(OPERATORS)).is_error
        used: set[str] = set()
        while used != {"team-a/tiny/v1/sql", "team-b/tiny/v1/law"}:  # a report is on its way
            told = http.get("/v1/replicas", headers=bearer(OPERATORS)).json()["replicas"]
            used = {key for one in told for key in one["usage"]}
        while "law" not in http.get("/v1/replicas/events", headers=bearer(OPERATORS)).text:
            pass
        own = ("/v1/lora_adapters/team-a/tiny", at("team-a", "sql"))
        for path in ("/v1/replicas", "/v1/replicas/events", *own):
            answer = http.get(path, headers=bearer(CI_A))
            assert answer.status_code == 200
            assert "sql" in answer.text
            assert "team-b" not in answer.text
            assert "law" not in answer.text
        assert http.get("/v1/replicas").json()["replicas"] == []
        assert all(one["events"] == [] for one in http.get("/v1/replicas/events").json()["lists"])

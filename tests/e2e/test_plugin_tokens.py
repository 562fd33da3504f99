"""A real vLLM with the plugin and a token file: who may register, list and use what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import PROMPT, PluginReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until

OPERATORS, READER = "all-of-it-4711", "looks-at-a-42"
TOKENS = f"{OPERATORS} name=operators\n{READER} name=board-a namespaces=team-a verbs=read\n"
LISTED_S = 60.0


class Updating(PluginReplica):
    """With vLLM's own routes that load and unload, as who moves here from the sidecar has them."""

    engine_env: ClassVar = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


@pytest.fixture(scope="module")
def replica(
    farm: EngineFarm,
    model_dir: Path,
    adapters: Callable[[int], Path],
    volume_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PluginReplica]:
    """Serves a public namespace and one that takes a token, an adapter in each."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "tokens").write_text(TOKENS)
    volume = Volume(volume_root, MODEL_NAME, cwd=model_dir.parent)
    volume.run("init")
    settings = {
        "namespaces": "default,team-a",
        "public_namespaces": "default",
        "token_file": str(folder / "tokens"),
    }
    with closing(Updating("a", farm, model_dir, volume, folder / "run", settings=settings)) as replica:
        volume.run("register", "open", str(adapters(20)))
        volume.run("--namespace", "team-a", "register", "own", str(adapters(21)))
        replica.wait_ready()
        seen = {"default/open", "team-a/own"}
        wait_until("both are listed", lambda: seen <= names(replica, OPERATORS), timeout_s=LISTED_S)
        yield replica


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def names(replica: PluginReplica, token: str | None) -> set[str]:
    listed = replica.http.get("/v1/models", headers=bearer(token)).raise_for_status()
    return {card["id"] for card in listed.json()["data"]}


def complete(replica: PluginReplica, model: str, token: str | None) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return replica.http.post("/v1/completions", json=body, headers=bearer(token))


def load(replica: PluginReplica, folder: Path, token: str | None) -> httpx.Response:
    body = {"lora_name": "default/new", "lora_path": str(folder)}
    return replica.http.post("/v1/load_lora_adapter", json=body, headers=bearer(token))


def shape(response: httpx.Response, name: str) -> Any:
    """What an answer says, whatever the name in it."""
    return response.status_code, response.text.replace(name, "NAME")


def test_names_are_listed_to_who_may_read_them(replica: PluginReplica) -> None:
    """Without a token the public ones alone."""
    assert names(replica, None) == {MODEL_NAME, "default/open"}
    for token in (READER, OPERATORS):
        assert names(replica, token) == {MODEL_NAME, "default/open", "team-a/own"}


def test_who_may_not_read_gets_the_answer_of_a_name_that_does_not_exist(replica: PluginReplica) -> None:
    """With a token of its namespace it is served, and what is public is served to all."""
    refused = complete(replica, "team-a/own", None)
    assert refused.status_code == 404
    assert shape(refused, "team-a/own") == shape(complete(replica, "team-a/no", None), "team-a/no")
    assert complete(replica, "team-a/own", READER).status_code == 200
    served = complete(replica, "default/open", None)
    assert served.status_code == 200
    assert served.headers["x-lora-fs-adapter"] == f"default/{MODEL_NAME}/v1/open"


def test_who_may_register(replica: PluginReplica, adapters: Callable[[int], Path]) -> None:
    """401 without a token, 403 with one that is not good for it; with one that is, it is served."""
    assert load(replica, adapters(22), None).status_code == 401
    assert load(replica, adapters(22), READER).status_code == 403
    assert complete(replica, "default/new", None).status_code == 404
    assert load(replica, adapters(22), OPERATORS).status_code == 200
    assert complete(replica, "default/new", None).status_code == 200


def test_sagemakers_calls_are_the_registrys(
    replica: PluginReplica, adapters: Callable[[int], Path], tmp_path: Path
) -> None:
    """Like vLLM's own: with a token, from allowed folders, and listed; nobody else's are there."""
    body = {"name": "default/made", "src": str(adapters(23))}
    outside = {**body, "src": str(tmp_path)}
    for token, sent, status in ((None, body, 401), (READER, body, 403), (OPERATORS, outside, 400)):
        answer = replica.http.post("/adapters", json=sent, headers=bearer(token))
        assert answer.status_code == status, answer.text
        assert complete(replica, "default/made", OPERATORS).status_code == 404
    done = replica.http.post("/adapters", json=body, headers=bearer(OPERATORS))
    assert (done.status_code, done.text) == (200, "Adapter default/made registered")
    assert "default/made" in names(replica, None)
    assert complete(replica, "default/made", None).status_code == 200
    path = "/adapters/default/made"
    for token, status in ((None, 401), (READER, 403), (OPERATORS, 200)):
        assert replica.http.delete(path, headers=bearer(token)).status_code == status
    assert complete(replica, "default/made", None).status_code == 404

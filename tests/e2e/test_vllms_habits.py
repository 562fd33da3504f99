"""On vLLM's own routes a client of vLLM finds vLLM's errors: a stock engine is asked the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.replica import PROMPT, PluginReplica, Replica, SidecarReplica, openai_client
from lora_fs.demo.sidecar import start_gateway

Adapters = Callable[[int], Path]

# vLLM's own tests change the config so, and look for these words.
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "rank": ({"r": 1024}, "is greater than max_lora_rank"),
    "dora": ({"use_dora": True}, "does not yet support DoRA"),
    "modules": ({"modules_to_save": ["lm_head"]}, "Unsupported modules_to_save"),
}


@pytest.fixture(scope="module", params=[SidecarReplica, PluginReplica], ids=["sidecar", "plugin"])
def kind(request: pytest.FixtureRequest) -> type[Replica]:
    """Both kinds, one after the other."""
    chosen: type[Replica] = request.param
    return chosen


@pytest.fixture(scope="module")
def settings(settings: dict[str, str]) -> dict[str, str]:
    """A sidecar is told the engine's bound; the plugin sees it."""
    return settings | {"max_rank": "16"}


@pytest.fixture(scope="module")
def stock(engine: Process) -> Iterator[openai.OpenAI]:
    """A vLLM without lora-fs."""
    with openai_client(engine.url) as client:
        yield client


def told(client: openai.OpenAI, path: str, **body: object) -> tuple[int, Any]:
    """The status and the error of a call that is refused."""
    with pytest.raises(openai.APIStatusError) as refused:
        client.post(path, cast_to=str, body=body)
    return refused.value.status_code, refused.value.body


@pytest.mark.parametrize("change", REFUSED)
def test_a_bad_adapter_is_a_bad_request(
    pair: Pair[Replica], stock: openai.OpenAI, adapters: Adapters, change: str, kind: type[Replica]
) -> None:
    """400 with vLLM's words. vLLM 0.32 says the same words with a 500, which clients repeat."""
    folder = shutil.copytree(adapters(3), pair.volume.cwd / f"{kind.__name__}-{change}")
    config = json.loads((folder / "adapter_config.json").read_text())
    fields, words = REFUSED[change]
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    asked = {"lora_name": change, "lora_path": str(folder)}
    status, by_vllm = told(stock, "/load_lora_adapter", **asked)
    assert (status, by_vllm["type"], words in by_vllm["message"]) == (500, "InternalServerError", True)
    status, ours = told(pair.a.openai, "/load_lora_adapter", **asked)
    assert (status, ours["type"], words in ours["message"]) == (400, "BadRequestError", True)
    assert ours.keys() == by_vllm.keys()
    sagemakers = pair.a.http.post("/adapters", json={"name": change, "src": str(folder)})
    assert (sagemakers.status_code, sagemakers.json()["error"]["type"]) == (400, "BadRequestError")


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        ("/load_lora_adapter", {"lora_name": "twice", "lora_path": "{folder}"}, "has already been loaded"),
        ("/load_lora_adapter", {"lora_name": "gone", "lora_path": "{folder}-gone"}, "No adapter found for"),
        ("/unload_lora_adapter", {"lora_name": "gone"}, "The lora adapter 'gone' cannot be found."),
        ("/completions", {"model": "gone", "prompt": "x"}, "The model `gone` does not exist."),
    ],
)
def test_what_else_is_refused(
    pair: Pair[Replica],
    stock: openai.OpenAI,
    adapters: Adapters,
    path: str,
    asked: dict[str, str],
    words: str,
) -> None:
    """The status and the type are vLLM's, and so are the words."""
    folder = adapters(4)
    asked = {name: value.format(folder=folder) for name, value in asked.items()}
    answers = []
    for client in (stock, pair.a.openai):
        if asked.get("lora_name") == "twice":
            client.post(path, cast_to=str, body=asked)
        status, error = told(client, path, **asked)
        answers.append((status, error["type"], words in error["message"]))
        if asked.get("lora_name") == "twice":
            client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "twice"})
    assert answers[0] == answers[1]
    assert answers[0][2]


def test_a_folder_under_no_allowed_source(pair: Pair[Replica], tmp_path: Path, adapters: Adapters) -> None:
    """What vLLM would read: here 400 with the type that vLLM has for bad input, and the cure."""
    folder = shutil.copytree(adapters(5), tmp_path / "elsewhere")
    status, error = told(pair.a.openai, "/load_lora_adapter", lora_name="else", lora_path=str(folder))
    assert (status, error["type"]) == (400, "InvalidUserInput")
    assert "LORA_FS_ALLOWED_SOURCES" in error["message"]


@pytest.fixture(scope="module")
def gateway(pair: Pair[Replica], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A gateway before one of the replicas."""
    process = start_gateway([pair.a.url], log=tmp_path_factory.mktemp("gateway") / "gateway.log")
    process.wait_ready()
    yield process
    process.stop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/tokenize", {"prompt": PROMPT}),
    ],
    ids=lambda one: one.rpartition("/")[2] if isinstance(one, str) else "",
)
def test_a_request_that_names_no_model_is_answered_as_vllm_answers_it(
    pair: Pair[Replica], engine: Process, gateway: Process, path: str, body: dict[str, object]
) -> None:
    """None, null and an empty name are the base model where vLLM takes them so; what is no text is a 400."""
    for model in ({}, {"model": None}, {"model": ""}, {"model": 5}, {"model": ["a"]}, {"model": {"id": "a"}}):
        told = []
        for url in (engine.url, pair.a.url, gateway.url):
            answer = httpx.post(f"{url}{path}", json={**body, **model}, **LOCAL)
            said = answer.json()
            told.append((answer.status_code, *(said.get(one) for one in ("error", "tokens")), _texts(said)))
        assert told[1:] == [told[0]] * 2, model
        status, error, *_ = told[0]
        assert status < 500, told[0]
        assert (error is None) == (status == 200), told[0]
        if path == "/v1/completions":
            assert status == (400 if model.get("model") else 200), told[0]


def _texts(said: dict[str, Any]) -> list[str]:
    return [choice.get("text", "") for choice in said.get("choices", ())]

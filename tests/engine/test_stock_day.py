"""What a stock vLLM 0.32 does in an operator's day: the reasons for the plugin, row by row.

These tests pin upstream's behaviour, good or bad, so that an upgrade which changes it is
noticed. When one fails after an upgrade, look whether its twin in ``test_plugin_day.py`` and
what the plugin does for it are still needed.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from tests.engine.bad_adapters import BAD, CONFIG, WEIGHTS, overflow
from tests.engine.client import LONG_PROMPT, Client, owned
from tests.engine.disk import opened
from tests.engine.stream import Stream

Put = Callable[[str, int], Path]
Start = Callable[..., AbstractContextManager[Client]]
Adapters = Callable[[int], Path]
Right = Callable[[int], str]

WITHOUT_A_REASON = "was found but could not be loaded."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What vLLM's own filesystem resolver looks into."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def put(folder: Path, replace: Callable[[Path, int], Path]) -> Put:
    """``put(name, seed)``: an adapter's files under a name, whatever was there."""
    return lambda name, seed: replace(folder / name, seed)


@pytest.fixture(scope="module")
def start(farm: EngineFarm, model_dir: Path, folder: Path) -> Start:
    """``with start(name, *arguments)``: a stock engine with vLLM's own resolver."""

    def run(name: str, *arguments: str) -> AbstractContextManager[Client]:
        env = {
            "VLLM_PLUGINS": "lora_filesystem_resolver",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(folder),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        }
        return owned(farm.start(f"stock-{name}", model_dir, args=arguments, env=env))

    return run


@pytest.fixture(scope="module")
def stock(start: Start) -> Iterator[Client]:
    """One engine for the rows that it survives: two slots, four adapters in memory."""
    with start("shared") as client:
        yield client


def evict_all(stock: Client, put: Put, seed: int = 8) -> None:
    """Ask for as many other adapters as the engine keeps."""
    for number in range(4):
        put(f"filler-{number}", seed + number)
        assert stock.complete(f"filler-{number}").status == 200


@pytest.mark.parametrize("what", ["gone", "truncated"])
def test_evicted_and_then_broken_on_disk(start: Start, put: Put, what: str) -> None:
    """One request for it ends the engine, with every other tenant's."""
    doomed = put("doomed", 0)
    put("bystander", 1)
    put("other", 2)
    with start(what, "--max-cpu-loras", "2") as client:
        for name in ("doomed", "other"):
            assert client.complete(name).status == 200
        with Stream(client.url, "bystander") as stream:
            if what == "gone":
                shutil.rmtree(doomed)
            else:
                os.truncate(doomed / WEIGHTS, 1000)
            answer = client.complete("doomed")
            assert answer.status in (500, None)
            assert stream.wait_broken(limit_s=10)
        assert client.engine.wait_ended(timeout_s=60)
        assert not client.healthy()


def test_config_is_a_fifo(stock: Client, put: Put, folder: Path, adapters: Adapters) -> None:
    """A request for it stops the whole API server, until somebody writes to the FIFO."""
    put("bystander", 1)
    pipe = BAD["fifo"].make(adapters(3), folder / "fifo") / CONFIG
    with Stream(stock.url, "bystander") as stream, ThreadPoolExecutor(1) as thread:
        asking = thread.submit(stock.complete, "fifo")
        assert stream.wait_still(1.0, limit_s=10)
        assert not stock.healthy()
        assert not asking.done()
        # Fails unless somebody has it open for reading.
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        assert asking.result().status == 400
        stream.wait_tokens(1)
    assert set(stream.texts) == {stream.expected}
    assert stock.healthy()


def test_hub_does_not_answer(start: Start, put: Put, silent_hub: socket.socket) -> None:
    """The engine itself waits for it: no reply, no token for anybody, and ``/health`` says 200."""
    put("bystander", 1)
    with start("hub") as client, ThreadPoolExecutor(1) as thread:
        with Stream(client.url, "bystander") as stream:
            loading = thread.submit(client.load, "far", "acme/adapter")
            connection, _ = silent_hub.accept()
            with connection:
                assert stream.wait_still(3.0, limit_s=10)
                assert not loading.done()
                assert client.healthy()
                client.engine.kill()
                assert stream.wait_broken(limit_s=10)
        assert loading.result().status is None


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("no-r", 400, WITHOUT_A_REASON),
        ("empty-object", 500, "'peft_type'"),
        ("bad-json", 400, "Expecting ',' delimiter: line 1 column 8 (char 7)"),
    ],
)
def test_config_that_is_none(
    stock: Client, folder: Path, adapters: Adapters, kind: str, status: int, message: str
) -> None:
    """A request is told nothing of the file, or the parser's words; a load is a server's error."""
    made = BAD[kind].make(adapters(3), folder / kind)
    error = stock.complete(kind).error
    assert error["code"] == status
    assert error["message"].endswith(message)
    assert stock.load(f"{kind}-loaded", made).status == 500
    assert kind not in stock.names()


@pytest.mark.parametrize("kind", ["no-such-layers", "half-hidden", "other-rank"])
def test_served_silently_wrong(
    stock: Client, folder: Path, adapters: Adapters, right: Right, kind: str
) -> None:
    """200 and listed, with another answer than the adapter was trained to give."""
    BAD[kind].make(adapters(3), folder / kind)
    said = stock.complete(kind).text
    assert said != right(3)
    assert kind in stock.names()
    assert (said == stock.complete(MODEL_NAME).text) == (kind == "no-such-layers")


@pytest.mark.parametrize("kind", ["nan", "overflowing"])
def test_answers_of_nan_harm_others(
    start: Start, put: Put, folder: Path, adapters: Adapters, right: Right, kind: str
) -> None:
    """200 and an empty answer, and NaN stays in the KV blocks that the next tenant is given."""
    spoil = BAD["nan"].spoil if kind == "nan" else overflow
    spoil(put(kind, 3))
    for seed in range(4):
        put(f"after-{kind}-{seed}", seed)
    with start(kind) as client:
        assert client.complete(kind).text == ""
        said = [client.complete(f"after-{kind}-{seed}").text for seed in range(4)]
    assert said != [right(seed) for seed in range(4)]


def test_oversized_shape_evicts_others(
    stock: Client, put: Put, folder: Path, adapters: Adapters, right: Right
) -> None:
    """400, yet each failure took a place in memory: four of them evicted both good adapters."""
    BAD["oversized"].make(adapters(3), folder / "oversized")
    for name, seed in (("good-0", 0), ("good-1", 1)):
        put(name, seed)
        assert stock.complete(name).text == right(seed)
        put(name, seed + 5)  # what is read again says something else
    assert [stock.complete(name).text for name in ("good-0", "good-1")] == [right(0), right(1)]
    for _ in range(4):
        assert stock.complete("oversized").error["message"].endswith(WITHOUT_A_REASON)
    assert [stock.complete(name).text for name in ("good-0", "good-1")] == [right(5), right(6)]


@pytest.mark.parametrize("kind", ["truncated", "rank-too-high", "dora", "no-weights"])
def test_refused_without_a_reason(stock: Client, folder: Path, adapters: Adapters, kind: str) -> None:
    """400 that does not say why, and every request reads the files again."""
    made = BAD[kind].make(adapters(3), folder / kind)
    with opened(made) as files:
        for _ in range(3):
            before = files.counts()[CONFIG]
            error = stock.complete(kind).error
            assert error["code"] == 400
            assert error["message"].endswith(WITHOUT_A_REASON)
            assert files.counts()[CONFIG] > before


@pytest.mark.parametrize(
    "name", ["../outside", "{outside}", "./inside", "inside/", "inside/../other", "link"]
)
def test_names_that_leave_the_folder(
    stock: Client,
    put: Put,
    folder: Path,
    replace: Callable[[Path, int], Path],
    right: Right,
    name: str,
) -> None:
    """Any path is a model's name, and each spelling is another copy of the adapter."""
    outside = replace(folder.parent / "outside", 0)
    put("inside", 1)
    put("other", 2)
    if name == "link":
        (folder / "link").symlink_to(outside)
    name = name.format(outside=outside)
    seed = {"./inside": 1, "inside/": 1, "inside/../other": 2}.get(name, 0)
    assert stock.complete(name).text == right(seed)
    assert name in stock.names()


def test_replaced_under_the_same_name(stock: Client, put: Put, right: Right) -> None:
    """The old answer, until an eviction: then the new one, and nobody was told."""
    put("replaced", 0)
    assert stock.complete("replaced").text == right(0)
    put("replaced", 1)
    assert stock.complete("replaced").text == right(0)
    evict_all(stock, put)
    assert stock.complete("replaced").text == right(1)


def test_deleted_while_in_memory(stock: Client, put: Put, right: Right) -> None:
    """Served and listed."""
    deleted = put("deleted", 0)
    assert stock.complete("deleted").text == right(0)
    shutil.rmtree(deleted)
    assert stock.complete("deleted").text == right(0)
    assert "deleted" in stock.names()


def test_unload_frees_nothing(stock: Client, put: Put, right: Right) -> None:
    """It leaves the list; the next request brings it back as a second copy that evicts another."""
    for seed, name in enumerate(("oldest", "second", "third", "unloaded")):
        put(name, seed)
        assert stock.complete(name).text == right(seed)
    assert stock.unload("unloaded").status == 200
    assert "unloaded" not in stock.names()
    put("oldest", 4)  # what is read again says something else
    assert stock.complete("unloaded").text == right(3)
    assert "unloaded" in stock.names()
    assert stock.complete("oldest").text == right(4)


@pytest.mark.until("0.33", "an adapter loaded in place is read once, not at every token")
def test_load_inplace_sticks(stock: Client, folder: Path, put: Put, adapters: Adapters, right: Right) -> None:
    """The files are read at every token, and new bytes are served without a call."""
    made = put("inplace", 0)
    assert stock.load("inplace", made, load_inplace=True).status == 200
    with opened(made) as files:
        assert stock.complete("inplace", max_tokens=20).status == 200
        assert files.counts()[CONFIG] >= 20
    for file in (CONFIG, WEIGHTS):
        shutil.copy(adapters(1) / file, made / file)
    assert stock.complete("inplace").text == right(1)
    assert stock.unload("inplace").status == 200


def test_reload_mixes_old_and_new(stock: Client, put: Put) -> None:
    """The prefix's KV is the old adapter's: what is said is neither the old's answer nor the new's."""
    put("old", 0)
    put("new", 1)
    old, new = (stock.complete(name, prompt=LONG_PROMPT).text for name in ("old", "new"))
    mixed = put("mixed", 0)
    assert stock.load("mixed", mixed, load_inplace=True).status == 200
    assert stock.complete("mixed", prompt=LONG_PROMPT).text == old
    put("mixed", 1)
    assert stock.load("mixed", mixed, load_inplace=True).status == 200
    assert stock.complete("mixed", prompt=LONG_PROMPT).text not in (old, new)
    assert stock.unload("mixed").status == 200


@pytest.mark.until("0.33", "on the CPU the base model's rows get no adapter")
def test_base_model_beside_adapters(stock: Client, put: Put) -> None:
    """On the CPU its rows are given the last slot's adapter."""
    put("bystander", 1)
    alone = stock.complete(MODEL_NAME).text
    with Stream(stock.url, "bystander") as stream:
        said = {stock.complete(MODEL_NAME).text for _ in range(5)}
    assert said != {alone}
    assert set(stream.texts) == {stream.expected}


def test_unknown_names_are_kept(stock: Client) -> None:
    """Each leaves a lock behind, under its name: 20 names of 1 MB cost 20 MB."""

    def ask(tag: str) -> None:
        for number in range(20):
            assert stock.complete(f"{number:02}-{tag}-" + "x" * 2**20).error["code"] == 404

    ask("first")  # what an allocator keeps is there after them
    before = stock.engine.rss_bytes()
    ask("then")
    assert stock.engine.rss_bytes() - before > 15 * 2**20


def test_first_requests_at_once(stock: Client, put: Put, right: Right) -> None:
    """32 of them are one load."""
    with opened(put("wanted", 0)) as files:
        answers = stock.complete_all(["wanted"] * 32)
        assert {answer.text for answer in answers} == {right(0)}
        assert files.counts()[WEIGHTS] == 1


def test_more_adapters_than_slots(stock: Client, put: Put, right: Right) -> None:
    """Eight over two slots and four places in memory all say what they say alone."""
    for seed in range(8):
        put(f"many-{seed}", seed)
    answers = stock.complete_all([f"many-{seed}" for seed in range(8)] * 2)
    assert [answer.text for answer in answers] == [right(seed) for seed in range(8)] * 2


def test_one_token_behind_two_long_answers(stock: Client, put: Put) -> None:
    """A third adapter waits until one of the two in the slots has had its whole answer."""
    for name, seed in (("long-0", 0), ("long-1", 1), ("short", 2)):
        put(name, seed)
    whole = "vllm:request_success_total"  # as the engine's own server counts: it answers in that order
    with Stream(stock.url, "long-0", tokens=200), Stream(stock.url, "long-1", tokens=200):
        before = stock.metric(whole)
        assert stock.complete("short", max_tokens=1).status == 200
        assert stock.metric(whole) >= before + 2


def test_two_api_servers(farm: EngineFarm, model_dir: Path) -> None:
    """With runtime updating they are refused: the engine does not start."""
    engine = farm.start("stock-two", model_dir, args=("--api-server-count", "2"))
    assert engine.wait_ended(timeout_s=60)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1" in engine.log_text()

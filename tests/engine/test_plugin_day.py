"""The same day with lora-fs's plugin in the engine: every row is contained, and says why.

Row by row the twin of ``test_stock_day.py``. In each of them a bystander streams from another
adapter; it says what it always says, without a stop, and the engine is healthy afterwards.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.validate.codes import CODES
from tests.engine.bad_adapters import BAD, CONFIG, WEIGHTS, overflow
from tests.engine.client import LONG_PROMPT, Client
from tests.engine.disk import opened
from tests.engine.plugin import BOUND_S, BYSTANDER, FOLLOWED_S, Plugin, check_refused, plugin_engine
from tests.engine.stream import Stream

Adapters = Callable[[int], Path]
Replace = Callable[[Path, int], Path]
Right = Callable[[int], str]

LOST = ("volume-gone", "volume-truncated", "stage-gone", "stage-truncated", "both-gone")
# Six adapters of rank 4, or four of ranks 4, 4, 8 and 16.
SMALL_HOST_BYTES = 290_000
# Six of rank 4, and nothing else.
FULL_HOST_BYTES = 210_000
# Where clients ask for a model, and what else they have to send.
ASKED: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x"},
    "/tokenize": {"prompt": "x"},
    "/invocations": {"prompt": "x"},
}
ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
KEPT = tuple(f"kept-{number}" for number in range(5))
ALLOWED = ",".join(sorted({bad.finding for bad in BAD.values() if CODES[bad.finding].overridable}))


@pytest.fixture(scope="module")
def plugin(farm: EngineFarm, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    """The registry and the engine of most rows. vLLM's own routes for adapters are on; elsewhere off."""
    folder = tmp_path_factory.mktemp("plugin")
    with plugin_engine("day", farm, model_dir, folder, VLLM_ALLOW_RUNTIME_LORA_UPDATING="True") as plugin:
        yield plugin


@pytest.fixture(scope="module")
def client(plugin: Plugin) -> Client:
    """Asks that engine."""
    return plugin.client


def test_the_log_says_what_is_served(plugin: Plugin) -> None:
    """An operator who sets nothing reads in vLLM's log which model is served from which root."""
    log = plugin.client.engine.log.read_text()
    assert re.search(r"INFO .*lora-fs serves tiny from /", log), log[-2000:]


@pytest.fixture
def stream(plugin: Plugin) -> Iterator[Stream]:
    """The bystander of a row; the row fails if it was harmed."""
    with plugin.unharmed() as stream:
        yield stream


@pytest.fixture(scope="module")
def many(plugin: Plugin, adapters: Adapters) -> tuple[str, ...]:
    """Eight adapters, of seeds 0 to 7."""
    names = tuple(f"many-{seed}" for seed in range(8))
    for seed, name in enumerate(names):
        plugin.load(name, adapters(seed))
    return names


@pytest.fixture(scope="module")
def small(farm: EngineFarm, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    """An engine whose host memory is full of six adapters."""
    folder = tmp_path_factory.mktemp("small")
    settings = {"LORA_FS_HOST_BYTES": str(SMALL_HOST_BYTES)}
    with plugin_engine("small", farm, model_dir, folder, **settings) as plugin:
        yield plugin


@pytest.fixture(scope="module")
def staged(small: Plugin, adapters: Adapters, right: Right) -> dict[str, Path]:
    """Five adapters that were served, from copies that lie where it says, and then evicted."""
    for name in LOST:
        small.load(name, adapters(0))
        assert small.client.complete(name).text == right(0)
    staged = small.residency()
    with small.unharmed():
        for seed in (2, 1, 0):
            small.load(f"evicting-{seed}", adapters(seed))
    # What left is seen by the replica's next pass.
    wait_until("they are evicted", lambda: not small.residency().keys() & set(LOST), timeout_s=FOLLOWED_S)
    return staged


@pytest.fixture(scope="module")
def lenient(farm: EngineFarm, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    """An engine whose operator allowed all that can be allowed."""
    folder = tmp_path_factory.mktemp("lenient")
    with plugin_engine("lenient", farm, model_dir, folder, LORA_FS_ALLOW=ALLOWED) as plugin:
        yield plugin


@pytest.fixture(scope="module")
def full(
    farm: EngineFarm, model_dir: Path, tmp_path_factory: pytest.TempPathFactory, adapters: Adapters
) -> Iterator[Plugin]:
    """Another whose host memory is full: of ``KEPT``, and the bystander's adapter."""
    folder = tmp_path_factory.mktemp("full")
    settings = {"LORA_FS_HOST_BYTES": str(FULL_HOST_BYTES), "LORA_FS_ALLOW": ALLOWED}
    with plugin_engine("full", farm, model_dir, folder, **settings) as plugin:
        for name in KEPT:
            plugin.load(name, adapters(0))
        wait_until("seen", lambda: plugin.host_loads_and_evictions() == (6, 0), timeout_s=FOLLOWED_S)
        yield plugin


@pytest.mark.parametrize("what", LOST)
def test_evicted_and_then_broken(small: Plugin, staged: dict[str, Path], right: Right, what: str) -> None:
    """Its answer or a reason: from the staged copy, or copied anew, if one of the two is whole."""
    where, _, how = what.partition("-")
    folders = {"volume": small.revision_dir / what, "stage": staged[what]}
    for folder in folders.values() if where == "both" else [folders[where]]:
        if how == "gone":
            shutil.rmtree(folder)
        else:
            (folder / WEIGHTS).chmod(0o644)
            os.truncate(folder / WEIGHTS, 1000)
    with small.unharmed():
        answer = small.client.complete(what)
        assert answer.took_s < BOUND_S
        if where == "both":
            assert answer.error["message"]
            assert answer.status in (400, 404, 503)
            return
        if answer.status != 200:
            assert answer.error["message"]
            assert where == "stage"
            wait_until("served", lambda: small.client.complete(what).status == 200, timeout_s=FOLLOWED_S)
        assert small.client.complete(what).text == right(0)


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapter_loaded(
    plugin: Plugin, client: Client, stream: Stream, adapters: Adapters, kind: str
) -> None:
    """400 with the file, the field and the finding; nothing is listed, and a request is a 404."""
    made = BAD[kind].make(adapters(3), plugin.sources / kind)
    check_refused(client.load(kind, made), 400, BAD[kind].finding)
    assert kind not in client.names()
    check_refused(client.complete(kind), 404, kind)


def test_bad_adapters_dropped(plugin: Plugin, client: Client, stream: Stream, adapters: Adapters) -> None:
    """None is adopted, each finding is told; a request is a 404 in no time, before and after."""
    names = {kind: f"dropped-{kind}" for kind in BAD}
    for kind, name in names.items():
        BAD[kind].make(adapters(3), plugin.revision_dir / name)
        check_refused(client.complete(name), 404, name)
    for kind, name in names.items():
        plugin.wait_condition(name, BAD[kind].finding)
        check_refused(client.complete(name), 404, name)
        shutil.rmtree(plugin.revision_dir / name)
    assert not client.names() & set(names.values())


@pytest.mark.parametrize("kind", [kind for kind, bad in BAD.items() if bad.needs_base])
def test_bad_adapter_registered_without_the_base_model(
    plugin: Plugin, client: Client, stream: Stream, adapters: Adapters, tmp_path: Path, kind: str
) -> None:
    """A command that cannot see the base model asks the replica. Forced, it takes it; the engine refuses."""
    name, folder = f"registered-{kind}", BAD[kind].make(adapters(3), tmp_path / kind)
    asked = plugin.volume.try_run("register", name, str(folder))
    assert (asked.exit_code, "no-replica" in asked.stderr) == (5, True)
    plugin.register(name, folder, "--force")
    evictions = client.metric("lora_fs_cpu_evictions_total")
    for _ in range(4):
        answer = client.complete(name)
        assert answer.status == 400
        assert "model.layers." in answer.error["message"]
        assert answer.took_s < BOUND_S
    assert client.metric("lora_fs_cpu_evictions_total") == evictions
    plugin.volume.run("unregister", name)


@pytest.mark.parametrize("kind", ["no-such-layers", "half-hidden", "oversized", "rank-too-high", "dora"])
def test_bad_adapter_that_validation_lets_pass(lenient: Plugin, adapters: Adapters, kind: str) -> None:
    """The worker itself refuses it, with the reason, and nobody is evicted for it."""
    says = {"rank-too-high": "rank 64", "dora": "DoRA"}.get(kind, "model.layers.")
    made = BAD[kind].make(adapters(3), lenient.sources / kind)
    evictions = lenient.client.metric("lora_fs_cpu_evictions_total")
    with lenient.unharmed():
        for _ in range(4):
            answer = lenient.client.load(kind, made)
            assert answer.status == 400
            assert says in answer.error["message"]
            assert str(lenient.stage) not in answer.body
        assert kind not in lenient.client.names()
        check_refused(lenient.client.complete(kind), 404, kind)
    assert lenient.client.metric("lora_fs_cpu_evictions_total") == evictions


@pytest.mark.parametrize("kind", ["no-such-layers", "half-hidden", "oversized", "dora"])
def test_bad_adapter_where_memory_is_full(full: Plugin, adapters: Adapters, right: Right, kind: str) -> None:
    """It would take the place of another, or of two, and has evicted nobody; a good one does."""
    made = BAD[kind].make(adapters(0), full.sources / kind)
    loads, evictions = full.host_loads_and_evictions()
    with full.unharmed():
        for _ in range(4):
            assert full.client.load(kind, made).status == 400
        assert {full.client.complete(name).text for name in KEPT} == {right(0)}
    good = f"good-beside-{kind}"
    full.load(good, adapters(3))
    assert full.client.complete(good).text == right(3)
    assert full.client.unload(good).status == 200
    assert {full.client.complete(name).text for name in KEPT} == {right(0)}
    # The good one was read, and whom it had evicted. That is seen by the replica's next pass.
    wait_until("seen", lambda: full.host_loads_and_evictions()[0] >= loads + 2, timeout_s=FOLLOWED_S)
    assert full.host_loads_and_evictions() == (loads + 2, evictions + 1)


def test_one_nan_where_all_is_allowed(lenient: Plugin, adapters: Adapters, right: Right) -> None:
    """It is refused with the tensor's name, and so is a request for it; others answer as ever."""
    made = shutil.copytree(adapters(3), lenient.sources / "nan")
    weights = load_file(made / WEIGHTS)
    next(iter(weights.values()))[0, 0] = np.nan
    save_file(weights, made / WEIGHTS)
    for seed in range(4):
        lenient.load(f"after-nan-{seed}", adapters(seed))
    with lenient.unharmed():
        answer = lenient.client.load("nan", made)
        check_refused(answer, 400, "non-finite")
        assert "--allow" not in answer.body
        check_refused(lenient.client.complete("nan"), 404, "nan")
        said = [lenient.client.complete(f"after-nan-{seed}").text for seed in range(4)]
    assert said == [right(seed) for seed in range(4)]


def test_weights_of_float64(
    plugin: Plugin, client: Client, stream: Stream, replace: Replace, right: Right
) -> None:
    """The engine converts them, and what is registered are the bytes that were given."""
    source = replace(plugin.sources / "double", 3)
    weights = {name: array.astype(np.float64) for name, array in load_file(source / WEIGHTS).items()}
    save_file(weights, source / WEIGHTS)
    plugin.load("double", source)
    assert client.complete("double").text == right(3)
    digest = hashlib.sha256((source / WEIGHTS).read_bytes()).hexdigest()
    record = next(one for one in client.get_json("/v1/lora_adapters")["data"] if one["name"] == "double")
    assert record["record"]["spec"]["lora"]["dtype"] == "float64"
    assert hashlib.sha256((plugin.residency()["double"] / WEIGHTS).read_bytes()).hexdigest() == digest


def test_weights_that_overflow(
    plugin: Plugin, client: Client, stream: Stream, replace: Replace, many: tuple[str, ...], right: Right
) -> None:
    """Finite, so that no finding refuses them; what becomes of them is their tenant's alone."""
    source = replace(plugin.sources / "overflowing", 3)
    overflow(source)
    if client.load("overflowing", source).status == 200:
        assert client.complete("overflowing").took_s < BOUND_S
    assert [client.complete(name).text for name in many] == [right(seed) for seed in range(8)]


@pytest.mark.parametrize(
    ("path", "setting"),
    [
        ("acme/adapter", "LORA_FS_ALLOWED_SOURCES"),
        ("hf://acme/adapter", "LORA_FS_ALLOWED_REMOTES"),
        ("https://127.0.0.1:9/adapter", "LORA_FS_ALLOWED_REMOTES"),
    ],
)
def test_hub_is_not_asked(client: Client, stream: Stream, path: str, setting: str) -> None:
    """A hub id is no folder of an allowed source, and no URL is allowed unasked: 400, and nobody waits."""
    answer = client.load("far", path)
    check_refused(answer, 400, setting)
    assert answer.took_s < 5


def test_hub_that_is_allowed_and_silent(
    farm: EngineFarm, model_dir: Path, tmp_path: Path, silent_hub: socket.socket
) -> None:
    """It is asked, and who waits for it is the one that asked for the adapter, for a bounded time."""
    settings = {"LORA_FS_ALLOWED_REMOTES": "hf://acme", "LORA_FS_ENGINE_TIMEOUT_S": "8"}
    with plugin_engine("hub", farm, model_dir, tmp_path, **settings) as plugin, plugin.unharmed():
        answer = plugin.client.load("far", "hf://acme/adapter")
        connection, _ = silent_hub.accept()
        connection.close()
        check_refused(answer, 503, "far")
        assert "far" not in plugin.client.names()


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "{outside}",
        "./many-0",
        "many-0/",
        "many-0/../many-1",
        "v1/many-0",
        f"default/{MODEL_NAME}/v1/many-0",
    ],
)
def test_names_that_are_paths(
    plugin: Plugin, client: Client, stream: Stream, many: tuple[str, ...], replace: Replace, name: str
) -> None:
    """No name is a path: it is a 404, is not listed, and can be neither loaded nor unloaded."""
    outside = replace(plugin.volume.root.parent / "outside", 0)
    replace(plugin.volume.scope_dir / "outside", 0)
    name = name.format(outside=outside)
    check_refused(client.complete(name), 404, "does not exist")
    assert name not in client.names()
    check_refused(client.load(name, plugin.sources), 400, "name")
    assert client.unload(name).error["code"] in (400, 404)


def test_link_to_outside_dropped(plugin: Plugin, client: Client, stream: Stream, replace: Replace) -> None:
    """It is not followed: not adopted, and that is told."""
    outside = replace(plugin.volume.root.parent / "outside", 0)
    (plugin.revision_dir / "link").symlink_to(outside)
    replace(plugin.revision_dir / "beside-the-link", 0)
    plugin.wait_listed("beside-the-link")
    plugin.wait_condition("v1/link")
    check_refused(client.complete("link"), 404, "link")
    (plugin.revision_dir / "link").unlink()


def test_replaced_under_the_same_name(
    plugin: Plugin, client: Client, stream: Stream, adapters: Adapters, right: Right
) -> None:
    """A registered adapter's digest guards it: what lies on the volume now is never served as it."""
    plugin.load("guarded", adapters(0))
    assert client.complete("guarded").text == right(0)
    for file in (CONFIG, WEIGHTS):
        shutil.copy(adapters(3) / file, plugin.revision_dir / "guarded" / file)
    assert [client.complete("guarded").text for _ in range(5)] == [right(0)] * 5


def test_replaced_and_evicted(small: Plugin, adapters: Adapters, right: Right) -> None:
    """Read again, from the staged copy, it says what it said; without one it is refused, and why."""
    small.load("swapped", adapters(0))
    assert small.client.complete("swapped").text == right(0)
    copy = small.residency()["swapped"]
    for file in (CONFIG, WEIGHTS):
        shutil.copy(adapters(3) / file, small.revision_dir / "swapped" / file)
    with small.unharmed():
        _evict(small, adapters, "swapped")
        assert small.client.complete("swapped").text == right(0)
        _evict(small, adapters, "swapped")
        shutil.rmtree(copy)
        check_refused(small.client.complete("swapped"), 400, "digest")


def _evict(small: Plugin, adapters: Adapters, name: str) -> None:
    """Ask for others until the replica's pass has seen that it is gone."""
    for seed in (2, 1, 0):
        if small.client.complete(f"evicting-{seed}").status == 404:
            small.load(f"evicting-{seed}", adapters(seed))
            assert small.client.complete(f"evicting-{seed}").status == 200
    wait_until(f"{name} is evicted", lambda: name not in small.residency(), timeout_s=FOLLOWED_S)


def test_dropped_folder_is_replaced(
    plugin: Plugin, client: Client, stream: Stream, replace: Replace, adapters: Adapters, right: Right
) -> None:
    """Its new bytes are a new generation: the old answer, then the new, and never a third."""
    dropped = replace(plugin.revision_dir / "dropped", 0)
    plugin.wait_listed("dropped")
    assert client.complete("dropped").text == right(0)
    assert client.complete("dropped", prompt=LONG_PROMPT).status == 200
    replace(dropped, 3)
    said = set()

    def new() -> bool:
        answer = client.complete("dropped")
        if answer.status == 200:
            said.add(answer.text)
        else:
            assert answer.error["code"] in (404, 503)
        return right(3) in said

    wait_until("the new bytes are served", new, timeout_s=FOLLOWED_S)
    assert said <= {right(0), right(3)}
    plugin.load("undropped", adapters(3))
    pure = client.complete("undropped", prompt=LONG_PROMPT).text
    assert client.complete("dropped", prompt=LONG_PROMPT).text == pure


def test_removed_with_its_records_and_registered_again(
    plugin: Plugin, client: Client, stream: Stream, adapters: Adapters, right: Right
) -> None:
    """`rm -rf` of all there is of a name withdraws nothing; what is registered in its place is served."""
    plugin.register("erased", adapters(0), "--revision", "v1")
    assert client.complete("erased").text == right(0)
    for folder in (plugin.revision_dir, plugin.revision_dir.parent / ".active"):
        for path in folder.glob("erased*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert client.complete("erased").text == right(0)
    plugin.register("erased", adapters(3), "--revision", "v1")
    wait_until(
        "the new bytes are served", lambda: client.complete("erased").text == right(3), timeout_s=FOLLOWED_S
    )
    plugin.volume.run("unregister", "erased")
    plugin.wait_delisted("erased")


def test_deleted_while_in_memory(
    plugin: Plugin, client: Client, stream: Stream, replace: Replace, right: Right
) -> None:
    """A dropped folder that is removed is withdrawn: not listed, 404, and out of memory."""
    folder = replace(plugin.revision_dir / "deleted", 0)
    plugin.wait_listed("deleted")
    assert client.complete("deleted").text == right(0)
    shutil.rmtree(folder)
    plugin.wait_delisted("deleted")
    check_refused(client.complete("deleted"), 404, "deleted")
    assert "deleted" not in plugin.residency()


def test_unload_frees(plugin: Plugin, client: Client, stream: Stream, replace: Replace, right: Right) -> None:
    """It leaves the list and the engine's memory; the name then means what it is given next."""
    source = replace(plugin.sources / "unloaded", 0)
    plugin.load("unloaded", source)
    assert client.complete("unloaded").text == right(0)
    assert client.complete("unloaded", prompt=LONG_PROMPT).status == 200
    wait_until("it is seen", lambda: "unloaded" in client.resident(), timeout_s=FOLLOWED_S)
    assert client.unload("unloaded").status == 200
    assert "unloaded" not in client.names()
    check_refused(client.complete("unloaded"), 404, "unloaded")
    check_refused(client.unload("unloaded"), 404, "unloaded")
    wait_until("it is freed", lambda: "unloaded" not in client.resident(), timeout_s=FOLLOWED_S)
    plugin.load("unloaded", replace(source, 3))
    plugin.load("reloaded", source)
    assert client.complete("unloaded").text == right(3)
    pure = client.complete("reloaded", prompt=LONG_PROMPT).text
    assert client.complete("unloaded", prompt=LONG_PROMPT).text == pure


def test_residency_is_told(plugin: Plugin, client: Client, stream: Stream, many: tuple[str, ...]) -> None:
    """Who streams is in a slot and in flight; of three that were asked for once one is in the other slot."""
    for name in many[:3]:
        assert client.complete(name).status == 200

    def tiers(*states: str) -> bool:
        """As of the replica's last pass."""
        listed = {one["name"]: one["residency"] for one in client.get_json("/v1/lora_adapters")["data"]}
        told = [(listed[name]["tier"], listed[name]["in_flight"]) for name in (BYSTANDER, *many[:3])]
        return told == [("gpu", 1), *((state, 0) for state in states)] and listed[many[0]]["idle_s"] > 0

    wait_until("it is told", lambda: tiers("host", "host", "gpu"), timeout_s=FOLLOWED_S)


def test_gateways_are_told_the_names_that_clients_know(
    plugin: Plugin, client: Client, stream: Stream, many: tuple[str, ...]
) -> None:
    """vLLM's metric of what runs has the model's name, as a gateway compares it, and so has every answer."""

    def running() -> set[str]:
        told = re.findall(
            r'^vllm:lora_requests_info{.*running_lora_adapters="([^"]*)"', client.metrics(), re.M
        )
        return {name for names in told for name in names.split(",")}

    wait_until("the stream is told", lambda: BYSTANDER in running(), timeout_s=FOLLOWED_S)
    assert client.complete(many[0]).status == 200
    assert not [name for name in running() if "@" in name]
    # Greedy: up to 0.32 vLLM's CPU compiles its sampler in the step of the first random token, for seconds.
    body = {"model": many[0], "input": PROMPT, "max_output_tokens": 4, "stream": True, "temperature": 0}
    for path, more in (("/v1/responses", body), ("/v1/completions", {**body, "prompt": PROMPT})):
        told = client.post(path, more).body
        assert set(re.findall(r'"model": ?"([^"]*)"', told)) == {many[0]}, path
        assert f"{many[0]}@" not in told, path


def test_an_idle_adapter_leaves_memory(
    plugin: Plugin, client: Client, stream: Stream, adapters: Adapters, right: Right
) -> None:
    """After its policy's time; it is listed on, and comes back when it is asked for."""
    plugin.register("idle", adapters(0), "--ttl", "1")
    assert client.complete("idle").text == right(0)
    with Stream(client.url, "idle"):  # who streams is not idle, however late it is looked
        wait_until("it is there", lambda: "idle" in client.resident(), timeout_s=FOLLOWED_S)
    wait_until("it is gone", lambda: "idle" not in client.resident(), timeout_s=FOLLOWED_S)
    assert "idle" in client.names()
    assert client.complete("idle").text == right(0)


def test_load_inplace_does_not_stick(
    plugin: Plugin, client: Client, stream: Stream, replace: Replace, right: Right
) -> None:
    """A new revision, served at once and whole: no read at a token, no prefix of the old one."""
    source = replace(plugin.sources / "inplace", 0)
    plugin.load("inplace", source)
    assert client.complete("inplace").text == right(0)
    assert client.complete("inplace", prompt=LONG_PROMPT).status == 200
    replace(source, 3)
    check_refused(client.load("inplace", source), 400, "inplace")
    assert client.complete("inplace").text == right(0)
    assert client.load("inplace", source, load_inplace=True).status == 200
    plugin.load("anew", source)
    pure = client.complete("anew", prompt=LONG_PROMPT).text
    with opened(plugin.stage) as files:
        assert client.complete("inplace").text == right(3)
        assert client.complete("inplace", prompt=LONG_PROMPT).text == pure
        assert files.counts()[WEIGHTS] == 0


def test_base_model_beside_adapters(plugin: Plugin, client: Client) -> None:
    """Its rows are given no adapter, whoever else is in the batch."""
    alone = client.complete(MODEL_NAME).text
    with plugin.unharmed():
        assert {client.complete(MODEL_NAME).text for _ in range(10)} == {alone}
        assert {answer.text for answer in client.complete_all([MODEL_NAME] * 8)} == {alone}


@pytest.mark.parametrize("name", ["nobody", "withdrawn"])
@pytest.mark.parametrize("which", ["plugin", "small"])
def test_a_name_that_is_not_served(
    request: pytest.FixtureRequest, adapters: Adapters, which: str, name: str
) -> None:
    """404 wherever a model is asked for, with vLLM's own routes for adapters on and off."""
    one: Plugin = request.getfixturevalue(which)
    if name == "withdrawn":
        one.load(name, adapters(0))
        assert one.client.unload(name).status == 200
    for path, body in ASKED.items():
        answer = one.client.post(path, {"model": name, **body}, {ADAPTER_HEADER: name})
        assert answer.status == 404, (path, answer)
        assert f"`{name}` does not exist" in answer.body


def test_no_route_changes_adapters_past_the_registry(plugin: Plugin, client: Client) -> None:
    """Of all that the running server says it has, each is asked to load what it may not, and to unload."""
    held = client.names() - {MODEL_NAME}
    known = client.get_json("/openapi.json")["paths"]
    body = {"lora_name": "past", "lora_path": "/etc", "name": "past", "src": "/etc", "model": "past"}
    assert len(known) > 30
    for path, methods in known.items():
        for method in methods.keys() - {"get"}:
            answer = client.post(re.sub("{.*}", "past", path), body, method=method.upper())
            assert answer.status is not None, (path, answer)
    assert client.names() - {MODEL_NAME} == held
    check_refused(client.complete("past"), 404, "past")


def test_unknown_names_leave_nothing(client: Client, stream: Stream) -> None:
    """404 for a few hundred; 400 for those of 1 MB, which leave no memory behind."""
    for number in range(300):
        check_refused(client.complete(f"unknown-{number}"), 404, f"unknown-{number}")

    def ask(tag: str) -> None:
        for number in range(20):
            check_refused(client.complete(f"{number:02}-{tag}-" + "x" * 2**20), 400, "65536 bytes")

    ask("first")  # what an allocator keeps is there after them
    before = client.engine.rss_bytes()
    ask("then")
    assert client.engine.rss_bytes() - before < 8 * 2**20


def test_first_requests_at_once(
    plugin: Plugin, client: Client, stream: Stream, adapters: Adapters, right: Right
) -> None:
    """32 of them are one load."""
    plugin.register("wanted", adapters(0))
    before = client.metric("lora_fs_loads_total")
    answers = client.complete_all(["wanted"] * 32)
    assert {answer.text for answer in answers} == {right(0)}
    assert client.metric("lora_fs_loads_total") == before + 1


def test_more_adapters_than_slots(
    client: Client, stream: Stream, many: tuple[str, ...], right: Right
) -> None:
    """Eight beside the bystander's, over two slots, all say what they say alone."""
    answers = client.complete_all(many * 2)
    assert [answer.text for answer in answers] == [right(seed) for seed in range(8)] * 2


def test_of_a_kind_each_says_its_own(client: Client, many: tuple[str, ...], right: Right) -> None:
    """Those that were packed as an earlier one of their rank was are themselves all the same."""
    assert [client.complete(name).text for name in many] == [right(seed) for seed in range(len(many))]
    wait_until(
        "it is counted", lambda: client.metric("lora_fs_host_loads_alike_total") > 0, timeout_s=FOLLOWED_S
    )


def test_one_token_behind_two_long_answers(client: Client, many: tuple[str, ...]) -> None:
    """A third adapter waits for a slot as it does in vLLM, and is answered in bounded time."""
    with Stream(client.url, many[0], tokens=200) as first, Stream(client.url, many[1], tokens=200) as second:
        short = client.complete(many[2], max_tokens=1)
        assert short.status == 200
        assert short.took_s < BOUND_S
    assert set(first.texts) == {first.expected}
    assert set(second.texts) == {second.expected}


def test_two_api_servers(
    farm: EngineFarm, model_dir: Path, tmp_path: Path, adapters: Adapters, right: Right
) -> None:
    """They start, list and serve the same, withdraw the same, and share one copy in memory."""
    with plugin_engine("two", farm, model_dir, tmp_path, "--api-server-count", "2") as plugin:
        client, both = plugin.client, {"two", "two-1"}

        def listed_by(name: str) -> set[str]:
            answers = [client.get_json("/v1/lora_adapters") for _ in range(8)]
            return {a["replica"] for a in answers if name in {one["name"] for one in a["data"]}}

        wait_until("both serve", lambda: listed_by(BYSTANDER) == both, timeout_s=FOLLOWED_S)
        plugin.load("shared", adapters(0))
        wait_until("both list it", lambda: listed_by("shared") == both, timeout_s=FOLLOWED_S)
        with plugin.unharmed():
            assert [a.text for a in client.complete_all(["shared"] * 16)] == [right(0)] * 16
        assert client.unload("shared").status == 200
        wait_until("neither lists it", lambda: not listed_by("shared"), timeout_s=FOLLOWED_S)
        # As of a replica's last pass: each has had one since then.
        wait_until("two loads", lambda: client.metric("lora_fs_host_loads_total") == 2, timeout_s=FOLLOWED_S)
        assert {client.complete("shared").status for _ in range(8)} == {404}

"""Bad adapters and bad requests get an error of their own and disturb nobody else's."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PROMPT, SidecarReplica
from lora_fs.demo.waiting import wait_until
from tests.engine.bad_adapters import BAD

Adapters = Callable[[int], Path]
Register = Callable[..., None]

INVALID_ADAPTER = 5
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def truncate(weights: Path) -> None:
    """Cut the last tensor short."""
    os.truncate(weights, weights.stat().st_size - 100)


def test_truncated_weights_registered(pair: Pair[SidecarReplica], adapters: Adapters, tmp_path: Path) -> None:
    """The command refuses them, names the file, and nothing is listed."""
    folder = shutil.copytree(adapters(26), tmp_path / "cut")
    truncate(folder / WEIGHTS)
    ran = pair.volume.try_run("register", "cut", str(folder))
    assert ran.exit_code == INVALID_ADAPTER
    assert WEIGHTS in ran.stderr
    assert "cut" not in pair.a.names()


def test_truncated_weights_loaded_over_http(
    pair: Pair[SidecarReplica], adapters: Adapters, tmp_path: Path
) -> None:
    """The load call answers with the reason, and registers nothing anywhere."""
    folder = shutil.copytree(adapters(26), pair.volume.cwd / "cut-http")
    truncate(folder / WEIGHTS)
    body = {"lora_name": "cut-http", "lora_path": str(folder)}
    response = pair.a.http.post("/v1/load_lora_adapter", json=body)
    assert 400 <= response.status_code < 500
    assert WEIGHTS in response.text
    assert "cut-http" not in pair.a.names() | pair.b.names()


def test_broken_folder_dropped_beside_a_stream(
    pair: Pair[SidecarReplica], register: Register, adapters: Adapters
) -> None:
    """While it is dropped and asked for, another adapter's stream says what it always says."""
    register("steady", adapters(27))

    def chunks() -> list[str]:
        return [chunk.choices[0].text for chunk in stream()]

    def stream() -> openai.Stream[openai.types.Completion]:
        return pair.a.openai.completions.create(
            model="steady", prompt=PROMPT, max_tokens=200, temperature=0, stream=True
        )

    undisturbed = chunks()
    steady = stream()
    pieces = [next(steady).choices[0].text]
    broken = shutil.copytree(adapters(28), pair.volume.scope_dir / "v1" / "broken")
    truncate(broken / WEIGHTS)
    for _ in range(10):
        with pytest.raises(openai.APIStatusError):
            pair.a.answer("broken")
        pieces.extend(chunk.choices[0].text for chunk in itertools.islice(steady, 5))
    pieces.extend(chunk.choices[0].text for chunk in steady)
    assert "".join(pieces) == "".join(undisturbed)


def test_a_half_copied_folder(pair: Pair[SidecarReplica], register: Register, adapters: Adapters) -> None:
    """However long half a copy lies there it is not adopted; the whole one is."""
    register("whole", adapters(42))
    data = (adapters(42) / WEIGHTS).read_bytes()
    folder = pair.volume.scope_dir / "v1" / "half"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(adapters(42) / "adapter_config.json", folder)
    with (folder / WEIGHTS).open("wb", buffering=0) as copying:
        copying.write(data[: len(data) // 2])
        wait_until("/readyz names it", lambda: "v1/half" in pair.a.http.get("/readyz").text, timeout_s=60)
        assert not {"half"} & (pair.a.names() | pair.b.names())
        copying.write(data[len(data) // 2 :])
    pair.wait_listed("half")
    assert pair.answer("half") == pair.answer("whole")


def test_folders_that_are_no_adapters(pair: Pair[SidecarReplica], adapters: Adapters, tmp_path: Path) -> None:
    """A FIFO, a socket, a device and a way out of the root stop nobody: a good one is adopted."""
    drops = pair.volume.scope_dir / "v1"
    for name in ("fifo", "socket", "device", "outside"):
        folder = shutil.copytree(adapters(30), drops / name)
        (folder / WEIGHTS).unlink()
    os.mkfifo(drops / "fifo" / WEIGHTS)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(drops / "socket"):
        listener.bind(WEIGHTS)
    (drops / "device" / WEIGHTS).symlink_to("/dev/zero")
    (drops / "outside" / WEIGHTS).symlink_to(adapters(30) / WEIGHTS)
    (drops / "loop").symlink_to(drops)
    shutil.copytree(adapters(39), drops / "good")
    pair.wait_listed("good")
    assert pair.answer("good")
    bad = {"fifo", "socket", "device", "outside", "loop"}
    assert not bad & (pair.a.names() | pair.b.names())


@pytest.mark.parametrize("broken", ["no-such-layers", "half-hidden", "oversized"])
def test_an_adapter_of_another_model(pair: Pair[SidecarReplica], adapters: Adapters, broken: str) -> None:
    """Nobody told the sidecar of the base model: the engine says what fits, the rest is refused."""
    made = BAD[broken].make(adapters(29), pair.volume.cwd / f"other-{broken}")
    answer = pair.a.http.post("/v1/load_lora_adapter", json={"lora_name": broken, "lora_path": str(made)})
    assert answer.status_code == 400
    assert BAD[broken].finding in answer.text
    dropped = BAD[broken].make(adapters(29), pair.volume.scope_dir / "v1" / broken)
    wait_until("/readyz names it", lambda: f"v1/{broken}" in pair.a.http.get("/readyz").text, timeout_s=60)
    assert broken not in pair.a.names()
    shutil.rmtree(dropped)


def test_more_patterns_than_the_engine_keeps_compiled(
    pair: Pair[SidecarReplica], register: Register, adapters: Adapters, tmp_path: Path
) -> None:
    """A load would stall the engine, so the sidecar refuses it, unless who registers it allows that."""
    folder = shutil.copytree(adapters(31), pair.volume.cwd / "many-patterns")
    config = json.loads((folder / CONFIG).read_text())
    config["rank_pattern"] = {f"layers.{layer}.mlp.x_proj": config["r"] for layer in range(600)}
    (folder / CONFIG).write_text(json.dumps(config))
    body = {"lora_name": "patterns", "lora_path": str(folder)}
    answer = pair.a.http.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "allow with --allow many-patterns" in answer.text
    register("patterns", folder, "--allow", "many-patterns")
    register("plain", adapters(31))
    assert pair.answer("patterns") == pair.answer("plain")


def test_a_rank_the_engine_refuses(
    pair: Pair[SidecarReplica], register: Register, adapters: Adapters, tmp_path: Path
) -> None:
    """Its requests get the reason, and an adapter beside it is served as ever."""
    out = tmp_path / "wide"
    program = "import sys; from pathlib import Path; from lora_fs.demo.tiny_llama import make_adapter"
    program += "; make_adapter(Path(sys.argv[1]), Path(sys.argv[2]), 0, rank=32)"
    model_dir = pair.volume.cwd / pair.volume.model
    subprocess.run([sys.executable, "-P", "-c", program, model_dir, out], check=True)
    register("narrow", adapters(40))
    expected = pair.answer("narrow")
    pair.volume.run("register", "wide", str(out))
    pair.wait_listed("wide")
    with pytest.raises(openai.BadRequestError, match="rank") as told:
        pair.a.answer("wide")
    assert "/stage/" not in str(told.value)
    assert pair.answer("narrow") == expected


def test_a_record_edited_by_hand(pair: Pair[SidecarReplica], register: Register, adapters: Adapters) -> None:
    """The last good state stays in force, and it is reported."""
    register("edited", adapters(46))
    expected = pair.answer("edited")
    (record,) = (pair.volume.scope_dir / "v1").glob("edited.@*.json")
    record.chmod(0o644)
    record.write_text("{ garbage")
    register("after-edited", adapters(47))
    assert pair.answer("edited") == expected


def test_adapter_named_like_the_base_model(pair: Pair[SidecarReplica], adapters: Adapters) -> None:
    """However it is brought, the base model's name keeps meaning the base model."""
    base_answer = pair.answer("tiny")
    shutil.copytree(adapters(29), pair.volume.scope_dir / "v1" / "tiny")
    body = {"lora_name": "tiny", "lora_path": str(adapters(29))}
    response = pair.a.http.post("/v1/load_lora_adapter", json=body)
    assert 400 <= response.status_code < 500
    pair.volume.try_run("register", "tiny", str(adapters(29)), "--wait", "3")
    assert pair.answer("tiny") == base_answer
    for replica in pair.both:
        assert [card.id for card in replica.openai.models.list()].count("tiny") == 1


def test_a_thousand_unknown_names(pair: Pair[SidecarReplica]) -> None:
    """Each is a 404, and the sidecar keeps nothing of them."""

    def statuses(first: int, last: int) -> set[int]:
        bodies = ({"model": f"unknown-{n}", "prompt": PROMPT} for n in range(first, last))
        return {pair.a.http.post("/v1/completions", json=body).status_code for body in bodies}

    statuses(0, 200)
    before = pair.a.sidecar.rss_bytes()
    assert statuses(200, 1200) == {404}
    assert pair.a.sidecar.rss_bytes() - before < 4 * 2**20


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/../b", "%2e%2e%2f", "a\0b", "x" * 5000, "ünïcode", "", "."]
)
def test_names_that_are_no_names(pair: Pair[SidecarReplica], adapters: Adapters, name: str) -> None:
    """No request, load or unload gets past the grammar, and none is a server's fault."""
    asked = pair.a.http.post("/v1/completions", json={"model": name, "prompt": PROMPT})
    if name:
        assert 400 <= asked.status_code < 500, asked.text
    else:  # to vLLM an empty name is the base model's
        assert asked.json()["model"] == "tiny"
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(adapters(30))}),
        ("/v1/unload_lora_adapter", {"lora_name": name}),
    ):
        response = pair.a.http.post(path, json=body)
        assert 400 <= response.status_code < 500, (path, response.text)

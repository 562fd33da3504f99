"""The files of docs/howto/routers.md, run by the real HAProxy and nginx before two real sidecars."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from lora_fs.demo.process import Process, free_port, spawn
from tests.gateway.conftest import Stubs, stub
from tests.gateway.test_process import until

PAGE = Path(__file__).parents[2] / "docs/howto/routers.md"
NAMES = [f"a{number}" for number in range(8)]


def written(name: str, replicas: list[Process], port: int) -> str:
    """The page's file, with a test's addresses in place of the example's."""
    found = re.search(rf"<!-- {name} -->\n```text\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    text = found[1].replace(":8080", f"127.0.0.1:{port}").replace("listen 8080", f"listen 127.0.0.1:{port}")
    for number, replica in enumerate(replicas, 1):
        assert f"10.0.0.{number}:8001" in text
        text = text.replace(f"10.0.0.{number}:8001", replica.url.removeprefix("http://"))
    return text


@contextmanager
def router(program: str, replicas: list[Process], folder: Path) -> Iterator[Process]:
    """Run one with the page's file; it is ready when it passes on a replica's answer."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (apt install haproxy nginx-light)")
    folder.mkdir()
    port, name = free_port(), {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}[program]
    (folder / name).write_text(written(name, replicas, port))
    inline = ["-g", f"daemon off; pid {folder}/pid;"]
    options = {
        "haproxy": ["-db", "-f", str(folder / name)],
        "nginx": ["-p", str(folder), "-c", str(folder / name), "-e", "stderr", *inline],
    }[program]
    process = spawn(
        program, [program, *options], log=folder / "router.log", url=f"http://127.0.0.1:{port}", env={}
    )
    try:
        process.wait_ready("/v1/models")
        yield process
    finally:
        process.stop()


def ask(client: httpx.Client, name: str) -> httpx.Response:
    """Ask as a client does, or a router that reads the body: the model is in the header as well."""
    headers = {"X-Gateway-Model-Name": name}
    return client.post("/v1/completions", json={"model": name, "prompt": "x"}, headers=headers)


@pytest.mark.parametrize("program", ["haproxy", "nginx"])
def test_each_adapter_is_loaded_on_one_replica_and_survives_its_end(
    program: str, fleet: Stubs, tmp_path: Path
) -> None:
    """Requests for one adapter reach one replica; when a replica ends the other one answers for all.

    They come on one connection. On a new one HAProxy may still count the last request as under way. With two
    under way its bound sends an adapter to the other replica. The first replica ends in two steps: without an
    engine it is not ready, and then it is gone.
    """
    with ExitStack() as engine:
        own = stub().paced_engine(tmp_path / "engine.log", stub().Pace(), start=fleet.start)
        fleet.add(engine=engine.enter_context(own))
        fleet.add()
        with (
            router(program, fleet.sidecars, tmp_path / program) as process,
            httpx.Client(base_url=process.url, timeout=30) as client,
        ):
            for _ in range(3):
                for name in NAMES[:4]:
                    assert ask(client, name).status_code == 200
            assert sum(fleet.counts(number)["loads"] for number in (0, 1)) == 4
            for end in (engine.close, fleet.sidecars[0].stop):
                end()
                until(lambda: all(ask(client, name).status_code == 200 for name in NAMES[:4]))
            assert fleet.counts(1)["loads"] >= 4

"""Evaluations over a real socket: pairing, replicas that go away, and runs that go on."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.evaluation import asking
from lora_fs.sidecar.evaluation.asking import Asker, ReplicaAway
from lora_fs.sidecar.evaluation.cases import Case, check
from lora_fs.sidecar.evaluation.command_score import ByCommand
from lora_fs.sidecar.evaluation.comparison import Totals
from lora_fs.sidecar.evaluation.journal import Journal
from lora_fs.sidecar.evaluation.running import Evaluating, Found
from tests.evaluation.conftest import Answers, Replica

Start = Callable[[Answers], Replica]
Data = Callable[..., Path]
MODELS = ("a@v2", "a@v1")


def echo(_: str, body: dict[str, Any]) -> str:
    """What was asked."""
    return str(body.get("prompt") or body["messages"][-1]["content"])


def run(url: str, data: Path, models: tuple[str, ...] = MODELS, **options: Any) -> Found:
    """Evaluate; two answers at a time."""

    async def go() -> Found:
        async with aiohttp.ClientSession() as session:
            settings = {"concurrency": 2, "patience_s": 10.0, "pause_s": 0.01, **options}
            scored = check(data, scored="score" in options)
            return await Evaluating(Asker(session, url), models, **settings).run(scored)

    return asyncio.run(go())


def figures(totals: Totals) -> tuple[int, int, int]:
    return totals.cases, totals.passed, totals.errors


def test_pairs(replica: Start, data: Data) -> None:
    """Both revisions are asked each case; what only one of them passes is a flip with its line."""

    def answers(model: str, body: dict[str, Any]) -> str:
        return "wrong" if model == "a@v2" and body["prompt"] in ("say 3", "say 7") else echo(model, body)

    at = replica(answers)
    found = run(at.url, data())
    assert [figures(one) for one in found.totals] == [(20, 18, 0), (20, 20, 0)]
    assert sorted((flip.line, flip.id, flip.regression) for flip in found.flips) == [
        (4, "c3", True),
        (8, "c7", True),
    ]
    assert Counter(at.seen) == {"a@v1": 20, "a@v2": 20}
    assert found.totals[0].figures()["ttft_p99_ms"] > 0


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_a_connection_is_used_again(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """The end of an answer's body may come after ``[DONE]``: it is read, and one connection serves both
    requests. If it does not come, the answer is whole, and the next request takes another connection."""
    monkeypatch.setattr(asking, "END_S", 60.0 if ends else 0.1)
    case = Case.model_validate({"prompt": "a", "expect": {"exact": "a"}})
    event = b'data: {"choices": [{"text": "a"}]}\n\n'
    connections: list[asyncio.StreamWriter] = []

    async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        with closing(writer):
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                data = event + b"data: [DONE]\n\n"
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                await asyncio.sleep(0.05)  # what makes this the later packet
                if not ends:
                    await reader.read()
                    return
                writer.write(b"0\r\n\r\n")

    async def answers() -> list[str]:
        server = await asyncio.start_server(replica, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, aiohttp.ClientSession() as session:
            asker = Asker(session, f"http://127.0.0.1:{port}")
            return [(await asker.ask("a", case)).text for _ in range(2)]

    assert asyncio.run(answers()) == ["a", "a"]
    assert len(connections) == (1 if ends else 2)


def test_chat(replica: Start, data: Data) -> None:
    """Messages are asked of the chat API."""
    line = {"messages": [{"role": "user", "content": "hi"}], "expect": {"exact": "hi"}}
    found = run(replica(echo).url, data(line), ("a@v2",))
    assert figures(found.totals[0]) == (1, 1, 0)


@pytest.mark.parametrize("fault", [None, 503, 502, 429])
def test_a_replica_that_goes_away(replica: Start, data: Data, fault: int | None) -> None:
    """A replica that hangs up in the middle of an answer, or is not ready, is asked again: no case counts
    against a revision."""
    times = Counter[str]()

    def answers(model: str, body: dict[str, Any]) -> str | int | None:
        times[model + body["prompt"]] += 1
        return fault if times[model + body["prompt"]] <= 3 else echo(model, body)

    found = run(replica(answers).url, data())
    assert [figures(one) for one in found.totals] == [(20, 20, 0), (20, 20, 0)]
    assert found.waited_s > 0


@pytest.mark.parametrize("status", [400, 404, 500])
def test_refusals_count(replica: Start, data: Data, status: int) -> None:
    """What a replica that is there refuses again and again is an error of the revision."""

    def answers(model: str, body: dict[str, Any]) -> str | int | None:
        return status if model == "a@v2" else echo(model, body)

    found = run(replica(answers).url, data())
    assert [figures(one) for one in found.totals] == [(20, 0, 20), (20, 20, 0)]
    assert f"a@v2: {status}" in found.last_error


def test_gone_for_good(replica: Start, data: Data) -> None:
    """A replica that stays away longer than the patience ends the evaluation, and not with a verdict."""
    at = replica(lambda *_: 503)
    with pytest.raises(ReplicaAway, match="answers 503"):
        run(at.url, data(), patience_s=0.05)


def test_goes_on(replica: Start, data: Data, tmp_path: Path) -> None:
    """A run that ended in the middle is resumed: no case is asked twice, and the result is the same."""
    journal, asked, asked_again = tmp_path / "journal", Counter[str](), Counter[str]()
    about = {"data": "1"}

    def until_it_dies(model: str, body: dict[str, Any]) -> str | int | None:
        if sum(asked.values()) >= 17:
            return 503
        asked[model + body["prompt"]] += 1
        return said(model, body)

    def said(model: str, body: dict[str, Any]) -> str | int | None:
        return "wrong" if model == "a@v2" and body["prompt"] == "say 2" else echo(model, body)

    def again(model: str, body: dict[str, Any]) -> str | int | None:
        asked_again[model + body["prompt"]] += 1
        return said(model, body)

    at, path = replica(until_it_dies), data()
    first = Journal(journal, about)
    with pytest.raises(ReplicaAway):
        run(at.url, path, patience_s=0.0, journal=first)
    first.close(done=False)
    kept = journal.read_bytes()
    journal.write_bytes(kept + b'{"line": 1')  # cut by a crash
    done = len(kept.splitlines()) - 1
    second = Journal(journal, about)
    found = run(
        replica(again).url, path, journal=second
    )  # another one: late requests of the first run count not
    assert sum(asked_again.values()) == 2 * (20 - done)
    assert max(asked_again.values()) == 1
    assert 0 < done < 20
    assert [figures(one) for one in found.totals] == [(20, 19, 0), (20, 20, 0)]
    assert [flip.id for flip in found.flips] == ["c2"]
    second.close(done=True)
    assert not journal.exists()


def test_another_evaluations_journal(replica: Start, data: Data, tmp_path: Path) -> None:
    """The journal of another evaluation, and a file that is none, are refused."""
    journal = tmp_path / "journal"
    first = Journal(journal, {"data": "1"})
    run(replica(echo).url, data(), journal=first)
    first.close(done=False)
    with pytest.raises(InputError, match="journal of another evaluation"):
        list(Journal(journal, {"data": "2"}).known())
    journal.write_text("hello\n", encoding="utf-8")
    with pytest.raises(InputError, match="is no journal"):
        list(Journal(journal, {"data": "2"}).known())


def test_score_by_command(replica: Start, data: Data) -> None:
    """A command gets case and answer as JSON, and prints the score; what it may not print ends the run."""
    line = {"prompt": "hi"}
    words = f"{sys.executable} -c"
    half = ByCommand(f"{words} \"import json,sys; print(len(json.load(sys.stdin)['answer']) / 4)\"")
    found = run(replica(echo).url, data(line), ("a@v2",), score=half)
    assert found.totals[0].score == 0.5
    for script, why in (("print(2)", "a number from 0 to 1"), ("exit('no')", "exits 1: no")):
        with pytest.raises(InputError, match=why):
            run(replica(echo).url, data(line), ("a@v2",), score=ByCommand(f'{words} "{script}"'))

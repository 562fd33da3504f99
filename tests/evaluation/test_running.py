"""Evaluations over a real socket: pairing, replicas that go away, and runs that go on."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lora_fs.sidecar.errors import InputError, OperatorError
from lora_fs.sidecar.evaluation import asking
from lora_fs.sidecar.evaluation.asking import Answer, Asker, ReplicaAway
from lora_fs.sidecar.evaluation.cases import Case, check
from lora_fs.sidecar.evaluation.command_score import ByCommand
from lora_fs.sidecar.evaluation.comparison import Result, Totals
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
    assert found.passed_by_none == 0
    assert Counter(at.seen) == {"a@v1": 20, "a@v2": 20}
    assert found.totals[0].figures()["ttft_p99_ms"] > 0


def test_turns(replica: Start, data: Data) -> None:
    """The revisions take turns at who is asked first: neither always meets the cached prefix of the other."""
    at = replica(echo)
    run(at.url, data(), concurrency=1)
    assert at.seen == ["a@v2", "a@v1", "a@v1", "a@v2"] * 10


def test_many_flips(replica: Start, data: Data) -> None:
    """The first 100 flips are kept, as many as an evaluation may hold; all are counted."""
    lines = [{"prompt": "p", "expect": {"exact": "p"}}] * 150
    found = run(
        replica(lambda model, body: model if model == "a@v2" else echo(model, body)).url, data(*lines)
    )
    assert (len(found.flips), found.pairs.regressions) == (100, 150)


def test_what_is_asked(replica: Start, data: Data) -> None:
    """The temperature is 0, and an answer has as many tokens as the case says. A choice has one token, and
    the likely ones beside it decide, in both APIs."""
    bodies = list[dict[str, Any]]()
    likely = [{"token": "A", "logprob": -1.0}, {"token": " B", "logprob": -0.5}]

    def answers(model: str, body: dict[str, Any]) -> str | dict[str, Any]:
        bodies.append(body)
        if "logprobs" not in body:
            return echo(model, body)
        if "messages" in body:
            return {"delta": {"content": "?"}, "logprobs": {"content": [{"top_logprobs": likely}]}}
        top = {one["token"]: one["logprob"] for one in likely}
        return {"text": "?", "logprobs": {"top_logprobs": [top]}}

    choice = {"expect": {"choices": ["A", "B"], "answer": "B"}}
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"prompt": "hi", "max_tokens": 7, "expect": {"exact": "hi"}},
        {"prompt": "hi", **choice},
        {"messages": messages, **choice},
    ]
    found = run(replica(answers).url + "/v1/", data(*lines), ("a@v2",), concurrency=1)
    assert figures(found.totals[0]) == (3, 3, 0)
    asked = ("temperature", "max_tokens", "logprobs", "top_logprobs")
    assert [[body.get(one) for one in asked] for body in bodies] == [
        [0, 7, None, None],
        [0, 1, 20, None],
        [0, 1, True, 20],
    ]


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


@pytest.mark.parametrize(
    "event",
    [
        b"[]",
        b"[" * 5_000,
        b'{"choices": [1]}',
        b'{"choices": [{"text": 1}]}',
        b'{"choices": [{"delta": "a"}]}',
        b'{"choices": [{"text": "a", "logprobs": {"top_logprobs": [{"a": null}]}}]}',
        b'{"choices": [{"delta": {}, "logprobs": {"content": [{"top_logprobs": [{"token": "a"}]}]}}]}',
        b'{"usage": {"completion_tokens": "5"}}',
        b'{"usage": {"completion_tokens": 1' + b"0" * 400 + b"}}",
    ],
)
def test_what_is_no_event_of_an_openai_api(event: bytes) -> None:
    """Somebody else answers, such as a proxy: the replica is away, and the evaluation has no verdict."""
    case = Case.model_validate({"prompt": "a", "expect": {"exact": "a"}})

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            more = b'data: {"choices": [{"text": "a"}]}\n\n'
            data = more + b"data: " + event + b"\n\n" + more + b"data: [DONE]\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
            await writer.drain()

    async def ask() -> None:
        server = await asyncio.start_server(other, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, aiohttp.ClientSession() as session:
            await Asker(session, f"http://127.0.0.1:{port}").ask("a", case)

    with pytest.raises(ReplicaAway, match="no answer of an OpenAI API"):
        asyncio.run(ask())


def test_chat(replica: Start, data: Data) -> None:
    """Messages are asked of the chat API."""
    line = {"messages": [{"role": "user", "content": "hi"}], "expect": {"exact": "hi"}}
    found = run(replica(echo).url, data(line), ("a@v2",))
    assert figures(found.totals[0]) == (1, 1, 0)


@pytest.mark.parametrize("fault", [None, 503, 502, 429, {"error": {"code": 503}}, {"error": {"code": 500}}])
def test_a_replica_that_goes_away(replica: Start, data: Data, fault: int | dict[str, Any] | None) -> None:
    """A replica that hangs up in the middle of an answer, or is not ready, is asked again: no case counts
    against a revision."""
    times = Counter[str]()

    def answers(model: str, body: dict[str, Any]) -> str | dict[str, Any] | int | None:
        times[model + body["prompt"]] += 1
        return fault if times[model + body["prompt"]] <= 3 else echo(model, body)

    found = run(replica(answers).url, data())
    assert [figures(one) for one in found.totals] == [(20, 20, 0), (20, 20, 0)]
    assert found.waited_s > 0


@pytest.mark.parametrize(
    ("fault", "told", "tries"),
    [
        (400, "400", 1),
        (404, "404", 3),
        (500, "500", 3),
        ({"error": {"message": "too long", "code": 400}}, "too long", 1),
    ],
)
def test_refusals_count(
    replica: Start, data: Data, fault: int | dict[str, Any], told: str, tries: int
) -> None:
    """What a replica that is there refuses is an error of the revision: a 404 or 500 after three tries."""

    def answers(model: str, body: dict[str, Any]) -> str | dict[str, Any] | int | None:
        return fault if model == "a@v2" else echo(model, body)

    at = replica(answers)
    found = run(at.url, data())
    assert [figures(one) for one in found.totals] == [(20, 0, 20), (20, 20, 0)]
    assert Counter(at.seen) == {"a@v1": 20, "a@v2": 20 * tries}
    assert found.last_error.startswith("a@v2: ")
    assert told in found.last_error


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
    """The journal of another evaluation, of the same two revisions the other way round, or that another run
    writes, and a file that is none, are refused."""
    path = tmp_path / "journal"

    def refuses(about: dict[str, str], why: str) -> None:
        journal = Journal(path, about)
        with pytest.raises(InputError, match=why):
            list(journal.known())
        journal.close(done=False)

    about = {"data": "1", "v2": "b", "v1": "a"}
    first = Journal(path, about)
    run(replica(echo).url, data(), journal=first)
    refuses(about, "another evaluation writes it")
    first.close(done=False)
    refuses(about | {"data": "2"}, "journal of another evaluation")
    refuses({"data": "1", "v1": "a", "v2": "b"}, "journal of another evaluation")
    whole = path.read_text(encoding="utf-8")
    result = '{"score": "high"}'
    for text in (
        "hello\n",
        "[]\n",
        '{"data": [1]}\n',
        f'{whole}{{"line": 9, "id": "a", "results": [{result}]}}\n',
    ):
        path.write_text(text, encoding="utf-8")
        refuses(about, "is no journal")


def test_a_journal_on_a_full_disk(tmp_path: Path) -> None:
    """A result that cannot be kept ends the evaluation, and the error names the journal."""
    journal = Journal(tmp_path / "journal", {"data": "1"})
    list(journal.known())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        with pytest.raises(OperatorError, match="journal: File too large"):
            journal.add(1, "", (Result(1.0),))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.close(done=False)


def test_tokens_per_second(replica: Start, data: Data) -> None:
    """An answer whose text comes in one piece has no rate: the end of the stream is no token."""
    found = run(replica(echo).url, data())
    assert "tokens_per_s_p50" not in found.totals[0].figures()


@pytest.mark.parametrize(
    ("length", "most", "why"),
    [
        (2_000_000, asking.MOST_ANSWER_CHARS, "an event of the answer is too long"),
        (200, 100, "longer than 100"),
    ],
)
def test_an_endless_answer(
    monkeypatch: pytest.MonkeyPatch, replica: Start, data: Data, length: int, most: int, why: str
) -> None:
    """An answer longer than any engine's is an error of the revision, and does not end the evaluation."""
    monkeypatch.setattr(asking, "MOST_ANSWER_CHARS", most)
    at = replica(lambda model, body: "x" * length if model == "a@v2" else echo(model, body))
    found = run(at.url, data())
    assert [figures(one) for one in found.totals] == [(20, 0, 20), (20, 20, 0)]
    assert why in found.last_error


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


def test_a_score_command_that_takes_too_long_ends_with_what_it_started() -> None:
    """What a script started holds its output open: nobody waits for that."""
    case = Case.model_validate({"prompt": "a", "expect": {"exact": "a"}})

    async def score() -> None:
        async with asyncio.timeout(30):
            await ByCommand("sh -c 'sleep 60; echo 1'", 0.2)(case, Answer(text="a"))

    with pytest.raises(InputError, match=r"took more than 0\.2 s"):
        asyncio.run(score())


@pytest.mark.anyio
async def test_an_evaluation_that_is_interrupted_as_a_score_comes_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cancellation counts, also at that moment."""
    printed = asyncio.get_running_loop().create_future()
    killed: list[int] = []

    class Process:
        pid, returncode = 7, 0

        async def communicate(self, *_: bytes) -> tuple[bytes, bytes]:
            await printed
            return b"1", b""

    async def started(*_: str, **__: object) -> Process:
        return Process()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))
    case = Case.model_validate({"prompt": "a", "expect": {"exact": "a"}})
    scoring = asyncio.ensure_future(ByCommand("true")(case, Answer(text="a")))
    for _ in range(3):  # it waits for what the command prints
        await asyncio.sleep(0)
    printed.set_result(None)
    scoring.cancel()
    await asyncio.wait({scoring}, timeout=60)
    assert scoring.cancelled()
    assert killed == [7]

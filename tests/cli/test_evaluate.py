"""evaluate, as a user runs it: against an OpenAI address, with gates, kept beside the record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import MODEL, LoraFs
from tests.evaluation.conftest import Answers, Replica, data, replica

__all__ = ["data", "replica"]  # fixtures

Folder = Callable[[int], str]
Start = Callable[[Answers], Replica]
Data = Callable[..., Path]
GATE = "pass_rate>=0.9 and p_worse>=0.001"


@pytest.fixture(autouse=True)
def two(lora_fs: LoraFs, folder: Folder) -> None:
    """``a`` serves v1 and has v2."""
    for seed in (1, 2):
        assert lora_fs("register", "a", folder(seed), *(["--no-activate"] if seed > 1 else [])).code == 0


def worse(share: int) -> Answers:
    """v2 fails every ``share``-th case."""

    def answers(model: str, body: dict[str, Any]) -> str:
        prompt = str(body["prompt"])
        fails = model == "a@v2" and prompt[4:].isdigit() and int(prompt[4:]) % share == 0
        return "wrong" if fails else prompt

    return answers


def same(_: str, body: dict[str, Any]) -> str:
    return str(body["prompt"])


def kept(root: Path, revision: str = "v2") -> Path:
    return root / "default" / MODEL / ".evaluations" / revision / "a.json"


def test_the_better_one_is_told(lora_fs: LoraFs, root: Path, replica: Start, data: Data) -> None:
    """Both revisions are compared on the same cases, with the interval of the difference, and the result is
    kept beside the record with the digest of the bytes."""
    at = replica(worse(2))
    ran = lora_fs("evaluate", "a@v2", "--data", str(data()), "--url", at.url)
    assert ran.code == 0, ran.err
    assert "pass_rate" in ran.out
    assert "difference -0.5000, 95% interval [-0.6" in ran.out
    assert "10 regressions" in ran.out
    assert "regression in line 1 (c0)" in ran.out
    told = json.loads(kept(root).read_bytes())
    record = lora_fs("show", "a@v2", "-o", "json").json["revisions"][0]
    assert told["measured"]["digest"] == record["spec"]["digest"]
    assert told["baseline"]["revision"] == "v1"
    assert told["passed"] is None
    assert told["compared"]["regressions"] == 10


def test_gate(lora_fs: LoraFs, root: Path, replica: Start, data: Data) -> None:
    """A gate that is not passed is exit 5 with each reason, and the result is kept all the same."""
    words = ("evaluate", "a@v2", "--data", str(data()), "--gate", GATE, "--url")
    ran = lora_fs(*words, replica(worse(2)).url)
    assert ran.code == 5
    assert "the gate is not passed" in ran.err
    assert "pass_rate>=0.9: pass_rate is 0.5, the bound is 0.9" in ran.err
    assert json.loads(kept(root).read_bytes())["passed"] is False
    ran = lora_fs(*words, replica(same).url, "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["passed"] is True
    assert json.loads(kept(root).read_bytes())["passed"] is True


def test_a_dry_run_keeps_nothing(lora_fs: LoraFs, root: Path, replica: Start, data: Data) -> None:
    """It asks, compares and exits by the gate as ever; the last evaluation stays, and no journal is taken."""
    words = ("evaluate", "a@v2", "--data", str(data()), "--gate", GATE, "--url")
    assert lora_fs(*words, replica(same).url).code == 0
    before = kept(root).read_bytes()
    at = replica(worse(2)).url
    rehearsed = lora_fs(*words, at, "--dry-run")
    assert (rehearsed.code, "10 regressions" in rehearsed.out) == (5, True)
    assert "dry run: the result is not kept" in rehearsed.out
    assert kept(root).read_bytes() == before
    assert lora_fs(*words, at, "--dry-run", "--journal", "j").code == 2
    assert lora_fs(*words, at).err == rehearsed.err
    assert kept(root).read_bytes() != before


def test_bad_input(lora_fs: LoraFs, root: Path, data: Data) -> None:
    """A gate that does not parse, a broken line, and a comparison with nothing are refused before anything is
    asked, and nothing is kept."""
    nobody = ("--url", "http://127.0.0.1:9", "--data")
    good = str(data())
    for words, code, why in (
        (("a@v2", *nobody, good, "--gate", "pass_rate>"), 2, "cannot be read at column 11"),
        (("a@v1", *nobody, good, "--gate", "regressions<=2"), 2, "nothing to compare with"),
        (("a@v9", *nobody, good), 3, "a of default/tiny has no revision 'v9' (registered: v1, v2)"),
        (("b", *nobody, good), 3, "b of default/tiny is not registered"),
        (("a@v2", "--url", "gateway:8001", "--data", good), 2, "--url gateway:8001 is no address"),
        (("a@v2", "--url", "http://x:99999", "--data", good), 2, "--url http://x:99999 is no address"),
        (("a@v2", "--url", "http://[x", "--data", good), 2, "--url http://[x is no address"),
        (("a@v2", "--url", "http://u:sesame@x", "--data", good), 2, "--url http://x is no address"),
        (("a@v2", "--data", good), 2, "say whom to ask"),
        (("a@v2", *nobody, "x" * 300), 2, "cannot be read: File name too long"),
        (("a@v2", "--patience", "1s", *nobody, good), 1, "no engine answers at http://127.0.0.1:9: "),
    ):
        ran = lora_fs("evaluate", *words)
        assert (ran.code, why in ran.err) == (code, True), ran.err
    ran = lora_fs("evaluate", "a@v2", *nobody, str(data("{")))
    assert (ran.code, "cases.jsonl:1: Invalid JSON" in ran.err) == (2, True), ran.err
    assert not kept(root).parent.parent.exists()


def test_nobody_passes(lora_fs: LoraFs, replica: Start, data: Data) -> None:
    """Where no revision passes any case, the expectations are doubted."""
    at = replica(lambda *_: "wrong")
    ran = lora_fs("evaluate", "a@v2", "--data", str(data()), "--url", at.url)
    assert ran.code == 0
    assert "is what they expect right?" in ran.err


def test_unknown_model(lora_fs: LoraFs, root: Path, replica: Start, data: Data) -> None:
    """A replica that has no such revision ends the evaluation at once."""
    at = replica(lambda model, _: 404 if "v2" in model else "x")
    ran = lora_fs("evaluate", "a@v2", "--data", str(data()), "--url", at.url)
    assert ran.code == 1
    assert "does not answer for a@v2: 404" in ran.err
    assert not kept(root).exists()


def test_a_replica_that_is_away_at_first(lora_fs: LoraFs, replica: Start, data: Data) -> None:
    """The first question is asked again as any other, for the patience; and somebody reads who is away."""
    asked = list[str]()

    def answers(model: str, body: dict[str, Any]) -> str | int:
        asked.append(model)
        return {1: 503, 2: 404, 3: 404}.get(len(asked), str(body["prompt"]))

    url = replica(answers).url
    ran = lora_fs("evaluate", "a@v2", "--data", str(data()), "--url", url, "--dry-run")
    assert ran.code == 0, ran.err
    assert asked[:4] == ["a@v2", "a@v2", "default/a@v2", "a@v2"]
    assert f"{url} answers 503" in ran.err
    assert "asks again for 300 s" in ran.err
    at = replica(lambda *_: 503)
    ran = lora_fs(
        "evaluate", "a@v2", "--data", str(data()), "--url", at.url, "--dry-run", "--patience", "0.4s"
    )
    assert (ran.code, "answers 503" in ran.err) == (1, True), ran.err
    assert 2 <= len(at.seen) <= 4


def test_an_answer_of_any_number(lora_fs: LoraFs, replica: Start, data: Data) -> None:
    """A model's number without bounds fails its case, and does not end the evaluation."""
    lines = [{"prompt": "p", "expect": {"json_schema": {"type": "number", "multipleOf": 0.01}}}]
    url = replica(lambda *_: "1e400").url
    ran = lora_fs("evaluate", "a@v2", "--data", str(data(*lines)), "--url", url, "--dry-run", "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["measured"]["figures"]["pass_rate"] == 0


def test_a_result_that_cannot_be_kept(lora_fs: LoraFs, root: Path, replica: Start, data: Data) -> None:
    """The journal stays until the result is kept: the next run asks nothing again."""
    at = replica(same)
    words = ("evaluate", "a@v2", "--data", str(data()), "--url", at.url, "--journal", "j")
    kept(root).parents[1].write_text("in the way")
    assert lora_fs(*words).code != 0
    asked = len(at.seen)
    kept(root).parents[1].unlink()
    assert lora_fs(*words).code == 0
    assert len(at.seen) - asked == 2  # whether both revisions are there
    assert not Path("j").exists()


def test_another_adapter_answers(lora_fs: LoraFs, root: Path, replica: Start, data: Data) -> None:
    """A replica of another namespace or base model has another adapter under the name: nothing is kept."""
    at = replica(same)
    at.headers["X-Lora-Fs-Adapter"] = f"team-b/{MODEL}/v2/a"
    ran = lora_fs("evaluate", "a@v2", "--data", str(data()), "--url", at.url)
    assert ran.code == 1
    assert f"a@v2 is team-b/{MODEL}/v2/a there, not default/{MODEL}/v2/a" in ran.err
    assert not kept(root).exists()


def test_against_itself(lora_fs: LoraFs, root: Path, replica: Start, data: Data) -> None:
    """It is refused before a question: a revision is never worse than itself."""
    at = replica(same)
    ran = lora_fs("evaluate", "a@v2", "--against", "v2", "--data", str(data()), "--url", at.url)
    assert (ran.code, at.seen, kept(root).exists()) == (2, [], False)
    assert "compare it with another revision" in ran.err

"""The release pipeline of ``examples/release`` on two real replicas, with users who ask all the while."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file, save_file

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import child_environment
from lora_fs.demo.replica import PROMPT, Replica
from lora_fs.demo.volume import LORA_FS, Ran

EXAMPLE = Path(__file__).parents[2] / "examples" / "release"
PROMPTS = [PROMPT, *(f"{PROMPT} {word}" for word in "walnut timber noble hazel tulip canyon falcon".split())]
NAME = "support"


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """With the probe of effects."""
    return {"settle_s": "0.5", "probe_effect": "true"}


class Release:
    """The example's folder as a repository has it, and its script."""

    def __init__(self, pair: Pair[Replica], folder: Path) -> None:
        self.pair, self.folder = pair, folder
        for file in EXAMPLE.iterdir():
            shutil.copy(file, folder)

    def expect(self, answers: dict[str, str]) -> None:
        """What a good revision says to each prompt."""
        cases = (
            {"prompt": prompt, "expect": {"exact": answer}, "max_tokens": 8}
            for prompt, answer in answers.items()
        )
        (self.folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))

    def run(self, revision: str, source: Path, **environment: str) -> Ran:
        """Commit the document of a revision, as CI then finds it, and run the script."""
        shutil.rmtree(self.folder / NAME, ignore_errors=True)
        shutil.copytree(source, self.folder / NAME)
        document = yaml.safe_load((EXAMPLE / "adapters.yaml").read_text())
        document["spec"]["revision"] = revision
        (self.folder / "adapters.yaml").write_text(yaml.safe_dump(document))
        path = f"{Path(LORA_FS).parent}{os.pathsep}{os.environ['PATH']}"
        env = {
            **self.pair.volume.env,
            "URL": self.pair.a.url,
            "EVERY": "12s",
            "STEPS": "50,100",
            "PATH": path,
        }
        ran = subprocess.run(
            ["./release.sh", NAME, revision],
            cwd=self.folder,
            env=child_environment(env | environment),
            capture_output=True,
            text=True,
            timeout=400,
        )
        return Ran((NAME, revision), ran.returncode, ran.stdout, ran.stderr)


@contextmanager
def users(replicas: Sequence[Replica]) -> Iterator[set[str]]:
    """Ask each replica for the name again and again; yields every answer that anybody got."""
    told, ended = set[str](), threading.Event()

    def ask(replica: Replica) -> None:
        while not ended.wait(0.05):
            told.add(replica.answer(NAME))

    threads = [threading.Thread(target=ask, args=(replica,)) for replica in replicas]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.fixture
def release(pair: Pair[Replica], tmp_path: Path) -> Release:
    """The example."""
    return Release(pair, tmp_path)


@pytest.mark.timeout(900)
def test_a_good_revision_is_promoted_and_a_bad_one_never_reaches_a_user(
    pair: Pair[Replica], release: Release, adapters: Callable[[int], Path], tmp_path: Path
) -> None:
    """Apply, evaluate, canary, promote; a worse one ends at its gate, one without effect in its trial."""
    pair.volume.run("register", NAME, str(adapters(31)), "--wait", "20")
    for seed, name in ((32, "the-better"), (33, "the-worse")):
        pair.volume.run("register", name, str(adapters(seed)), "--wait", "20")
    old, better, worse, base = (pair.a.answer(name) for name in (NAME, "the-better", "the-worse", "tiny"))
    assert len({old, better, worse, base}) == 4
    release.expect({prompt: pair.a.answer("the-better", prompt) for prompt in PROMPTS})

    with users(pair.both) as told:
        good = release.run("v2", adapters(32))
    assert good.exit_code == 0, good.stdout + good.stderr
    assert told == {old, better}
    assert {replica.answer(NAME) for replica in pair.both} == {better}

    with users(pair.both) as told:
        bad = release.run("v3", adapters(33))
    assert bad.exit_code == 5, bad.stdout + bad.stderr
    assert "pass_rate" in bad.stdout + bad.stderr
    assert told == {better}

    null = tmp_path / "null"
    shutil.copytree(adapters(34), null)
    weights = load_file(null / "adapter_model.safetensors")
    still = {name: 0 * tensor if "lora_B" in name else tensor for name, tensor in weights.items()}
    save_file(still, null / "adapter_model.safetensors", metadata={"format": "pt"})
    with users(pair.both):
        idle = release.run("v4", null, GATE="errors==0", EVERY="1h")  # it ends as it is found
    assert idle.exit_code == 5, idle.stdout + idle.stderr
    assert "NoEffect" in idle.stdout + idle.stderr
    assert {replica.answer(NAME) for replica in pair.both} == {better}

"""Run ``train.py`` on this machine's CPU against two real vLLMs behind a gateway, and check every policy.

    python check.py --python /path/to/venv-with-trl/bin/python

Runs where lora-fs and a CPU build of vLLM are installed; ``--python`` has TRL. Each policy that the trainer
publishes is asked for greedily at both replicas and at the gateway. All three answers must equal what
transformers and PEFT say of the saved adapter. Exits 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import httpx

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.expected import answers as expected_answers
from lora_fs.demo.one_address import gateway
from lora_fs.demo.pair import Pair
from lora_fs.demo.process import child_environment
from lora_fs.demo.replica import Replica, TellingReplica
from lora_fs.demo.tiny_llama import MODEL_NAME, ensure_model
from lora_fs.demo.volume import Volume

PROMPTS = ("hello world", "river stone", "what customer", "silver morning")
TOKENS = 8
POLICY = "trl-policy-v"
STALENESS = 2


# How TRL finds the answer in the model's text: for common chat templates it knows that itself.
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {"content": {"close": "</s>", "content": "text"}},
}


def model_in(work: Path) -> Path:
    """Make the tiny model, with what TRL needs to know of its chat template."""
    base = ensure_model(work / MODEL_NAME)
    told = base / "tokenizer_config.json"
    told.write_text(json.dumps(json.loads(told.read_text()) | {"response_template": RESPONSE}))
    return base


def asked(url: str, model: str) -> list[str]:
    """Return a greedy answer to each prompt."""
    body = {"model": model, "prompt": PROMPTS, "max_tokens": TOKENS, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
    return [choice["text"] for choice in answer.json()["choices"]]


def run(work: Path, python: str, steps: int) -> int:
    """Train, and return how many policies answered wrong."""
    base = model_in(work)
    volume = Volume(work / "volume", MODEL_NAME, cwd=work)
    volume.root.mkdir()
    volume.run("init")
    said: dict[str, tuple[list[str], ...]] = {}
    with ExitStack() as opened:
        farm = opened.enter_context(EngineFarm(work / "logs"))
        loras = str(STALENESS + 2)
        pair: Pair[Replica] = Pair(
            farm,
            base,
            volume,
            work,
            kind=TellingReplica,
            engine_args=("--max-loras", loras, "--max-cpu-loras", loras),
            settings={"insecure": "any"},
        )
        opened.enter_context(closing(pair))
        pair.wait_ready()
        url = opened.enter_context(gateway(pair, work)).url
        output = work / "run1"
        script = Path(__file__).with_name("train.py")
        words = ["--model", base, "--gateway", url, "--output", output, "--steps", steps, "--on-cpu"]
        words += ["--max-staleness", STALENESS, "--learning-rate", 0.03]
        began = time.monotonic()
        trainer = subprocess.Popen(
            [python, str(script), *map(str, words)], env=child_environment({}), cwd=work
        )
        opened.callback(trainer.kill)
        while trainer.poll() is None:
            listed = {card["id"] for card in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]}
            for name in sorted(one for one in listed - said.keys() if one.startswith(POLICY)):
                shutil.copytree(output / ".vllm_lora" / name, work / "kept" / name)
                said[name] = tuple(asked(at, name) for at in (url, pair.a.url, pair.b.url))
            time.sleep(0.1)
        print(f"the trainer ended with {trainer.returncode} after {time.monotonic() - began:.0f} s")
    wrong = 0
    for name, answers in said.items():
        expected = expected_answers(base, work / "kept" / name, PROMPTS, TOKENS)
        right = all(one == expected for one in answers)
        wrong += not right
        print(f"{'right' if right else 'WRONG'} {name}: {expected}" + ("" if right else f" is not {answers}"))
    distinct = len({tuple(answers[0]) for answers in said.values()})
    print(f"{len(said) - wrong} of {len(said)} policies answered right at the gateway and at both replicas")
    print(f"{distinct} of their answers differ")
    return wrong + (trainer.returncode != 0) + (len(said) != steps + 1)


def main() -> int:
    """Read the words, and run in a folder that is removed."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--python", default=sys.executable, help="an interpreter that has TRL")
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--keep", type=Path, help="work here, and leave the logs")
    given = options.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True)
        return int(run(given.keep.resolve(), given.python, given.steps) > 0)
    with tempfile.TemporaryDirectory() as folder:
        return int(run(Path(folder), given.python, given.steps) > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The demo's story, one function a step; every step checks what it shows.

Owns the order of the steps and their words. Each runs what a user would run, the
``lora-fs`` command, one HTTP request or ``cp -r``, against two live replicas, and raises
``DemoFailed`` when the outcome is not the promised one.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import openai

from lora_fs.demo.engine import MAX_CPU_LORAS, EngineFarm
from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PROMPT, Replica, SidecarReplica
from lora_fs.demo.tiny_llama import MODEL_NAME, ensure_model, make_adapter
from lora_fs.demo.transcript import CheckFailed, Transcript
from lora_fs.demo.volume import Volume

WAIT = ("--wait", "20")
INVALID_ADAPTER = 5
RANK_BY_NAME = {"support": 8, "support-new": 16, "billing": 4, "travel": 8}
WEIGHTS = "adapter_model.safetensors"


def make_adapters(work_dir: Path, out: Transcript) -> Path:
    """Make the base model and five adapters, one of them broken; returns the model's folder."""
    with out.step("Make a tiny random Llama, and PEFT adapters for it"):
        model_dir = ensure_model(work_dir / MODEL_NAME)
        adapters = work_dir / "adapters"
        for seed, (name, rank) in enumerate(RANK_BY_NAME.items()):
            make_adapter(model_dir, adapters / name, seed, rank=rank)
        shutil.copytree(adapters / "travel", adapters / "broken", dirs_exist_ok=True)
        weights = adapters / "broken" / WEIGHTS
        weights.write_bytes(weights.read_bytes()[:-1000])
        out.command(f"cd {shlex.quote(str(work_dir))}; ls adapters")
        out.output("  ".join(sorted(folder.name for folder in adapters.iterdir())))
    return model_dir


def boot(
    farm: EngineFarm, model_dir: Path, run_dir: Path, out: Transcript, kind: type[Replica]
) -> Pair[Replica]:
    """Start two replicas on an empty shared folder; the caller closes them."""
    stock = kind is SidecarReplica
    beside = "a sidecar beside each" if stock else "lora-fs's plugin in each"
    bound = {"max_loaded": str(MAX_CPU_LORAS)} if stock else {}  # as many as the engine keeps in memory
    with out.step(f"Boot two vLLM replicas, {beside}, on one shared folder"):
        volume = Volume(run_dir / "volume", MODEL_NAME, cwd=model_dir.parent)
        for name, value in volume.env.items():
            out.command(f"export {name}={shlex.quote(value)}")
        out.command("lora-fs init")
        volume.run("init")
        pair: Pair[Replica] = Pair(farm, model_dir, volume, run_dir, kind=kind, settings=bound)
        pair.wait_ready()
        for replica in pair.both:
            behind = "" if replica.url == replica.engine_url else f", {replica.engine_url} its engine"
            out.say(f"replica {replica.name}: {replica.url}{behind}")
    return pair


class Story:
    """What happens to two running replicas.

    Args:
        pair: the replicas, on a volume that holds no adapter yet.
        out: where the transcript goes.
    """

    def __init__(self, pair: Pair[Replica], out: Transcript) -> None:
        self._pair, self._out, self._volume = pair, out, pair.volume
        self._answers: dict[str, str] = {}  # by name, what both replicas said

    def tell(self) -> None:
        """All steps, in order."""
        self._meet_the_base_model()
        self._register_by_command()
        self._load_over_http()
        self._drop_a_folder()
        self._kill_a_replica()
        self._promote_a_revision()
        self._roll_back()
        self._unregister()
        self._refuse_a_broken_adapter()
        self._show_status()

    def _meet_the_base_model(self) -> None:
        with self._out.step("Ask the base model; no adapter is known yet"):
            self._check_listed(MODEL_NAME)
            self._ask_a_new_one(MODEL_NAME)

    def _register_by_command(self) -> None:
        with self._out.step("Register an adapter by command; both replicas serve it"):
            self._lora_fs("register", "support", "./adapters/support", *WAIT)
            self._check_listed(MODEL_NAME, "support")
            self._ask_a_new_one("support")

    def _load_over_http(self) -> None:
        with self._out.step("Load one through replica b's HTTP API; replica a serves it too"):
            b, call = self._pair.b, "/v1/load_lora_adapter"
            path = self._volume.cwd / "adapters" / "billing"
            body = {"lora_name": "billing", "lora_path": str(path)}
            self._out.command(shlex.join(["curl", b.url + call, "--json", json.dumps(body)]))
            response = b.http.post(call, json=body)
            self._out.output(response.text)
            self._out.check("b answers 200", response.is_success, str(response))
            self._await_listed("billing")
            self._ask_a_new_one("billing")

    def _drop_a_folder(self) -> None:
        with self._out.step("Drop a folder on the volume: no command, no request"):
            target = self._volume.scope_dir / "v1" / "travel"
            command = ["cp", "-r", "./adapters/travel", str(target)]
            self._out.command(shlex.join(command))
            subprocess.run(command, cwd=self._volume.cwd, check=True)
            self._await_listed("travel")
            self._ask_a_new_one("travel")

    def _kill_a_replica(self) -> None:
        with self._out.step("Kill replica b; restarted, it has everything"):
            a, b = self._pair.both
            self._out.command(shlex.join(["kill", "-9", *(str(process.pid) for process in b.processes)]))
            b.kill()
            self._out.check("meanwhile a serves on", a.answer("support") == self._answers["support"])
            b.start()
            b.wait_ready()
            self._check_listed(*self._answers)
            for name, answer in self._answers.items():
                self._out.check(f"b answers {name} as before", b.answer(name) == answer)

    def _promote_a_revision(self) -> None:
        with self._out.step("Register a second revision, try it, promote it"):
            self._lora_fs("register", "support", "./adapters/support-new", "--no-activate", *WAIT)
            self._ask_for("support", self._answers["support"], "still the first revision")
            self._ask_a_new_one("support@v2")
            self._lora_fs("promote", "support", "v2", *WAIT)
            self._ask_for("support", self._answers["support@v2"], "now the second revision")

    def _roll_back(self) -> None:
        with self._out.step("Roll back"):
            self._lora_fs("rollback", "support", *WAIT)
            self._ask_for("support", self._answers["support"], "the first revision again")

    def _unregister(self) -> None:
        with self._out.step("Unregister; it is gone on both"):
            self._lora_fs("unregister", "billing", "--all-revisions", *WAIT)
            self._check_listed(MODEL_NAME, "support", "travel")
            for replica in self._pair.both:
                try:
                    text = replica.answer("billing")
                except openai.NotFoundError as error:
                    self._out.check(f"{replica.name} answers 404", True)
                    self._out.output(str(error))
                else:
                    raise CheckFailed(f"{replica.name} still serves billing: {text}")

    def _refuse_a_broken_adapter(self) -> None:
        with self._out.step("Try to register a broken adapter: refused, with its reason"):
            self._out.command("lora-fs register broken ./adapters/broken")
            ran = self._volume.try_run("register", "broken", "./adapters/broken")
            said = ran.stdout + ran.stderr
            self._out.output(said)
            self._out.check(
                f"exit code {INVALID_ADAPTER}: invalid adapter",
                ran.exit_code == INVALID_ADAPTER,
                f"exit code {ran.exit_code}",
            )
            self._out.check("the reason names the file", WEIGHTS in said)
            self._check_listed(MODEL_NAME, "support", "travel")

    def _show_status(self) -> None:
        with self._out.step("What an operator sees"):
            self._lora_fs("status")

    def _lora_fs(self, *arguments: str) -> None:
        self._out.command(shlex.join(["lora-fs", *arguments]))
        self._out.output(self._volume.run(*arguments).stdout)

    def _check_listed(self, *names: str) -> None:
        seen = {replica.name: replica.names() for replica in self._pair.both}
        agreed = all(listed == set(names) for listed in seen.values())
        self._out.check(f"/v1/models on a and b: {', '.join(sorted(names))}", agreed, str(seen))

    def _await_listed(self, name: str) -> None:
        took_s = self._pair.wait_listed(name)
        self._out.check(f"/v1/models on a and b lists {name} after {took_s:.1f} s", True)

    def _ask(self, name: str) -> str:
        answer = self._pair.answer(name)
        self._out.say(f'{name}, asked "{PROMPT}" on a and on b: "{answer}"')
        return answer

    def _ask_a_new_one(self, name: str) -> None:
        """Ask for a name for the first time: nothing else may answer like it."""
        answer = self._ask(name)
        alike = [other for other, known in self._answers.items() if known == answer]
        self._out.check("the same on both, and unlike the others", not alike, str(alike))
        self._answers[name] = answer

    def _ask_for(self, name: str, expected: str, fact: str) -> None:
        answer = self._ask(name)
        self._out.check(fact, answer == expected, f"expected: {expected}")

"""Commands of the pages that a test cannot run, for want of a cluster, a network or a GPU: they are parsed.

Each checker takes the words after the program's name and raises if a reader could not type them: the files,
targets, extras and values that are named exist, the verbs and options are known.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import yaml
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.sidecar.sources import uri
from tests.cli.conftest import parse
from tests.docs.blocks import ROOT


def deployments() -> dict[str, set[str]]:
    """The name of each deployment of the examples, and its containers."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "examples/kubernetes").rglob("*.yaml"):
        for one in yaml.safe_load_all(path.read_text()):
            if one["kind"] == "Deployment":
                pod = one["spec"]["template"]["spec"]
                names = {container["name"] for container in pod["initContainers"] + pod["containers"]}
                found.setdefault(one["metadata"]["name"], set()).update(names)
    return found


def kubectl(words: list[str]) -> None:
    """The verb takes the options; files and containers that are named exist; an inner lora-fs parses."""
    known = {
        "apply": {"-n", "-f", "-k"},
        "cp": {"-c", "-n"},
        "create": {"-n", "--from-file", "--from-literal"},
        "delete": {"-n", "-f", "-k"},
        "exec": {"-c", "-n", "-i", "-t", "-it", "--"},
        "get": {"-n", "-l", "-o"},
        "logs": {"-c", "-n", "-f"},
        "port-forward": {"-n"},
        "rollout": {"-n"},
        "wait": {"-n", "--for", "--timeout"},
    }
    verb, rest = words[0], words[1:]
    own, _, inner = "\0".join(rest).partition("\0--\0")
    for option in (word.partition("=")[0] for word in own.split("\0") if word.startswith("-")):
        assert option in known[verb], f"kubectl {verb} {option}"
    files_exist(own.split("\0"), {"-f", "-k"})
    made = deployments()
    for option, value in pairwise(rest):
        assert option != "-c" or value in set().union(*made.values()), f"no container {value}"
    for word in rest:
        assert not word.startswith("deploy/") or word[7:] in made, f"no {word}"
    if inner:
        command = inner.split("\0")
        assert Path(command[0]).name == "lora-fs", inner
        parse(command[1:])


def helm(words: list[str]) -> None:
    """The chart and the files exist, and every value that is set is one of the chart's."""
    known = {"install", "upgrade", "template", "uninstall", "lint"}
    assert words[0] in known, words
    files_exist(words, {"-f", "--values"})
    charts = [ROOT / word for word in words if (ROOT / word / "Chart.yaml").exists()]
    assert len(charts) == (words[0] != "uninstall"), f"which chart? {words}"
    for at, word in enumerate(words):
        if word in {"--set", "--set-string"}:
            values = yaml.safe_load((charts[0] / "values.yaml").read_text())
            for setting in words[at + 1].split(","):
                found = values
                for key in re.sub(r"\[\d+\]", "", setting.partition("=")[0]).split("."):
                    assert key in found, f"{setting}: not in {charts[0]}/values.yaml"
                    found = found[key] or {}


def docker(words: list[str]) -> None:
    """Builds the folder with the Dockerfile, or runs lora-fs as the image's entry point does."""
    assert words[0] in {"build", "push", "run"}, words
    if words[0] == "build":
        assert (ROOT / words[-1] / "Dockerfile").exists()


def make(words: list[str]) -> None:
    """The target is in the Makefile."""
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def python(words: list[str]) -> None:
    """The script or module exists and takes the options."""
    if words[0] == "-m":
        if words[1] in {"venv", "pip"}:
            return
        if words[1].startswith("vllm."):
            vllm(words[2:])
            return
        spec = find_spec(words[1])
        assert spec is not None, words
        assert spec.origin is not None
        script, options = Path(spec.origin), words[2:]
    else:
        script, options = ROOT / words[0], words[1:]
    text = script.read_text()
    for option in (word.partition("=")[0] for word in options if word.startswith("--")):
        known = (
            f'"{option}"' in text
            or f'"{option.removeprefix("--")}"' in text
            or f"{option[2:].replace('-', '_')}=" in text
        )
        assert known, f"{script} takes no {option}"


def pip(words: list[str]) -> None:
    """It installs this folder, with extras that exist, or packages by name."""
    assert words[0] == "install", words
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    for word in words[1:]:
        if match := re.fullmatch(r"(?:\.|lora-fs)\[([\w,]+)\](.*)", word):
            assert set(match[1].split(",")) <= extras, word


def pytest_(words: list[str]) -> None:
    """The folders are there."""
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/")), words


def vllm(words: list[str]) -> None:
    """The options are vLLM's."""
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    source = "".join(
        (folder / part).read_text() for part in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
    )
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        field = option.removeprefix("--").replace("-", "_")
        assert f'"{option}"' in source or re.search(rf"\b{field}:", source), f"vllm serve {option}"


def files_exist(words: list[str], options: set[str]) -> None:
    """What follows each of these options is in the repository."""
    for option, value in pairwise(words):
        if option in options:
            assert (ROOT / value).exists(), value


def fetches(line: str) -> bool:
    """Whether a line has an adapter fetched from elsewhere: tests/sources do that, from their own servers."""
    remote = r"\b(?:lora-fs .*register|curl) .*\b(?:hf|oci|s3|gs|https|pvc)://|--lora-downloader-plugin"
    return bool(re.search(remote, line)) or ("import gie" in line and "--folder" not in line)


def fetched(line: str) -> None:
    """The command and its options are there, the body is a load's, and the URI is one."""
    words = shlex.split(line)
    sources = []
    if words[0] == "lora-fs":
        parse(words[1:])
        if "register" in words and "--lora-downloader-plugin" not in words:
            sources = words[words.index("register") + 2 :][:1]
    else:
        (data,) = (value for option, value in pairwise(words) if option in {"-d", "--data", "--json"})
        body = json.loads(data)
        Draft202012Validator(schemas.load("load-request")).validate(body)
        sources = [body["lora_path"]]
    for source in sources:
        uri.parse(source)


PARSED: dict[str, Callable[[list[str]], None]] = {
    "kubectl": kubectl,
    "helm": helm,
    "docker": docker,
    "make": make,
    "python": python,
    "python3": python,
    "pip": pip,
    "pytest": pytest_,
    "vllm": vllm,
}

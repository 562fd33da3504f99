"""``-o json``: the shape that docs/cli.md promises is the shape that scripts get."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.model import Phase
from tests.cli.conftest import LoraFs
from tests.cli.test_examples import DOCUMENT
from tests.trust.conftest import new_key

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
SHAPES = dict(re.findall(r"^## (\S+)\n(?:(?!^## ).*\n)*?JSON: `([^`]*)`", PAGE, re.MULTILINE))


def keys(shape: str) -> set[str]:
    """The names at the top of a promised shape, those inside left out."""
    inner = shape.removeprefix("{").removesuffix("}")
    while (less := re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", "", inner)) != inner:
        inner = less
    return set(re.findall(r'"(\w+)"', inner))


@pytest.fixture
def one(lora_fs: LoraFs, folder: Callable[[int], str], report: Callable[..., None]) -> LoraFs:
    """``a`` with v1 and v2, on one replica."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "a", folder(2))
    report("r", phases={"a": Phase.READY})
    return lora_fs


def test_every_shape_is_promised() -> None:
    """Each command that takes ``-o json`` has its line."""
    assert SHAPES.keys() == {"list", *COMMANDS}


COMMANDS = {
    "init": "init",
    "register": "register b {source}",
    "apply": "apply -f {documents}",
    "validate": "validate {source}",
    "sign": "sign {source} --key {key}",
    "verify": "verify {source} --trust {trust}",
    "unregister": "unregister a --all-revisions",
    "promote": "promote a v1",
    "rollback": "rollback a",
    "canary": "canary a v1 --percent 5",
    "pin": "pin a",
    "unpin": "unpin a",
    "set": "set a --keep-revisions 3",
    "show": "show a",
    "status": "status",
    "events": "events",
    "top": "top",
    "doctor": "doctor",
    "gc": "gc",
    "quota": "quota",
    "export": "export adapters.tar",
    "import": "import nim {store}",
    "fsck": "fsck",
    "install-plugin": "install-plugin plugin",
    "wait": "wait nobody --for deleted",
    "version": "version",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_shape_is_kept(one: LoraFs, folder: Callable[[int], str], name: str) -> None:
    """stdout is one JSON object with exactly the names that are promised, stderr is empty."""
    source = folder(3)
    documents = Path(source).with_name("adapters.yaml")
    documents.write_text(DOCUMENT.replace("support-lora", source))
    key, trust = documents.with_name("signing.pem"), documents.with_name("trust.yaml")
    key.write_bytes(new_key().pem)
    trust.write_text("unsigned: [default]")
    places = {"documents": documents, "key": key, "trust": trust}
    words = COMMANDS[name].format(source=source, store=store_of(source), **places).split()
    ran = one(*words, "-o", "json")
    assert set(ran.json) == keys(SHAPES[name])
    if name != "doctor":  # which may have found something
        assert (ran.code, ran.err) == (0, "")


def store_of(source: str) -> Path:
    """A flat store with that one adapter."""
    store = Path(source).with_name("store")
    shutil.copytree(source, store / "one")
    return store


def names(row: dict[str, object]) -> str:
    """An object's names as the page writes them."""
    return "{" + json.dumps(list(row))[1:-1] + "}"


def test_rows_of_status_and_findings(one: LoraFs, tmp_path: Path) -> None:
    """The names inside are those that are promised, too."""
    (row,) = one("status", "-o", "json").json["adapters"]
    assert f'"adapters": [{names(row)}, …]' in SHAPES["status"]
    (tmp_path / "empty").mkdir()
    finding = one("validate", "empty", "-o", "json").json["findings"][0]
    assert names(finding) in SHAPES["validate"]


def test_list(one: LoraFs) -> None:
    """Every record as it is stored, with whether the plain name serves it."""
    rows = one("list", "-o", "json").json
    assert [(row["kind"], row["revision"], row["active"]) for row in rows] == [
        ("Adapter", "v1", False),
        ("Adapter", "v2", True),
    ]

"""Every 429 and 503 of ours says when to repeat the request, wherever in the sources it is made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from lora_fs.sidecar.errors import LoraFsError, RegistryLost, TooManyRegistrations
from lora_fs.sidecar.server.middleware.errors import LATER, TABLE, error_response, refuse, respond

SOURCES = Path(__file__).parents[2]
# What is raised is answered by ``error_response``, too.
BY_ERROR_RESPONSE = {"HTTPException", "error_response"}
NAMES = {HTTPStatus.SERVICE_UNAVAILABLE.name, HTTPStatus.TOO_MANY_REQUESTS.name}


def classes(kind: type[LoraFsError]) -> Iterator[type[LoraFsError]]:
    """A class of errors and those below it that the whole project shares."""
    if kind.__module__ == LoraFsError.__module__:
        yield kind
    for below in kind.__subclasses__():
        yield from classes(below)


def test_each_error_that_may_pass_says_when() -> None:
    """Whatever error becomes 429 or 503, and whatever the framework refuses so."""
    kinds = [kind for kind, status, _ in TABLE if status in LATER]
    assert {RegistryLost, TooManyRegistrations} < set(kinds)
    for kind in {one for above in kinds for one in classes(above)}:
        more = {"retry_after_s": 2.0} if kind is TooManyRegistrations else {}
        answer = respond(kind("why", **more))
        if answer.status_code in LATER:
            assert int(answer.headers["Retry-After"]) >= 1, kind
    for status in LATER:
        assert refuse(HTTPException(status, "why")).headers["Retry-After"] == "1"
        said = error_response("why", status, "kind", headers={"Retry-After": "7"})
        assert said.headers["Retry-After"] == "7"
    assert "Retry-After" not in error_response("why", 500, "kind").headers


def made(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that are given 429 or 503 for a status."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            map(_is_later, [*node.args, *(k.value for k in node.keywords)])
        ):
            yield node


def _is_later(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_later(value.body) or _is_later(value.orelse)
    if isinstance(value, ast.Attribute):
        return value.attr in NAMES
    return isinstance(value, ast.Constant) and type(value.value) is int and value.value in LATER


@pytest.mark.parametrize("folder", ["sidecar", "worker_patch"])
def test_each_place_that_answers_so(folder: str) -> None:
    """An answer that is made by hand has the header in the same call."""
    lacking = []
    for path in sorted((SOURCES / folder).rglob("*.py")):
        for call in made(ast.parse(path.read_text())):
            name = ast.unparse(call.func).rpartition(".")[2]
            says = re.search(r"again|retry.after", ast.unparse(call), re.IGNORECASE)
            if name not in BY_ERROR_RESPONSE | {"frozenset"} and not says:
                lacking.append(f"{path.relative_to(SOURCES)}:{call.lineno}")
    assert not lacking

"""Lines for people and lines for machines say the same, one event each, and never a secret."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_fs.sidecar.logs import JsonLines, TextLines, configure, event

ROOT = Path(__file__).parents[2]
SERVICE = [*(ROOT / "sidecar").rglob("*.py"), *(ROOT / "worker_patch/api").rglob("*.py")]
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
SECRET = "sk-of-the-engine-4711"


def logged(formatter: logging.Formatter, message: str, *arguments: object, **options: Any) -> str:
    """What a handler writes for one call."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger = logging.Logger("lora_fs.test")
    logger.addHandler(handler)
    logger.warning(message, *arguments, **options)
    return out.getvalue()


def test_a_line_of_json_has_its_event_and_fields() -> None:
    """Beside the sentence, the level, the logger and the time in UTC."""
    told = event("load.failed", adapter="sql", attempts=3, seconds=0.5)
    line = json.loads(logged(JsonLines(), "%s is not loaded", "sql", extra=told))
    at = line.pop("time")
    assert at.endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "lora_fs.test",
        "event": "load.failed",
        "message": "sql is not loaded",
        "adapter": "sql",
        "attempts": 3,
        "seconds": 0.5,
    }


def test_other_peoples_lines_are_events_too() -> None:
    """A library's call has no fields, and its traceback is one field."""
    try:
        raise ValueError("torn")
    except ValueError:
        line = json.loads(logged(JsonLines(), "it failed", exc_info=True))
    assert line["event"] == "log"
    assert "ValueError: torn" in line["exception"]


@given(st.text(), st.text())
@example("\udcff", "\ud800")
def test_a_call_is_one_line(message: str, field: str) -> None:
    """Whatever is in it: a name with a line break in it forges no second line, and JSON is UTF-8."""
    for formatter in (JsonLines(), TextLines()):
        written = logged(formatter, "%s", message, extra=event("x", field=field))
        if isinstance(formatter, JsonLines):
            assert json.dumps(json.loads(written), ensure_ascii=False).encode()
        assert written.count("\n") == 1
        assert "\r" not in written
        assert "\x1b" not in written


def test_an_error_forges_no_line() -> None:
    """A source's answer may stand in a traceback: its lines are indented, and a terminal acts on none."""
    try:
        raise ValueError("refused\n2026-11-28 05:00:00,000 INFO lora_fs.audit all is well\x1b[2J")
    except ValueError:
        first, *others = logged(TextLines(), "it failed", exc_info=True).splitlines()
    assert first.endswith("it failed")
    assert "\x1b" not in "".join(others)
    assert [line for line in others if not line.startswith("  ")] == []


@pytest.mark.parametrize("formatter", [JsonLines([SECRET]), TextLines([SECRET])])
@pytest.mark.parametrize(
    "told",
    [
        f"the engine refused {SECRET}",
        "fetching https://user:pa55word@hub.example/x",
        "GET /x with authorization: bearer abcdefgh12345678",
        "GET s3://b/k?X-Amz-Signature=0123abcdef&x=1&X-Amz-Security-Token=0123abcdef&access_token=0123abcdef",
        "using hf_ABCDEFGHIJKLMNOPqrst",
    ],
)
def test_no_secret_is_told(formatter: logging.Formatter, told: str) -> None:
    """In the message, in a field, in a traceback."""
    try:
        raise ValueError(told)
    except ValueError:
        written = logged(formatter, told, exc_info=True, extra=event("x", field=told))
    for secret in (SECRET, "pa55word", "abcdefgh12345678", "0123abcdef", "hf_ABCDEFGHIJKLMNOPqrst"):
        assert secret not in written


def test_where_the_process_is_somebody_elses(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Our lines are written once, by our handler. A secret that begins another one hides all of both."""
    own = logging.getLogger("lora_fs.test.own")
    configure("info", "text", secrets=("sk", SECRET), logger=own.name)
    own.debug("too much")
    own.info("the key is %s", SECRET)
    assert capsys.readouterr().err.endswith(" INFO lora_fs.test.own the key is ***\n")
    assert caplog.records == []


def calls(path: Path) -> Iterator[ast.Call]:
    """Every call that logs in a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and isinstance(node.func.value, ast.Name | ast.Attribute)
            and ast.unparse(node.func.value).endswith("logger")
        ):
            yield node


def test_every_call_names_its_event() -> None:
    """In what runs as a service; the lines of vLLM's workers are vLLM's to format."""
    found = [(path, node) for path in SERVICE for node in calls(path)]
    assert len(found) > 25
    assert [
        f"{path}:{node.lineno}" for path, node in found if not any(k.arg == "extra" for k in node.keywords)
    ] == []

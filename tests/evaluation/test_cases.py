"""Data files: what a line may be, and what is said of one that is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lora_fs.sidecar.errors import InputError, OperatorError
from lora_fs.sidecar.evaluation import searching
from lora_fs.sidecar.evaluation.cases import check
from lora_fs.sidecar.evaluation.expectations import Expect

Data = Callable[..., Path]
MILLION = 1_000_000
PROPERTIES: dict[str, Any] = {"properties": {"a": {"type": "number"}}}
STRICT: dict[str, Any] = {**PROPERTIES, "patternProperties": {"^x_": True}, "additionalProperties": False}
GOOD = {"prompt": "1+1=", "expect": {"exact": "2"}}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "2: Invalid JSON: EOF while parsing an object at column 1"),
        ("[]", "2: is no JSON object"),
        ({"prompt": 1, "expect": {"exact": "a"}}, "2: prompt: is no text"),
        ({"prompt": "a", "expect": {"contains": 3}}, "2: expect.contains: is no text"),
        ({"prompt": "a"}, "2: expect: is missing, and there is no --score-command"),
        ({"expect": {"exact": "a"}}, "2: say prompt or messages"),
        (
            {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "expect": {"exact": "a"}},
            "one of them",
        ),
        ({"prompt": "a", "expected": {"exact": "a"}}, "2: expected: there is no such field"),
        ({"prompt": "a", "expect": {}}, "2: expect: say what is expected"),
        ({"prompt": "a", "expect": {"regex": "("}}, "2: expect: regex does not compile"),
        ({"prompt": "a", "expect": {"contains": []}}, "2: expect.contains"),
        ({"prompt": "a", "expect": {"exact": "a"}, "max_tokens": 0}, "2: max_tokens"),
        ({"messages": [{"role": "boss", "content": "a"}], "expect": {"exact": "a"}}, "2: messages.0.role"),
        ({"prompt": "a", "expect": {"json_schema": {"type": "nope"}}}, "2: expect: json_schema is no schema"),
        ({"prompt": "a", "expect": {"json_schema": {"pattern": 1}}}, "2: expect: json_schema is no schema"),
        ({"prompt": "a", "expect": {"json_schema": {"$schema": 1}}}, "2: expect: json_schema is no schema"),
        ({"prompt": "a", "expect": {"json_schema": {"patternProperties": 1}}}, "json_schema is no schema"),
        ({"prompt": "a", "expect": {"json_schema": {"pattern": "x{99999999999}"}}}, "does not compile"),
        (
            {"prompt": "a", "expect": {"json_schema": {"items": {"pattern": "("}}}},
            "2: expect: json_schema: pattern '(' does not compile",
        ),
        (
            {"prompt": "a", "expect": {"json_schema": {"patternProperties": {"a": {}, "[": {}}}}},
            "2: expect: json_schema: pattern '[' does not compile",
        ),
        (
            {
                "prompt": "a",
                "expect": {
                    "json_schema": {
                        "allOf": [{"patternProperties": {"a": {}}}],
                        "unevaluatedProperties": False,
                    }
                },
            },
            "2: expect: json_schema has patternProperties and unevaluatedProperties, which together",
        ),
        (
            {"prompt": "a", "expect": {"choices": ["no", "no comment", "yes"], "answer": "yes"}},
            "2: expect: choice 'no' begins choice 'no comment'",
        ),
    ],
)
def test_broken(data: Data, line: object, why: str) -> None:
    """A broken line is refused with its file, line, field and reason before anything is asked."""
    path = data(GOOD, line)
    with pytest.raises(InputError) as refused:
        check(path)
    assert str(refused.value).startswith(f"{path}:")
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "expect",
    [
        {"exact": "yes", "contains": "no"},
        {"exact": "yes", "regex": "^no$"},
        {"exact": "yes", "json_schema": {"type": "object"}},
        {"json_schema": False},
        {"json_schema": {"enum": []}},
        {"json_schema": {"not": {}}},
        {"json_schema": {"$ref": "http://127.0.0.1:9/schema.json"}},
        {"json_schema": {"properties": {"a": {"$ref": "#/$defs/none"}}, "$ref": "#/none"}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        {"choices": ["A", "B"], "answer": "C"},
        {"choices": ["A", " A"], "answer": "A"},
        {"choices": [str(number) for number in range(1, 11)], "answer": "1"},
        {"choices": ["no comment", " no", "yes"], "answer": " no"},
        {"choices": [" ", "yes"], "answer": " "},
    ],
)
def test_no_answer_can_meet(data: Data, expect: object) -> None:
    """A case that no answer can meet is refused when it is read."""
    with pytest.raises(InputError, match=r"cases\.jsonl:1: expect: no answer can meet this"):
        check(data({"prompt": "a", "expect": expect}))


def test_unevaluated_under_a_name_of_data(data: Data) -> None:
    """A property may have a keyword's name: what it must be is looked at as any other schema."""
    both = {"patternProperties": {"a": {}}, "unevaluatedProperties": False}
    with pytest.raises(InputError, match="which together have no limit of time"):
        check(data({"prompt": "a", "expect": {"json_schema": {"properties": {"default": both}}}}))


def test_many_broken(data: Data) -> None:
    """Of many broken lines the error lists the first ten and counts the others."""
    with pytest.raises(InputError) as refused:
        check(data(*["{"] * 25))
    lines = str(refused.value).splitlines()
    assert len(lines) == 11
    assert lines[-1].endswith("15 more lines are broken")


def test_empty(data: Data) -> None:
    """A file without a case, and a file that is not there, are refused."""
    with pytest.raises(InputError, match="holds no case"):
        check(data(""))
    with pytest.raises(InputError, match="cannot be read"):
        check(Path("/nowhere/cases.jsonl"))


def test_long_line(tmp_path: Path) -> None:
    """A line of more than 1 MiB is refused; it is not read to its end."""
    path = tmp_path / "long.jsonl"
    path.write_text("a" * (2 << 20), encoding="utf-8")
    with pytest.raises(InputError, match=r"long\.jsonl:1: the line is longer than 1 MiB"):
        check(path)


def test_lines(data: Data) -> None:
    """Blank lines are no cases; each case keeps the number of its line."""
    found = check(data(GOOD, "", GOOD))
    assert [line for line, _ in found] == [1, 3]
    assert found.cases == 2


def test_a_byte_order_mark(data: Data) -> None:
    """The mark that PowerShell puts before the first line is no part of it, nor are its line ends."""
    path = data()
    plain = [case.prompt for _, case in check(path)]
    path.write_bytes(BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert [case.prompt for _, case in check(path)] == plain


def test_a_pipe(tmp_path: Path) -> None:
    """A pipe, such as a shell's ``<(…)``, gives its lines once: it is refused before anything is asked."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="no regular file, and cases are read twice"):
        check(pipe)


def test_changed_meanwhile(data: Data) -> None:
    """A data file that changes during an evaluation ends it."""
    found = check(data(GOOD, GOOD))
    data(GOOD)
    with pytest.raises(InputError, match="was changed while it was read"):
        list(found)


READS = """
import resource, sys
from pathlib import Path
from typing import Any
from lora_fs.sidecar.evaluation.cases import check
print(check(Path(sys.argv[1])).cases, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def read_alone(path: Path) -> tuple[int, int]:
    """Check a file in a process of its own; return its cases, and the process's most memory in KiB."""
    command = [sys.executable, "-P", "-c", READS, str(path)]
    cases, peak_kib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(cases), int(peak_kib)


def test_a_million_lines(tmp_path: Path) -> None:
    """A million cases are read in the memory of ten: at most 8 MiB more, of a file of ten times that."""
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    expect = json.dumps({"json_schema": {"type": "object", "required": ["answer"]}})
    for path, count in ((few, 10), (many, MILLION)):
        with path.open("w", encoding="utf-8") as out:
            out.writelines(f'{{"prompt": "{number}", "expect": {expect}}}\n' for number in range(count))
    cases, floor_kib = read_alone(few)
    assert cases == 10
    cases, peak_kib = read_alone(many)
    assert cases == MILLION
    assert peak_kib - floor_kib < 8 << 10


def test_a_schema_is_checked_once(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many cases have it: a check takes a millisecond, and a file may have a million cases."""
    checks, real = list[Any](), jsonschema.Draft202012Validator.check_schema

    def counted(schema: Any) -> None:
        checks.append(schema)
        real(schema)

    monkeypatch.setattr(jsonschema.Draft202012Validator, "check_schema", counted)
    schema = {"type": "object", "required": ["checked once"]}
    found = check(data(*[{"prompt": f"{n}", "expect": {"json_schema": schema}} for n in range(1000)]))
    assert sum(1 for _ in found) == 1000
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("expect", "good", "bad"),
    [
        ({"exact": "Yes"}, " Yes\n", "yes"),
        ({"exact": "Yes", "ignore_case": True}, "YES", "no"),
        ({"contains": "b"}, "abc", "ac"),
        ({"contains": ["a", "c"]}, "abc", "ab"),
        ({"regex": r"\d{3}"}, "call 112", "call 11"),
        ({"json_schema": {"type": "object", "required": ["a"]}}, '{"a": 1}', '{"b": 1}'),
        ({"json_schema": True}, "1", "one"),
        ({"json_schema": True}, "1e400", "NaN"),
        ({"json_schema": True}, "[1]", "[Infinity]"),
        ({"json_schema": True}, "{}", '{"a": -Infinity}'),
        ({"json_schema": {"type": "number", "multipleOf": 0.5}}, "1e300", "1e400"),
        ({"json_schema": {"type": "number", "multipleOf": 0.5}}, "-2.5", "1" + 400 * "0"),
        ({"json_schema": {"multipleOf": 10**400}}, "0", "0.5"),
        ({"json_schema": {"pattern": "^\\d+$"}}, '"12"', '"1a"'),
        ({"json_schema": {"pattern": "^a"}}, "1", '"b"'),
        ({"json_schema": {"patternProperties": {"^n_": {"type": "number"}}}}, '{"n_a": 1}', '{"n_a": "1"}'),
        ({"json_schema": STRICT}, '{"a": 1, "x_1": 2}', '{"a": 1, "y": 2}'),
        ({"json_schema": {**STRICT, "additionalProperties": {"type": "null"}}}, '{"y": null}', '{"y": 2}'),
        (
            {"json_schema": {"const": {"pattern": "(", "patternProperties": {}}}},
            '{"pattern": "(", "patternProperties": {}}',
            "{}",
        ),
        ({"json_schema": {"unevaluatedProperties": False, **PROPERTIES}}, '{"a": 1}', '{"b": 1}'),
        ({"regex": "^SELECT", "contains": "FROM"}, "SELECT a FROM b", "SELECT a"),
    ],
)
def test_scores(expect: dict[str, object], good: str, bad: str) -> None:
    """Each check passes what it expects and nothing else; checks that stand together must all hold."""
    made = Expect.model_validate(expect)
    assert made.met(good)
    assert not made.met(bad)


def test_choices() -> None:
    """The likeliest choice is the answer; a token that begins two choices counts for neither."""
    made = Expect.model_validate({"choices": ["Paris", "Prague", "Rome"], "answer": "Rome"})
    assert made.chosen({" Ro": -0.7, " Par": -0.9, " P": -0.1, "x": -0.01})
    assert not made.chosen({" Ro": -0.9, " Par": -0.7})
    assert made.chosen({" Ro": -0.6, " Par": -0.7, " R": -0.8}), "a choice counts by its likeliest token"
    assert not made.chosen({" P": -0.1})
    assert not made.chosen({})


def test_a_regex_that_goes_on_for_ever_is_told() -> None:
    """It ends the evaluation with the expression and the cure, and does not hang it."""
    case = Expect(regex="(a|aa)+$")
    assert case.met("aaa")
    with pytest.raises(OperatorError, match=r"'\(a\|aa\)\+\$' is not done .* repeats inside repeats"):
        case.met("a" * 64 + "b")


SLOW = "(a|aa)+$"
DRAFTS = ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
SLOW_SCHEMAS: dict[str, dict[str, Any]] = {
    "pattern": {"items": {"pattern": SLOW}},
    "every string": {"items": {"pattern": "^.*(a|aa)+$"}},
    "patternProperties": {"items": {"patternProperties": {SLOW: {"type": "null"}}}},
    "additionalProperties": {"items": {"additionalProperties": False, "patternProperties": {SLOW: {}}}},
    "referred": {"$defs": {"a": {"pattern": SLOW}}, "items": {"$ref": "#/$defs/a"}},
    "another draft": {"items": {"$schema": DRAFTS[1], "pattern": SLOW}},
    "the same draft": {"items": {"$schema": DRAFTS[0], "allOf": [{"pattern": SLOW}]}},
}


@pytest.mark.parametrize("draft", DRAFTS, ids=["2020-12", "7"])
@pytest.mark.parametrize("schema", SLOW_SCHEMAS.values(), ids=SLOW_SCHEMAS)
def test_a_schemas_regex_that_goes_on_for_ever_is_told(
    schema: dict[str, Any], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stands in the schema: it ends the evaluation, and holds up nothing for minutes."""
    monkeypatch.setattr(searching, "REGEX_S", 0.1)
    held = 30 * "a" + "b"
    case = Expect(json_schema={"$schema": draft, **schema})
    began = time.monotonic()
    with pytest.raises(OperatorError, match=r"the regex .* is not done .* repeats inside repeats"):
        case.met(json.dumps([{held: 1}, held]))
    assert time.monotonic() - began < 60


def test_the_regexes_of_a_schema_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many strings an answer has, all their searches together have the time of one regex."""
    monkeypatch.setattr(searching, "REGEX_S", 0.2)
    case = Expect(json_schema={"items": {"pattern": r"^(?:.*,)*;|^a"}})
    assert case.met(json.dumps(["a"] * 1000))
    slow = "a," + 16 * "b,"
    with pytest.raises(OperatorError, match="is not done"):
        case.met(json.dumps([slow] * 100_000))

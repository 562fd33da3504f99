"""The reference page of the Helm chart's values.

``values.yaml`` says what each value means and its default, ``values.schema.json`` what it may be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "examples/helm/lora-fs"
Schema = dict[str, Any]

HEAD = """\
# Chart values

Written from the chart's own `values.yaml` and `values.schema.json` by `make schemas`. `helm install` refuses
a value that is not here, and one of another type. How to use them:
[Kubernetes](../howto/kubernetes.md#with-helm).
"""
KEY = re.compile(r"^( *)(\w+):")
COMMENT = re.compile(r"^ *# ?(.*)$")
PAGE = re.compile(r"\bdocs/([\w/-]+\.md(?:#[\w-]+)?)")
YAML = re.compile(r"(?<![`\w])(\[?\{(?:[^{}]|\{[^{}]*\})*\}\]?)")


def comments() -> dict[str, str]:
    """Return the comment above each key, by the key's dotted path."""
    found: dict[str, str] = {}
    above: list[str] = []
    path: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if match := COMMENT.match(line):
            above.append(match[1])
            continue
        if match := KEY.match(line):
            path = [*path[: len(match[1]) // 2], match[2]]
            found[".".join(path)] = " ".join(above)
        above = []
    return found


def resolved(schema: Schema, whole: Schema) -> Schema:
    """Return what a schema refers to."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return {**whole["definitions"][name], "called": name}
    return schema


def kind(schema: Schema, whole: Schema) -> str:
    """Return in words what a value may be."""
    if "enum" in schema:
        return ", ".join(f"`{one}`" if one != "" else "empty" for one in schema["enum"])
    if schema.get("called") == "quantity":
        return "a Kubernetes quantity"
    types = schema.get("type", "anything")
    words = [types] if isinstance(types, str) else list(types)
    if words == ["array"]:
        inner = resolved(schema.get("items", {}), whole)
        return "list of maps" if inner.get("type") == "object" else f"list of {kind(inner, whole)}"
    bounds = [f"at least {schema['minimum']}"] if "minimum" in schema else []
    bounds += [f"at most {schema['maximum']}"] if "maximum" in schema else []
    bounds += [f"`{schema['pattern']}`"] if "pattern" in schema else []
    plain = " or ".join({"string": "text", "object": "map"}.get(word, word) for word in words)
    return ", ".join([plain, *bounds])


def default(value: Any) -> str:
    """Return a default as JSON, which is YAML, too."""
    return "empty" if value in ("", [], {}) else f"`{json.dumps(value)}`"


def meaning(comment: str) -> str:
    """Return a comment as a cell: its pages are links, its YAML is code."""
    linked = PAGE.sub(lambda page: f"[{page[1].rpartition('/')[2]}](../{page[1]})", comment)
    return YAML.sub(r"`\1`", linked).replace("|", "\\|")


def rows(path: str, value: Any, schema: Schema, whole: Schema, told: dict[str, str]) -> Iterator[str]:
    """Yield the row of a value, or those of what it holds."""
    schema = resolved(schema, whole)
    if "properties" in schema:
        assert value.keys() == schema["properties"].keys(), f"values.yaml and its schema differ at {path}"
        for name, inner in schema["properties"].items():
            yield from rows(f"{path}.{name}", value[name], inner, whole, told)
        return
    shown = kind(schema, whole).replace("|", "\\|")
    yield f"| `{path}` | {shown} | {default(value)} | {meaning(told[path])} |"


def page() -> str:
    """Return ``chart-values.md``."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    whole = json.loads((CHART / "values.schema.json").read_text())
    told = comments()
    assert values.keys() == whole["properties"].keys() - {"global"}, "values.yaml and its schema differ"
    table = "| Value | May be | Default | Meaning |\n|---|---|---|---|"
    single, groups = ["\n## Of the whole release\n", table], []
    for name, value in values.items():
        schema = resolved(whole["properties"][name], whole)
        lines = list(rows(name, value, schema, whole, told))
        if "properties" in schema:
            groups += [f"\n## {name}\n", *([meaning(told[name]), ""] if told[name] else []), table, *lines]
        else:
            single += lines
    return "\n".join([HEAD.rstrip("\n"), *single, *groups]) + "\n"

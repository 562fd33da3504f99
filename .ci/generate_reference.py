"""Write ``docs/reference/``: the HTTP API from OpenAPI, the JSON from ``schemas/``, the chart's values.

``make schemas`` runs it; a test fails while the pages differ from what it would write.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lora_fs.sidecar.errors import (
    EngineRejected,
    GateNotPassed,
    InvalidAdapter,
    LoraFsError,
    TemporaryError,
    TooManyRegistrations,
)
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.errors import AS_VLLM, KINDS, TABLE, VLLMS
from lora_fs.sidecar.server.ports import ReplicaPort

sys.path.insert(0, str(Path(__file__).parent))

import chart_values

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
FILES = ("marker", "head", "record", "pointer", "quota", "replica-status")
VOLUME, API = "Files on the volume", "Bodies of the HTTP API"
DOCUMENTS, APPLIED = "Documents of apply", ("lora-adapter",)
Schema = dict[str, Any]

HTTP = """\
# HTTP API

Written from the sidecar's own `/openapi.json` by `make schemas`. The sidecar answers on port 8001. With the
[plugin](../engine.md) the same routes are on vLLM's port, but for `/health` and
`/metrics`, which stay vLLM's. Every other path under `/v1/` goes to the engine, once the adapter is loaded
that the body names as its `model`. Who may call what: [security](../howto/security.md).

| Route | |
|---|---|
"""
ERRORS = """
## Errors

Every error has the body [ErrorBody](schemas.md#errorbody), and no other field. `message` says what
happened. `type` is OpenAI's word for it. The header `X-Lora-Fs-Error` has the error's own name, as
`Conflict` or `WaitTimeout`, which the command line's exit codes follow. With the plugin vLLM's own handlers
answer what they refuse before a route does its work: a missing or wrong token, a malformed or too large
body, an unknown route. Its `type` is then vLLM's, as `Unauthorized` for 401.

| Status | `type` | When |
|---|---|---|
"""
# Of errors whose class says what its attributes are, which a client does not see.
WHEN: dict[type[Exception], str] = {
    GateNotPassed: "The revision has no evaluation, or did not pass its namespace's gate.",
    InvalidAdapter: "No engine may serve the adapter; `message` has a line for each finding.",
    TooManyRegistrations: "The namespace registered as often as its quota allows.",
    TemporaryError: "The same call may succeed later.",
    EngineRejected: "The engine answered and refused; `message` says why.",
}
FRAMEWORK = (
    "| 400 | `Bad Request` | A parameter, or a field of the body, is missing or invalid; `param` names it. |",
    "| 404, 405 | `Error` | There is no such route, or not with this method. |",
)
SCHEMAS = """\
# JSON files and bodies

Written from [schemas/](../../schemas) by `make schemas`. Each is a JSON Schema, draft 2020-12, and in the
package `lora_fs.schemas`. What the files mean together: [the format](../format.md). The routes:
[HTTP API](http.md). A field in **bold** has to be there.
"""


def kind(schema: Schema, elsewhere: frozenset[str] = frozenset()) -> str:
    """A field's type, in words; the types of ``elsewhere`` are told in schemas.md, others here."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}]({'schemas.md' * (name in elsewhere)}#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(kind(one, elsewhere) for one in schema["anyOf"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"list of {', '.join(kind(one, elsewhere) for one in schema['prefixItems'])}"
        case "array":
            return f"list of {kind(schema.get('items', {}), elsewhere)}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"map of text to {kind(schema['additionalProperties'], elsewhere)}"
        case "string":
            most = f" of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
            return f"text{most}, `{schema['pattern']}`" if "pattern" in schema else f"text{most}"
        case None:
            return "anything"
        case plain:
            return str(plain)


def cell(text: str) -> str:
    """Text that a table can hold."""
    return " ".join(text.replace("|", "\\|").replace("``", "`").split())


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    text = text.rstrip(".")
    return text and f"{text[0].upper()}{text[1:]}."


def table(schema: Schema, elsewhere: frozenset[str]) -> Iterator[str]:
    """The fields of an object; nothing for what is none."""
    if not schema.get("properties"):
        return
    yield "\n| Field | Type | Meaning |\n|---|---|---|"
    for name, field in schema["properties"].items():
        required = name in schema.get("required", ())
        shown = f"**`{name}`**" if required else f"`{name}`"
        meaning = sentence(field.get("description", ""))
        if not required and field.get("default") is not None:
            meaning += f" Default: `{json.dumps(field['default'])}`."
        yield f"| {shown} | {cell(kind(field, elsewhere))} | {cell(meaning)} |"


def section(
    name: str, schema: Schema, note: str = "", elsewhere: frozenset[str] = frozenset()
) -> Iterator[str]:
    """One type: its name, what it is, its fields or its values."""
    yield f"\n### {name}\n"
    yield f"{note} {cell(sentence(schema.get('description', '')))}".strip()
    if "enum" in schema:
        yield f"\nOne of {kind(schema)}."
    yield from table(schema, elsewhere)


def stored_types() -> dict[str, dict[str, tuple[Schema, str]]]:
    """Every type of ``schemas/`` once, by heading and name, with the file that it is told in."""
    found: dict[str, dict[str, tuple[Schema, str]]] = {
        "Files on the volume": {},
        "Bodies of the HTTP API": {},
        DOCUMENTS: {},
    }
    parts: dict[str, tuple[Schema, str]] = {}
    names = sorted(path.stem for path in (ROOT / "schemas").glob("*.json"))
    for name in sorted(
        names, key=lambda one: (one not in FILES, FILES.index(one) if one in FILES else 0, one)
    ):
        schema = json.loads((ROOT / f"schemas/{name}.json").read_text())
        heading = VOLUME if name in FILES else DOCUMENTS if name in APPLIED else API
        found[heading].setdefault(schema["title"], (schema, name))
        for title, part in schema.get("$defs", {}).items():
            parts.setdefault(title, (part, ""))
    whole = {title for types in found.values() for title in types}
    return {**found, "Parts of them": {title: parts[title] for title in sorted(parts.keys() - whole)}}


def schemas_page() -> str:
    """``schemas.md``."""
    lines = [SCHEMAS]
    for heading, types in stored_types().items():
        lines.append(f"\n## {heading}")
        for name, (schema, file) in types.items():
            lines += section(name, schema, f"[`{file}.json`](../../schemas/{file}.json):" if file else "")
    return tidy(lines)


def openapi() -> Schema:
    """What the sidecar answers to ``/openapi.json``."""
    replica = SimpleNamespace(model="", namespaces=(), replica_id="")
    return create_app(cast("ReplicaPort", replica), engine_url="http://engine", admin=Admin(None)).openapi()


def body(content: Schema, elsewhere: frozenset[str]) -> str:
    """What a request or an answer holds, by media type."""
    told = []
    for media, what in content.items():
        schema = what.get("schema", {})
        told.append(kind(schema, elsewhere) if "$ref" in schema else f"`{media}`")
    return " or ".join(told)


def http_page() -> str:
    """``http.md``."""
    document = openapi()
    known = frozenset(name for types in stored_types().values() for name in types)
    routes = [
        (method.upper(), path, route)
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    ]
    lines = [HTTP.rstrip("\n")]
    for method, path, route in routes:
        anchor = f"{method}-{path}".lower().translate({ord(one): None for one in "/{}."})
        lines.append(f"| [`{method} {path}`](#{anchor}) | {cell(route['summary'])} |")
    for method, path, route in routes:
        lines += [f"\n## {method} {path}\n", f"{route['summary'].rstrip('.')}."]
        if route.get("description"):
            lines.append(f"\n{cell(route['description'])}")
        if route.get("parameters"):
            lines.append("\n| Parameter | In | Type | Meaning |\n|---|---|---|---|")
            for one in route["parameters"]:
                shown = f"**`{one['name']}`**" if one.get("required") else f"`{one['name']}`"
                what, about = cell(kind(one["schema"], known)), cell(sentence(one.get("description", "")))
                lines.append(f"| {shown} | {one['in']} | {what} | {about} |")
        if "requestBody" in route:
            lines.append(f"\nBody: {body(route['requestBody']['content'], known)}.")
        lines.append("\n| Status | Answer |\n|---|---|")
        answers: dict[str, list[str]] = {}
        for status, answer in sorted(route["responses"].items()):
            answers.setdefault(body(answer.get("content", {}), known) or "nothing", []).append(status)
        lines += [f"| {', '.join(statuses)} | {what} |" for what, statuses in answers.items()]
    lines.append(ERRORS.rstrip("\n"))
    routes_of_vllm = " and ".join(f"`{path}`" for path in sorted(VLLMS, reverse=True))
    for error, status, name in TABLE:
        when = "Anything else." if error is LoraFsError else first_sentence(error)
        again = " `Retry-After` says when to ask again." if issubclass(error, TemporaryError) else ""
        lines.append(f"| {status} | `{name}` | {when}{again} |")
        if error is InvalidAdapter:
            status, name = AS_VLLM
            lines.append(
                f"| {status} | `{name}` | The same on requests for a model, and at {routes_of_vllm}. |"
            )
    callers = {
        401: "No token, or none of the token file.",
        403: "The token does not allow that, or there is no token file.",
        503: "The token file cannot be read.",
    }
    lines += [f"| {status} | `{KINDS[status]}` | {when} |" for status, when in callers.items()]
    lines += FRAMEWORK
    more = {name: schema for name, schema in document["components"]["schemas"].items() if name not in known}
    if more:
        lines.append("\n## Other bodies")
        for name, schema in more.items():
            lines += section(name, schema, elsewhere=known)
    return tidy(lines)


def first_sentence(error: type[Exception]) -> str:
    """What an error is, in a sentence: its class says it of itself."""
    if error in WHEN:
        return WHEN[error]
    text = inspect.cleandoc(error.__doc__ or "").partition("\n\n")[0]
    return cell(text.partition(". ")[0].rstrip(".") + ".")


def tidy(lines: list[str]) -> str:
    """One text, without runs of empty lines."""
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip() + "\n"


PAGES = {"schemas.md": schemas_page, "http.md": http_page, "chart-values.md": chart_values.page}


def main() -> None:
    """Write them."""
    FOLDER.mkdir(exist_ok=True)
    for name, render in PAGES.items():
        (FOLDER / name).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The how-to pages against the code: what they list is what there is, and their links resolve."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import AliasChoices

from lora_fs.sidecar.cli.main import cli
from lora_fs.sidecar.model import AdapterStatus, Phase, RevisionUsage, Severity
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, Trial
from lora_fs.sidecar.reconcile.residents.engine_state import COUNTERS
from lora_fs.sidecar.reconcile.telemetry.conditions import Readiness
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.telemetry.usage import UsageReport
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.ports import ReplicaPort
from lora_fs.sidecar.server.routes import observe
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import CODES
from lora_fs.worker_patch.api.metrics import Tiers
from tests.reconcile.test_plan import RECORD

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs/howto"
RECONCILE = ROOT / "sidecar/reconcile"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(name: str) -> str:
    """One how-to page."""
    return (HOWTO / name).read_text()


def reference(name: str) -> str:
    """One page of the reference."""
    return (ROOT / "docs/reference" / name).read_text()


def page_id(path: Path) -> str:
    """A page's name in a test's id."""
    return str(path.relative_to(ROOT))


# -- metrics -------------------------------------------------------------------------------------


class ScrapedReplica:
    """A replica with one adapter and every counter that the code counts."""

    namespaces = ("default",)

    def notable(self) -> tuple[dict[str, AdapterStatus], dict[str, int]]:
        one = AdapterStatus(key=("default", "tiny", "v1", "a1"), generation=1, phase=Phase.READY)
        failed = AdapterStatus(key=("default", "tiny", "v1", "a2"), generation=1, phase=Phase.FAILED)
        return {"a1": one, "a2": failed}, {Phase.READY: 1, Phase.FAILED: 1}

    def residency(self) -> dict[str, dict[str, object]]:
        return {"a1": {"in_flight": 2, "idle_s": 0.0, "path": "/stage/a1"}}

    def usage(self) -> UsageReport:
        return UsageReport({RECORD.key: RevisionUsage(requests=3)})

    def catalog(self) -> Catalog:
        return Catalog(trials={"a1": Trial(Served("a1@v2", RECORD), 5)})

    def readiness(self) -> Readiness:
        return Readiness(True, ("NotAdopted: a3: torn",))

    def capacity(self) -> int:
        return 4

    def downloads(self) -> dict[str, object]:
        return {}

    def tiers(self) -> dict[str, int]:
        return {"disk": 1}

    def durations(self) -> dict[str, Durations]:
        return {f"{kind}_seconds": Durations() for kind in ("pass", "stage", "load", "unload")}

    def counters(self) -> dict[str, float]:
        return dict.fromkeys(counter_names(), 1.0)


def counter_names() -> set[str]:
    """Every counter that ``sidecar/reconcile`` counts."""
    texts = (path.read_text() for path in RECONCILE.rglob("*.py"))
    return {*COUNTERS, *(name for text in texts for name in re.findall(r'counters\["(\w+)"\]', text))}


def exposed_metrics() -> dict[str, set[str]]:
    """Name → labels of every sample that a scrape gives."""
    app = FastAPI()
    app.include_router(observe.router(cast(ReplicaPort, ScrapedReplica()), Admin(None), Trail(None)))

    async def scrape() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            return (await client.get("/metrics")).text

    text = asyncio.run(scrape())
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = family.name if family.type in ("histogram", "summary") else sample.name
            if not name.startswith("process_"):  # Prometheus's own
                found[name] = set(sample.labels) - {"le"}
    return found


def told_metrics() -> dict[str, set[str]]:
    """Name → labels as the page has them."""
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) \|", reference("metrics.md"), re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_counters_are_found() -> None:
    """The search for counters in the code finds them."""
    assert {"loads_total", "load_failures_total"} <= counter_names()


def plugin_metrics() -> set[str]:
    """What the plugin's collector gives besides."""
    sizes = {"slots": 2, "budget_bytes": 1, "used_bytes": 0}
    seen: dict[str, Any] = {"engine": "0", "resident": {}, "counters": {}, **sizes}
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in Tiers(lambda: [seen]).collect()
    }


def test_the_plugins_series_are_told() -> None:
    """Every one of them is in its table, and no other is."""
    section = reference("metrics.md").partition("## With the plugin")[2]
    assert set(re.findall(r"^\| `([\w:]+)` \|", section, re.MULTILINE)) == plugin_metrics()


def test_metrics_table_is_what_a_scrape_gives() -> None:
    """Every metric is in the table with its labels, and no other is."""
    assert told_metrics() == exposed_metrics()


def test_queries_name_metrics_that_exist() -> None:
    """No query or remark names a metric that is not exposed."""
    named = set(re.findall(r"\b(?:lora_fs|lora_syncer)_\w+", page("metrics.md") + reference("metrics.md")))
    assert {
        re.sub("_(bucket|sum|count)$", "", name) for name in named
    } <= exposed_metrics().keys() | plugin_metrics()


# -- settings ------------------------------------------------------------------------------------


def environment_names(field: str) -> set[str]:
    """The variables that are promised for a field: its own name with the prefix, and its aliases."""
    alias = Settings.model_fields[field].validation_alias
    own = f"LORA_FS_{field.upper()}"
    if not isinstance(alias, AliasChoices):
        return {own}
    return {own} | {str(choice) for choice in alias.choices if choice != field}


def settings_rows() -> dict[str, list[str]]:
    """Field → the other cells of its row."""
    rows = {}
    for line in page("settings.md").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if match := re.fullmatch(r"`([a-z_]+)`", cells[0]):
            rows[match[1]] = cells[1:]
    return rows


def test_every_setting_has_its_row() -> None:
    """A new field without a row fails here, and so does a row without a field."""
    assert settings_rows().keys() == Settings.model_fields.keys()


@pytest.mark.parametrize("field", Settings.model_fields)
def test_setting_names_its_variables(field: str) -> None:
    """The row names every variable of the field and no other."""
    assert set(re.findall(r"`([A-Z_]+)`", settings_rows()[field][0])) == environment_names(field)


@pytest.mark.parametrize("field", Settings.model_fields)
def test_setting_tells_its_default(field: str) -> None:
    """The row's default is the field's."""
    if field == "replica_id":
        return  # made on the host
    default = Settings.model_fields[field].default
    told = settings_rows()[field][2]
    if default is None:
        assert told == "none"
    elif default == ():
        assert told == "empty"
    elif isinstance(default, tuple):
        assert told.strip("`") == ",".join(default)
    elif isinstance(default, float):
        assert float(told) == default
    else:
        assert told.strip("`").split()[0] == str(default)


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_pages_name_settings_that_exist(path: Path) -> None:
    """A variable that a page names is one that is read."""
    known = {name for field in Settings.model_fields for name in environment_names(field)}
    assert set(re.findall(r"\b(?:LORA_FS|DYNAMO)_[A-Z_]+\b", path.read_text())) <= known


# -- conditions, phases, reasons -----------------------------------------------------------------


def texts_of(path: Path) -> Iterator[str]:
    """Every text in a module's code, docstrings left out; of an f-string its constant parts."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def told_reasons() -> set[str]:
    """Names of conditions and reasons: texts that begin with ``Name: ``, and reasons of a status."""
    found = {
        match[1]
        for path in RECONCILE.rglob("*.py")
        for text in texts_of(path)
        if (match := re.match(r"([A-Z][A-Za-z]+): ", text))
    }
    status = ast.parse((RECONCILE / "status.py").read_text())
    for node in ast.walk(status):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            at = {"_make": 2, "_of": 3}.get(node.func.id, len(node.args))
            found |= {
                str(argument.value)
                for argument in node.args[at : at + 1]
                if isinstance(argument, ast.Constant)
            }
    return found


def test_conditions_are_found() -> None:
    """The search for conditions in the code finds those that are known."""
    known = {"VolumeUnavailable", "VolumeStalled", "Frozen", "Unreadable", "NotAdopted", "StatusNotWritten"}
    assert known | {"EngineUnavailable", "NameConflict", "Loaded", "Evicted"} <= told_reasons()


@pytest.mark.parametrize("name", sorted(told_reasons()))
def test_reason_is_explained(name: str) -> None:
    """Whatever an operator reads in a status or a log is in conditions.md."""
    assert f"`{name}`" in reference("conditions.md")


def rows(heading: str) -> set[str]:
    """The names in the first column of a section's table in conditions.md."""
    section = reference("conditions.md").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def told_events() -> set[str]:
    """The reasons that ``sidecar/reconcile`` gives to ``tell``."""
    calls = (
        node
        for path in RECONCILE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    )
    texts = (
        part.value
        for call in calls
        if cast(ast.Attribute, call.func).attr in {"tell", "_tell"} and call.args
        for part in ast.walk(call.args[0])
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )
    return {text for text in texts if re.fullmatch(r"[A-Z]\w+", text)}


def test_phases_are_those_of_the_code() -> None:
    """Each has its row, and no other has one."""
    assert rows("Phases") == {phase.value for phase in Phase}


def test_events_are_those_of_the_code() -> None:
    """Each reason of an event has its row, and no other has one."""
    assert rows("Events") == told_events()


@pytest.mark.parametrize(
    "heading", ["Conditions", "Reasons of a failure", "Reasons in the log for an unload"]
)
def test_no_row_outlives_its_code(heading: str) -> None:
    """What a table explains is a text, or a class, of the code."""
    modules = (path for folder in ("sidecar", "worker_patch") for path in (ROOT / folder).rglob("*.py"))
    code = "".join(path.read_text() for path in modules)
    assert rows(heading)
    assert {name for name in rows(heading) if not re.search(rf"\b{name}\b", code)} == set()


# -- validation ----------------------------------------------------------------------------------


def validation_rows() -> dict[str, tuple[str, str]]:
    """Code → outcome and meaning."""
    rows = re.findall(
        r"^\| `([a-z-]+)` \| ((?:warning|error)(?:, `--allow`)?) \| (.*) \|$",
        page("validation.md"),
        re.MULTILINE,
    )
    return {code: (outcome, meaning) for code, outcome, meaning in rows}


def test_validation_table_is_the_table_of_codes() -> None:
    """Every code is there with its outcome and its meaning, and no other is."""
    expected = {}
    for code, entry in CODES.items():
        outcome = "warning" if entry.severity is Severity.WARNING else "error"
        expected[code] = (outcome + ", `--allow`" * entry.overridable, entry.doc)
    assert validation_rows() == expected


# -- commands --------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Every ``lora-fs …`` in a page's running text, as its words; blocks are typed by ``test_blocks.py``."""
    return [shlex.split(span)[1:] for span in re.findall(r"`(lora-fs [a-z][^`\n]*)`", text)]


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_commands_exist(path: Path) -> None:
    """Every command that a page names is one, and takes the options named."""
    for words in commands(path.read_text()):
        assert words[0] in cli.commands, words
        options = {
            option
            for parameter in cli.commands[words[0]].params
            if isinstance(parameter, click.Option)
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words[1:] if word.startswith("-")} <= options, words


def test_commands_are_found() -> None:
    """Commands are seen in running text, and options are not."""
    assert commands("use `lora-fs gc --dry-run`, or `--quick`\n") == [["gc", "--dry-run"]]


# -- decisions -----------------------------------------------------------------------------------


def test_the_quickstart_bounds_what_is_loaded() -> None:
    """Each of its sidecars loads no more than its engine keeps in memory: no `EngineMayReread`."""
    text = (ROOT / "docs/quickstart.md").read_text()
    (keeps,) = re.findall(r"--max-cpu-loras ([0-9]+)", text)
    loaded = re.findall(r"^\$ lora-fs sidecar .*--max-loaded ([0-9]+)$", text, re.MULTILINE)
    assert loaded == [keeps] * text.count("$ lora-fs sidecar")


@pytest.mark.parametrize("path", sorted((ROOT / "docs/adr").glob("0*.md")), ids=page_id)
def test_decision_has_its_parts(path: Path) -> None:
    """A decision says why, what, what it costs, and what else was thought of; its code exists."""
    text = path.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Context",
        "Decision",
        "Consequences",
        "Alternatives",
    ]
    assert text.startswith(f"# {path.name[:4]}: ")
    modules = re.findall(r"`((?:sidecar|worker_patch)/[\w/]+\.py)`", text)
    assert modules
    assert all((ROOT / module).exists() for module in modules)

"""canary, pin, unpin, set, gc of old revisions, events and wait, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from lora_fs.sidecar.cli.look.events import _local
from lora_fs.sidecar.cli.main import COMMANDS, cli
from lora_fs.sidecar.cli.output import shown_time
from lora_fs.sidecar.model import Event, EventList, Phase
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.volume import atomic
from tests.cli.conftest import LORA_FS, MODEL, LoraFs, seen

Folder = Callable[[int], str]
Report = Callable[..., None]
AT = "2026-01-01T00:00:0{}.000+00:00"


@pytest.fixture
def two(lora_fs: LoraFs, folder: Folder) -> None:
    """``a`` serves v1 and has v2."""
    for seed in (1, 2):
        assert lora_fs("register", "a", folder(seed), *(["--no-activate"] if seed > 1 else [])).code == 0


# -- canary --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two")
def test_a_canary_by_command(lora_fs: LoraFs) -> None:
    """Begun, shown, raised, finished: each by one command that says what serves."""
    assert lora_fs("canary", "a").code == 3
    assert lora_fs("canary", "a", "v2", "--percent", "5").out == (
        "a serves v1, v2 answers 5 % of the requests\n"
    )
    assert "; v2 answers 5 % of the requests\n" in lora_fs("show", "a").out
    assert [line.split()[2:4] for line in lora_fs("list").out.splitlines()[1:]] == [["*", "4"], ["5", "%"]]
    assert lora_fs("canary", "a").out == "a serves v1, v2 answers 5 % of the requests\n"
    raised = lora_fs("canary", "a", "--percent", "50", "-o", "json").json["pointer"]
    assert (raised["revision"], raised["canary"]) == ("v1", {"revision": "v2", "percent": 50})
    assert lora_fs("canary", "a", "--finish").out == "a serves v2\n"
    assert lora_fs("canary", "a", "--abort").code == 3


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("v2", "--percent", "101"), 2),
        (("v2", "--percent", "-1"), 2),
        (("v1", "--percent", "5"), 2),
        (("v9",), 3),
        (("--finish", "--abort"), 2),
        (("v2", "--finish"), 2),
        (("..",), 2),
    ],
)
def test_canaries_that_are_none(lora_fs: LoraFs, options: tuple[str, ...], code: int) -> None:
    """Refused in one sentence, and nothing is written."""
    ran = lora_fs("canary", "a", *options)
    assert ran.code == code
    assert ran.err
    assert lora_fs("canary", "a").code == 3


@pytest.mark.usefixtures("two")
def test_a_canary_is_waited_for(lora_fs: LoraFs, report: Report) -> None:
    """Until every replica has seen the share, and loads the revision if it has to."""
    report("pod-a", recent=seen(pointer=2))
    report("pod-b", recent=seen(pointer=1))
    ran = lora_fs("canary", "a", "v2", "--percent", "5", "--wait", "0.2")
    assert ran.code == 6
    assert "pod-b" in ran.err
    assert "pod-a" not in ran.err
    report("pod-b", recent=seen(pointer=3), phases={"b@v2": Phase.FAILED})
    ran = lora_fs("canary", "a", "--percent", "6", "--wait", "0.2")
    assert (ran.code, "pod-b cannot load" in ran.err) == (6, False)  # pod-b told of another name


# -- what is said of a name ----------------------------------------------------------------------


def policies(lora_fs: LoraFs) -> dict[str, Any]:
    return {
        one["revision"]: one["spec"]["policy"] for one in lora_fs("show", "a", "-o", "json").json["revisions"]
    }


@pytest.mark.usefixtures("two")
def test_pinned_and_unpinned(lora_fs: LoraFs) -> None:
    """Every revision is, and is what it was afterwards."""
    lora_fs("set", "a", "--policy", "eager", "--priority", "4", "--revision", "v1")
    assert lora_fs("pin", "a").out == "a@v1: pinned, generation 3\na@v2: pinned, generation 2\n"
    assert {policy["kind"] for policy in policies(lora_fs).values()} == {"pinned"}
    assert lora_fs("unpin", "a").code == 0
    after = policies(lora_fs)
    assert (after["v1"]["kind"], after["v1"]["priority"], after["v2"]) == ("eager", 4, None)
    assert lora_fs("pin", "nobody").code == 3


@pytest.mark.usefixtures("two")
def test_set(lora_fs: LoraFs) -> None:
    """Each option changes what it names, in one go."""
    ran = lora_fs(
        *("set", "a", "--ttl", "15m", "--label", "team=care", "--label", "x=", "--keep-revisions", "3"),
        *("-o", "json"),
    )
    assert [one["spec"]["policy"]["ttl_s"] for one in ran.json["records"]] == [900, 900]
    assert ran.json["records"][0]["spec"]["labels"] == {"team": "care", "x": ""}
    assert ran.json["pointer"]["keep_revisions"] == 3
    ran = lora_fs("set", "a", "--label", "x-", "--policy", "default", "--keep-revisions", "none")
    assert ran.out.startswith("a@v1: policy as each sidecar is set, team=care, generation ")
    show = lora_fs("show", "a", "-o", "json").json
    assert [one["spec"]["policy"] for one in show["revisions"]] == [None, None]
    assert show["revisions"][0]["spec"]["labels"] == {"team": "care"}
    assert show["pointer"]["keep_revisions"] is None


@pytest.mark.usefixtures("two")
def test_a_label_that_is_no_text(lora_fs: LoraFs) -> None:
    """The message names the option, and quotes no record."""
    ran = lora_fs("set", "a", "--label", "x=\udcff")
    assert (ran.code, r"'--label': x=\udcff is no text in UTF-8" in ran.err) == (2, True)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 2),
        (("--label", "x"), 2),
        (("--label", "-"), 2),
        (("--keep-revisions", "0"), 2),
        (("--policy", "default", "--ttl", "5m"), 2),
        (("--policy", "lazy", "--if-generation", "1"), 2),
        (("--policy", "lazy", "--if-generation", "2", "--revision", "v1"), 4),
        (("--policy", "lazy", "--revision", "v9"), 3),
    ],
)
def test_what_cannot_be_set(lora_fs: LoraFs, options: tuple[str, ...], code: int) -> None:
    """It is refused, and every record is of its first generation still."""
    assert lora_fs("set", "a", *options).code == code
    assert {one["generation"] for one in lora_fs("show", "a", "-o", "json").json["revisions"]} == {1}


def test_old_revisions_go(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """A dry run says which, why and how much; gc unregisters them, of the whole namespace or of a name."""
    for seed in range(4):
        lora_fs("register", "a", folder(seed))
    then = time.time() - 2 * 86_400
    for path in root.glob("default/*/*/*.json"):
        os.utime(path, (then, then))
    assert lora_fs("quota", "--keep-revisions", "2").code == 0
    assert lora_fs("gc", "--dry-run", "-o", "json").json["removed"][0]["withdrawn"] is True
    dry = lora_fs("gc", "--dry-run").out.splitlines()
    assert [line.split()[:2] for line in dry[:2]] == [["would", "unregister"]] * 2
    assert "a keeps 2 revisions, and v2 is an older one" in dry[0]
    assert dry[2].startswith("2 things, 0.0 kB, ")
    assert len(policies(lora_fs)) == 4
    done = lora_fs("gc").out
    assert done.startswith("unregistered ")
    assert policies(lora_fs).keys() == {"v3", "v4"}
    assert lora_fs("quota", "-o", "json").json["quota"]["keep_revisions"] == 2
    assert "revisions of a name that gc keeps  -     2" in lora_fs("quota").out


def test_history_goes(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """After a week, or as long as is said: of what is gone nothing is left, of what is there the newest."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "b", folder(2))
    lora_fs("pin", "b")
    lora_fs("unregister", "a")
    assert lora_fs("gc", "--older-than", "0", "--dry-run").out.count("supersedes") == 0
    for _ in range(4):
        ran = lora_fs("gc", "--older-than", "0", "--history-older-than", "0")
        assert ran.code == 0
    assert ran.out.startswith("0 things")
    left = sorted(path.relative_to(root / "default/tiny") for path in root.glob("default/*/*/*.json"))
    assert list(map(str, left)) == [".active/b.@00000001.json", "v1/b.@00000002.json"]
    assert lora_fs("unpin", "b").code == 0
    assert lora_fs("show", "b", "-o", "json").json["revisions"][0]["spec"]["policy"] is None


# -- events --------------------------------------------------------------------------------------


@pytest.fixture
def publish(root: Path) -> Callable[..., None]:
    """``publish("pod-a", Event(…), …)``: what a replica would have written."""

    def write(replica: str, *events: Event, model: str = MODEL) -> None:
        (root / ".events").mkdir(exist_ok=True)
        told = EventList(replica=replica, model=model, events=events)
        atomic.replace(root / ".events" / f"{replica}.json", seal(told))

    return write


def event(second: int, reason: str, name: str | None = "a", **more: Any) -> Event:
    key = ("default", MODEL, "v1", name) if name is not None else None
    return Event(reason=reason, key=key, first_at=AT.format(second), last_at=AT.format(second), **more)


@pytest.mark.usefixtures("two")
def test_events_of_all_replicas(lora_fs: LoraFs, publish: Callable[..., None], root: Path) -> None:
    """In the order of their last time; of one name, of this base model and namespace alone."""
    assert lora_fs("events").code == 0
    publish("pod-a", event(1, "Loading"), event(4, "Failed", type="Warning", count=3, message="no\x1broom"))
    publish("pod-b", event(2, "Loaded", "b"), event(3, "EngineUnavailable", None))
    publish("pod-c", event(3, "Loaded"), model="another")
    (root / ".events" / "pod-d.json").write_text("damage")
    ran = lora_fs("events", "-o", "json")
    assert [one["reason"] for one in ran.json["events"]] == [
        "Loading",
        "Loaded",
        "EngineUnavailable",
        "Failed",
    ]
    assert list(ran.json["unreadable"]) == ["pod-d"]
    text = lora_fs("events", "a")
    assert [line.split()[2:4] for line in text.out.splitlines()[1:]] == [
        ["Normal", "Loading"],
        ["Warning", "Failed"],
    ]
    assert "no\\x1broom" in text.out
    assert "pod-d" in text.err


def test_events_of_one_revision(lora_fs: LoraFs, publish: Callable[..., None], two: LoraFs) -> None:
    """NAME@R leaves out those of other revisions; with -A each name has its namespace."""
    key = ("default", MODEL, "v2", "a")
    publish("pod-a", event(1, "Loading"), event(2, "Loaded").model_copy(update={"key": key}))
    assert lora_fs("events", "a@v2", "-o", "name").out == "a@v2\n"
    assert lora_fs("events", "-A", "-o", "name").out == "default/a@v1\ndefault/a@v2\n"
    assert "default/a@v2" in lora_fs("events", "-A").out


@pytest.mark.usefixtures("two")
def test_events_are_followed(publish: Callable[..., None]) -> None:
    """What happens from now on is printed as it comes, once, a line of JSON each."""
    publish("pod-a", event(1, "Loading"))
    command = [LORA_FS, "events", "--follow", "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert json.loads(next(lines))["reason"] == "Loading"
        publish("pod-a", event(1, "Loading"), event(2, "Loaded"))
        assert json.loads(next(lines))["reason"] == "Loaded"
        publish("pod-a", event(2, "Loaded"), event(1, "Loading", count=2))
        assert json.loads(next(lines))["count"] == 2
        process.terminate()


@pytest.mark.usefixtures("two")
def test_followed_events_are_documents(
    lora_fs: LoraFs, publish: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In YAML one after the other."""
    publish("pod-a", event(1, "Loading"), event(2, "Loaded"))
    monkeypatch.setattr(time, "sleep", Mock(side_effect=KeyboardInterrupt))
    told = yaml.safe_load_all(lora_fs("events", "--follow", "-o", "yaml").out)
    assert [one["reason"] for one in told] == ["Loading", "Loaded"]


@pytest.mark.usefixtures("two")
def test_a_generation_above_which_there_is_none(lora_fs: LoraFs, root: Path) -> None:
    """Nothing is wrong with what was asked for: somebody has to look at the volume."""
    (root / "default/tiny/v1/a.@999999999999999999.json").write_text("{")
    ran = lora_fs("set", "a", "--policy", "eager", "--revision", "v1")
    assert (ran.code, "remove that file" in ran.err) == (1, True)


# -- wait ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("aim", "phases", "code"),
    [
        ("ready", {}, 0),
        ("ready", {"a": Phase.READY}, 0),
        ("ready", {"a": Phase.LOADING}, 6),
        ("ready", {"a": Phase.FAILED}, 6),
        ("condition=Loaded", {}, 6),
        ("condition=Loaded", {"a": Phase.READY}, 0),
        ("condition=Loaded=False", {}, 0),
        ("condition=Available", {"a": Phase.FAILED}, 6),
        ("condition=Available=False", {"a": Phase.FAILED}, 0),
        ("deleted", {}, 6),
    ],
)
def test_wait(lora_fs: LoraFs, report: Report, aim: str, phases: dict[str, Phase], code: int) -> None:
    """Until each live replica is there; one that is not is named, with why."""
    report("pod-a", recent=seen(), phases={"a": Phase.READY} if code == 0 and "a" in phases else phases)
    report("pod-b", recent=seen(), phases=phases)
    report("pod-old", age_s=100)
    if aim.endswith("=False"):
        report("pod-a", recent=seen(), phases=phases)
    ran = lora_fs("wait", "a", "--for", aim, "--timeout", "0.1")
    assert ran.code == code
    if code and aim != "deleted":
        assert "pod-b" in ran.err
        assert "pod-old" not in ran.err


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("engine", ["unknown", "rejected: it says so"])
@pytest.mark.parametrize(
    ("aim", "code"),
    [
        ("ready", 6),
        ("condition=Available", 6),
        ("condition=Available=True", 6),
        ("condition=Loaded", 6),
        ("condition=Loaded=False", 0),
    ],
)
def test_wait_for_an_engine_that_does_not_answer(
    lora_fs: LoraFs, report: Report, aim: str, code: int, engine: str
) -> None:
    """Nobody answers its requests there, whatever the replica last knew of it."""
    phases = {"a": Phase.READY} if code else {}
    report("pod-a", recent=seen(), phases=phases)
    report("pod-b", recent=seen(), phases=phases, engine=engine)
    ran = lora_fs("wait", "a", "--for", aim, "--timeout", "0")
    assert (ran.code, "pod-b (no engine answers)" in ran.err) == (code, code == 6), ran.err
    assert "pod-a" not in ran.err
    assert lora_fs("promote", "a", "v1", "--wait", "0").code == 0  # it was seen


@pytest.mark.usefixtures("two")
def test_wait_for_those_that_have_not_seen_it(lora_fs: LoraFs, report: Report) -> None:
    """No live replica is not every replica, and one that lags is waited for."""
    assert lora_fs("wait", "a", "--timeout", "0").code == 6
    report("pod-a", recent={})
    report("pod-b", recent=seen(pointer=0, record=0))
    ran = lora_fs("wait", "a", "--timeout", "0")
    assert (ran.code, "pod-b has not seen it yet" in ran.err) == (6, True)


@pytest.mark.usefixtures("two")
def test_wait_until_it_is_gone(lora_fs: LoraFs, report: Report) -> None:
    """From every engine; a name that is not there cannot become ready."""
    assert lora_fs("wait", "nobody", "--timeout", "0").code == 3
    assert lora_fs("wait", "nobody", "--for", "deleted", "--timeout", "0").code == 0
    lora_fs("unregister", "a", "--all-revisions")
    report("pod-a", recent=seen(pointer=2), phases={"a@v2": Phase.DRAINING}, revision="v2")
    ran = lora_fs("wait", "a", "--for", "deleted", "--timeout", "0")
    assert (ran.code, "still has it" in ran.err) == (6, True)
    report("pod-a", recent=seen(pointer=2))
    assert lora_fs("wait", "a", "--for", "deleted", "--timeout", "0").code == 0


@pytest.mark.usefixtures("two")
def test_a_name_that_serves_nothing_is_not_gone(lora_fs: LoraFs) -> None:
    """Its other revision is registered, and answers by its own name."""
    lora_fs("unregister", "a", "--revision", "v2")
    ran = lora_fs("wait", "a", "--for", "deleted", "--timeout", "0")
    assert (ran.code, "v1 is registered" in ran.err) == (6, True)


@pytest.mark.parametrize("aim", ["gone", "condition=", "condition=Odd", "condition=Loaded=Maybe", "Loaded"])
def test_aims_that_are_none(lora_fs: LoraFs, aim: str) -> None:
    """What can be waited for is told."""
    ran = lora_fs("wait", "a", "--for", aim)
    assert (ran.code, "condition=Loaded" in ran.err) == (2, True)


# -- the commands themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_list_says_what_the_command_says(name: str) -> None:
    """The list of commands is written down, so that it needs no import; it is no other."""
    assert cli.commands[name].get_short_help_str(200) == f"{COMMANDS[name][1]}."
    assert cli.commands[name].name == name


def test_help_imports_no_command() -> None:
    """Neither the server nor what reads tensors is needed to say what there is."""
    code = (
        "import sys;from lora_fs.sidecar.cli.main import run;run(['--help']);"
        "print(*sorted({'numpy','aiohttp','fastapi','uvicorn','watchdog'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == ""


def test_the_demo_takes_the_commands_place(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that ends ``lora-fs demo`` ends its engines, too: there is no other process to send it to."""
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: ran.append(words))
    lora_fs("demo", "--keep", "--dir", "work")
    assert ran == [[sys.executable, "-m", "lora_fs.demo", "--keep", "--dir", "work"]]


@pytest.mark.parametrize("written", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "yesterday"])
def test_a_time_that_is_none_is_shown_as_it_is(written: str) -> None:
    """A zone may lead out of the years there are; one odd record or event hides no other."""
    assert shown_time(written) == _local(written) == written

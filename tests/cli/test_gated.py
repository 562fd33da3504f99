"""What may serve a name: evaluated revisions where that is asked for; canaries that advance by themselves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.cli.adapters import stepping
from lora_fs.sidecar.model import AdapterKey, AdapterStatus, Phase, Quota, ReplicaStatus, RevisionUsage, Scope
from lora_fs.sidecar.model.evaluation import Evaluation, Measured
from lora_fs.sidecar.model.gates import parse
from lora_fs.sidecar.reconcile.status_file import HEARTBEAT_S
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from tests.cli.conftest import MODEL, LoraFs

Folder = Callable[[int], str]
Report = Callable[..., None]
SCOPE = Scope("default", MODEL)
GATE = "pass_rate>=0.9"


@pytest.fixture(autouse=True)
def two(lora_fs: LoraFs, folder: Folder) -> None:
    """``a`` serves v1 and has v2."""
    for seed in (1, 2):
        assert lora_fs("register", "a", folder(seed), *(["--no-activate"] if seed > 1 else [])).code == 0


def evaluated(
    root: Path, rate: float, revision: str = "v2", gate: str | None = GATE, digest: str = ""
) -> Path:
    """Keep an evaluation that found this pass rate; returns its file."""
    with_registry = Registry(root)
    record = release.chosen_of(with_registry, SCOPE, "a", revision)[revision]
    figures = {"pass_rate": rate, "cases": 200.0}
    unmet = parse(gate).unmet(figures, {}) if gate is not None else ()
    evaluations.write(
        with_registry,
        Evaluation(
            namespace="default",
            model=MODEL,
            name="a",
            data="cases.jsonl",
            data_sha256=64 * "0",
            cases=200,
            concurrency=4,
            measured=Measured(revision=revision, digest=digest or record.spec.digest, figures=figures),
            gate=gate,
            passed=None if gate is None else not unmet,
            unmet=unmet,
        ),
    )
    with_registry.close()
    return with_registry.layout.evaluation(record.key)


def serves(lora_fs: LoraFs) -> tuple[str, Any]:
    pointer = lora_fs("show", "a", "-o", "json").json["pointer"]
    return pointer["revision"], pointer["canary"]


# -- promote -------------------------------------------------------------------------------------


def test_no_evaluation(lora_fs: LoraFs) -> None:
    """In a namespace that requires evaluations, what was not evaluated is not promoted: exit 5."""
    assert lora_fs("quota", "--require-evaluation", GATE).code == 0
    ran = lora_fs("promote", "a", "v2")
    assert ran.code == 5
    assert "a@v2 may not serve a: it was not evaluated. Run `lora-fs evaluate a@v2`" in ran.err
    assert serves(lora_fs) == ("v1", None)


def test_the_gate_decides(lora_fs: LoraFs, root: Path) -> None:
    """The namespace's gate is judged on the figures that were kept; what passes is promoted, and goes back
    without being asked."""
    lora_fs("quota", "--require-evaluation", GATE)
    evaluated(root, 0.8, gate="pass_rate>=0.1")  # a gate of the author's own is not the namespace's
    ran = lora_fs("promote", "a", "v2")
    assert ran.code == 5
    assert "a@v2 may not serve a: pass_rate>=0.9: pass_rate is 0.8, the bound is 0.9" in ran.err
    evaluated(root, 0.95, gate=None)
    assert lora_fs("promote", "a", "v2").code == 0
    assert lora_fs("rollback", "a").code == 0
    assert serves(lora_fs) == ("v1", None)


def test_other_bytes(lora_fs: LoraFs, root: Path) -> None:
    """An evaluation of other bytes is none."""
    lora_fs("quota", "--require-evaluation", GATE)
    evaluated(root, 1.0, digest=f"sha256:{64 * '0'}")
    assert "it was not evaluated" in lora_fs("promote", "a", "v2").err


def test_damaged(lora_fs: LoraFs, root: Path) -> None:
    """An evaluation that cannot be read passes no gate, and `show` tells that it cannot be read."""
    lora_fs("quota", "--require-evaluation", GATE)
    evaluated(root, 1.0).write_text("{}", encoding="utf-8")
    ran = lora_fs("promote", "a", "v2")
    assert ran.code == 1
    assert "evaluate a@v2 again" in ran.err
    shown = lora_fs("show", "a")
    assert shown.code == 0
    lines = [line for line in shown.out.splitlines() if line.startswith("  evaluated")]
    assert lines[0] == "  evaluated  no"
    assert lines[1].startswith("  evaluated  cannot be read: ")
    assert lines[1].endswith("evaluate a@v2 again")
    told = lora_fs("show", "a", "-o", "json").json
    assert (told["evaluations"], list(told["unreadable_evaluations"])) == ({}, ["v2"])


@pytest.mark.parametrize(
    ("rate", "gate", "text"),
    [
        (0.95, GATE, "passed pass_rate>=0.9; 200 cases of cases.jsonl"),
        (0.8, GATE, "failed pass_rate>=0.9: pass_rate is 0.8, the bound is 0.9; 200 cases"),
        (0.8, None, "without a gate; 200 cases of cases.jsonl"),
    ],
)
def test_shown(lora_fs: LoraFs, root: Path, rate: float, gate: str | None, text: str) -> None:
    """`show` has each revision's newest evaluation: the verdict of its gate, its cases and its figures."""
    evaluated(root, rate, gate=gate)
    out = lora_fs("show", "a@v2").out
    assert f"  evaluated  {text}" in out
    assert f"  figures    pass_rate {rate}" in out
    told = lora_fs("show", "a", "-o", "json").json
    assert list(told["evaluations"]) == ["v2"]
    assert told["evaluations"]["v2"]["measured"]["figures"]["pass_rate"] == rate
    assert lora_fs("show", "a@v1", "-o", "json").json["evaluations"] == {}


def test_effect_and_signer_are_shown(lora_fs: LoraFs, report: Report, root: Path) -> None:
    """`show` says which live replicas found an effect or none, and that nobody looked; and who signed."""
    out = lora_fs("show", "a@v2").out
    assert "  effect     not known\n" in out
    assert "  signed by  not known\n" in out
    for replica, age_s in (("pod-a", 0), ("pod-b", 0), ("pod-c", 0), ("pod-d", 0), ("gone", 3600)):
        report(replica, age_s=age_s)
        said = AdapterStatus(
            key=("default", MODEL, "v2", "a"),
            generation=1,
            phase=Phase.READY,
            effect="some" if replica == "pod-a" else "none",
        )
        rewrite(root, {"adapters": {"a@v2": said}}, replica)
    out = lora_fs("show", "a@v2").out
    none = "none: it answers as the base model does (pod-b, pod-c, pod-d)"
    assert f"  effect     {none}; it changes answers (pod-a)\n" in out
    told = lora_fs("show", "a", "-o", "json").json
    others = dict.fromkeys(("pod-b", "pod-c", "pod-d"), "none")
    assert told["effects"] == {"v1": {}, "v2": {"pod-a": "some", **others}}


def test_asked_for_by_the_command(lora_fs: LoraFs, root: Path) -> None:
    """`--require-evaluation` holds to the gate that the evaluation had, in any namespace."""
    assert lora_fs("promote", "a", "v2", "--require-evaluation").code == 5
    evaluated(root, 0.95, gate=None)
    assert "evaluated without a gate" in lora_fs("promote", "a", "v2", "--require-evaluation").err
    evaluated(root, 0.8)
    assert "pass_rate is 0.8" in lora_fs("promote", "a", "v2", "--require-evaluation").err
    evaluated(root, 0.95)
    assert lora_fs("promote", "a", "v2", "--require-evaluation").code == 0


def test_force_is_audited(
    lora_fs: LoraFs, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--force` promotes past the gate, and the audit has it."""
    monkeypatch.setenv("LORA_FS_AUDIT_FILE", str(tmp_path / "audit"))
    lora_fs("quota", "--require-evaluation", GATE)
    assert lora_fs("promote", "a", "v2", "--force", "--require-evaluation").code == 2
    assert lora_fs("promote", "a", "v2", "--force").code == 0
    told = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert (told[-1]["act"], told[-1]["what"]["force"]) == ("promote", True)


def test_registering_activates_nothing_new(lora_fs: LoraFs, root: Path, folder: Folder) -> None:
    """New bytes cannot have been evaluated: registering refuses to activate them, and writes nothing."""
    lora_fs("quota", "--require-evaluation", GATE)
    before = lora_fs("list", "-o", "json").json
    for words in (("a", folder(3)), ("b", folder(4)), ("b", folder(4), "--dry-run")):
        ran = lora_fs("register", *words)
        assert ran.code == 5, ran
        assert "--no-activate, evaluate it, and promote it" in ran.err
    assert lora_fs("list", "-o", "json").json == before
    assert lora_fs("register", "a", folder(3), "--no-activate").code == 0
    assert lora_fs("register", "a", folder(1)).code == 0  # it serves the name already
    rehearsed, done = (lora_fs("register", "a", folder(2), *more) for more in (["--dry-run"], []))
    assert (rehearsed.code, rehearsed.err) == (done.code, done.err)
    assert "a@v2 may not serve a" in done.err


def test_a_gate_that_is_none(lora_fs: LoraFs, root: Path) -> None:
    """`quota` refuses a gate that does not parse; one that got there otherwise lets nothing through; `none`
    takes it away."""
    assert lora_fs("quota", "--require-evaluation", "pas_rate>1").code == 2
    lora_fs("quota", "--require-evaluation", GATE)
    assert GATE in lora_fs("quota").out
    path = root / "default" / ".quota.json"
    path.write_bytes(seal({**json.loads(path.read_bytes()), "require_evaluation": "nonsense"}))
    ran = lora_fs("promote", "a", "v2")
    assert ran.code == 1
    assert "nothing is promoted there until" in ran.err
    assert lora_fs("quota", "--require-evaluation", "none").code == 0
    assert lora_fs("promote", "a", "v2").code == 0


def test_canary_of_what_is_not_evaluated(lora_fs: LoraFs, root: Path) -> None:
    """A share above 0 and a finish need what a promotion needs; 0 % loads it, and an abort is free."""
    lora_fs("quota", "--require-evaluation", GATE)
    assert lora_fs("canary", "a", "v2", "--percent", "5").code == 5
    assert lora_fs("canary", "a", "v2").code == 0
    assert lora_fs("canary", "a", "--percent", "5").code == 5
    assert lora_fs("canary", "a", "--finish").code == 5
    assert lora_fs("canary", "a", "--abort").code == 0
    evaluated(root, 1.0)
    assert lora_fs("canary", "a", "v2", "--percent", "5").code == 0
    assert lora_fs("canary", "a", "--finish").code == 0


# -- a canary by steps ---------------------------------------------------------------------------

STEPS = ("canary", "a", "v2", "--every", "0s", "--steps")


def test_it_advances(lora_fs: LoraFs, root: Path) -> None:
    """It takes each step that passes the gate, and after 100 % the revision serves the name."""
    evaluated(root, 0.95)
    ran = lora_fs(*STEPS, "5,25,100", "--gate", GATE)
    assert ran.code == 0, ran.err
    assert "no live replica reports" in ran.err
    assert ran.out.splitlines() == [
        "a@v2 answers 5 % of the requests",
        "a@v2 answers 25 % of the requests",
        "a@v2 answers 100 % of the requests",
        "a serves v2",
    ]
    assert serves(lora_fs) == ("v2", None)


def test_it_stays_at_a_last_step(lora_fs: LoraFs, report: Report) -> None:
    """Without 100 it stays at the last share, and goes on from there."""
    report("pod-a")
    ran = lora_fs(*STEPS, "5,25")
    assert (ran.code, ran.err) == (0, "")
    assert serves(lora_fs) == ("v1", {"revision": "v2", "percent": 25})
    assert lora_fs("canary", "a", "--every", "0s", "--steps", "50,100").code == 0
    assert serves(lora_fs) == ("v2", None)


@pytest.mark.parametrize("rate", [0.8, None])
def test_it_goes_back_by_its_gate(lora_fs: LoraFs, root: Path, rate: float | None) -> None:
    """A step that does not pass the gate ends the trial: exit 5, and the old revision answers everything.
    Without an evaluation no gate is passed."""
    if rate is not None:
        evaluated(root, rate)
    ran = lora_fs(*STEPS, "5,100", "--gate", GATE)
    assert ran.code == 5
    assert "5 % failed: v1 answers everything" in ran.err
    assert serves(lora_fs) == ("v1", None)


@pytest.mark.parametrize(("phase", "reason"), [(Phase.FAILED, "InvalidAdapter"), (Phase.READY, "NoEffect")])
def test_it_goes_back_by_a_replica(
    lora_fs: LoraFs, report: Report, root: Path, phase: Phase, reason: str
) -> None:
    """A replica that cannot load it, or finds that it changes nothing, ends the trial at once."""
    report("pod-a")
    told = AdapterStatus(key=("default", MODEL, "v2", "a"), generation=1, phase=phase, reason=reason)
    rewrite(root, {"adapters": {"a@v2": told}})
    ran = lora_fs("canary", "a", "v2", "--every", "1h", "--steps", "5,100")
    assert ran.code == 5
    assert f"pod-a: {reason}" in ran.err
    assert serves(lora_fs) == ("v1", None)


@pytest.mark.parametrize(("errors", "code"), [(1, 0), (30, 5)])
def test_live_errors(
    lora_fs: LoraFs,
    report: Report,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    errors: int,
    code: int,
) -> None:
    """Users' requests and their errors since the step began are figures; what was before does not count."""
    report("pod-a")
    usage = {"default/tiny/v2/a": RevisionUsage(requests=1_000, errors_5xx=900)}
    rewrite(root, {"usage": usage})
    counting, begin = threading.Event(), stepping.Live.begin

    def told(live: stepping.Live, replicas: list[ReplicaStatus]) -> None:
        begin(live, replicas)
        counting.set()

    monkeypatch.setattr(stepping.Live, "begin", told)
    after = {"default/tiny/v2/a": RevisionUsage(requests=1_100, errors_5xx=900 + errors)}
    with during(counting.is_set, lambda: rewrite(root, {"usage": after})):
        ran = lora_fs(
            *("canary", "a", "v2", "--every", "2s", "--steps", "100"),
            *("--gate", "live_requests>=100 and live_error_rate<=0.05"),
        )
    assert ran.code == code, ran
    assert serves(lora_fs) == (("v1", None) if code else ("v2", None))


@pytest.mark.parametrize(("gate", "doubted"), [("live_requests>=0", True), (GATE, False)])
def test_a_step_shorter_than_a_report(lora_fs: LoraFs, root: Path, gate: str, doubted: bool) -> None:
    """A gate on requests that no replica may have reported by the end of a step: the command says so."""
    evaluated(root, 0.95)
    ran = lora_fs(*STEPS, "100", "--gate", gate)
    assert ran.code == 0, ran.err
    assert ("replicas report every 10 s" in ran.err) == doubted
    assert stepping.REPORT_S == HEARTBEAT_S


def test_ctrl_c(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the trial."""

    sleep = time.sleep

    def press(seconds: float) -> None:
        if seconds < stepping.LOOK_S:  # a write's own pause
            return sleep(seconds)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", press)
        assert lora_fs("canary", "a", "v2", "--every", "1h", "--steps", "5,100").code == 130
    assert serves(lora_fs) == ("v1", None)


@contextmanager
def at_a_look(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> Iterator[None]:
    """Do something once, where a step would wait for its next look; it waits no longer than that."""
    sleep, done = time.sleep, list[object]()

    def act(seconds: float) -> None:
        if seconds < stepping.LOOK_S:  # a write's own pause
            return sleep(seconds)
        if not done:
            done.append(then())

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", act)
        yield
    assert done


@pytest.mark.parametrize("steps", ["5,25,100", "100"])
@pytest.mark.parametrize(
    ("acts", "left"),
    [
        ([("canary", "a", "--abort")], ("v1", None)),
        ([("canary", "a", "--percent", "1")], ("v1", {"revision": "v2", "percent": 1})),
        (
            [("canary", "a", "--abort"), ("canary", "a", "v3", "--percent", "1")],
            ("v1", {"revision": "v3", "percent": 1}),
        ),
        ([("promote", "a", "v3")], ("v3", None)),
    ],
    ids=["ended", "changed", "another", "promoted"],
)
def test_somebody_else_acts(
    lora_fs: LoraFs,
    folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    steps: str,
    acts: list[tuple[str, ...]],
    left: tuple[str, Any],
) -> None:
    """A trial that somebody else ended, changed or replaced is theirs: exit 4, and it stays as it is."""
    assert lora_fs("register", "a", folder(3), "--no-activate").code == 0

    def somebody() -> None:
        assert [lora_fs(*words).code for words in acts] == [0] * len(acts)

    with at_a_look(monkeypatch, somebody):
        ran = lora_fs("canary", "a", "v2", "--every", "5s", "--steps", steps)
    assert (ran.code, "somebody else" in ran.err) == (4, True), ran
    assert serves(lora_fs) == left


def test_another_trial_is_under_way(lora_fs: LoraFs, folder: Folder) -> None:
    """Steps are refused beside the trial of another revision, which goes on."""
    assert lora_fs("register", "a", folder(3), "--no-activate").code == 0
    assert lora_fs("canary", "a", "v3", "--percent", "7").code == 0
    assert lora_fs(*STEPS, "5,100").code == 4
    assert serves(lora_fs) == ("v1", {"revision": "v3", "percent": 7})


def test_a_replica_that_reports_late() -> None:
    """What a replica counted before its first report of a step is not of the step."""
    key = AdapterKey("default", MODEL, "v2", "a")

    def told(requests: int) -> list[ReplicaStatus]:
        usage = {str(key): RevisionUsage(requests=requests, errors_5xx=requests)}
        return [ReplicaStatus(replica="pod-a", model=MODEL, namespaces=("default",), usage=usage)]

    live = stepping.Live(key)
    for requests in (None, 900, 901):
        live.begin(told(requests) if requests is not None else [])
    assert live.figures(told(902)) == {"live_requests": 2, "live_errors": 2, "live_error_rate": 1.0}


@pytest.mark.parametrize("steps", ["", "0,5", "5,5", "25,5", "5,101", "5;10", "five", "5,"])
def test_steps_that_are_none(lora_fs: LoraFs, steps: str) -> None:
    """Steps rise from 1 to 100."""
    assert lora_fs(*STEPS, steps).code == 2
    assert serves(lora_fs) == ("v1", None)


@pytest.mark.parametrize(
    "more", [("--percent", "5"), ("--finish",), ("--abort",), ("--dry-run",), ("--gate", "pass_rate>")]
)
def test_steps_and_others(lora_fs: LoraFs, more: tuple[str, ...]) -> None:
    """What contradicts steps, and a gate that does not parse, is refused before anything changes."""
    assert lora_fs(*STEPS, "5,100", *more).code == 2
    assert lora_fs("canary", "a", "v2", "--gate", GATE).code == 2
    assert serves(lora_fs) == ("v1", None)


def rewrite(root: Path, changes: dict[str, Any], replica: str = "pod-a") -> None:
    """Let a replica report something else."""
    path = root / ".replicas" / f"{replica}.json"
    status = decode(ReplicaStatus, path.read_bytes())
    atomic.replace(path, seal(status.model_copy(update=changes)))


@contextmanager
def during(when: Callable[[], bool], then: Callable[[], None]) -> Iterator[None]:
    """Do something from another thread once ``when`` is so."""

    def wait() -> None:
        while not when():
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_damaged_quotas_gate_does_not_end_unsaid(root: Path, lora_fs: LoraFs) -> None:
    """Three bounds replace a damaged quota; whether evaluations are required has to be said, too."""
    assert lora_fs("quota", "--require-evaluation", GATE).code == 0
    path = root / "default" / ".quota.json"
    path.write_text("{")
    bounds = ("quota", "--adapters", "5", "--bytes", "none", "--per-minute", "none")
    refused = lora_fs(*bounds)
    assert refused.code == 1
    assert "--require-evaluation" in refused.err
    assert path.read_text() == "{"
    assert lora_fs(*bounds, "--require-evaluation", GATE).code == 0
    assert decode(Quota, path.read_bytes()).require_evaluation == GATE


def test_a_newer_lora_fs_quota_is_not_replaced(root: Path, lora_fs: LoraFs) -> None:
    """What a newer lora-fs bounds is no damage: all bounds together do not replace it, ``--remove`` does."""
    assert lora_fs("quota", "--require-evaluation", GATE).code == 0
    path = root / "default" / ".quota.json"
    path.write_bytes(seal({**json.loads(path.read_bytes()), "apiVersion": "lora-fs/v2"}))
    before = path.read_bytes()
    bounds = ("--adapters", "5", "--bytes", "none", "--per-minute", "none", "--require-evaluation", "none")
    refused = lora_fs("quota", *bounds)
    assert refused.code == 1
    assert "needs another lora-fs" in refused.err
    assert path.read_bytes() == before
    assert lora_fs("quota", "--remove").code == 0

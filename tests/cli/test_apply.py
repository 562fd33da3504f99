"""apply: documents become what is registered, each by itself, and again changes nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_fs.sidecar import yaml_texts as texts
from lora_fs.sidecar.cli.declared import carrying
from lora_fs.sidecar.registry.format.layout import TEMPORARY
from lora_fs.sidecar.registry.lifecycle import copying
from lora_fs.sidecar.registry.lifecycle.artifacts import hash_files
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate.folder import open_adapter
from tests.cli.conftest import MODEL, LoraFs, seen
from tests.registry.conftest import write_adapter
from tests.sources.conftest import Hub, WebServer, hub, web

__all__ = ["hub", "web"]  # fixtures


def document(name: str, source: str, **spec: Any) -> dict[str, Any]:
    """A document; ``labels``, ``namespace`` are metadata's."""
    metadata = {"name": name} | {key: spec.pop(key) for key in ("labels", "namespace") if key in spec}
    body = {"source": source, **spec}
    return {"apiVersion": "lora-fs/v1", "kind": "LoraAdapter", "metadata": metadata, "spec": body}


def write(file: Path, *documents: dict[str, Any]) -> str:
    """A file of documents."""
    file.write_text(yaml.safe_dump_all(documents, explicit_start=True))
    return str(file)


def state(root: Path) -> dict[str, bytes]:
    """Every file below the root."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def served(lora_fs: LoraFs, *more: str) -> dict[str, tuple[str, str | None, dict[str, str]]]:
    """Name → the digest it serves, its policy, its labels."""
    return {
        row["name"]: (
            row["spec"]["digest"],
            (row["spec"]["policy"] or {}).get("kind"),
            row["spec"]["labels"],
        )
        for row in lora_fs("list", "-o", "json", *more).json
        if row["active"]
    }


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Three adapters beside the documents."""
    for seed in (1, 2, 3):
        write_adapter(tmp_path / f"lora-{seed}", seed)
    return tmp_path


def test_a_second_apply_writes_nothing(lora_fs: LoraFs, shop: Path, root: Path) -> None:
    """What the documents say is registered, and said again it leaves every file as it is."""
    file = write(
        shop / "a.yaml",
        document("sql", "./lora-1", policy={"kind": "pinned", "priority": 3}, labels={"team": "data"}),
        document("care", "lora-2", keepRevisions=4),
    )
    first = lora_fs("apply", "-f", file)
    assert (first.code, first.out.splitlines()[-1]) == (0, "2 created")
    before = state(root)
    again = lora_fs("apply", "-f", file, "-o", "json")
    assert (again.code, [item["outcome"] for item in again.json["items"]]) == (0, ["unchanged"] * 2)
    assert lora_fs("apply", "-f", file, "--dry-run").code == 0
    assert state(root) == before
    assert served(lora_fs)["sql"][1:] == ("pinned", {"team": "data", "lora-fs/owner": "apply"})
    lora_fs("set", "care", "--keep-revisions", "2")
    assert [lora_fs("apply", "-f", file, *more).code for more in (["--dry-run"], [])] == [8, 0]
    assert lora_fs("show", "care", "-o", "json").json["pointer"]["keep_revisions"] == 4


def test_a_dry_run_tells_the_difference_and_writes_nothing(lora_fs: LoraFs, shop: Path, root: Path) -> None:
    """Exit 8, each field with its value before and after, and no file changed."""
    file = shop / "a.yaml"
    ours = document("care", "lora-3", policy={"kind": "eager"}), document("new", "lora-2")
    lora_fs("apply", "-f", write(file, document("sql", "lora-1", labels={"team": "data"})))
    lora_fs("register", "care", "lora-3")
    before = state(root)
    write(file, *ours, document("sql", "lora-1", labels={}))
    told = lora_fs("apply", "-f", str(file), "--dry-run")
    assert (told.code, state(root)) == (8, before)
    assert told.out.splitlines() == [
        "~ default/tiny: care would be changed",
        "    policy.kind: none → eager",
        "+ default/tiny: new would be created",
        "    revision: none → the next",
        "    source: none → lora-2",
        "~ default/tiny: sql would be changed",
        "    labels.team: data → none",
        "1 created, 2 changed",
    ]
    as_json = lora_fs("apply", "-f", str(file), "--dry-run", "-o", "json")
    assert as_json.code == 8
    assert as_json.json["items"][0]["differences"][0] == {
        "field": "policy.kind",
        "before": None,
        "after": "eager",
    }
    assert lora_fs("apply", "-f", str(file)).code == 0
    assert lora_fs("apply", "-f", str(file), "--dry-run").code == 0


GOOD = "apiVersion: lora-fs/v1\nkind: LoraAdapter\nmetadata: {name: good}\nspec: {source: lora-1}\n"
HEAD = "apiVersion: lora-fs/v1\nkind: LoraAdapter\n"
BAD = {
    "a list": ("- a\n- b\n", 6, "", "not a mapping"),
    "no YAML": ("a: [1,\nb: }\n", 7, "", "not YAML"),
    "a key twice": (
        HEAD + "metadata: {name: a}\nspec:\n  source: x\n  source: y\n",
        11,
        "spec.source",
        "twice",
    ),
    "anchors that multiply": (
        "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in itertools.pairwise("abcdefg")),
        10,
        "e",
        "its anchors written out",
    ),
    "an anchor in itself": ("a: &a [*a]\n", 6, "a[0]", "holds itself"),
    "an unknown kind": ("kind: Deployment\n", 6, "kind", "'Deployment' is not read"),
    "no kind": ("spec: {}\n", 6, "kind", "is missing"),
    "an unknown field": (
        HEAD + "metadata: {name: a}\nspec:\n  source: lora-1\n  polcy: {}\n",
        11,
        "spec.polcy",
        "there is no such field",
    ),
    "no source": (HEAD + "metadata: {name: a}\nspec: {}\n", 9, "spec.source", "is missing"),
    "a bad name": (
        HEAD + "metadata:\n  name: ../a\nspec: {source: lora-1}\n",
        9,
        "metadata.name",
        "'../a' does not match",
    ),
    "a label with an empty key": (
        HEAD + 'metadata:\n  name: a\n  labels:\n    team: data\n    "": x\nspec: {source: lora-1}\n',
        12,
        'metadata.labels.""',
        "its key is empty",
    ),
    "a wrong type": (
        HEAD + "metadata: {name: a}\nspec:\n  source: lora-1\n  canary: true\n",
        11,
        "spec.canary",
        "is no whole number",
    ),
    "a policy that is a word": (
        HEAD + "metadata: {name: a}\nspec:\n  source: lora-1\n  policy: eager\n",
        11,
        "spec.policy",
        "is no mapping",
    ),
    "a label that is a number": (
        HEAD + "metadata: {name: a, labels: {size: 7}}\nspec: {source: lora-1}\n",
        8,
        "metadata.labels.size",
        "is no text: quote it",
    ),
    "a policy that is none": (
        HEAD + "metadata: {name: a}\nspec:\n  source: lora-1\n  policy:\n    kind: eagre\n",
        12,
        "spec.policy.kind",
        "'eagre' is not 'lazy', 'sticky', 'eager' or 'pinned'",
    ),
    "no such folder": (
        HEAD + "metadata: {name: a}\nspec:\n  source: lora-9\n",
        10,
        "spec.source",
        "lora-9",
    ),
    "other bytes": (
        HEAD + f"metadata: {{name: a}}\nspec:\n  source: lora-1\n  digest: sha256:{'0' * 64}\n",
        11,
        "spec.digest",
        "the bytes of lora-1 are",
    ),
    "a depth that no stack holds": ("a: " + "[" * 100_000 + "]" * 100_000 + "\n", 6, "", "nested deeper"),
    "a depth that Python does not hold": (
        HEAD + "metadata: {name: a}\nspec:\n  source: " + "[" * 900 + "]" * 900 + "\n",
        10,
        "",
        "nested deeper than 64 levels",
    ),
    "a source of another scheme": (
        HEAD + "metadata: {name: a}\nspec:\n  source: ftp://a/b\n",
        10,
        "spec.source",
        "ftp://",
    ),
    "a source that is a file": (
        HEAD + "metadata: {name: a}\nspec: {source: a.yaml}\n",
        9,
        "spec.source",
        "file",
    ),
    "a finding that is none": (
        HEAD + "metadata: {name: a}\nspec:\n  source: lora-1\n  allow: [nonsense]\n",
        11,
        "spec.allow[0]",
        "there is no finding 'nonsense'",
    ),
    "a key twice in GIE's text": (
        "kind: ConfigMap\ndata:\n  c.yaml: |\n    vLLMLoRAConfig:\n      ensureExist: []\n"
        "      ensureExist: []\n",
        11,
        "vLLMLoRAConfig.ensureExist",
        "twice",
    ),
    "Dynamo with a policy that is a list": (
        "kind: DynamoModel\nspec:\n  baseModel: {name: b}\n  loras:\n  - loraId: a\n"
        "    loadingPolicy: [eager]\n",
        11,
        "spec.loras[0].loadingPolicy",
        "none of eager",
    ),
    "an unknown tag": ("kind: !!python/name:os.system x\n", 6, "kind", "not a value"),
    "a merge key": ("x: &x {a: 1}\ny:\n  <<: *x\n", 8, "y.<<", "merge keys are not read"),
    "GIE without a list": ("kind: ConfigMap\ndata: {a: b}\n", 7, "data", "vLLMLoRAConfig"),
    "KServe without a uri": (
        "kind: LLMInferenceService\nspec:\n  model:\n    lora:\n      adapters:\n      - name: a\n",
        11,
        "spec.model.lora.adapters[0].uri",
        "text is needed",
    ),
    "Dynamo with a revision that is a number": (
        "kind: DynamoModel\nspec:\n  baseModel: {name: b}\n  loras:\n  - loraId: a\n"
        "    source: {type: huggingface, repository: a/b,\n      revision: 1.10}\n",
        12,
        "spec.loras[0].source.revision",
        "text is needed",
    ),
    "Dynamo with a policy of its own": (
        "kind: DynamoModel\nspec:\n  baseModel: {name: b}\n  loras:\n  - loraId: a\n"
        "    loadingPolicy: often\n",
        11,
        "spec.loras[0].loadingPolicy",
        "none of eager",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_document_is_told_and_the_others_are_applied(lora_fs: LoraFs, shop: Path, what: str) -> None:
    """File, line, field and reason; exit 1; the documents before and behind it are registered; no prune."""
    text, line, field, why = BAD[what]
    file = shop / "a.yaml"
    assert lora_fs("apply", "-f", write(shop / "old.yaml", document("old", "lora-3"))).code == 0
    file.write_text(f"{GOOD}---\n{text}---\n{GOOD.replace('good', 'late')}")
    ran = lora_fs("apply", "-f", str(file), "--prune", "-o", "json")
    assert ran.code == 1
    (problem,) = ran.json["problems"]
    assert (problem["file"], problem["line"], problem["field"]) == (str(file), line, field)
    assert why in problem["why"]
    assert f"{file}:{line}: " in ran.err
    assert {"good", "late"} <= served(lora_fs).keys()
    readable = what in (
        "no such folder",
        "other bytes",
        "a source of another scheme",
        "a source that is a file",
        "a finding that is none",
    )
    assert ("old" in served(lora_fs)) is not readable


def test_two_documents_for_one_name_are_both_refused(lora_fs: LoraFs, shop: Path) -> None:
    """Neither is applied, wherever they stand; both places are told."""
    one = write(shop / "a.yaml", document("sql", "lora-1"), document("care", "lora-2"))
    two = write(shop / "b.yaml", document("sql", "lora-2"))
    ran = lora_fs("apply", "-f", one, "-f", two)
    assert ran.code == 1
    assert served(lora_fs).keys() == {"care"}
    assert f"{one}:5: metadata.name: sql of default/tiny has 2 documents" in ran.err
    assert f"{two}:5: metadata.name: sql of default/tiny has 2 documents" in ran.err


def test_what_belongs_to_somebody_else_is_left_alone(lora_fs: LoraFs, shop: Path) -> None:
    """A document for another owner's adapter fails, and the adapter stays as it is."""
    file = shop / "a.yaml"
    assert lora_fs("apply", "-f", write(file, document("sql", "lora-1")), "--owner", "team-a").code == 0
    before = served(lora_fs)
    ran = lora_fs("apply", "-f", write(file, document("sql", "lora-2")), "--owner", "team-b")
    assert (ran.code, served(lora_fs)) == (1, before)
    assert f"{file}:5: metadata.name: it belongs to owner team-a" in ran.err
    models = "{models: [{id: sql, source: lora-1}]}"
    file.write_text(f"vLLMLoRAConfig: {{defaultBaseModel: tiny, ensureNotExist: {models}}}\n")
    ran = lora_fs("apply", "-f", str(file), "--owner", "team-b")
    assert (ran.code, served(lora_fs), "it belongs to owner team-a" in ran.err) == (1, before, True)


@pytest.mark.parametrize("when", ["after it was hashed", "while it is copied"])
def test_a_source_that_vanishes_fails_alone(
    lora_fs: LoraFs, shop: Path, root: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its document is told, nothing of it is registered, and the documents around it are applied."""
    file = write(shop / "a.yaml", *(document(f"a{seed}", f"lora-{seed}") for seed in (1, 2, 3)))
    hashed, opened = hash_files, open_adapter

    def gone(path: object) -> None:
        if "lora-2" in str(path):
            shutil.rmtree(shop / "lora-2")

    def hashing(folder: Path, files: Any) -> Any:
        found = hashed(folder, files)
        gone(folder)
        return found

    @contextmanager
    def opening(path: Path, called: str) -> Iterator[int]:
        with opened(path, called) as folder:
            gone(path)
            yield folder

    if when == "after it was hashed":
        monkeypatch.setattr(f"{carrying.__name__}.hash_files", hashing)
    else:
        monkeypatch.setattr(f"{copying.__name__}.open_adapter", opening)
    ran = lora_fs("apply", "-f", file, "-o", "json")
    assert (ran.code, ran.json["problems"][0]["field"]) == (1, "spec.source")
    assert served(lora_fs).keys() == {"a1", "a3"}
    assert len(list(root.rglob("*.safetensors"))) == 2


def test_a_directive_and_comments_are_no_document(lora_fs: LoraFs, shop: Path) -> None:
    """What stands before the first mark of a document says nothing of an adapter."""
    (shop / "a.yaml").write_text(f"# ours\n%YAML 1.1\n---\n{GOOD}")
    assert lora_fs("apply", "-f", str(shop / "a.yaml")).out.splitlines()[-1] == "1 created"


def test_one_run_opens_the_registry_once(
    lora_fs: LoraFs, shop: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing one waits for its temporary names: a run closes one, whatever it writes, and none is left."""
    closed = list[Registry]()
    close = Registry.close

    def counted(registry: Registry) -> None:
        closed.append(registry)
        close(registry)

    monkeypatch.setattr(Registry, "close", counted)
    file = write(shop / "a.yaml", *(document(f"a{seed}", f"lora-{seed}") for seed in (1, 2, 3)))
    assert lora_fs("apply", "-f", file).code == 0
    assert len(closed) == 1
    assert not list(root.rglob(f"{TEMPORARY}*"))


def test_prune_removes_only_the_owners(lora_fs: LoraFs, shop: Path) -> None:
    """What was registered by hand, or by another owner, stays; so does a name that both registered."""
    assert lora_fs("register", "hand", "lora-1").code == 0
    assert lora_fs("register", "both", "lora-1").code == 0
    lora_fs("apply", "-f", write(shop / "b.yaml", document("theirs", "lora-1")), "--owner", "b")
    a = write(shop / "a.yaml", *(document(name, "lora-2") for name in ("mine", "gone", "both")))
    assert lora_fs("apply", "-f", a).code == 0
    write(shop / "a.yaml", document("mine", "lora-2"))
    dry = lora_fs("apply", "-f", a, "--prune", "--dry-run")
    assert (dry.code, "gone" in served(lora_fs)) == (8, True)
    pruned = lora_fs("apply", "-f", a, "--prune")
    assert pruned.code == 0
    assert served(lora_fs).keys() == {"hand", "both", "theirs", "mine"}
    assert "= default/tiny: both kept: others registered revisions of it, too" in pruned.out
    assert "hand" not in pruned.out


def test_prune_says_where_it_did_not_look(lora_fs: LoraFs, shop: Path) -> None:
    """The adapters of a namespace whose last document went stay, and the command that shows them is named."""
    file = write(shop / "a.yaml", document("sql", "lora-1"), document("care", "lora-2", namespace="team-b"))
    ran = lora_fs("apply", "-f", file, "--prune")
    assert (ran.code, ran.err) == (0, "")
    write(shop / "a.yaml", document("sql", "lora-1"))
    ran = lora_fs("apply", "-f", file, "--prune")
    assert (ran.code, "--prune did not look in team-b/tiny, " in ran.err) == (0, True)
    shown = lora_fs(*ran.err.split("`")[1].split()[1:], "-o", "name")
    assert shown.out.splitlines() == ["default/sql", "team-b/care"]
    assert "did not look" not in lora_fs("apply", "-f", file).err


@pytest.fixture
def after_the_look(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``after_the_look("register", …)``: a command of somebody else, while the next apply is under way."""
    look = carrying.Carrying.look

    def call(*command: str) -> None:
        def looking(self: carrying.Carrying, scopes: Any) -> None:
            look(self, scopes)
            monkeypatch.setattr(carrying.Carrying, "look", look)
            assert lora_fs(*command).code == 0

        monkeypatch.setattr(carrying.Carrying, "look", looking)

    return call


def test_prune_keeps_what_was_registered_meanwhile(
    lora_fs: LoraFs, shop: Path, after_the_look: Callable[..., None]
) -> None:
    """A revision that somebody registers during a long run keeps its name."""
    file = write(shop / "a.yaml", document("sql", "lora-1"), document("care", "lora-2"))
    assert lora_fs("apply", "-f", file).code == 0
    write(shop / "a.yaml", document("sql", "lora-1"))
    after_the_look("register", "care", "lora-3")
    pruned = lora_fs("apply", "-f", file, "--prune")
    assert (pruned.code, "= default/tiny: care kept" in pruned.out) == (0, True)
    assert lora_fs("show", "care", "-o", "json").json["pointer"]["revision"] == "v2"


def test_a_name_that_another_owner_takes_meanwhile_is_left_alone(
    lora_fs: LoraFs, shop: Path, after_the_look: Callable[..., None]
) -> None:
    """An apply that began before the other owner's apply is refused, and serves nothing under the name."""
    theirs = write(shop / "theirs.yaml", document("sql", "lora-1"))
    mine = write(shop / "mine.yaml", document("sql", "lora-2"))
    after_the_look("apply", "-f", theirs, "--owner", "team-b")
    ran = lora_fs("apply", "-f", mine, "--owner", "team-a")
    assert (ran.code, "it belongs to owner team-b" in ran.err) == (1, True)
    assert [row["revision"] for row in lora_fs("list", "-o", "json").json] == ["v1"]


def test_no_document_prunes_nothing(lora_fs: LoraFs, shop: Path) -> None:
    """An empty file is refused: it may be one that was not written yet."""
    lora_fs("apply", "-f", write(shop / "a.yaml", document("sql", "lora-1")))
    (shop / "a.yaml").write_text("# nothing\n---\n")
    assert lora_fs("apply", "-f", str(shop / "a.yaml"), "--prune").code == 2
    assert served(lora_fs).keys() == {"sql"}


def test_a_changed_folder_is_a_new_revision(lora_fs: LoraFs, shop: Path) -> None:
    """Other bytes at the source are registered and served; a document with a digest does not read it."""
    file = write(shop / "a.yaml", document("sql", "lora-1"))
    lora_fs("apply", "-f", file)
    write_adapter(shop / "lora-1", 9)
    assert lora_fs("apply", "-f", file).out.splitlines()[1] == "    revision: v1 → the next"
    rows = {row["revision"]: row["active"] for row in lora_fs("list", "-o", "json").json}
    assert rows == {"v1": False, "v2": True}
    write(shop / "a.yaml", document("sql", "nowhere", digest=served(lora_fs)["sql"][0]))
    assert lora_fs("apply", "-f", file, "--dry-run").code == 0


def test_a_canary_ends_by_a_document(lora_fs: LoraFs, shop: Path) -> None:
    """A share first, then the name: a revision is tried and then served, each applied twice."""
    file = shop / "a.yaml"
    rehearsal = ("apply", "-f", str(file), "--dry-run")
    for spec, serves, tries in (
        ({"source": "lora-1"}, "v1", None),
        ({"source": "lora-2", "canary": 5}, "v1", "v2"),
        ({"source": "lora-2", "canary": 20}, "v1", "v2"),
        ({"source": "lora-2"}, "v2", None),
    ):
        write(file, document("sql", **spec))
        assert [lora_fs(*words).code for words in (rehearsal, rehearsal[:-1], rehearsal)] == [8, 0, 0]
        pointer = lora_fs("show", "sql", "-o", "json").json["pointer"]
        trial = pointer["canary"] or {}
        assert (pointer["revision"], trial.get("revision")) == (serves, tries)
        assert trial.get("percent") == spec.get("canary")


def test_a_dry_run_fails_as_the_run_would(lora_fs: LoraFs, shop: Path) -> None:
    """A gate, and a canary that nobody can begin, refuse both; nothing is left behind."""
    lora_fs("register", "sql", "lora-1")
    lora_fs("register", "sql", "lora-2", "--no-activate")
    lora_fs("register", "care", "lora-1")
    lora_fs("register", "tried", "lora-1")
    lora_fs("register", "tried", "lora-2", "--no-activate")
    lora_fs("canary", "tried", "v2", "--percent", "5")
    lora_fs("quota", "--require-evaluation", "pass_rate>=0.9")
    before = lora_fs("list", "-o", "json").json
    canaries = {"new": "lora-3", "care": "lora-1", "tried": "lora-3"}
    documents = [document(name, source, canary=5) for name, source in canaries.items()]
    words = ("apply", "-f", write(shop / "a.yaml", document("sql", "lora-2"), *documents))
    rehearsed, done = lora_fs(*words, "--dry-run"), lora_fs(*words)
    assert (rehearsed.code, rehearsed.err) == (done.code, done.err)
    assert "spec: sql@v2 may not serve sql" in done.err
    for name in ("new", "care"):
        assert f"spec.canary: a canary needs another revision that {name} serves" in done.err
    assert "spec.canary: v2 is on trial" in done.err
    assert lora_fs("list", "-o", "json").json == before


def test_get_writes_what_apply_reads(
    lora_fs: LoraFs, shop: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Applied to the registry it came from it changes nothing; to another one it makes the same."""
    lora_fs("register", "sql", "lora-1", "--label", "city=東京", "--policy", "pinned")
    lora_fs("register", "sql", "lora-2", "--no-activate")
    lora_fs("register", "care", "lora-3")
    written = lora_fs("get", "-o", "yaml").out
    assert written.isascii()  # whatever the encoding of stdout lacks
    file = tmp_path / "all.yaml"
    file.write_text(written)
    assert lora_fs("apply", "-f", str(file), "--dry-run").code == 0
    before = served(lora_fs)
    other = tmp_path / "other"
    marker.create(other)
    monkeypatch.setenv("LORA_FS_ROOT", str(other))
    assert lora_fs("apply", "-f", str(file)).code == 0
    after = served(lora_fs)
    owned = {"lora-fs/owner": "apply"}
    assert after == {name: (d, p, labels | owned) for name, (d, p, labels) in before.items()}


OTHERS = {
    "configmap": """
kind: ConfigMap
metadata: {name: loras}
data:
  configmap.yaml: |
    vLLMLoRAConfig:
      defaultBaseModel: tiny
      ensureExist: {models: [{id: sql, source: ./lora-1}]}
      ensureNotExist: {models: [{id: old, source: ./lora-3}]}
""",
    "kserve": """
apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
spec:
  model: {uri: "hf://tiny", name: tiny, lora: {adapters: [{name: sql, uri: ./lora-1}]}}
  router: {}
""",
    "dynamo": """
apiVersion: nvidia.com/v1alpha1
kind: DynamoModel
metadata: {name: coding}
spec:
  baseModel: {name: tiny}
  loras:
  - {loraId: sql, source: {type: pvc, path: ./lora-1}, priority: 10, loadingPolicy: eager}
""",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_others_documents_are_read(lora_fs: LoraFs, shop: Path, kind: str) -> None:
    """GIE's, KServe's and the seeds' adapters are registered, and a second apply changes nothing."""
    lora_fs("register", "old", "lora-3")
    (shop / "a.yaml").write_text(OTHERS[kind])
    assert lora_fs("apply", "-f", str(shop / "a.yaml")).code == 0
    assert lora_fs("apply", "-f", str(shop / "a.yaml"), "--dry-run").code == 0
    found = served(lora_fs)
    assert found["sql"][1] == ("eager" if kind == "dynamo" else None)
    assert ("old" in found) is (kind != "configmap")


def test_dynamos_names_and_sources() -> None:
    """A ``loraId`` that ends in a version is a name and a revision; each source is a URI of ours."""
    from lora_fs.sidecar.cli.declared.others import from_dynamo

    text = """
kind: DynamoModel
spec:
  baseModel: {name: Qwen/Q}
  loras:
  - {loraId: qwen/sql/v1, source: {type: huggingface, repository: a/b, revision: main}}
  - {loraId: js, source: {type: s3, bucket: loras, path: /q/js}}
"""
    tree = texts.parse(text, 1)
    assert tree is not None
    one, two = from_dynamo(tree)
    assert one.value["metadata"] == {"name": "qwen--sql"}
    assert one.value["spec"] == {
        "source": "hf://a/b@main",
        "model": "Qwen/Q",
        "revision": "v1",
        "policy": {},
    }
    assert two.value["spec"]["source"] == "s3://loras/q/js"


def test_a_folder_and_stdin_are_read(lora_fs: LoraFs, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every YAML of a folder, relative to it; stdin relative to where the command runs."""
    (shop / "docs").mkdir()
    write(shop / "docs" / "a.yaml", document("sql", "../lora-1"))
    write(shop / "docs" / "b.yml", document("care", "../lora-2"))
    (shop / "docs" / "README.md").write_text("no document")
    with (shop / "in.yaml").open("w+") as stdin:
        stdin.write(json.dumps(document("third", "lora-3")))
        stdin.seek(0)
        monkeypatch.setattr("sys.stdin", stdin)
        assert lora_fs("apply", "-f", "docs", "-f", "-").code == 0
    assert served(lora_fs).keys() == {"sql", "care", "third"}
    missing = lora_fs("apply", "-f", "docs", "-f", "none.yaml")
    assert (missing.code, "none.yaml: cannot be read" in missing.err) == (1, True)
    write(shop / "last.yaml", document("last", "lora-1"))
    unusable = lora_fs("apply", "-f", "x" * 300, "-f", "last.yaml")
    assert (unusable.code, "cannot be read: File name too long" in unusable.err) == (1, True)
    assert "last" in served(lora_fs)
    monkeypatch.setattr("sys.stdin", None)
    closed = lora_fs("apply", "-f", "-")
    assert (closed.code, "stdin, and that is closed" in closed.err) == (2, True)


def test_apply_waits_for_the_replicas(lora_fs: LoraFs, shop: Path, report: Callable[..., None]) -> None:
    """Until they have seen what was written; exit 6 where fewer follow than a document asks for."""
    file = write(shop / "a.yaml", document("a", "lora-1"), document("c", "lora-3", replicas=2))
    report("one", recent=seen())
    late = lora_fs("apply", "-f", file, "--wait", "50ms")
    assert (late.code, "after 0.05 s not followed by any replica: 1 of" in late.err) == (6, True), late.err
    write(shop / "a.yaml", document("b", "lora-2", replicas=2))
    report("one", recent=seen("b"))
    report("two", recent=seen("b"))
    assert lora_fs("apply", "-f", file, "--wait", "20").code == 0


class Killed(BaseException):
    """What a kill is to this process."""


@pytest.mark.parametrize("at", [1, 2, 3, 4, 6, 7])
def test_the_run_after_a_kill_completes(
    lora_fs: LoraFs, shop: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Ended before any write of a record or a pointer, the next run makes what an unbroken one makes."""
    file = write(
        shop / "a.yaml",
        document("a", "lora-1", policy={"kind": "eager"}, keepRevisions=2),
        document("b", "lora-2"),
        document("c", "lora-3", labels={"x": "y"}),
    )
    calls, append = itertools.count(1), Registry.append

    def killing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise Killed
        return append(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Registry, "append", killing)
        with pytest.raises(Killed):
            lora_fs("apply", "-f", file)
    assert lora_fs("apply", "-f", file).code == 0
    assert lora_fs("apply", "-f", file, "--dry-run").code == 0
    found = served(lora_fs)
    assert {name: row[1] for name, row in found.items()} == {"a": "eager", "b": None, "c": None}
    assert len(lora_fs("list", "-o", "json").json) == 3


POLICIES = st.sampled_from(["lazy", "sticky", "eager", "pinned"])
WANTED = st.dictionaries(st.sampled_from("abcd"), st.tuples(st.integers(1, 3), POLICIES), min_size=1)


@given(WANTED, WANTED, st.randoms(use_true_random=False))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_gives_the_same_registry(
    lora_fs: LoraFs, shop: Path, first: Any, second: Any, random: Any
) -> None:
    """From any state to any other, in any order, with prune: what is served is what the documents say."""
    ends = []
    for shuffled in (False, True):
        root = shop / f"root-{len(os.listdir(shop))}"
        marker.create(root)
        for wanted in (first, second):
            documents = [
                document(name, f"lora-{seed}", policy={"kind": kind}) for name, (seed, kind) in wanted.items()
            ]
            if shuffled:
                random.shuffle(documents)
            file = write(shop / "a.yaml", *documents)
            words = ("apply", "-f", file, "--prune", "--root", str(root))
            assert lora_fs(*words).code == 0
            assert lora_fs(*words, "--dry-run").code == 0
        ends.append(served(lora_fs, "--root", str(root)))
    assert ends[0] == ends[1]
    assert {name: row[1] for name, row in ends[0].items()} == {
        name: kind for name, (_, kind) in second.items()
    }


def test_the_model_of_a_document_is_its_scope(lora_fs: LoraFs, shop: Path) -> None:
    """A namespace and a base model of its own: registered there, not in the command's scope."""
    write_adapter(shop / "other", 5, base="other/base")
    file = write(shop / "a.yaml", document("sql", "other", model="other/base", namespace="team-a"))
    assert lora_fs("apply", "-f", file).code == 0
    assert served(lora_fs) == {}
    assert MODEL != "other/base"
    assert served(lora_fs, "-n", "team-a", "--model", "other/base").keys() == {"sql"}


def test_what_somebody_registered_by_hand_stays_theirs(lora_fs: LoraFs, shop: Path, hub: Hub) -> None:
    """Its bytes come from another address, too: nobody's ``--prune`` takes it, and no refusal changes it."""
    hub.repo = "acme/support"
    hub.publish(shop / "lora-1", "a" * 40)
    hub.publish(shop / "lora-1", "b" * 40)
    assert lora_fs("register", "sql", "hf://acme/support@" + "a" * 40, "--label", "team=care").code == 0
    before = lora_fs("list", "-o", "json").json
    other = "hf://acme/support@" + "b" * 40
    refused = document("sql", other, digest="sha256:" + "0" * 64, policy={"kind": "pinned", "priority": 99})
    ran = lora_fs("apply", "-f", write(shop / "a.yaml", refused))
    assert (ran.code, "spec.digest: what came from" in ran.err) == (1, True)
    assert lora_fs("list", "-o", "json").json == before
    both = document("sql", other), document("mine", str(shop / "lora-2"))
    assert lora_fs("apply", "-f", write(shop / "a.yaml", *both)).code == 0
    assert lora_fs("apply", "-f", write(shop / "b.yaml", both[1]), "--prune").code == 0
    assert served(lora_fs).keys() == {"sql", "mine"}
    assert served(lora_fs)["sql"][2] == {"team": "care"}
    wanted = document("sql", other, policy={"kind": "pinned"})
    assert lora_fs("apply", "-f", write(shop / "a.yaml", wanted)).code == 0
    policies = {one["name"]: one["spec"]["policy"] for one in lora_fs("list", "-o", "json").json}
    assert policies["sql"]["kind"] == "pinned"


def test_what_is_fetched_is_checked(
    lora_fs: LoraFs, shop: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URI is not fetched again; other bytes than the digest's never serve the name, and are withdrawn."""
    hub.repo = "acme/support"
    hub.publish(shop / "lora-1", "a" * 40)
    file = write(shop / "a.yaml", document("sql", "hf://acme/support"))
    assert lora_fs("apply", "-f", file).code == 0
    assert lora_fs("apply", "-f", file, "--dry-run").code == 0
    digest = served(lora_fs)["sql"][0]
    before = lora_fs("list", "-o", "json").json
    hub.publish(shop / "lora-2", "b" * 40)
    source = "hf://acme/support@" + "b" * 40
    ran = lora_fs("apply", "-f", write(shop / "a.yaml", document("sql", source, digest="sha256:" + "0" * 64)))
    assert (ran.code, "spec.digest: what came from" in ran.err) == (1, True)
    assert lora_fs("list", "-o", "json").json == before
    write(shop / "a.yaml", document("sql", source, pin="b" * 40))
    assert lora_fs("apply", "-f", file).code == 0
    assert lora_fs("apply", "-f", file, "--dry-run").code == 0
    assert served(lora_fs)["sql"][0] != digest


def test_a_pin_is_all_that_pins_a_source(lora_fs: LoraFs, shop: Path, web: WebServer) -> None:
    """Of weights at a web server: both etags; of a URL with a query: not the hash of that."""
    config, weights = "adapter_config.json", "adapter_model.safetensors"
    for name in (config, weights):
        web.put(f"/{name}", (shop / "lora-1" / name).read_bytes())
    url = f"{web.url}/{weights}"
    assert lora_fs("register", "by-hand", url).code == 0
    pin = lora_fs("list", "-o", "json").json[0]["spec"]["source"]["pin"]
    both = document("sql", url, pin=pin), document("other", f"{url}?id=1", pin=pin)
    file = write(shop / "a.yaml", *both)
    assert lora_fs("apply", "-f", file).code == 0
    assert lora_fs("apply", "-f", file, "--dry-run").code == 0
    web.put(f"/{config}", (shop / "lora-1" / config).read_bytes() + b" ")
    ran = lora_fs("apply", "-f", write(shop / "a.yaml", document("third", url, pin=pin)))
    assert (ran.code, "spec.pin: what came from" in ran.err) == (1, True), ran.err
    assert "third" not in served(lora_fs)

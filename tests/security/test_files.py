"""Which folders are read, and what in them is not."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import InputError, InvalidAdapter, InvalidName, LoraFsError
from lora_fs.sidecar.model import AdapterKey, Scope, check_segment
from lora_fs.sidecar.reconcile.admin.fetching import Fetching
from lora_fs.sidecar.reconcile.admin.service import LoadRequest, Registrations
from lora_fs.sidecar.reconcile.assembly import locator
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.revisions import revisions_of
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import Desired
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.sources.allowed import Allowed, AllowedRemotes
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.validate import Expectation
from tests.cli.conftest import LoraFs
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.test_adopt import Site
from tests.registry.test_operations import put
from tests.security.conftest import CI_A, OPERATORS, bearer
from tests.server.conftest import tenants

ROOT = Path(__file__).parents[2]
PICKLE = "adapter_model.bin"

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class NoVolume:
    """A volume that nobody looks at."""

    desired = Desired()

    def look_now(self) -> None:
        pass


def over_http(registry: Registry, scope: Scope, *sources: Path, allow: str = "") -> Registrations:
    """What a load over HTTP registers with."""
    expectation = Expectation(allow=frozenset(allow.split()))
    volume = NoVolume()
    return Registrations(
        registry,
        (scope,),
        volume,  # type: ignore[arg-type]
        expectation,
        allowed=Allowed(registry.layout.root, sources),
        timeout_s=60,
        fetching=Fetching(Options(AllowedRemotes().check), 0, 0.0),
        wait_s=60,
    )


def stager(registry: Registry, stage: Path, *sources: Path, allow: str = "") -> Stager:
    """What makes a replica's copies, as ``assemble`` wires it."""
    found = locator(registry, Allowed(registry.layout.root, sources))
    made = Stager(stage, found, Expectation(allow=frozenset(allow.split())), max_bytes=1 << 30, timeout_s=60)
    made.prepare()
    return made


def pickled(folder: Path) -> Path:
    """An adapter whose weights are a pickle that would write a file, were it loaded."""
    write_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / PICKLE).write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    return folder


async def test_places(
    registry: Registry, scope: Scope, tmp_path: Path, lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`POST /v1/load_lora_adapter`, `POST /adapters`, `register --link` and `import --link` take folders
    under the root and under `LORA_FS_ALLOWED_SOURCES`, links followed, and no others."""
    allowed, inside = tmp_path / "allowed", registry.layout.root / "inside"
    outside = write_adapter(tmp_path / "secret" / "a", 1)
    allowed.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "up").symlink_to(outside.parent)
    (tmp_path / "allowed-too").symlink_to(outside.parent)
    good = [write_adapter(allowed / "a", 2), write_adapter(inside, 3)]
    bad = [outside, allowed / "link", allowed / "up" / "a", allowed / ".." / "secret" / "a"]
    bad += [tmp_path / "allowed-too" / "a"]
    http = over_http(registry, scope, allowed)
    for text in (*map(str, bad), "meta/llama", "file:///etc", "", "\0", "~", "/proc/self/root"):
        with pytest.raises(InputError, match=r"not (under an allowed folder|allowed here)"):
            await http.register(LoadRequest("x", text), "test")
    for number, path in enumerate(good):
        await http.register(LoadRequest(f"good-{number}", str(path)), "test")
    monkeypatch.setenv("LORA_FS_ROOT", str(registry.layout.root))
    monkeypatch.setenv("LORA_FS_ALLOWED_SOURCES", str(allowed))
    for path in bad:
        assert lora_fs("register", "x", str(path), "--link").code == 2, path
    for number, path in enumerate(good):
        assert lora_fs("register", f"linked-{number}", str(path), "--link").code == 0
    store = tmp_path / "secret"
    assert lora_fs("import", "nim", str(store), "--link").code == 1
    config = tmp_path / "config.yaml"
    config.write_text(f"vLLMLoRAConfig: {{ensureExist: {{models: [{{id: sql, source: {outside}}}]}}}}")
    assert lora_fs("import", "gie", str(config), "--link").code == 1
    listed = lora_fs("list", "-o", "json").json
    assert str(outside) not in {record["spec"]["path"] for record in listed}


def test_whose_folders(tmp_path: Path, token_file: Path) -> None:
    """Over HTTP a replica takes folders of the registry only from namespaces that the caller may read,
    and from the one it registers in. It refuses any other as a folder that is not allowed, whether it
    exists or not."""
    root, made = tmp_path / "volume", write_adapter(tmp_path / "sources" / "a")
    others = ("team-b/tiny/v1/law", "team-z/tiny/v1/law", "uploads/team-a/law")
    with tenants(tmp_path, Admin(token_file, ("-",))) as http:

        def asked(name: str, source: object, token: str) -> tuple[int, str]:
            headers = bearer(token)
            body = {"lora_name": name, "lora_path": str(source)}
            vllm = http.post("/v1/load_lora_adapter", json=body, headers=headers)
            again = {"lora_name": f"{name}-too", "source": {"uri": str(source)}}
            dynamo = http.post("/v1/loras", json=again, headers=headers)
            third = {"name": f"{name}-three", "src": str(source)}
            sagemaker = http.post("/adapters", json=third, headers=headers)
            assert vllm.status_code == dynamo.status_code == sagemaker.status_code, (vllm.text, dynamo.text)
            return vllm.status_code, vllm.text.replace(str(source), "SOURCE")

        assert asked("team-b/law", made, OPERATORS)[0] == 200
        for other in others[1:]:
            write_adapter(root / other)
        (root / "team-a").mkdir()
        (root / "team-a" / "link").symlink_to(root / others[0])
        (root / "team-a" / "round").symlink_to("round")
        bad: list[object] = [
            root,
            root / "team-a" / ".." / others[0],
            root / "team-a" / "round",
            "/etc/passwd",
        ]
        for other in (*others, "team-b/tiny/v1/none", "none", "team-a/link"):
            bad += [root / other, (root / other).as_uri(), f"pvc:///{other}"]
        ((status, told),) = {asked("team-a/steal", source, CI_A) for source in bad}
        assert (status, "is not under an allowed folder" in told) == (400, True)
        listed = http.get("/v1/models", headers=bearer(OPERATORS)).json()["data"]
        assert {card["id"] for card in listed} == {"tiny", "team-b/law", "team-b/law-too", "team-b/law-three"}
        own = write_adapter(root / "team-a" / "uploads" / "b", 1)
        assert asked("team-a/b", own, CI_A)[0] == 200
        for number, other in enumerate(others):
            assert asked(f"team-a/moved-{number}", root / other, OPERATORS)[0] == 200


async def test_records_that_lead_elsewhere(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """A replica does not read a record that leads out of those places, whoever wrote it."""
    outside = make_adapter("outside", 1)
    record = put(registry, scope, outside, link=True).record
    with pytest.raises(InvalidAdapter, match="LORA_FS_ALLOWED_SOURCES"):
        await stager(registry, tmp_path / "stage").stage(record)
    link = registry.layout.root / "link"
    link.symlink_to(outside)
    for path in ("../outside", "link", str(link), "default/../../outside"):
        spec = record.spec.model_copy(update={"path": path})
        with pytest.raises(InvalidAdapter):
            await stager(registry, tmp_path / "stage").stage(record.model_copy(update={"spec": spec}))
    assert Path(await stager(registry, tmp_path / "stage", outside.parent).stage(record)).is_dir()


async def test_links_inside(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path
) -> None:
    """lora-fs follows no symlink among an adapter's files, neither to register it nor to copy it for the
    engine."""
    secret = tmp_path / "secret"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        source = make_adapter(f"s-{name}", 1)
        (source / name).rename(secret)
        (source / name).symlink_to(secret)
        with pytest.raises(InvalidAdapter, match="symlink"):
            put(registry, scope, source)
        record = put(registry, scope, make_adapter(f"t-{name}", 2), name=name.replace("_", "-")).record
        file = registry.layout.artifact(record.key) / name
        file.rename(secret)
        file.symlink_to(secret)
        with pytest.raises(LoraFsError, match=name):
            await stager(registry, tmp_path / "stage").stage(record)


@given(
    st.lists(
        st.text(min_size=1, max_size=20) | st.sampled_from(["..", ".", "a", "a/b", "a\0"]),
        min_size=4,
        max_size=4,
    )
)
def test_names(words: list[str]) -> None:
    """No name of a namespace, model, revision or adapter becomes a path that leaves its folder."""
    try:
        key = AdapterKey.checked(*words)
    except InvalidName:
        assert not all(word.isascii() and word.isalnum() for word in words)
        return
    root = Path("/volume")
    path = Layout(root).artifact(key)
    assert Path(os.path.normpath(path)) == path
    assert path.relative_to(root).parts == tuple(words)
    assert check_segment("name", words[3]) == words[3]


async def test_pickles(
    registry: Registry,
    scope: Scope,
    tmp_path: Path,
    lora_fs: LoraFs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`register`, calls over HTTP, the adoption of dropped folders, `import gie` and `import nim` refuse
    a pickle."""
    monkeypatch.setenv("LORA_FS_ROOT", str(registry.layout.root))
    source = pickled(tmp_path / "store" / "a")
    assert lora_fs("register", "a", str(source)).code == 5
    assert lora_fs("import", "nim", str(source.parent)).code == 1
    config = tmp_path / "config.yaml"
    config.write_text(f"vLLMLoRAConfig: {{ensureExist: {{models: [{{id: sql, source: {source}}}]}}}}")
    assert lora_fs("import", "gie", str(config)).code == 1
    with pytest.raises(InvalidAdapter, match="pickle"):
        await over_http(registry, scope, source.parent).register(LoadRequest("a", str(source)), "test")
    site = Site(registry, scope)
    pickled(site.folder)
    assert site.settle() == {}
    assert "[pickle]" in site.refusal()
    assert lora_fs("list", "-o", "json").json == []
    assert not Path("ran").exists()


async def test_pickles_of_others(
    registry: Registry, scope: Scope, tmp_path: Path, lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--allow pickle` at `register`, or a pickle in an imported archive, makes no replica serve one:
    `LORA_FS_ALLOW` of the replica does."""
    monkeypatch.setenv("LORA_FS_ROOT", str(registry.layout.root))
    assert lora_fs("register", "a", str(pickled(tmp_path / "a")), "--allow", "pickle").code == 0
    assert lora_fs("export", "out.tar").code == 0
    monkeypatch.setenv("LORA_FS_ROOT", str(tmp_path / "restored"))
    assert lora_fs("import", "archive", "out.tar").code == 0
    restored = Registry(tmp_path / "restored")
    for number, one in enumerate((registry, restored)):
        key = AdapterKey(*scope, "v1", "a")
        record = one.latest(one.records(key))[1]
        assert record is not None
        with pytest.raises(InvalidAdapter, match="pickle"):
            await stager(one, tmp_path / f"stage-{number}").stage(record)
        assert await stager(one, tmp_path / f"stage-{number}", allow="pickle").stage(record)
    assert not Path("ran").exists()


@pytest.mark.parametrize("how", ["staged", "over HTTP", "adopted"])
async def test_folders_on_the_way(
    registry: Registry, scope: Scope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """lora-fs follows no symlink that takes the place of a folder on the path after the check. To adopt a
    dropped folder, a replica follows none that leads out of the allowed places."""
    upper, moved = registry.layout.revision(scope, "v1"), tmp_path / "moved"

    def swap() -> None:
        upper.rename(moved)
        upper.symlink_to(moved)

    if how == "adopted":
        drop = Site(registry, scope)
        drop.adopter._find = lambda path: Allowed(registry.layout.root).find(path, follow=False)
        write_adapter(upper / "a")
        swap()
        drop.settle()
        assert not drop.view.desired.records
        assert "leads out of the registry" in "".join(drop.adopter.refusals().values())
    elif how == "staged":
        record = put(registry, scope, write_adapter(tmp_path / "source"), name="a", revision="v1").record
        replica = stager(registry, tmp_path / "stage")
        monkeypatch.setattr(replica, "_reserve", lambda *_: swap())
        with pytest.raises(InvalidAdapter, match="symlink or behind one"):
            await replica.stage(record)
    else:
        write_adapter(upper / "a")

        def then_swap(*args: Any) -> Any:
            found = revisions_of(*args)
            swap()
            return found

        monkeypatch.setattr(ingest, "revisions_of", then_swap)
        with pytest.raises(InputError, match="symlink or behind one"):
            await over_http(registry, scope).register(LoadRequest("b", str(upper / "a")), "test")


UNPICKLES = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}


def test_nothing_unpickles() -> None:
    """lora-fs itself never unpickles: no module of it can."""
    for path in (*(ROOT / "sidecar").rglob("*.py"), *(ROOT / "worker_patch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not UNPICKLES & {name.name.split(".")[0] for name in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in UNPICKLES, path
            if isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
                assert node.value.id not in ("torch", "numpy", "np"), path

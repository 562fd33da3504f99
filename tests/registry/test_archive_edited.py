"""An archive that was edited and sealed anew: what it says of itself is compared before anything is made."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import AdapterKey, FileEntry, JsonObject, Scope
from lora_fs.sidecar.registry.backup import archive, restore
from lora_fs.sidecar.registry.format.ids import int_id
from lora_fs.sidecar.registry.format.sealed import seal, unseal
from lora_fs.sidecar.registry.lifecycle.artifacts import digest_of
from lora_fs.sidecar.registry.maintenance import fsck, survey
from lora_fs.sidecar.registry.maintenance.repair import mend
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.cli.conftest import LoraFs, lora_fs, root
from tests.registry.conftest import MakeAdapter
from tests.registry.test_export import exported
from tests.registry.test_operations import put

__all__ = ["lora_fs", "root"]

Members = list[tuple[str, bytes]]
Change = Callable[[JsonObject], object]

A1, B1 = (AdapterKey("default", "tiny", "v1", name) for name in ("a1", "b1"))
RECORD = "default/tiny/v1/a1.@00000001.json"
POINTER = "default/tiny/.active/a1.@00000001.json"


@pytest.fixture
def file(registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path) -> Path:
    """An export of a1 and b1, which are present and served."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1), name="b1")
    return exported(registry, tmp_path / "e.tar")


def members(file: Path) -> Members:
    with tarfile.open(file) as tar:
        return [(one.name, data.read()) for one in tar if (data := tar.extractfile(one)) is not None]


def sealed(file: Path, held: Members) -> Path:
    """An export of these members, whose last one counts and hashes them."""
    tally, target = archive.Tally(), file.with_name("edited.tar")
    with tarfile.open(target, "w") as tar:

        def add(name: str, data: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))

        for name, data in held:
            if name != archive.END:
                add(name, data)
                tally.add(name, len(data), hashlib.sha256(data).hexdigest())
        add(archive.END, seal(archive.End(members=tally.members, digest=tally.digest)))
    return target


def edited(file: Path, change: Change, at: str = RECORD, name: str | None = None) -> Path:
    """The export with one body changed and sealed anew, under another name where one is given."""

    def anew(data: bytes) -> bytes:
        body = unseal(data)
        change(body)
        return seal(body)

    held = [(name or one, anew(data)) if one == at else (one, data) for one, data in members(file)]
    return sealed(file, held)


def says(**fields: object) -> Change:
    return lambda body: body.update(fields)


def specifies(**fields: object) -> Change:
    return lambda body: body["spec"].update(fields)


def twice(body: JsonObject) -> None:
    """Names one file two times, with a digest and a size of both."""
    files = [body["spec"]["files"][0], *body["spec"]["files"]]
    entries = [FileEntry(**one) for one in files]
    size = sum(one.size_bytes for one in entries)
    body["spec"].update(files=files, digest=digest_of(entries), size_bytes=size)


EDITS: dict[str, tuple[Change, str, str]] = {
    "another generation than its name": (says(generation=2), RECORD, "generation 2"),
    "a pointer's, too": (says(generation=2), POINTER, "generation 2"),
    "a generation that no name has": (says(generation=10**18), RECORD, "a file's name can have"),
    "the last generation": (says(generation=10**18 - 1), RECORD, "a file's name can have"),
    "a token that leads elsewhere": (says(token="x/../../../../x"), RECORD, "a file's name can have"),
    "a pointer's token": (says(token="x/../../../../x"), POINTER, "a file's name can have"),
    "a token in upper case": (says(token="A" * 32), RECORD, "a file's name can have"),
    "no token": (says(token=""), RECORD, "a file's name can have"),
    "no files": (specifies(files=[], digest=digest_of([]), size_bytes=0), RECORD, "spec.files is empty"),
    "a file twice": (twice, RECORD, "names a file twice"),
    "another digest": (specifies(digest="sha256:" + "0" * 64), RECORD, "spec.digest is not that"),
    "another size": (specifies(size_bytes=5), RECORD, "spec.size_bytes is not that"),
}


@pytest.mark.parametrize("case", EDITS)
def test_what_does_not_agree_is_refused(file: Path, case: str) -> None:
    """The member is named, and what is wrong with it; it is not said that the export changed meanwhile."""
    change, at, why = EDITS[case]
    with pytest.raises(InputError) as told:
        archive.read(edited(file, change, at))
    assert f"{at}: " in str(told.value)
    assert why in str(told.value)


def test_a_name_that_says_another_token_is_refused(file: Path) -> None:
    """Of an export from a volume without hard links the token stands in the name, too."""
    token = archive.read(file).records[A1].token
    good = RECORD.replace(".json", f".{token}.json")
    assert A1 in archive.read(edited(file, says(), name=good)).records
    with pytest.raises(InputError, match="holds generation 1, or a token"):
        archive.read(edited(file, says(), name=RECORD.replace(".json", f".{'0' * 32}.json")))


@pytest.mark.parametrize("at", [RECORD, POINTER])
def test_a_second_generation_is_refused(file: Path, at: str) -> None:
    """Whichever comes last: a tombstone is not taken back by an older generation behind it."""
    held = members(file)
    place = next(number for number, (name, _) in enumerate(held) if name == at)
    body = unseal(held[place][1])
    later = seal({**body, "generation": 2})
    for where in (place, place + 1):
        both = [*held[:where], (at.replace("@00000001", "@00000002"), later), *held[where:]]
        with pytest.raises(InputError, match="one generation of each"):
            archive.read(sealed(file, both))


def test_an_adapter_named_like_its_model_is_refused(file: Path) -> None:
    """Clients may mean the base model by that name. A tombstone of one is in nobody's way."""
    at = RECORD.replace("a1", "tiny")
    with pytest.raises(InputError, match=r"tiny\.@00000001\.json: no adapter has the name of its model"):
        archive.read(edited(file, says(name="tiny"), name=at))
    gone = archive.read(edited(file, says(name="tiny", state="deleted"), name=at))
    assert not gone.records[AdapterKey("default", "tiny", "v1", "tiny")].present


@pytest.mark.parametrize("case", ["another digest", "no files", "a token that leads elsewhere"])
def test_nothing_is_made_of_it(file: Path, lora_fs: LoraFs, tmp_path: Path, case: str) -> None:
    """Neither a restored registry nor a new one is left behind, and the exit code says that it is refused."""
    change, at, _ = EDITS[case]
    edited(file, change, at)
    for more in ([], ["--as-new"]):
        done = lora_fs(
            "--root", str(tmp_path / "other"), "import", "archive", str(tmp_path / "edited.tar"), *more
        )
        assert done.code == 2, done.err
        assert not (tmp_path / "other").exists()


def test_a_shared_id_is_restored_and_told_apart_by_fsck(file: Path, tmp_path: Path) -> None:
    """A restore brings back what was exported. `fsck --repair` gives the second one an id of its own."""
    taken = archive.read(file).records[A1].spec.int_id
    bad = edited(file, specifies(int_id=taken), RECORD.replace("a1", "b1"))
    assert restore.restore(tmp_path / "new", bad, archive.read(bad)) == []
    again = Registry(tmp_path / "new")
    state = survey.look(again)
    found = list(fsck.find(again, state, older_than_s=0, hash_files=True))
    assert [one.kind for one in found] == [fsck.Kind.SAME_ID]
    assert [why for _, why in mend(again, state, found, Expectation(), writer="test")] == [None]
    a1, b1 = (survey.look(again).records[key] for key in (A1, B1))
    assert (a1.generation, a1.spec.int_id, b1.generation) == (1, taken, 2)
    assert b1.spec.int_id == int_id(again.marker.registry_uuid, B1, b1.spec.digest)

"""What a volume that does not answer is told as."""

from __future__ import annotations

from pathlib import Path

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.volume import STALLED_AFTER_S, Volume
from lora_fs.sidecar.registry.adopt import Adopter
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import RegistryView
from lora_fs.sidecar.validate import Expectation


def test_a_look_that_does_not_end(tmp_path: Path) -> None:
    """Before the first one ended no good state is in force, and none is claimed."""
    registry = Registry(tmp_path, create=True)
    view = RegistryView(registry, (Scope("default", "tiny"),))
    adopter = Adopter(registry, Expectation(), settle_s=2.0, writer="test")
    volume = Volume(registry.layout, view, adopter, poll_s=1.0, notify=False)
    assert volume.conditions() == ()
    volume._looked_at -= STALLED_AFTER_S + 1
    (told,) = volume.conditions()
    assert told == "VolumeStalled: the first look at it has not ended; nothing is listed until then"
    volume.read_once = True
    assert volume.conditions() == ("VolumeStalled: it does not answer; the last good state is in force",)

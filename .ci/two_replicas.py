"""Film two replicas that follow one folder: ``python .ci/two_replicas.py docs/two-replicas.svg``.

Two real vLLM servers with the plugin, as in ``lora-fs demo``. Each is asked again and again, for its list
and for an answer of every adapter. Meanwhile commands register adapters, and one server is killed and
started again. The picture holds only what a command printed or a server answered.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).parent))

from timeline import Moment, Pane, draw

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PluginReplica
from lora_fs.demo.tiny_llama import MODEL_NAME, ensure_model, make_adapter
from lora_fs.demo.volume import Volume

PANES = (
    Pane("terminal", 0, 0, 62, 16),
    Pane("replica a", 62, 0, 62, 7),
    Pane("replica b", 62, 9, 62, 7),
)
NAMES = {"support": 8, "billing": 4}  # name → rank
TITLE = (
    "Two vLLM replicas on one folder: adapters registered once are answered by both; "
    "replica b is killed, restarts, and answers as before"
)
ASK_EVERY_S, COUNT_EVERY_S, READ_S = 0.1, 0.5, 2.5  # READ_S: what a viewer needs to read a change


class Film:
    """What was shown, in seconds since the film began."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self._began, self._row = time.monotonic(), 0

    def show(self, pane: int, row: int, text: str) -> None:
        """Show ``text`` from now on; longer than its pane, it ends in an ellipsis."""
        room = PANES[pane].columns - 5
        cut = text if len(text) <= room else f"{text[: room - 1]}…"
        self.moments.append(Moment(time.monotonic() - self._began, pane, row, cut))

    def print(self, text: str) -> None:
        """Show the lines of ``text`` below the last ones of the terminal."""
        for line in text.rstrip().splitlines():
            self.show(0, self._row, line)
            self._row += 1


class Asker(threading.Thread):
    """Asks one replica until ``stop``, and films what it answers."""

    def __init__(self, film: Film, pane: int, replica: PluginReplica) -> None:
        super().__init__(daemon=True)
        self._film, self._pane, self._replica = film, pane, replica
        self._stopped = threading.Event()
        self._counted_at, self.answers, self.known = 0.0, 0, dict[str, str]()

    def stop(self) -> None:
        """End after the request that is under way."""
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Ask on and on; a server that is down is what the picture shows then."""
        while not self._stopped.wait(ASK_EVERY_S):
            try:
                names = sorted(self._replica.names())
                said = {name: self._replica.answer(name) for name in names if name != MODEL_NAME}
            except openai.OpenAIError as error:
                self._show("✗ no answer", type(error).__name__, "", "")
                continue
            self.answers += len(said)
            self.known |= said
            rows = [f"▸ {name}: {answer}" for name, answer in said.items()]
            self._show("✓ /v1/models", ", ".join(names), *rows, *[""] * (2 - len(rows)))

    def _show(self, state: str, names: str, *rows: str) -> None:
        for row, text in enumerate((f"{state}: {names}", *rows)):
            self._film.show(self._pane, row, text)
        if time.monotonic() - self._counted_at > COUNT_EVERY_S:
            self._counted_at = time.monotonic()
            self._film.show(self._pane, 5, f"{self.answers} answers")


def main() -> None:
    """Start both, film, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    picture: Path = parser.parse_args().picture
    with tempfile.TemporaryDirectory() as folder:
        moments = filmed(Path(folder))
    picture.write_text(draw(TITLE, PANES, moments), encoding="utf-8")


def filmed(work: Path) -> list[Moment]:
    """Play the story, and return what was shown."""
    model = ensure_model(work / MODEL_NAME)
    for seed, (name, rank) in enumerate(NAMES.items()):
        make_adapter(model, work / name, seed, rank=rank)
    volume = Volume(work / "volume", MODEL_NAME, cwd=work)
    volume.run("init")
    with EngineFarm(work) as farm, closing(Pair(farm, model, volume, work, kind=PluginReplica)) as pair:
        pair.wait_ready()
        film = Film()
        askers = [Asker(film, 1 + number, replica) for number, replica in enumerate(pair.both)]
        for asker in askers:
            asker.start()
        play(film, volume, pair)
        for asker in askers:
            asker.stop()
        first, second = askers
        if first.known != second.known or first.known.keys() != NAMES.keys():
            raise SystemExit(f"the replicas did not agree: {first.known} and {second.known}")
    return film.moments


def play(film: Film, volume: Volume, pair: Pair[PluginReplica]) -> None:
    """Register two adapters, kill replica b, start it again, and show the status."""
    time.sleep(READ_S)
    for name in NAMES:
        typed(film, volume, "register", name, f"./{name}", "--wait", "20")
    film.print(f"$ kill -9 {pair.b.engine.pid}  # replica b")
    pair.b.kill()
    time.sleep(READ_S)
    film.print("$ vllm serve tiny …  # replica b again")
    pair.b.start()
    pair.b.wait_ready()
    time.sleep(READ_S)
    typed(film, volume, "status")


def typed(film: Film, volume: Volume, *words: str) -> None:
    """Run a command, show it with what it prints, and leave time to read it."""
    film.print(f"$ lora-fs {' '.join(words)}")
    film.print(volume.run(*words).stdout)
    time.sleep(READ_S)


if __name__ == "__main__":
    main()

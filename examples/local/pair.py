"""Two replicas on one volume: what has to be the same on both, asked of both.

Owns the questions of the demo and the tests that no replica can answer alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.failures import DemoFailed
from lora_fs.demo.replica import Replica
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until

_LISTED_LIMIT_S = 60.0

Kind = TypeVar("Kind", bound=Replica)


class AnswersDiffer(DemoFailed):
    """Two replicas answered the same request unlike."""


class Pair(Generic[Kind]):
    """Two replicas, ``a`` and ``b``, on one volume, of one ``kind``. Takes what ``Replica`` takes."""

    def __init__(
        self,
        farm: EngineFarm,
        model_dir: Path,
        volume: Volume,
        run_dir: Path,
        *,
        kind: type[Kind],
        engine_args: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.volume = volume
        self.a, self.b = self.both = tuple(
            kind(
                name,
                farm,
                model_dir,
                volume,
                run_dir,
                engine_args=engine_args,
                settings=settings,
            )
            for name in ("a", "b")
        )

    def wait_ready(self) -> None:
        """Wait until both can serve."""
        for replica in self.both:
            replica.wait_ready()

    def close(self) -> None:
        """Close both."""
        for replica in self.both:
            replica.close()

    def answer(self, model: str) -> str:
        """The answer both give.

        Raises:
            AnswersDiffer: they do not agree.
        """
        a, b = (replica.answer(model) for replica in self.both)
        if a != b:
            raise AnswersDiffer(f"{model}: a says {a!r}, b says {b!r}")
        return a

    def wait_listed(self, name: str) -> float:
        """Wait until both list ``name``; returns the seconds it took."""
        return wait_until(
            f"both replicas list {name}",
            lambda: all(name in replica.names() for replica in self.both),
            timeout_s=_LISTED_LIMIT_S,
        )

    def wait_delisted(self, name: str) -> float:
        """Wait until neither lists ``name``; returns the seconds it took."""
        return wait_until(
            f"neither replica lists {name}",
            lambda: not any(name in replica.names() for replica in self.both),
            timeout_s=_LISTED_LIMIT_S,
        )

"""``--dry-run`` of commands that change names: the same checks and the same answer, without a write."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from lora_fs.sidecar.errors import Conflict
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry


class Rehearsal(Registry):
    """A registry whose appends return a generation and write nothing."""

    def append(
        self,
        series: Series[Body],
        change: Callable[[Body | None], dict[str, Any] | None],
        *,
        writer: str,
        expect: int | None = None,
        announce: bool = True,
        checked: bool = False,
    ) -> Body:
        """Build the next generation; raises as the write would, but for what only a write can meet."""
        self.check_changeable(series)
        top, newest = self.latest(series)
        seen = newest.generation if newest is not None else 0
        if expect not in (None, seen):
            raise Conflict(f"{series.name}: expected generation {expect}, found {seen}")
        fields = change(newest)
        if fields is None and newest is None:
            raise Conflict(f"{series.name}: nothing to keep")
        if fields is None and newest is not None:
            return newest
        return series.kind.model_validate(
            {
                **(newest.model_dump(mode="json") if newest is not None else {"request_id": "", "token": ""}),
                "namespace": series.scope.namespace,
                "model": series.scope.model,
                "name": series.name,
                "generation": top.generation + 1,
                "writer": writer,
                "updated_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                **(fields or {}),
            }
        )

    def confirm(self, series: Series[Body], body: Body) -> None:
        """Confirm nothing."""

    def announce(self) -> None:
        """Announce nothing."""

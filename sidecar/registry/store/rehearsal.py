"""``--dry-run`` of commands that change names: the same checks and the same answer, without a write."""

from __future__ import annotations

from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Change, Registry


class Rehearsal(Registry):
    """A registry whose appends return a generation and write nothing."""

    def append(
        self,
        series: Series[Body],
        change: Change[Body],
        *,
        writer: str,
        expect: int | None = None,
        announce: bool = True,
        checked: bool = False,
    ) -> Body:
        """Build the next generation; raises as the write would, but for what only a write can meet."""
        self.check_writable()
        _, newest, body = self._next(series, change, writer, expect)
        found = body or newest
        assert found is not None  # else ``_next`` raised
        return found

    def confirm(self, series: Series[Body], body: Body) -> None:
        """Confirm nothing."""

    def announce(self) -> None:
        """Announce nothing."""

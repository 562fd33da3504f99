"""The engine's own series beside ours, so that one scrape of the sidecar has both. Pure text.

A family that we have as well is left out of the engine's. Adapters have the names that clients know, and the
model has the name that the engine gives it: routers compare both with what a request says. Of vLLM's gauge of
LoRA requests only the latest series is here. vLLM keeps one for each set of adapters that it ever saw in use
together. By public names, two of them may have the same labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from lora_fs.sidecar.engine.activity import seen_at
from lora_fs.sidecar.model import public_of

ANSWERS: Final = "lora_fs_engine_metrics"
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ADAPTERS: Final = re.compile(r'((?:running|waiting)_lora_adapters=")([^"]*)"')
_SUFFIXES: Final = ("_total", "_created", "_bucket", "_count", "_sum", "_info")
REQUESTS: Final = "vllm:lora_requests_info{"


def merged(ours: str, theirs: str | None) -> str:
    """Return both texts as one, which has each family once.

    Args:
        theirs: None: the engine does not answer, and the gauge ``lora_fs_engine_metrics`` is 0.
    """
    told = f"# HELP {ANSWERS} Whether the engine's own series are here\n# TYPE {ANSWERS} gauge\n"
    told += f"{ANSWERS} {float(theirs is not None)}\n"
    return "\n".join([ours + told.rstrip("\n"), *_kept(theirs or "", _families(ours))]) + "\n"


def _families(text: str) -> frozenset[str]:
    return frozenset(line.split(" ", 3)[2] for line in text.splitlines() if line.startswith("# TYPE "))


def _kept(text: str, taken: frozenset[str]) -> Iterator[str]:
    """Yield the lines of families that are not ``taken``."""
    lines = text.splitlines()
    last = latest([line for line in lines if line.startswith(REQUESTS)])
    for line in lines:
        if line.startswith(REQUESTS):
            if line is last:
                yield _renamed(line)
        elif line.startswith(("# HELP ", "# TYPE ")):
            if not _is_of(line.split(" ", 3)[2], taken):
                yield line
        elif (name := _NAME.match(line)) is not None and not _is_of(name[0], taken):
            yield line


def latest(series: Sequence[str]) -> str | None:
    """Return which of vLLM's series of LoRA requests holds: the latest that can be read, or None."""
    dated = []
    for line in series:
        with suppress(ValueError):
            dated.append((seen_at(line), line))
    return max(dated)[1] if dated else None


def _is_of(name: str, families: frozenset[str]) -> bool:
    """Return whether a series or a family belongs to one of ``families``, by either's spelling."""
    return any(one in families for one in _spellings(name))


def _spellings(name: str) -> Iterable[str]:
    yield name
    yield from (name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix))
    yield f"{name}_total"


def _renamed(line: str) -> str:
    """Give the adapters in vLLM's list of them their public names, each once."""

    def public(found: re.Match[str]) -> str:
        names = (public_of(name.strip()) for name in found[2].split(",") if name.strip())
        return f'{found[1]}{",".join(dict.fromkeys(names))}"'

    return _ADAPTERS.sub(public, line)

"""Which adapters are meant: by a pattern of the name, and by labels as Kubernetes selects by them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Record

LONGEST = 1_024  # characters, of a pattern and of a selector
_REQUIREMENT = re.compile(r"(?P<not>!)?(?P<key>[^\s=!,()]+)(?:\s*(?P<operator>==?|!=)\s*(?P<value>[^=!,]*))?")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition on one label. ``value`` None: it must exist, or with ``negated`` must not."""

    key: str
    value: str | None
    negated: bool

    def met_by(self, record: Record) -> bool:
        """As in Kubernetes, ``!=`` is also met by a record without the label."""
        found = record.spec.labels.get(self.key)
        holds = found is not None if self.value is None else found == self.value
        return holds != self.negated


@dataclass(frozen=True)
class Selection:
    """Which adapters a list contains; all by default.

    Attributes:
        pattern: of the name that clients use: ``*``, ``?`` and ``[…]`` as in a shell.
    """

    pattern: str | None = None
    requirements: tuple[Requirement, ...] = ()

    @cached_property
    def _name(self) -> re.Pattern[str] | None:
        # fnmatchcase would keep 32,768 patterns for good, each of up to 70 KiB.
        return re.compile(translate(self.pattern)) if self.pattern is not None else None

    @classmethod
    def parse(cls, pattern: str | None, selector: str | None) -> Selection:
        """Read what a caller wrote.

        Args:
            selector: ``key=value``, ``key!=value``, ``key`` and ``!key``, with commas between them.
        Raises:
            InputError: it is no selector, or either is too long.
        """
        for what, text in (("pattern", pattern), ("label selector", selector)):
            if text is not None and len(text) > LONGEST:
                raise InputError(f"the {what} has {len(text)} characters: at most {LONGEST}")
        parts = [part.strip() for part in selector.split(",")] if selector else []
        return cls(pattern, tuple(map(_requirement, parts)))

    def covers(self, name: str, record: Record) -> bool:
        """Whether an adapter of this name is one of them."""
        if self._name is not None and self._name.match(name) is None:
            return False
        return all(one.met_by(record) for one in self.requirements)


def _requirement(text: str) -> Requirement:
    found = _REQUIREMENT.fullmatch(text)
    if found is None or (found["not"] and found["operator"]):
        raise InputError(
            f"not a label selector: {text!r}; write key=value, key!=value, key or !key, with commas between"
        )
    negated = bool(found["not"]) or found["operator"] == "!="
    return Requirement(found["key"].strip(), found["value"], negated)

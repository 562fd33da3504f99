"""What the process logs: a line of text for people, or one of JSON for machines.

A call names its event and the fields that belong to it, and says the same in words:
``logger.info("%s is loaded", name, extra=event("load.done", adapter=name))``. No line holds a token:
it removes known secrets, and whatever looks like one.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

Format = Literal["text", "json"]

TEXT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
STRUCK: Final = "***"
_FIELDS: Final = "lora_fs_fields"
_LOOKS_SECRET = re.compile(
    r"(?P<before>://)[^/\s]+(?=@)"
    r"|(?P<scheme>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{16,}"
    r"|(?P<query>[?&](?:X-Amz-Signature|X-Amz-Security-Token|X-Goog-Signature|sig|token|access_token)=)[^&\s]+"
    r"|\bhf_[A-Za-z0-9]{16,}\b",
    re.IGNORECASE,
)
# A line is one line, and a terminal acts on none of it.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def event(name: str, **fields: object) -> dict[str, Any]:
    """For ``extra=``: which event this is, ``thing.happened``, and its fields."""
    return {_FIELDS: {"event": name, **fields}}


def strike(text: str, secrets: Collection[str] = ()) -> str:
    """The text without what is secret or looks like it, and without halves of surrogate pairs.

    They stand for bytes of a file's name that are no UTF-8. Strict readers of JSON refuse a line with one.
    """
    text = text.encode(errors="backslashreplace").decode()
    for secret in secrets:
        text = text.replace(secret, STRUCK)
    return _LOOKS_SECRET.sub(_struck, text)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _struck(found: re.Match[str]) -> str:
    return next((part for part in found.groups() if part), "") + STRUCK


class TextLines(logging.Formatter):
    """A line for people. A traceback takes more, each of them indented: no error's text looks like a line."""

    def __init__(self, secrets: Collection[str] = ()) -> None:
        super().__init__(TEXT)
        self._secrets = secrets

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {_escaped(line)}" for line in super().formatException(ei).split("\n"))

    def format(self, record: logging.LogRecord) -> str:
        return strike(super().format(record), self._secrets)


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, event, message, the event's fields.

    ``ids`` adds those of the span that a line belongs to.
    """

    def __init__(
        self, secrets: Collection[str] = (), ids: Callable[[], Mapping[str, str]] = lambda: {}
    ) -> None:
        super().__init__()
        self._secrets, self._ids = secrets, ids

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "log",
            "message": record.getMessage(),
            **self._ids(),
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        told = {name: self._struck(value) for name, value in line.items()}
        return json.dumps(told)

    def _struck(self, value: object) -> object:
        if value is None or isinstance(value, bool | int | float):
            return value
        return strike(str(value), self._secrets)


def configure(
    level: str,
    form: Format,
    *,
    secrets: Collection[str] = (),
    ids: Callable[[], Mapping[str, str]] = lambda: {},
    logger: str | None = None,
) -> None:
    """Send the log to stderr.

    Args:
        secrets: texts that no line may hold.
        logger: this one alone and what is below it, where the process is somebody else's.
    """
    handler = logging.StreamHandler()
    known = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
    handler.setFormatter(JsonLines(known, ids) if form == "json" else TextLines(known))
    if logger is None:
        logging.basicConfig(level=level.upper(), handlers=[handler])
        return
    own = logging.getLogger(logger)
    own.handlers[:], own.propagate = [handler], False
    own.setLevel(level.upper())

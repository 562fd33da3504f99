"""What a request asks for: the model that its body or a header names, and for whom.

A small body is read by Python's own parser, as vLLM reads it; a longer one in turns with other requests.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import Headers
from starlette.types import Scope

from lora_fs.sidecar.server.proxy.json_fields import SMALL_BYTES
from lora_fs.sidecar.server.proxy.model_rewrite import ModelField, find_fields
from lora_fs.worker_patch.api.incoming import route_of

_SAGEMAKERS = "/invocations"
_ADAPTER = "x-amzn-sagemaker-adapter-identifier"


class Asks(NamedTuple):
    """``background``: what the body has there. ``model``, ``user``: None where it names none."""

    model: str | None
    user: str | None = None
    background: object = None

    @property
    def is_fetched_later(self) -> bool:
        """Whether vLLM may take ``background`` for true: pydantic reads "yes" and 1 as that, too."""
        try:
            return bool(_flag.validate_python(self.background))
        except ValidationError:
            return True


_flag = TypeAdapter[bool | None](bool | None)


async def read(scope: Scope, body: bytes) -> Asks:
    """The parsed body and headers of a request.

    Raises:
        InputError: it may name a model, in an encoding that takes too long to read.
    """
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "")
    asks = _of_small(body) if len(body) <= SMALL_BYTES and "form" not in kind.lower() else None
    if asks is None:
        said = await find_fields(kind, body)
        name = said.name if isinstance(said, ModelField) else None
        asks = Asks(name, said.user, said.background)
    if route_of(scope) == _SAGEMAKERS:  # there vLLM puts the header in the model's place, or nothing
        return asks._replace(model=headers.get(_ADAPTER))
    return asks


def _of_small(body: bytes) -> Asks | None:
    """The model and user of a JSON object; None for any other body."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    model, user = (one if isinstance(one := said.get(name), str) else None for name in ("model", "user"))
    return Asks(model, user, said.get("background"))

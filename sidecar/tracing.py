"""Spans, if ``LORA_FS_TRACES`` asks for them; otherwise it imports and does nothing.

The provider is our own and is not made global: vLLM's tracing, in whose process the plugin runs, stays
as it is. Where spans go, how many and under which name is OpenTelemetry's ``OTEL_*`` environment.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from lora_fs.sidecar import __version__
from lora_fs.sidecar.errors import InputError, install_extra
from lora_fs.sidecar.logs import event

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

Value = str | int | float | bool
Headers = list[tuple[str, str]]

SERVICE: Final = "lora-fs"  # unless OTEL_SERVICE_NAME says otherwise
END_S: Final = 3.0  # the time that the last spans get

logger = logging.getLogger(__name__)

_tracer: Tracer | None = None


def start(exporter: str, instance: str) -> Callable[[], None]:
    """Begin to make spans; returns what ends it and sends the last of them.

    Args:
        exporter: ``otlp``, ``console`` (a span a line on stdout) or ``off``.
        instance: which replica this is.
    Raises:
        InputError: the extra is not installed, or an ``OTEL_*`` variable is invalid.
    """
    if exporter == "off":
        return lambda: None
    try:
        from opentelemetry import propagate  # its import reads OTEL_PROPAGATORS
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        propagate.get_global_textmap()
        sends = BatchSpanProcessor(_exporter(exporter))
    except ImportError as error:
        raise InputError(f"LORA_FS_TRACES={exporter} needs OpenTelemetry: {install_extra('otel')}") from error
    except ValueError as error:
        raise InputError(f"LORA_FS_TRACES={exporter}: {error}: look at the OTEL_* variables") from error
    named = Resource.create({"service.instance.id": instance, "service.version": __version__})
    if str(named.attributes.get("service.name", "")).startswith("unknown_service"):
        named = named.merge(Resource({"service.name": SERVICE}))
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    provider.add_span_processor(sends)
    use(provider)

    def end() -> None:
        use(None)
        last = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(END_S)  # a receiver that does not answer would take 30 s
        if last.is_alive():
            told = event("traces.lost")
            logger.warning("the last spans were not taken in %.0f s", END_S, extra=told)

    return end


def use(provider: TracerProvider | None) -> None:
    """Make spans with ``provider`` from now on, with None no more."""
    global _tracer
    _tracer = provider.get_tracer("lora_fs") if provider is not None else None


def _exporter(name: str) -> SpanExporter:
    if name == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\n")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def is_on() -> bool:
    """Return whether spans are made."""
    return _tracer is not None


@contextmanager
def span(name: str, *, carrier: Mapping[str, str] | None = None, **attributes: Value) -> Iterator[None]:
    """A span around the block, child of the one around it. It records an error that leaves the block.

    Args:
        carrier: the headers of an incoming request: its sender's span is the parent.
        attributes: a double underscore stands for a dot.
    """
    if _tracer is None:
        yield
        return
    from opentelemetry import context, propagate
    from opentelemetry.trace import SpanKind

    kind = SpanKind.INTERNAL if carrier is None else SpanKind.SERVER
    # The sender's context is the one around: with its span it has its baggage.
    sent = None if carrier is None else context.attach(propagate.extract(dict(carrier)))
    try:
        with _tracer.start_as_current_span(
            name, None, kind, _dotted(attributes), record_exception=False, set_status_on_exception=False
        ):
            try:
                yield
            except Exception as error:
                failed(type(error).__name__)
                raise
    finally:
        if sent is not None:
            context.detach(sent)


def note(**attributes: Value) -> None:
    """Add to the span around, as ``span`` takes them."""
    if _tracer is not None:
        from opentelemetry.trace import get_current_span

        get_current_span().set_attributes(_dotted(attributes))


def answered(status: int) -> None:
    """Add an answer's HTTP status to the span around; 500 and more are its error."""
    note(http__response__status_code=status)
    if status >= 500:
        _set_error()


def failed(kind: str) -> None:
    """Give the span around an error. Of an error it takes no text, which may quote what a client sent."""
    note(error__type=kind)
    _set_error()


def _set_error() -> None:
    if _tracer is not None:
        from opentelemetry.trace import StatusCode, get_current_span

        get_current_span().set_status(StatusCode.ERROR)


def outgoing(headers: Headers) -> Headers:
    """A request's headers with this block's span as its parent; without tracing, as they are."""
    if _tracer is None:
        return headers
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    carried = {name.lower() for name in propagate.get_global_textmap().fields}
    return [(name, value) for name, value in headers if name.lower() not in carried] + [*carrier.items()]


def ids() -> dict[str, str]:
    """Return the ids of the current span, for a log line; empty without one."""
    if _tracer is None:
        return {}
    from opentelemetry.trace import get_current_span

    now = get_current_span().get_span_context()
    if not now.is_valid:
        return {}
    return {"trace_id": f"{now.trace_id:032x}", "span_id": f"{now.span_id:016x}"}


def _dotted(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {name.replace("__", "."): value for name, value in attributes.items()}

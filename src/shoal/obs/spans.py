"""Spans: where the time of each request went, for a tracing system that supports OpenTelemetry.

Owns the names of spans and their attributes. OpenTelemetry is optional (the extra `[otel]`) and loaded only if spans
are switched on. No request waits for a span: a thread of its own sends them, and drops them when there are too many.
Spans hold no prompts and no answers. Knows no HTTP beyond the header that names the caller's span.

    completion ├─────────────────────────────────────────────────┤
    queue       ├───────┤
    prefill             ├─────────┤ first token
    decode                        ├──────────────────────────────┤
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.errors import BadConfig

TRACES = "/v1/traces"  # where a collector takes them
CLOSE_S = 3.0  # longest wait for the last spans to be sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One generation request from its arrival to its end. Times are seconds since 1970."""

    name: str
    began_s: float
    asked_s: float  # when it was submitted to the engine
    queue_s: float = 0.0  # how long it waited there
    first_token_s: float | None = None  # None: it got no token
    ended_s: float
    error: str = ""  # the kind of error that ended it
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    parent: str = ""  # the traceparent header


class Spans(Protocol):
    """Takes requests that have ended."""

    def record(self, walk: Walk) -> None: ...

    def close(self) -> None: ...


class NoSpans:
    """Spans are switched off."""

    def record(self, walk: Walk) -> None: ...

    def close(self) -> None: ...


def parts(walk: Walk) -> list[tuple[str, float, float]]:
    """(name, begin, end) of what a request went through.

    >>> parts(Walk(name="x", began_s=0.0, asked_s=1.0, queue_s=2.0, first_token_s=4.0, ended_s=9.0))
    [('queue', 1.0, 3.0), ('prefill', 3.0, 4.0), ('decode', 4.0, 9.0)]
    """
    if walk.first_token_s is None:
        return [("queue", walk.asked_s, walk.ended_s)]
    started_s = min(walk.asked_s + walk.queue_s, walk.first_token_s)
    return [
        ("queue", walk.asked_s, started_s),
        ("prefill", started_s, walk.first_token_s),
        ("decode", walk.first_token_s, max(walk.first_token_s, walk.ended_s)),
    ]


class OtelSpans:
    """Hands spans to an OpenTelemetry tracer provider."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("shoal")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, walk: Walk) -> None:
        caller = self._propagator.extract({"traceparent": walk.parent}) if walk.parent else None
        whole = self._tracer.start_span(
            walk.name,
            context=caller,
            kind=self._trace.SpanKind.SERVER,
            attributes=dict(walk.facts),
            start_time=_ns(walk.began_s),
        )
        inside = self._trace.set_span_in_context(whole)
        for name, begin_s, end_s in parts(walk):
            part = self._tracer.start_span(name, context=inside, start_time=_ns(begin_s))
            part.end(end_time=_ns(end_s))
        if walk.error:
            whole.set_status(self._trace.Status(self._trace.StatusCode.ERROR, walk.error))
        whole.end(end_time=_ns(walk.ended_s))

    def close(self) -> None:
        """Send what is left, if the collector takes it in time."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(CLOSE_S)


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)


def open_spans(endpoint: str | None, version: str) -> Spans:
    """Spans for the collector at this URL; none for None."""
    if endpoint is None:
        return NoSpans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise BadConfig(
            f"--otlp-endpoint needs OpenTelemetry, of which {error.name or 'a part'} is missing; "
            "install shoal with its extra [otel] (in a checkout: pip install '.[otel]'), or leave the flag out"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "shoal", "service.version": version}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
    return OtelSpans(provider)


def traces_url(endpoint: str) -> str:
    """A collector's address with the path for traces.

    >>> traces_url("http://collector:4318"), traces_url("http://collector:4318/v1/traces")
    ('http://collector:4318/v1/traces', 'http://collector:4318/v1/traces')
    """
    return endpoint if endpoint.endswith(TRACES) else endpoint.rstrip("/") + TRACES

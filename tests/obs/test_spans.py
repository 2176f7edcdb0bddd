"""Spans: what they show of a request's time, with and without OpenTelemetry."""

import importlib
import sys
from typing import Any

import pytest

from shoal.errors import BadConfig
from shoal.obs.spans import NoSpans, OtelSpans, Walk, open_spans, parts
from tests.obs.collector import collector
from tests.server.fake_client import FakeClient
from tests.server.fronts import ask, complete, front


def installed() -> bool:
    try:
        for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
            importlib.import_module(name)
    except ImportError:
        return False
    return True


otel = pytest.mark.skipif(not installed(), reason="OpenTelemetry is not installed")


class Kept:
    """Keeps all walks."""

    def __init__(self) -> None:
        self.walks: list[Walk] = []

    def record(self, walk: Walk) -> None:
        self.walks.append(walk)

    def close(self) -> None: ...


def test_the_parts_follow_each_other_without_gaps() -> None:
    walk = Walk(name="x", began_s=10.0, asked_s=11.0, queue_s=2.0, first_token_s=14.0, ended_s=20.0)
    found = parts(walk)
    assert [name for name, _, _ in found] == ["queue", "prefill", "decode"]
    assert [begin for _, begin, _ in found] == [11.0, 13.0, 14.0]
    assert [end for _, _, end in found] == [13.0, 14.0, 20.0]


def test_a_request_without_tokens_has_only_a_queue_span() -> None:
    assert parts(Walk(name="x", began_s=1.0, asked_s=2.0, ended_s=5.0)) == [("queue", 2.0, 5.0)]


def test_clocks_that_disagree_make_no_negative_times() -> None:
    walk = Walk(name="x", began_s=1.0, asked_s=2.0, queue_s=9.0, first_token_s=3.0, ended_s=2.5)
    assert all(begin <= end for _, begin, end in parts(walk))


@pytest.mark.parametrize("stream", [False, True])
def test_every_generation_is_recorded_without_its_text(stream: bool) -> None:
    kept = Kept()
    app = front(spans=kept)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x-request-id": "mine"}
    body = {"prompt": "my secret words", "stream": stream}
    assert ask(app, "POST", "/v1/completions", json=body, headers=headers).status_code == 200
    ask(app, "GET", "/health")
    (walk,) = kept.walks
    assert walk.name == "/v1/completions"
    assert walk.parent == headers["traceparent"]
    assert walk.facts["shoal.request_id"] == "mine"
    assert walk.facts["gen_ai.usage.input_tokens"] == walk.facts["gen_ai.usage.output_tokens"]
    assert walk.first_token_s is not None
    assert walk.began_s <= walk.asked_s <= walk.first_token_s <= walk.ended_s
    assert walk.error == ""
    assert "secret" not in str(walk)


def test_an_error_is_told_by_its_kind() -> None:
    class Broken(FakeClient):
        def submit(self, job: Any, sink: Any) -> None:
            raise ZeroDivisionError("secret")

    kept = Kept()
    complete(front(Broken(), spans=kept), prompt="x")
    assert [walk.error for walk in kept.walks] == ["ZeroDivisionError"]
    assert "secret" not in str(kept.walks)


def test_without_an_endpoint_there_are_none() -> None:
    assert isinstance(open_spans(None, "1"), NoSpans)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http.trace_exporter"])
def test_without_the_library_the_message_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [missing, *(name for name in sys.modules if name.startswith(f"{missing}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(BadConfig, match=r"extra \[otel\]"):
        open_spans("http://127.0.0.1:4318", "1")


@otel
def test_spans_reach_a_tracer_as_one_tree() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    spans = OtelSpans(provider)
    spans.record(
        Walk(
            name="/v1/completions", began_s=10.0, asked_s=11.0, queue_s=2.0, first_token_s=14.0, ended_s=20.0,
            error="QueueFull", facts={"shoal.request_id": "mine"},
            parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
    )  # fmt: skip
    found = {span.name: span for span in memory.get_finished_spans()}
    whole = found.pop("/v1/completions")
    assert format(whole.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c"
    assert format(whole.parent.span_id, "016x") == "b7ad6b7169203331"
    assert whole.attributes["shoal.request_id"] == "mine"
    assert (whole.start_time, whole.end_time) == (10_000_000_000, 20_000_000_000)
    assert not whole.status.is_ok
    assert set(found) == {"queue", "prefill", "decode"}
    assert all(span.parent.span_id == whole.context.span_id for span in found.values())
    assert found["prefill"].start_time == 13_000_000_000
    spans.close()


@otel
def test_spans_are_sent_to_the_collector() -> None:
    with collector() as (url, seen):
        spans = open_spans(url, "1.2.3")
        spans.record(Walk(name="/v1/completions", began_s=1.0, asked_s=2.0, ended_s=3.0))
        spans.close()
    assert [path for path, _ in seen] == ["/v1/traces"]
    assert b"/v1/completions" in seen[0][1]
    assert b"1.2.3" in seen[0][1]
    assert b"queue" in seen[0][1]

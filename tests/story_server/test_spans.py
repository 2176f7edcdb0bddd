"""Spans of a real server, as a collector gets them: one tree for each request, and times that can be."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.obs.collector import collector
from tests.story_server.servers import SMALL, long_stream, running

pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OFTEN = {"OTEL_BSP_SCHEDULE_DELAY": "200"}  # milliseconds between two deliveries
DEAD = "http://127.0.0.1:9"  # a port on which nobody listens


def spans_in(posted: list[tuple[str, bytes]]) -> list[Any]:
    """All that was sent, in order."""
    sent = [ExportTraceServiceRequest.FromString(body) for _, body in posted]
    return [s for one in sent for resource in one.resource_spans for scope in resource.scope_spans for s in scope.spans]


def facts_of(span: Any) -> dict[str, Any]:
    return {fact.key: getattr(fact.value, fact.value.WhichOneof("value")) for fact in span.attributes}


def assert_a_tree(whole: Any, parts: dict[str, Any]) -> None:
    """Its parts are below it, follow each other without a gap, and lie within it."""
    assert set(parts) == {"queue", "prefill", "decode"}
    for part in parts.values():
        assert (part.trace_id, part.parent_span_id) == (whole.trace_id, whole.span_id)
    queue, prefill, decode = parts["queue"], parts["prefill"], parts["decode"]
    times = [
        whole.start_time_unix_nano, queue.start_time_unix_nano, queue.end_time_unix_nano,
        prefill.end_time_unix_nano, decode.end_time_unix_nano,
    ]  # fmt: skip
    assert times == sorted(times)
    assert prefill.start_time_unix_nano == queue.end_time_unix_nano
    assert decode.start_time_unix_nano == prefill.end_time_unix_nano
    assert decode.end_time_unix_nano <= whole.end_time_unix_nano + 10_000_000, "two looks at the clock"


def test_a_request_becomes_a_tree_below_its_callers_span(tiny_model: Path, tmp_path: Path) -> None:
    began_ns = time.time_ns()
    with collector() as (url, posted):
        flags = ("--max-num-seqs", "1", "--otlp-endpoint", url)
        with running(tmp_path, tiny_model, *SMALL, *flags, env=OFTEN) as server:
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "mine"}
            asked = {"model": "tiny", "prompt": [5] * 300, "max_tokens": 20, "ignore_eos": True}
            answers: list[Any] = []
            with long_stream(server) as events:
                waiting = threading.Thread(
                    target=lambda: answers.append(
                        server.http.post(f"{server.url}/v1/completions", json=asked, headers=headers)
                    )
                )
                waiting.start()
                server.wait_for("one to wait", lambda: server.metrics()["shoal_requests_waiting"] == 1)
                waited_from_ns = time.time_ns()
                for _ in range(50):
                    next(events)
                waited_to_ns = time.time_ns()
            waiting.join()
            assert answers[0].status_code == 200
            server.wait_until_idle()
            server.wait_for("both spans", lambda: sum(one.name == "/v1/completions" for one in spans_in(posted)) == 2)
        assert server.process.returncode == 0
    spans = spans_in(posted)
    wholes = [span for span in spans if span.name == "/v1/completions"]
    assert len(wholes) == 2
    left, mine = sorted(wholes, key=lambda span: facts_of(span)["shoal.request_id"] == "mine")
    assert (mine.trace_id.hex(), mine.parent_span_id.hex()) == (TRACE, CALLER)
    assert left.trace_id != mine.trace_id
    assert left.status.message == "ClientGone"
    facts = facts_of(mine)
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (300, 20)
    for whole in wholes:
        assert_a_tree(whole, {span.name: span for span in spans if span.parent_span_id == whole.span_id})
        assert began_ns <= whole.start_time_unix_nano <= whole.end_time_unix_nano <= time.time_ns()
    (queue,) = [span for span in spans if span.name == "queue" and span.parent_span_id == mine.span_id]
    assert queue.start_time_unix_nano <= waited_from_ns
    assert queue.end_time_unix_nano - queue.start_time_unix_nano >= waited_to_ns - waited_from_ns, "all that time"


@pytest.mark.slow
def test_a_collector_that_does_not_answer_harms_nobody(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny_model, *SMALL, "--otlp-endpoint", DEAD, env=OFTEN) as server:
        for _ in range(5):
            assert server.complete(max_tokens=3).status_code == 200
        server.wait_for("a word in the log", lambda: "opentelemetry" in server.log(10**9))
        assert server.complete(max_tokens=3).status_code == 200
    assert "Traceback" not in server.log(10**9)

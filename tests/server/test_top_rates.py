"""shoal top's line about the server: the model, tokens per second, times to the first token."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal.cli.top_rates import ServerRates

SCRAPE = """# HELP shoal_output_tokens_total tokens
shoal_output_tokens_total{{engine="0"}} {tokens}
shoal_output_tokens_total{{engine="1"}} 10
shoal_time_to_first_token_seconds_bucket{{le="0.1"}} {early}
shoal_time_to_first_token_seconds_bucket{{le="0.2"}} {all}
shoal_time_to_first_token_seconds_bucket{{le="+Inf"}} {all}
"""


class Answers(BaseHTTPRequestHandler):
    metrics = ""
    keys: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        Answers.keys.append(self.headers.get("Authorization", ""))
        body = '{"data": [{"id": "tiny"}]}' if self.path == "/v1/models" else Answers.metrics
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_rates_are_those_between_two_looks(url: str) -> None:
    times = iter([0.0, 2.0, 4.0, 6.0])
    rates = ServerRates(url, "secret", False, lambda: next(times))
    Answers.metrics = SCRAPE.format(tokens=100, early=10, all=10)
    assert rates.lines() == ["tiny   TTFT p50 50 ms, p99 99 ms"]
    Answers.metrics = SCRAPE.format(tokens=150, early=10, all=30)
    assert rates.lines() == ["tiny   25.0 tok/s   TTFT p50 150 ms, p99 199 ms"]
    Answers.metrics = SCRAPE.format(tokens=150, early=10, all=30)
    assert rates.lines()[0].startswith("tiny   0.0 tok/s   TTFT"), "nothing new: since the server began"
    Answers.metrics = SCRAPE.format(tokens=20, early=1, all=1)
    assert rates.lines()[0].startswith("tiny   15.0 tok/s"), "the server was restarted"
    assert set(Answers.keys) == {"Bearer secret"}


def test_a_server_without_metrics_has_no_such_line() -> None:
    assert ServerRates("http://127.0.0.1:9", None, False).lines() == []

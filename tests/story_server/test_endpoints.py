"""The endpoints beside the two that generate, headers, logs, and a model without a tokenizer."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from shoal import LLM, SamplingParams
from tests.processes.stopping import stop
from tests.story.models import first, greedy, open_llm
from tests.story_server.asks import ASKED, ON, PARIS, STORY
from tests.story_server.servers import HELD, RUNNING, SMALL, WAITING, Server, assert_error_shape, running

# ---- the same text as offline ---------------------------------------------------------------------------------------


def test_the_server_says_what_the_library_says(client: OpenAI, tiny_model: Path) -> None:
    prompts = [STORY, "The dog sleeps", "fish " * 40]
    with open_llm(tiny_model, max_model_len=2048) as llm:
        want = [first(llm.generate(prompt, greedy(32))).text for prompt in prompts]
    done = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=32, extra_body=ON)
    assert [choice.text for choice in done.choices] == want


def test_the_default_model_says_what_the_library_says(smol_client: OpenAI, smol_name: str) -> None:
    with LLM(kv_memory="128MiB", dtype="float32", max_model_len=2048) as llm:
        want = first(llm.generate(PARIS, SamplingParams(temperature=0, max_tokens=16))).text
        story = first(llm.generate(STORY, SamplingParams(temperature=0, max_tokens=16))).text
    chat = smol_client.chat.completions.create(model=smol_name, messages=PARIS, temperature=0, max_tokens=16)
    assert chat.choices[0].message.content == want
    done = smol_client.completions.create(model=smol_name, prompt=STORY, temperature=0, max_tokens=16)
    assert done.choices[0].text == story


# ---- what it prints -------------------------------------------------------------------------------------------------


def test_it_says_ready_when_it_is(tiny: Server) -> None:
    assert tiny.first_health == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_curl_line_works(smol: Server) -> None:
    (line,) = [line for line in smol.logs[0].read_text().splitlines() if line.strip().startswith("curl ")]
    with subprocess.Popen(shlex.split(line), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as curl:
        assert curl.stdout is not None
        came = [curl.stdout.readline() for _ in range(4)]
        curl.terminate()
    assert json.loads(came[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    smol.wait_until_idle()


# ---- models ---------------------------------------------------------------------------------------------------------


def test_the_models_are_listed_and_retrieved(client: OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert listed[0].object == "model"
    assert client.models.retrieve("tiny").id == "tiny"


def test_an_unknown_model_is_a_404_that_names_it(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="gpt-7"):
        client.models.retrieve("gpt-7")
    with pytest.raises(NotFoundError, match="gpt-7"):
        client.completions.create(model="gpt-7", prompt=STORY)
    with pytest.raises(NotFoundError, match="gpt-7"):
        client.chat.completions.create(model="gpt-7", messages=ASKED)


# ---- tokenize, detokenize -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Once upon a time", "naïve 鱼 🐟\n\ttabs", "x" * 500])
def test_tokenize_and_detokenize_are_a_round_trip(tiny: Server, text: str) -> None:
    told = tiny.post("/tokenize", {"prompt": text}).json()
    assert told["count"] == len(told["tokens"]) > 0
    assert told["max_model_len"] == 2048
    assert tiny.post("/detokenize", {"tokens": told["tokens"]}).json()["prompt"].removeprefix("<s>") == text


def test_tokenize_counts_what_usage_counts(tiny: Server, client: OpenAI) -> None:
    told = tiny.post("/tokenize", {"prompt": STORY}).json()
    done = client.completions.create(model="tiny", prompt=STORY, max_tokens=1)
    assert done.usage is not None
    assert done.usage.prompt_tokens == told["count"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "nonsense": 1}),
        ("/tokenize", {"prompt": "a", "model": "gpt-7"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**12]}),
        ("/detokenize", {"tokens": [1.5]}),
        ("/detokenize", {"tokens": [True]}),
    ],
    ids=str,
)
def test_bad_tokenizer_requests_are_refused(tiny: Server, path: str, body: Any) -> None:
    answer = tiny.post(path, body)
    assert answer.status_code in (400, 404, 422)
    assert_error_shape(answer)


# ---- version, health, metrics, pages --------------------------------------------------------------------------------


def test_version_and_health(tiny: Server) -> None:
    assert tiny.http.get(f"{tiny.url}/version").json()["version"] == version("shoal")
    assert tiny.http.get(f"{tiny.url}/health").status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_for_people_are_html(tiny: Server, path: str) -> None:
    answer = tiny.http.get(f"{tiny.url}{path}", follow_redirects=True)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "<html" in answer.text.lower()


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(tiny: Server, path: str) -> None:
    text = tiny.http.get(f"{tiny.url}{path}", follow_redirects=True).text.lower()
    for loaded in ('src="http', "src='http", 'src="//', '<link rel="stylesheet" href="http', "@import", "cdn."):
        assert loaded not in text


def test_the_schema_is_served_and_lists_every_endpoint(tiny: Server) -> None:
    schema = tiny.http.get(f"{tiny.url}/openapi.json").json()
    assert schema["openapi"].startswith("3.")
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health"} <= set(
        schema["paths"]
    )


# a word of the list → what some metric's name must contain
FAMILIES = [
    "running",
    "waiting",
    "kv",
    "prefix",
    "preempt",
    "queue",
    "time_to_first_token|ttft",
    "inter_token",
    "e2e|end_to_end|request_seconds",
    "tokens",
    "step|pass",
    "batch",
    "budget",
    "finish",
    "reject|refus",
    "engine_restarts",
]


@pytest.mark.parametrize("words", FAMILIES)
def test_metrics_tell(tiny: Server, client: OpenAI, words: str) -> None:
    client.completions.create(model="tiny", prompt=STORY, max_tokens=4)
    text = tiny.http.get(f"{tiny.url}/metrics").text
    names = [family.name for family in text_string_to_metric_families(text)]
    ours = [name for name in names if name.startswith("shoal_")]
    assert any(word in name for name in ours for word in words.split("|")), ours


def test_metrics_are_prometheus_text_and_count_tokens(tiny: Server, client: OpenAI) -> None:
    answer = tiny.http.get(f"{tiny.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    before = tiny.metrics()
    assert {RUNNING, WAITING, HELD} <= set(before)
    client.completions.create(model="tiny", prompt=STORY, max_tokens=9, extra_body=ON)

    def grown() -> set[float]:
        after = tiny.metrics()
        counters = (name for name in after if name.endswith("_total") and "token" in name)
        return {after[name] - before.get(name, 0.0) for name in counters}

    tiny.wait_for("nine tokens to be counted", lambda: 9 in grown())  # a busy engine's numbers may be a second old


def test_dashboard_and_alerts_are_about_metrics_that_a_server_has(tiny: Server) -> None:
    """A label's values may still be to come (refusals, promises), but its metric is there from the start."""
    tiny.complete(max_tokens=2)
    text = tiny.http.get(f"{tiny.url}/metrics").text
    there = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    there |= {family.name + end for family in text_string_to_metric_families(text) for end in ("", "_total")}
    docs = Path(__file__).parents[2] / "docs"
    panels = json.loads((docs / "grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    alerts = [line for line in (docs / "operations.md").read_text().splitlines() if line.startswith("| `")]
    asked += [expression for line in alerts for expression in re.findall(r"`([^`]*shoal_[^`]*)`", line)]
    assert len(asked) > 25
    for expression in asked:
        for name in re.findall(r"\bshoal_\w+", expression):
            assert name in there, f"{name}: {expression}"


def health_answers(text: str) -> dict[str, float]:
    """Front → how often it answered GET /health."""
    return {
        sample.labels["front"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "shoal_http_requests_total" and sample.labels["route"] == "/health"
    }


def fronts_in(text: str) -> set[str]:
    """The fronts whose numbers are told: one that is late is left out."""
    return {
        sample.labels["front"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "shoal_http_active_requests"
    }


def test_one_connection_hears_of_all_fronts(tiny_model: Path, tmp_path: Path) -> None:
    """As a Prometheus scrapes: always over the same connection, so from one front of two."""
    with running(tmp_path, tiny_model, *SMALL, "--api-workers", "2") as server, httpx.Client(timeout=60) as scraper:
        url = f"{server.url}/metrics"

        def told() -> dict[str, float]:
            return health_answers(scraper.get(url).text)

        server.wait_for("both fronts to tell", lambda: len(fronts_in(scraper.get(url).text)) == 2)
        seen = told()
        before, asked = sum(seen.values()), 0
        while len(seen) < 2 or min(seen.values()) < 3:  # until both fronts have had some
            assert asked < 500, f"only {set(seen)} answers"
            other = httpx.get(f"{server.url}/health", verify=False, timeout=60)  # over a connection of its own
            assert other.status_code == 200
            asked += 1
            seen = told()
        server.wait_for("all of them to be counted", lambda: sum(told().values()) == before + asked)

        stuck = server.front_pids()[0]
        stop(stuck)
        try:  # a new connection is taken by the other one, which does not wait for long
            assert len(health_answers(httpx.get(url, timeout=60).text)) == 1
        finally:
            os.kill(stuck, signal.SIGCONT)
        server.wait_for("all of them to be told again", lambda: sum(told().values()) == before + asked)


# ---- headers and logs -----------------------------------------------------------------------------------------------


def test_a_request_id_comes_back(tiny: Server) -> None:
    given = f"mine-{uuid.uuid4()}"
    body = {"model": "tiny", "prompt": "fish", "max_tokens": 1}
    answer = tiny.http.post(f"{tiny.url}/v1/completions", json=body, headers={"X-Request-Id": given})
    assert answer.headers["x-request-id"] == given
    one = tiny.http.post(f"{tiny.url}/v1/completions", json=body).headers["x-request-id"]
    other = tiny.http.post(f"{tiny.url}/v1/completions", json=body).headers["x-request-id"]
    assert one
    assert one != other


def test_streams_and_refusals_have_a_request_id_too(tiny: Server) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "fish", "max_tokens": 1, "stream": True}
    for change, status in (({}, 200), ({"temperature": -1}, 400), ({"model": "gpt-7"}, 404)):
        answer = tiny.http.post(
            f"{tiny.url}/v1/completions", json={**body, **change}, headers={"X-Request-Id": f"mine{status}"}
        )
        assert answer.status_code == status
        assert answer.headers["x-request-id"] == f"mine{status}"


def test_two_requests_with_one_id_are_both_served(tiny: Server) -> None:
    body = {"model": "tiny", "prompt": "fish", "max_tokens": 150, "stream": True, "ignore_eos": True}
    headers = {"X-Request-Id": "the-same"}
    with tiny.http.stream("POST", f"{tiny.url}/v1/completions", json=body, headers=headers, timeout=60) as long:
        assert long.status_code == 200
        short = tiny.http.post(f"{tiny.url}/v1/completions", json={**body, "max_tokens": 2}, headers=headers)
        assert short.status_code == 200
        assert short.text.endswith("data: [DONE]\n\n")
        assert long.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("given", ["x" * 5000, "a b;c", "%0d%0aX-Evil: 1"], ids=["long", "spaces", "escapes"])
def test_an_odd_request_id_does_no_harm(tiny: Server, given: str) -> None:
    body = {"model": "tiny", "prompt": "fish", "max_tokens": 1}
    answer = tiny.http.post(f"{tiny.url}/v1/completions", json=body, headers={"X-Request-Id": given})
    assert answer.status_code in (200, 400, 431)
    assert "x-evil" not in answer.headers


def test_ignored_fields_are_answered_with_a_warning(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=ASKED, max_tokens=1, user="me", metadata={"a": "b"}, store=False
    )
    warning = raw.headers["x-shoal-warning"]
    assert all(name in warning for name in ("user", "metadata", "store")), warning
    plain = client.chat.completions.with_raw_response.create(model="tiny", messages=ASKED, max_tokens=1)
    assert "x-shoal-warning" not in plain.headers


def test_streams_carry_the_warning_too(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="tiny", prompt="fish", max_tokens=1, user="me", stream=True)
    assert "user" in raw.headers["x-shoal-warning"]
    assert list(raw.parse())


def test_logs_have_request_ids_and_never_prompts(tiny: Server, client: OpenAI) -> None:
    given = f"id-{uuid.uuid4()}"
    secret = f"secret {uuid.uuid4()}"
    done = client.completions.create(
        model="tiny", prompt=secret, max_tokens=2, extra_headers={"X-Request-Id": given}, stop=[f"stop {secret}"]
    )
    assert done.choices
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": secret}], max_tokens=2)
    with pytest.raises(BadRequestError):
        client.completions.create(model="tiny", prompt=secret, temperature=-1)
    tiny.wait_for("the request id in its log", lambda: given in tiny.log(10**9))
    assert secret not in tiny.log(10**9)


def test_a_browser_may_call_from_the_allowed_page_only(tiny: Server) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}

    def allowed(origin: str) -> str | None:
        answer = tiny.http.options(f"{tiny.url}/v1/chat/completions", headers={"Origin": origin, **asked})
        return answer.headers.get("access-control-allow-origin")

    assert allowed("https://page.example") == "https://page.example"
    assert allowed("https://elsewhere.example") is None


# ---- a model without a tokenizer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(bare_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("bare-server"), bare_model, *SMALL, "--max-model-len", "512") as server:
        yield server


def test_a_model_without_a_tokenizer_serves_token_ids(bare: Server, client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 8}
    extra = {**ON, "return_token_ids": True}
    with bare.openai() as made:
        done = made.completions.create(**asked, extra_body=extra)
        streamed = list(made.completions.create(**asked, extra_body=extra, stream=True))
    want = client.completions.create(**asked, extra_body=extra)
    ids = (want.choices[0].model_extra or {})["token_ids"]
    assert (done.choices[0].model_extra or {})["token_ids"] == ids
    parts = [(c.model_extra or {}).get("token_ids") or [] for chunk in streamed for c in chunk.choices]
    assert [token for part in parts for token in part] == ids


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a text"}),
        ("/v1/completions", {"prompt": ["a text", "another"]}),
        ("/v1/completions", {"prompt": [5], "stop": "a text"}),
        ("/v1/chat/completions", {"messages": ASKED}),
        ("/tokenize", {"prompt": "a text"}),
        ("/detokenize", {"tokens": [5]}),
    ],
    ids=str,
)
def test_a_model_without_a_tokenizer_refuses_text(bare: Server, path: str, body: Any) -> None:
    answer = bare.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400
    assert "tokenizer" in assert_error_shape(answer)["message"]


# ---- the programs of the API page -----------------------------------------------------------------------------------


def test_programs_of_the_api_page_run(tiny: Server) -> None:
    """Those of clients that are installed here, in one process; tests/clients runs the others.

    An answer of random weights may be blank, so what counts is that it is printed."""
    paths = tiny.http.get(f"{tiny.url}/openapi.json").json()["paths"]
    stored = tiny.post("/v1/responses", {"input": "Hello", "max_output_tokens": 2}).json()["id"]
    ran = 0
    for path, methods in sorted(paths.items(), key=lambda one: "delete" in one[1]):  # it is deleted last
        for method, operation in sorted(methods.items(), reverse=True):
            source = operation["x-codeSamples"][0]["source"].replace("http://localhost:8000", tiny.url)
            if re.search(r"from (anthropic|ollama) import", source) or path.endswith("/cancel"):
                continue
            program = compile(source.replace('"id"', json.dumps(stored)), f"{method} {path}", "exec")
            printed: list[Any] = []
            exec(program, {"print": lambda *values, printed=printed, **_: printed.extend(values)})
            assert printed, f"{method} {path} printed nothing"
            ran += 1
    assert ran > 25

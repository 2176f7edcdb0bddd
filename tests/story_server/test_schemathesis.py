"""schemathesis over the schema the server serves: no 500, and no answer that the schema does not allow."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.story_server.servers import SMALL, Server, running

EXAMPLES = 15
OPERATIONS = [
    ("/api/chat", "POST"),
    ("/api/generate", "POST"),
    ("/api/tags", "GET"),
    ("/api/ps", "GET"),
    ("/api/show", "POST"),
    ("/api/version", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/chat/completions/batch", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/{id}", "GET"),
    ("/v1/responses/{id}", "DELETE"),
    ("/v1/responses/{id}/cancel", "POST"),
    ("/v1/responses/{id}/input_items", "GET"),
    ("/tokenize", "POST"),
    ("/v1/tokenize", "POST"),
    ("/v1/detokenize", "POST"),
    ("/generate", "POST"),
    ("/get_model_info", "GET"),
    ("/model_info", "GET"),
    ("/get_server_info", "GET"),
    ("/health_generate", "GET"),
    ("/flush_cache", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/load", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/server_info", "GET"),
    ("/tokenizer_info", "GET"),
    ("/reset_prefix_cache", "POST"),
    ("/health", "GET"),
    ("/version", "GET"),
    ("/metrics", "GET"),
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 503]
"""  # 503 is what a tiny timeout gets, and the schema says so
HOOKS = """
import schemathesis

@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "tiny"
    return body
"""  # what with_our_model() does, for the program


def with_our_model(body: Any) -> Any:
    """Any text is a model's name as far as the schema knows; this makes most requests get further than a 404."""
    if not isinstance(body, dict):
        return body
    known = {name: value for name, value in body.items() if name != "previous_response_id"}
    if len(known) < len(body) and body.get("input") is None:
        known["input"] = "Hi"
    return {**known, "model": "tiny"} if "model" in known else known


@pytest.fixture(scope="module")
def short(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Every answer is short here, whatever max_tokens says."""
    flags = ("--max-model-len", "128", "--max-num-seqs", "64")
    with running(tmp_path_factory.mktemp("short"), tiny_model, *SMALL, *flags) as server:
        yield server
        server.wait_until_idle()
        assert server.complete(max_tokens=2).status_code == 200


@pytest.fixture(scope="module")
def schema(short: Server) -> Any:
    load_all_checks()
    config = schemathesis.Config.from_str(CONFIG)
    return schemathesis.openapi.from_url(f"{short.url}/openapi.json", config=config, timeout=120)


def test_no_operation_is_left_out(short: Server) -> None:
    paths = httpx.get(f"{short.url}/openapi.json", timeout=120).json()["paths"]
    served = {(path, method.upper()) for path, methods in paths.items() for method in methods if method != "parameters"}
    assert {operation for operation in served if operation[0] not in ("/", "/docs", "/openapi.json")} == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_generated_requests_get_answers_the_schema_allows(schema: Any, path: str, method: str) -> None:
    operation = schema[path][method]
    modes = [GenerationMode.POSITIVE]
    if method == "POST":
        modes.append(GenerationMode.NEGATIVE)

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]))
    def ask(case: schemathesis.Case) -> None:
        if case.meta.generation.mode == GenerationMode.POSITIVE:
            case.body = with_our_model(case.body)
        statuses.add(case.call_and_validate(checks=CHECKS, timeout=60).status_code)

    statuses: set[int] = set()
    ask()
    assert 200 in statuses or "{id}" in path, "some of it must have been served"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_schemathesis_program_finds_nothing(short: Server, tmp_path: Path) -> None:
    names = ",".join(check.__name__ for check in CHECKS)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{short.url}/openapi.json", "--checks", names]
    command += [
        "--phases",
        "examples,coverage,fuzzing",
        "--max-examples",
        "100",
        "--request-timeout",
        "60",
        "--seed",
        "1",
    ]
    (tmp_path / "hooks.py").write_text(HOOKS)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    env = {**os.environ, "NO_COLOR": "1", "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

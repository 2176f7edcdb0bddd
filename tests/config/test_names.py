"""Messages name an option as the caller wrote it: a flag on the command line, a keyword argument in Python."""

from dataclasses import fields
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from shoal.cli import main
from shoal.config.engine import EngineConfig
from shoal.config.options import as_flags, as_keywords
from shoal.errors import BadConfig, BadParameter, ModelNotFound

NAMES = [item.name for item in fields(EngineConfig)]
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("max_num_seqs must be at least 1, not 0", "--max-num-seqs must be at least 1, not 0"),
        ("memory=ondemand with when_short=wait: x", "--memory ondemand with --when-short wait: x"),
        ("the KV memory is short", "the KV memory is short"),
        ("device must be a name", "--device must be a name"),
        ("chat_template.jinja in the folder", "chat_template.jinja in the folder"),
        ("raise --max-model-len", "raise --max-model-len"),
        ('lower kv_memory= or kv_share=; use device="cpu"', "lower --kv-memory or --kv-share; use --device cpu"),
        ("a folder '/x/block_size'", "a folder '/x/block_size'"),
    ],
)
def test_as_flags(text: str, flags: str) -> None:
    assert as_flags(text, NAMES) == flags


def test_as_keywords_leaves_other_flags_alone() -> None:
    assert as_keywords("see --help; raise --kv-memory or lower --max-model-len", NAMES) == (
        "see --help; raise kv_memory= or lower max_model_len="
    )


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["generate", "x", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["generate", "x", "--memory", "ondemand", "--when-short", "wait"], "use --memory reserve"),
        (["generate", "x", "--model", "/no/such/model"], "no model at '/no/such/model'"),
        (["generate", "x", "--chat-template", "/no/such"], "cannot read --chat-template /no/such"),
        (["serve", "/no/such/model"], "no model at"),
        (["serve", "--draft-model", "nix", "--speculate", "draft"], "no model at 'nix'"),
        (["bench", "throughput", "--workload", "cpu46"], "did you mean cpu64?"),
        (["bench", "throughput", "--workload", "single", "--config", "llama8b", "--load-format", "dummy"], "llama-8b"),
        (["compare", "--trace", "nix.csv"], "no trace 'nix.csv'"),
        (["compare", "--presets", "vlm"], "did you mean 'vllm'?"),
        (["bench", "policies", "--only", "flod"], "did you mean 'flood'?"),
    ],
    ids=" ".join,
)
def test_checked_before_anything_loads(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, argv: list[str], told: str
) -> None:
    def never(*args: object, **more: object) -> None:
        raise AssertionError("it was checked too late")

    monkeypatch.setattr("shoal.build.load", never)
    monkeypatch.setattr("shoal.engine.supervise.Supervisor.run", never)
    assert main(argv) == 2
    caught = capsys.readouterr()
    assert told in caught.err
    assert len(caught.err.splitlines()) == 1


def test_no_gpu_is_said_at_once(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for argv in (["serve", "--device", "cuda"], ["generate", "x", "--device", "cuda"]):
        assert main(argv) == 2
        assert "--device cuda: this machine has no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["serve", "--max-num-seq", "8"], "unknown flag --max-num-seq (did you mean --max-num-seqs?)"),
        (["generate", "x", "--temprature=1"], "unknown flag --temprature (did you mean --temperature?)"),
        (["generate", "x", "--order", "fcsf"], "'fcsf' is not known (did you mean fcfs?); choose from: fcfs, priority"),
        (["serv"], "'serv' is not known (did you mean serve?)"),
        (["bench", "latencies"], "did you mean latency?"),
    ],
    ids=" ".join,
)
def test_a_misspelt_flag_names_the_one_that_was_meant(capsys: Capture, argv: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    usage, message = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: shoal")
    assert told in message


def test_a_misspelt_keyword_names_the_one_that_was_meant() -> None:
    with pytest.raises(BadConfig, match=r"unknown engine option 'max_model_length' \(did you mean 'max_model_len'\?\)"):
        LLM(max_model_length=8)  # type: ignore[call-arg]
    with pytest.raises(BadParameter, match=r"unknown sampling parameter 'temprature' \(did you mean 'temperature'\?\)"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(BadConfig, match=r"unknown dtype 'half'.*known: auto, bfloat16, float16, float32"):
        LLM(dtype="half")


def test_python_reads_keywords_not_flags(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        LLM(tmp_path / "none")
    assert "--" not in str(caught.value)

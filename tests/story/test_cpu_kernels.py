"""Whole runs on every kind of CPU kernel: C of each instruction set, plain torch, one thread, 16- and 8-bit weights."""

import json
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from shoal.bench.cpu_noise import Noise, NoiseWatch
from shoal.cli import main
from shoal.kernels.cpu import VARIABLE, Library, compiled, find
from shoal.machine.cgroup import MemoryLimit
from tests.story.models import greedy, open_llm, token_ids

LEVELS = ["off", *(level for level in compiled.NEEDS if getattr(find(level), "level", "") == level)]
LOWER = "avx2" if "avx2" in LEVELS else "portable"  # what a CPU without AVX-512 or NEON has
PROMPTS = [[7, 8, 9], [20] * 40, [5], list(range(30, 95))]
Capture = pytest.CaptureFixture[str]


def answers(folder: Path, **options: object) -> list[list[int]]:
    with open_llm(folder, **options) as llm:
        return token_ids(llm.generate(PROMPTS, greedy(20)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_kernel_says_the_same(model: Path, level: str, threads: int) -> None:
    assert answers(model, cpu_kernels=level, threads=threads) == answers(model, cpu_kernels="off")


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"dtype": "float16"}])
@pytest.mark.parametrize("level", LEVELS)
def test_small_weights(model: Path, level: str, options: dict[str, str]) -> None:
    """They run everywhere; in C a request says the same alone and in company, whatever its chunks."""
    together = answers(model, cpu_kernels=level, **options)
    assert [len(one) for one in together] == [20] * 4
    if level == "off":
        return
    assert answers(model, cpu_kernels=level, chunk_tokens=7, block_size=8, **options) == together
    with open_llm(model, cpu_kernels=level, **options) as llm:
        for prompt, wanted in zip(PROMPTS, together, strict=True):
            assert token_ids(llm.generate([prompt], greedy(20))) == [wanted]


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_an_older_cpu_with_one_core(model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]) -> None:
    """The environment forbids newer instructions; the answers are those of the level asked for by name."""
    monkeypatch.setenv(VARIABLE, LOWER)
    found = find()
    assert isinstance(found, Library)
    assert found.level == LOWER
    one_core = answers(model, threads=1, **options)
    monkeypatch.delenv(VARIABLE)
    assert one_core == answers(model, threads=2, cpu_kernels=LOWER, **options)


def test_int8_is_near(model: Path) -> None:
    """What the model thinks of a text, in 8 bits and in full."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for quantization in ("none", "int8"):
        with open_llm(model, quantization=quantization) as llm:
            logprobs = llm.generate([PROMPTS[3]], params)[0].prompt_logprobs or []
            found.append([one.logprob for one in logprobs if one is not None])
    assert found[0] != found[1]
    assert max(abs(one - two) for one, two in zip(*found, strict=True)) < 0.3


def test_the_kernels_can_be_chosen_by_name_only(model: Path) -> None:
    with pytest.raises(Exception, match="cpu_kernels"):
        LLM(str(model), cpu_kernels="fast")


@pytest.mark.parametrize("level", LEVELS)
def test_doctor_at_every_level(capsys: Capture, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr("shoal.bench.doctor.OUTPUTS", 64)
    assert main(["doctor", "--cpu-kernels", level, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"] == ("plain torch: switched off" if level == "off" else f"C kernels, {level}")
    assert report["bandwidth_gb_s"] > 0
    assert report["matrix_gflop_s"] > 0
    assert [one["type"] for one in report["linear"]] == ["float32", "bfloat16", "int8"]
    assert all(one["one_row_gb_s"] > 0 and one["many_rows_gflop_s"] > 0 for one in report["linear"])
    assert {"others", "stolen", "cpu_quota", "memory_limit_bytes"} <= set(report)
    assert all({"others", "stolen"} <= set(one) for one in report["linear"])


def test_doctor(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.doctor.OUTPUTS", 64)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert str(find()) in shown
    assert "GB/s read" in shown
    monkeypatch.setattr(NoiseWatch, "noise", lambda self: Noise(0.2, 0.1))
    monkeypatch.setattr("shoal.bench.doctor.cpu_quota", lambda: 1.5)
    monkeypatch.setattr("shoal.bench.doctor.memory_limit", lambda: MemoryLimit(3 * 2**30, 2**30))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Noisy machine: other programs and stolen time took 30% of the CPUs (10% stolen) during")
    assert shown.count("(others used 30% of the CPUs)") == 5, "at each figure"
    assert "a quota of 1.5 CPUs" in shown
    assert "3.0 GiB (control group)" in shown
    assert main(["doctor", "--cpu-kernels", "mmx"]) == 2
    assert "portable" in capsys.readouterr().err


def test_accuracy(model: Path, tmp_path: Path, capsys: Capture) -> None:
    lines = [{"turns": ["Once upon a time there was a little fish", "The quick brown fox"]}, {"text": "a lazy dog"}]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(map(json.dumps, lines)))
    small = ["--kv-memory", "64MiB", "--threads", "1", "--model", str(model), "--texts", str(texts)]
    assert main(["bench", "accuracy", *small, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["type"] for row in rows] == ["float32", "bfloat16", "int8"]
    assert rows[0]["ratio"] == 1
    assert all(0.9 < row["ratio"] < 1.1 for row in rows)
    assert rows[0]["same_top1"] == 1
    assert all(0.5 < row["same_top1"] <= 1 for row in rows)
    assert rows[0]["perplexity"] != rows[2]["perplexity"]
    assert main(["bench", "accuracy", *small, "--types", "int3"]) == 2
    assert "int3" in capsys.readouterr().err
    assert main(["bench", "accuracy", *small[:-1], str(tmp_path / "none.txt")]) == 2


def test_accuracy_of_fp8_over_the_text_that_comes_with_python(model: Path, capsys: Capture) -> None:
    small = ["--kv-memory", "64MiB", "--threads", "1", "--model", str(model), "--tokens", "300"]
    assert main(["bench", "accuracy", *small, "--types", "float32,fp8,kv-fp8"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[-4:]] == ["type", "float32", "fp8", "kv-fp8"]
    assert shown[-3].split()[3] == "100.00%"
    whole, weights, kv = (float(line.split()[1]) for line in shown[-3:])
    assert len({whole, weights, kv}) == 3

"""benchmarks/neighbours.py: its neighbours, its limit, what counts, its table. Real processes, a stand-in engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import neighbours
import pytest
from neighbours import Neighbours, Worker, counted, measured, seconds_for, share, speed, summary, table

PATIENCE_S = 60.0
TELL = """
import json, os, subprocess, sys, time
def tell(what):
    print("noise without an end" + chr(10) + json.dumps(what), flush=True)
tell({"ready": {"version": "1.0", "load_s": 0.1}})
sys.stdin.readline()
"""


def until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def children(parent: int) -> set[int]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,stat,comm"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()[1:]]
    return {int(pid) for pid, ppid, stat, name in rows if int(ppid) == parent and stat[0] != "Z" and name != "ps"}


def gone(pid: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return not listed.strip() or listed.startswith("Z")


# ---- neighbours ------------------------------------------------------------------------------------------------------


def test_neighbours_are_read_and_named() -> None:
    assert Neighbours.parse("0") == Neighbours(0)
    assert Neighbours.parse("8").name == "8 spinning"
    assert Neighbours.parse("1x20ms") == Neighbours(1, 20)
    assert Neighbours.parse("1x20ms").name == "1 in turns of 20 ms"
    for wrong in ("", "two", "-1", "1x20", "1x0ms", "20ms"):
        with pytest.raises(SystemExit, match="should be a number of processes"):
            Neighbours.parse(wrong)


def test_the_fair_share_counts_one_that_comes_and_goes_as_half() -> None:
    assert Neighbours(0).fair_share(2) == 1.0
    assert Neighbours(2).fair_share(2) == 0.5
    assert Neighbours(8).fair_share(2) == 0.2
    assert Neighbours(1, 20).fair_share(2) == 0.8


def test_neighbours_end_with_the_block_also_when_it_fails() -> None:
    before = children(os.getpid())

    def interrupted() -> None:
        with Neighbours(2).running():
            assert len(children(os.getpid()) - before) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert children(os.getpid()) <= before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_neighbours_end_when_the_benchmark_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time, neighbours\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a program in the background may ignore it
        "neighbours.end_on_sigterm()\n"
        "with neighbours.Neighbours(1).running(), neighbours.Neighbours(1, 20).running():\n"
        "    print('running', flush=True)\n"
        "    time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout
        assert process.stdout.readline() == "running\n"
        started = children(process.pid)
        assert len(started) == 2
        process.send_signal(number)
        process.wait(PATIENCE_S)
    until(lambda: all(gone(one) for one in started))


def test_the_reference_is_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "REFERENCE_S", 0.2)
    found = neighbours.reference(Neighbours(1), 1)
    assert found["neighbours"] == "1 spinning"
    assert 0.0 < found["share"] < 2.0  # a machine that is not told of stolen time counts it


# ---- one measurement -------------------------------------------------------------------------------------------------


def run_stand_in(
    monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, limit_s: float = PATIENCE_S
) -> tuple[dict[str, Any] | None, Worker]:
    """`measured` with this program as the engine, one neighbour and 10 tokens to wait for."""
    stand_in = folder / "engine.py"
    stand_in.write_text(TELL + code)
    monkeypatch.setattr(neighbours, "WORKER", stand_in)
    with (folder / "errors").open("wb") as errors:
        worker = Worker(sys.executable, {}, dict(os.environ), errors)
        try:
            return measured(worker, Neighbours(1), 10, limit_s), worker
        finally:
            worker.kill()


def test_an_engine_that_finishes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "tell({'s': 0.5, 'tokens': 4})\ntell({'s': 1.0, 'tokens': 10})\ntime.sleep(600)\n"
    found, worker = run_stand_in(monkeypatch, tmp_path, code)
    assert found is not None
    assert set(found) == {"finished", "points", "version", "load_s", "others", "stolen"}
    assert found["finished"]
    assert found["points"] == [(0.5, 4), (1.0, 10)]
    assert worker.process.returncode == -signal.SIGKILL


def test_an_engine_that_stands_still_is_stopped_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "tell({'s': 0.1, 'tokens': 3})\n"
        "time.sleep(600)\n"
    )
    found, _ = run_stand_in(monkeypatch, tmp_path, code, limit_s=3.0)
    assert found is not None
    assert not found["finished"]
    assert found["points"][-1][0] == 3.0
    assert speed(counted({"kind": "throughput", **found})) in (0.0, 1.0)  # 0: the machine was too busy to start it
    if (tmp_path / "child").exists():
        until(lambda: gone(int((tmp_path / "child").read_text())))


def test_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, _ = run_stand_in(monkeypatch, tmp_path, "tell({'s': 0.1, 'tokens': 3})\nsys.exit('no memory')\n")
    assert found is None
    assert (tmp_path / "errors").read_text() == "no memory\n"


@pytest.mark.slow
def test_shoal_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "work.json").write_text("[[40, 12], [20, 5], [9, 9]]")
    flags = ["--model", str(tmp_path), "--workload", str(tmp_path / "work.json"), "--requests", "2", "--runs", "1"]
    flags += ["--only", "shoal:float32", "--neighbours", "0,1", "--figures", str(tmp_path / "runs.jsonl"), "--json"]
    monkeypatch.setattr(sys, "argv", ["neighbours.py", *flags])
    monkeypatch.setattr(neighbours, "REFERENCE_S", 0.2)
    neighbours.main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["throughput"]["shoal:float32"]["1 spinning"]["tok_s"] > 0
    assert figures["single"]["shoal:float32"]["quiet"]["of_fair_share"] == 1.0
    kept = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [run["points"][-1][1] for run in kept if run.get("kind") == "throughput"] == [17, 17]


# ---- figures ---------------------------------------------------------------------------------------------------------


def made(row: str, kind: str, name: str, points: list[tuple[float, int]], finished: bool = True) -> dict[str, Any]:
    return {
        "row": row, "kind": kind, "neighbours": name, "points": points, "finished": finished, "version": "1",
        "others": 0.0,
    }  # fmt: skip


def test_a_single_request_counts_from_its_first_token() -> None:
    points = [(2.0, 1), (3.0, 6), (4.0, 11)]
    assert speed(counted(made("a:b", "single", "quiet", points))) == 5.0
    assert speed(counted(made("a:b", "throughput", "quiet", points))) == 2.75
    assert speed(counted(made("a:b", "single", "quiet", [(60.0, 0)], finished=False))) == 0.0
    assert speed(counted(made("a:b", "single", "quiet", [(9.0, 1), (60.0, 1)], finished=False))) == 0.0


def test_a_share_compares_the_time_for_the_same_tokens() -> None:
    quiet = [(0.0, 0), (4.0, 0), (5.0, 100)]  # four seconds of prompts, then a second of tokens
    assert seconds_for(quiet, 50) == 4.5
    assert seconds_for(quiet, 200) == 10.0
    assert share([(0.0, 0), (10.0, 100)], [quiet]) == 0.5
    assert share([(0.0, 0), (9.0, 50)], [quiet]) == 0.5  # stopped; by tokens per second it would be 0.28
    assert share([(0.0, 0), (60.0, 0)], [quiet]) == 0.0
    assert share([(0.0, 0), (10.0, 100)], []) is None


def test_the_table() -> None:
    cases = [Neighbours(0), Neighbours(2)]
    runs: list[dict[str, Any]] = [{"row": "scheduler", "neighbours": "2 spinning", "share": 0.49}]
    for seconds in (1.0, 2.0, 9.0):
        runs.append(made("shoal:float32", "throughput", "quiet", [(seconds, 100)]))
        runs.append(made("shoal:float32", "throughput", "2 spinning", [(2.5 * seconds, 100)]))
    runs.append(made("openvino:f32", "throughput", "quiet", [(2.5, 100)]))
    runs.append(made("openvino:f32", "throughput", "2 spinning", [(60.0, 60)], finished=False))
    runs.append(made("llama.cpp:q8_0", "throughput", "quiet", [(0.1, 100)]))  # 8 bits: another class
    runs.append(made("shoal:float32", "throughput", "7 spinning", [(1.0, 1)]))  # not asked for
    lines = table(summary(runs, cases, 2)).splitlines()
    assert lines[0] == "| output tok/s (of the fair share) | quiet | 2 spinning |"
    assert lines[2:4] == ["| fair share | 1.00 | 0.50 |", "| scheduler | - | 0.49 |"]
    assert "| shoal:float32 | 50.0 | 20.0 (0.80) |" in lines
    assert "| openvino:f32 | 40.0 | 1.0* (0.05) |" in lines
    assert "| llama.cpp:q8_0 | 1,000.0 | - |" in lines
    assert "| shoal:float32 over the best peer | 1.25 | 20.00 |" in lines
    assert summary([*runs, {**runs[1], "others": 0.3, "stolen": 0.1}], cases, 2)["others"] == 0.3


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    runs = [
        made("shoal:float32", kind, name, [(1.0, 1), (2.0, 20)])
        for kind in neighbours.KINDS
        for name in ("quiet", "2 spinning")
    ]
    neighbours.draw(summary(runs, [Neighbours(0), Neighbours(2)], 2), tmp_path / "plot")
    assert "2 spinning" in (tmp_path / "plot.svg").read_text()
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in ((["--kinds", "prefill"], "there is no prefill"), ([], "throughput needs a --workload")):
        monkeypatch.setattr(sys, "argv", ["neighbours.py", "--model", "here", *flags])
        with pytest.raises(SystemExit):
            neighbours.arguments()
        assert said in capsys.readouterr().err

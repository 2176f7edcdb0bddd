"""What other programs took of the CPUs, and how reports say so."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.bench import cpu_noise, plot_style
from shoal.bench.cpu_noise import (
    Noise,
    NoiseWatch,
    banner,
    is_here,
    listeners,
    noise_figures,
    noise_in,
    short_banner,
    tree_seconds,
    under_banner,
    watch_server,
)
from shoal.bench.giant_plots import giant_plot
from shoal.bench.policies import Finding, table
from shoal.bench.policy_plots import finding_plot
from shoal.bench.report import compare_table, giant_table, latency_table
from shoal.cli import main
from tests.bench.conftest import rows_of
from tests.bench.made import giant_run, made_run

TICK = os.sysconf("SC_CLK_TCK")
LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
LOUD, QUIET = Noise(0.2, 0.1), Noise(0.01, 0.0)


def write(proc: Path, cpus: dict[int, tuple[int, ...]], processes: dict[int, tuple[int, int]]) -> None:
    """cpus: user, nice, system, idle, iowait, irq, softirq, steal in seconds; processes: parent and CPU seconds."""
    lines = [f"cpu{cpu} {' '.join(str(TICK * one) for one in times)} 0 0" for cpu, times in cpus.items()]
    (proc / "stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 6"]))
    for pid, (parent, seconds) in processes.items():
        (proc / str(pid)).mkdir(exist_ok=True)
        ended = TICK * seconds // 2  # of children
        rest = f"S {parent} 1 1 0 -1 4194304 1 1 0 0 {TICK * seconds - ended} 0 {ended} 0 20 0 1 0 99"
        (proc / str(pid) / "stat").write_text(f"{pid} (a ) b (c) {rest}")


def test_others_are_what_is_not_ours(tmp_path: Path) -> None:
    """Of the CPUs we may run on; our children and the server's processes are ours."""
    me, quiet = os.getpid(), (0, 0, 0, 0, 0, 0, 0, 0)
    tree = {me: (1, 10), me + 1: (me, 20), 7: (1, 5), 8: (7, 5), 9: (1, 1000)}
    write(tmp_path, {0: quiet, 1: quiet, 2: quiet, 3: (9, 9, 9, 9, 9, 9, 9, 9)}, tree)
    watch = NoiseWatch(also=[7], cpus=[0, 2, 3], proc=tmp_path)
    later = {me: (1, 15), me + 1: (me, 30), 7: (1, 5), 8: (7, 15), 9: (1, 1010)}  # 25 s are ours
    busy = {0: (20, 1, 2, 40, 1, 1, 1, 34), 1: (100, 0, 0, 0, 0, 0, 0, 0), 2: (25, 0, 0, 75, 0, 0, 0, 0)}
    write(tmp_path, {**busy, 3: (9, 9, 9, 9, 9, 9, 9, 9)}, later)
    noise = watch.noise()
    assert noise is not None
    assert noise.programs == pytest.approx((50 - 25) / 200)
    assert noise.stolen == pytest.approx(34 / 200)
    assert noise.share == pytest.approx(59 / 200)


def test_shares_stay_between_0_and_1(tmp_path: Path) -> None:
    """Ticks and CPU times of processes are counted by different clocks."""
    me = os.getpid()
    write(tmp_path, {0: (0, 0, 0, 1, 0, 0, 0, 0)}, {me: (1, 0)})
    watch = NoiseWatch(cpus=[0], proc=tmp_path)
    write(tmp_path, {0: (5, 0, 0, 6, 0, 0, 0, 0)}, {me: (1, 6)})
    assert watch.noise() == Noise(0.0, 0.0)
    write(tmp_path, {0: (5, 0, 0, 1, 0, 0, 0, 5)}, {})
    (tmp_path / str(me) / "stat").unlink()
    assert watch.noise() == Noise(0.5, 0.5)


def test_where_nothing_is_counted_nothing_is_said(tmp_path: Path) -> None:
    assert NoiseWatch(cpus=[0], proc=tmp_path).noise() is None
    (tmp_path / "stat").write_text("cpu0 a b c d e f g h\ncpu0 1 2\n\n")
    assert NoiseWatch(cpus=[0], proc=tmp_path).noise() is None
    write(tmp_path, {0: (1, 1, 1, 1, 1, 1, 1, 1)}, {})
    assert NoiseWatch(cpus=[0], proc=tmp_path).noise() is None, "no time has passed"
    assert noise_figures(None) == {"others": None, "stolen": None}
    assert noise_in(noise_figures(None)) is None
    assert banner([None]) == short_banner([None]) == ""
    assert under_banner("a table", [None, QUIET]) == "a table"


@LINUX
def test_the_time_of_children_is_ours_while_they_run_and_after() -> None:
    code = "import time, sys\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\nsys.stdin.read()"
    before_s = tree_seconds([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_seconds([child.pid]) >= 0.25
        assert tree_seconds([os.getpid()]) - before_s >= 0.25
    assert tree_seconds([os.getpid()]) - before_s >= 0.25
    assert tree_seconds([child.pid]) == 0.0


@LINUX
def test_a_server_here_is_found_by_its_port() -> None:
    code = (
        "import socket, sys\ns = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        assert listeners(port) == [server.pid]
        watch = watch_server("127.0.0.1", port)
        assert watch is not None
        assert server.pid in watch._ours
    assert watch_server("127.0.0.1", port) is None, "no process that we can see listens there"
    assert watch_server("192.0.2.1", port) is not None, "a server elsewhere is no program of this machine"


def test_which_addresses_are_ours() -> None:
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")
    assert not is_here("no-such-name.invalid")
    assert is_here("localhost")


def test_words() -> None:
    assert LOUD.remark() == "others used 30% of the CPUs"
    assert QUIET.remark() == ""
    assert banner([QUIET, LOUD, None]) == (
        "Noisy machine: other programs and stolen time took up to 30% of the CPUs (10% stolen) during these runs; "
        "compare only ratios taken in one run."
    )
    assert "took 6% of the CPUs during this run;" in banner([Noise(0.06, 0.0)])
    assert banner([Noise(0.04, 0.005)]) == "", "up to 5% a figure has a remark, and a report no banner"
    assert Noise(0.04, 0.005).remark()
    assert short_banner([LOUD]) == "noisy machine: others took 30% of the CPUs"
    back = noise_in(json.loads(json.dumps(noise_figures(LOUD))))
    assert back is not None
    assert (back.programs, back.stolen) == (pytest.approx(0.2), 0.1)


def test_tables_have_a_banner_and_a_remark_at_the_figure() -> None:
    runs = [made_run("shoal", 2.0, count=5), made_run("orca", 2.0, count=5)]
    runs[0].noise = LOUD
    shown = compare_table(rows_of(runs))
    assert shown.startswith("Noisy machine")
    assert "30%" in next(line for line in shown.splitlines() if line.startswith("shoal"))
    assert "?" in next(line for line in shown.splitlines() if line.startswith("orca"))
    runs[0].noise = QUIET
    assert compare_table(rows_of(runs)).startswith("preset")

    giant: dict[str, Any] = {"largest_gap_s": 1.0, "giant_ttft_s": 1.0, "gap_of_inline": 1.0, "ttft_of_inline": 1.0}
    rows = [{"prefill": "inline", **giant, **noise_figures(LOUD)}, {"prefill": "x", **giant, **noise_figures(QUIET)}]
    shown = giant_table(rows)
    assert shown.startswith("Noisy machine")
    assert shown.count("others used 30%") == 1

    names = ("ttft_p50_s", "ttft_last_s", "ttft_fraction", "gap_p50_s", "gap_p99_s", "gap_fraction", "output_tok_s")
    batch = {"batch": 1, **dict.fromkeys(names, 1.0), **noise_figures(LOUD)}
    machine = {"bandwidth_gb_s": 1.0, "matrix_gflop_s": 1.0}
    shown = latency_table({"model": "m", "dtype": "d", "machine": machine, "batches": [batch]})
    assert shown.startswith("Noisy machine")
    assert shown.endswith("others used 30% of the CPUs")


def test_policies_and_plots() -> None:
    run = made_run("shoal", 2.0, count=5)
    run.noise = LOUD
    kinds = {"fcfs": ["all"] * len(run.requests)}
    finding = Finding("sjf", "1.1x capacity", {"fcfs": run}, kinds, [{"policy": "fcfs", "kind": "all", "n": 1.0}])
    shown = table(finding)
    assert shown.startswith("Noisy machine")
    assert shown.endswith("fcfs: others used 30% of the CPUs")
    assert "noisy machine" in finding_plot(finding).get_suptitle()
    giant = giant_run("inline")
    assert "noisy" not in giant_plot({"inline": giant}).get_suptitle()
    giant.noise = LOUD
    assert giant_plot({"inline": giant}).get_suptitle().endswith("noisy machine: others took 30% of the CPUs")
    figure = plot_style.new_figure("a title", 1.0)
    plot_style.add_to_title(figure, "")
    assert figure.get_suptitle() == "a title"


def test_the_scheduler_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu_noise.NoiseWatch, "noise", lambda self: LOUD)
    argv = ["bench", "scheduler", "--running", "4", "--policies", "fcfs", "--passes", "3"]
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("Noisy machine")
    assert main([*argv, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["others"], row["stolen"]) == (pytest.approx(0.3), 0.1)

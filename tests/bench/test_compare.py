"""Replay and compare: times, swept groups, equal-latency ratios, and the whole command on a tiny model."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.bench import plots
from shoal.bench.compare import (
    ComparePlan,
    Results,
    arrive,
    at_latency,
    compare,
    count_runs,
    expected_s,
    group_sizes,
    in_words,
    rows_of,
    run_live,
    run_one,
    speed_up,
    variants,
)
from shoal.bench.cpu_noise import Noise, NoiseWatch
from shoal.bench.giant import giant_rows, run_giant
from shoal.bench.kept_runs import KeptRuns
from shoal.bench.record import Promise, RequestRecord, RunRecord, keeps, spread, summarise
from shoal.bench.replay import replay
from shoal.cli import main
from shoal.cli.compare_progress import count_kept
from shoal.config.engine import EngineConfig
from shoal.config.presets import PRESETS
from shoal.core.clock import VirtualClock
from shoal.core.plan import StepResult
from shoal.engine.loop import EngineLoop
from shoal.sched.admission import Limits
from shoal.sched.make import make_scheduler
from shoal.workload.traces import TraceRequest
from tests.fakes import VOCAB, FakeExecutor
from tests.server.chromium import Browser
from tests.server.page_server import needs_chromium
from tests.story.models import save_model


class Timed(FakeExecutor):
    """A device that takes 10 ms per pass and 1 ms per position, padding included."""

    def __init__(self, blocks: int, block_size: int, clock: VirtualClock) -> None:
        super().__init__(blocks, block_size)
        self.clock = clock

    def result(self) -> StepResult:
        plan = self.queue[0]
        positions = (len(plan.rows) + plan.dead) * plan.width if plan.width else len(plan.tokens)
        self.clock.advance(0.010 + 0.001 * positions)
        return super().result()


def make_engine(settings: dict[str, object]) -> EngineLoop:
    config = EngineConfig.from_mapping({"max_num_seqs": 8, "max_num_batched_tokens": 64, **settings})
    clock = VirtualClock()
    limits = Limits(2000, config.max_num_seqs, config.max_num_batched_tokens, VOCAB)
    scheduler = make_scheduler(config, limits, 400)
    return EngineLoop(scheduler, Timed(400, config.block_size, clock), clock, depth=config.depth or 2, check=True)


def make_plan(count: int = 24, **more: object) -> ComparePlan:
    trace = [TraceRequest(0.0, 3 + 5 * (n % 6), 2 + 7 * (n % 4)) for n in range(count)]
    values: dict[str, object] = {
        "presets": tuple(PRESETS),
        "rates": (5.0, 20.0),
        "trace": trace,
        "prompts": [[1 + n % 40] * one.prompt for n, one in enumerate(trace)],
        "max_tokens": 30,
        "slots": 8,
        "promise": Promise(1.0, 0.1),
        "price_per_hour": 1.0,
    }
    return ComparePlan(**{**values, **more})  # type: ignore[arg-type]


def test_requests_arrive_at_the_traces_times_and_end_at_its_lengths() -> None:
    trace = [TraceRequest(0.0, 5, 4), TraceRequest(0.5, 3, 9), TraceRequest(7.0, 2, 1)]
    run = replay(
        make_engine({"depth": 1}), trace, [[1] * 5, [2] * 3, [3] * 2], preset="p", label="p", rate=1, max_tokens=50
    )
    assert [record.arrived_s for record in run.requests] == [0.0, 0.5, 7.0]
    assert [len(record.token_s) for record in run.requests] == [4, 9, 1]
    assert [record.reason for record in run.requests] == ["stop"] * 3
    assert run.requests[0].ttft_s == pytest.approx(0.015)
    assert run.requests[0].gaps_s == pytest.approx([0.011] * 3)
    assert run.requests[2].started_s == pytest.approx(7.0)
    assert sum(one.useful for one in run.passes) == 5 + 3 + 3 + 8 + 2


def test_a_row_planned_before_the_end_was_known_is_counted_as_computed_in_vain() -> None:
    trace = [TraceRequest(0.0, 5, 4), TraceRequest(0.0, 3, 9)]
    prompts = [[1] * 5, [2] * 3]
    one, two = (
        replay(make_engine({"depth": depth}), trace, prompts, preset="p", label="p", rate=1, max_tokens=50)
        for depth in (1, 2)
    )
    assert sum(each.vain for each in one.passes) == 0
    assert [each.late for each in two.passes if each.late] == [(0,), (1,)]
    figures = [summarise(run, Promise(1, 1), 1.0) for run in (one, two)]
    assert [each["vain_tokens"] for each in figures] == [0, 2]
    assert figures[1]["wasted_share"] == pytest.approx(2 / (5 + 3 + 3 + 8 + 2))
    assert figures[1]["useful_work"] == pytest.approx(1 - figures[1]["wasted_share"])


def test_a_closed_loop_keeps_its_users() -> None:
    trace = [TraceRequest(0.0, 2, 5)] * 9
    run = replay(make_engine({}), trace, [[1, 2]] * 9, preset="p", label="p", rate=0, max_tokens=9, users=2)
    assert max(one.running for one in run.passes) == 2
    assert len([1 for record in run.requests if record.ended_s]) == 9


def test_a_closed_loop_smaller_than_a_group_does_not_wait_for_ever() -> None:
    trace = [TraceRequest(0.0, 2, 3)] * 4
    engine = make_engine({"preset": "fastertransformer", "group_size": 8})
    run = replay(engine, trace, [[1, 2]] * 4, preset="p", label="p", rate=0, max_tokens=9, users=1)
    assert all(record.reason for record in run.requests)


@pytest.fixture(scope="module")
def compared() -> tuple[ComparePlan, Results]:
    """Every preset, on the virtual device."""
    plan = make_plan()
    return plan, compare(plan, make_engine, progress=False)


def test_everything_is_compared_on_the_same_requests(compared: tuple[ComparePlan, Results]) -> None:
    plan, results = compared
    assert [(run.preset, run.rate) for run in results.kept] == [(p, r) for p in PRESETS for r in plan.rates]
    assert len(results.tried) == 2 + 2 + 2, "two more group sizes for each static preset, two more windows"
    for row in rows_of(results.kept, plan):
        assert row["finished"] == len(plan.trace)
        grouped = row["settings"]["batching"] != "continuous"
        assert (row["padded_tokens"] > 0) == grouped
        assert row["useful_tokens"] >= sum(one.prompt + one.output - 1 for one in plan.trace) - 1 - 1000 * grouped
    fastest = {row["preset"]: row["output_tok_s"] for row in rows_of(results.kept, plan) if row["rate"] == 20.0}
    assert fastest["shoal"] > 1.2 * max(fastest["transformers"], fastest["fastertransformer"])


def test_the_best_group_is_kept() -> None:
    plan = make_plan(presets=("fastertransformer",), rates=(20.0,))
    results = compare(plan, make_engine, progress=False)
    latency = lambda run: summarise(run, plan.promise, 1)["normalised_s"]["p50"]  # noqa: E731
    assert all(latency(results.kept[0]) <= latency(run) for run in results.tried)


def test_variants() -> None:
    plan = make_plan()
    assert group_sizes(16) == [4, 8, 16]
    assert group_sizes(1) == [1]
    assert [label for label, _ in variants("transformers", plan)] == [f"transformers ({n})" for n in (2, 4, 8)]
    assert len(list(variants("classic-dynamic", plan))) == 3
    assert list(variants("shoal", plan)) == [("shoal", {})]


def test_arrivals_by_name() -> None:
    plan = make_plan(arrivals="gamma:4")
    assert arrive(plan, 5.0)[-1].at_s > 0
    assert arrive(plan, 0.0)[-1].at_s == 0


def test_throughput_at_equal_latency(compared: tuple[ComparePlan, Results]) -> None:
    assert at_latency([(1.0, 2.0), (3.0, 4.0)], 0.5) is None
    assert at_latency([(1.0, 2.0), (3.0, 4.0)], 9.0) == 4.0
    plan, results = compared
    found = speed_up(results.kept, plan, ["shoal"], ["transformers", "fastertransformer"])
    assert found is not None
    assert found.times == found.ours / found.theirs > 1
    assert f"{found.times:.1f} times as many" in in_words(found)
    assert speed_up(results.kept, plan, ["shoal"], []) is None
    assert in_words(None) == ""


def test_a_promise_is_about_the_first_token_and_the_mean_gap() -> None:
    record = RequestRecord(0.0, 1, 3, token_s=[0.5, 0.6, 0.9], ended_s=0.9, reason="stop")
    assert keeps(record, Promise(0.5, 0.2))
    assert not keeps(record, Promise(0.4, 0.2))
    assert not keeps(record, Promise(0.5, 0.19))
    assert not keeps(RequestRecord(0.0, 1, 3), Promise(9, 9)), "a request without an answer meets no promise"
    assert spread([])["p99"] == 0.0
    nothing = RunRecord("p", "p", 1.0, {}, 4, [RequestRecord(0.0, 1, 1)], [], 0.0, 0.0)
    assert summarise(nothing, Promise(1, 1), 1.0)["finished"] == 0


def test_chunked_prefill_spares_the_streams_when_a_giant_arrives() -> None:
    rows = {row["prefill"]: row for row in giant_rows(run_giant(make_engine, VOCAB, streams=6, giant=600, output=40))}
    assert rows["chunked"]["largest_gap_s"] < rows["inline"]["largest_gap_s"] / 4
    assert rows["chunked"]["giant_ttft_s"] < rows["inline"]["giant_ttft_s"] * 1.5
    assert rows["inline"]["gap_of_inline"] == 1.0


def test_the_giant_arrives_when_all_streams_decode() -> None:
    for run in run_giant(make_engine, VOCAB, streams=3, giant=100, warm_passes=5, output=20).values():
        *streams, giant = run.requests
        assert all(len([at for at in stream.token_s if at <= giant.arrived_s]) >= 5 for stream in streams)
        assert all(stream.token_s[-1] > giant.arrived_s for stream in streams)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real command, on a real (tiny) model, with every preset."""
    folder = tmp_path_factory.mktemp("report")
    model = save_model(tmp_path_factory.mktemp("model"))
    flags = [
        "--requests",
        "10",
        "--rates",
        "40,400",
        "--slots",
        "4",
        "--prompt-scale",
        "0.02",
        "--output-scale",
        "0.04",
    ]
    assert main(["compare", "--model", str(model), "--dtype", "float32", *flags, "--out", str(folder), "--json"]) == 0
    return folder


def test_the_command_writes_the_whole_report(report: Path) -> None:
    results = json.loads((report / "results.json").read_text())
    assert {run["preset"] for run in results["runs"]} == set(PRESETS)
    assert len(results["runs"]) == 2 * len(PRESETS)
    assert "Azure" in results["meta"]["trace"]
    for run in results["runs"]:
        assert run["finished"] == 10
    for name in ("timeline", "throughput", "latency", "tokens", "waiting", "work", "kv"):
        for kind in ("svg", "png"):
            assert (report / f"{name}.{kind}").stat().st_size > 1000
    assert "timeline.png" in (report / "report.md").read_text()


@needs_chromium
def test_the_report_opens_in_chromium_with_every_plot(report: Path, browser: Browser) -> None:
    tab = browser.open((report / "report.html").as_uri())
    sizes = tab.run("[...document.querySelectorAll('figure svg')].map((one) => one.getBoundingClientRect().height)")
    assert len(sizes) == 7
    assert min(sizes) > 100
    assert tab.complaints() == []
    tab.close()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--presets", "orka"], "did you mean 'orca'"),
        (["--rates", "fast"], "numbers separated by commas"),
        (["--rates", "-1"], "not negative"),
        (["--requests", "0"], "at least 1"),
        (["--trace", "/no/such/trace.csv"], "there is no trace"),
        (["--arrivals", "replay"], "no arrival times"),
        (["--config", "."], "--load-format dummy"),
    ],
)
def test_invalid_flags_are_refused_with_the_reason(
    flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--config" in flags else ["--model", str(save_model(tmp_path / "model"))]
    assert main(["compare", *model, *flags, "--out", str(tmp_path / "out")]) == 2
    assert reason in capsys.readouterr().err


def test_a_disturbed_run_is_repeated_and_the_least_disturbed_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float | None] = [0.5, 0.2, 0.3]

    def noise(self: NoiseWatch) -> Noise | None:
        return None if (share := shares.pop(0)) is None else Noise(share, 0.0)

    monkeypatch.setattr(NoiseWatch, "noise", noise)
    again = partial(run_one, make_plan(repeats=2), make_engine, "shoal", "shoal", {}, 20.0)
    assert again().noise == Noise(0.2, 0.0)
    assert not shares
    shares = [0.01, 0.9]
    assert again().noise == Noise(0.01, 0.0)
    assert shares == [0.9], "a quiet run is not repeated"
    shares = [None, 0.9]
    assert again().noise is None
    assert shares == [0.9], "nor is one of which nothing is known"


def test_noise_is_in_the_report_s_headline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model")
    argv = ["compare", "--model", str(model), "--presets", "shoal", "--requests", "3", "--threads", "1"]
    monkeypatch.setattr(plots, "PLOTS", {"work": plots.PLOTS["work"]})
    for share, wanted in ((0.3, True), (0.04, False)):
        monkeypatch.setattr(NoiseWatch, "noise", lambda self, share=share: Noise(share, 0.0))
        out = tmp_path / str(share)
        assert main([*argv, "--out", str(out)]) == 0
        table, *_ = capsys.readouterr().out.splitlines()
        html, markdown = (out / "report.html").read_text(), (out / "report.md").read_text()
        for text in (table, html.partition("<nav")[0], markdown.partition("## ")[0]):
            assert ("Noisy machine: other programs and stolen time took 30% of the CPUs" in text) == wanted
        assert ("noisy machine" in (out / "work.svg").read_text()) == wanted
        (run,) = json.loads((out / "results.json").read_text())["runs"]
        assert (run["others"], run["stolen"]) == (share, 0.0)


def test_a_comparison_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """Runs that ended are found again, figures and all; those of other settings are not."""
    plan = make_plan(presets=("orca", "vllm", "fastertransformer"))
    made: list[tuple[str, float]] = []

    def counted(*args: Any, **more: Any) -> RunRecord:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((args[3], args[5]))
        return run_live(*args, **more)

    kept = KeptRuns(tmp_path / "runs", {"slots": 8})
    ended: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        compare(plan, make_engine, False, counted, kept, lambda preset, runs: ended.append(preset))
    assert ended == ["orca"]
    assert made == [("orca", 20.0), ("orca", 5.0), ("vllm", 20.0)]
    assert count_kept(kept, plan) == 3
    again = compare(plan, make_engine, False, run_live, kept)
    whole = compare(plan, make_engine, False, run_live)

    def rows(found: Results) -> list[dict[str, Any]]:
        noise = {"others", "stolen"}  # of this machine, while the tests run
        return [{key: row[key] for key in row if key not in noise} for row in rows_of(found.kept, plan)]

    assert rows(again) == rows(whole)
    assert count_kept(kept, plan) == count_runs(plan)
    assert count_kept(KeptRuns(tmp_path / "runs", {"slots": 4}), plan) == 0
    kept.clear()
    assert not (tmp_path / "runs").exists()


def test_a_run_that_was_cut_off_while_it_was_written_is_made_again(tmp_path: Path) -> None:
    kept = KeptRuns(tmp_path, {})
    run = run_one(make_plan(), make_engine, "shoal", "shoal", {}, 20.0, kept=kept)
    assert kept.find("shoal", 20.0) == run
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text()[:100])
    assert kept.find("shoal", 20.0) is None


def test_it_says_how_long_it_takes_and_a_line_for_each_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "PLOTS", {"work": plots.PLOTS["work"]})
    argv = ["compare", "--model", str(save_model(tmp_path / "model")), "--presets", "orca,shoal", "--requests", "3"]
    capsys.readouterr()
    assert main([*argv, "--rates", "0", "--threads", "1", "--out", str(tmp_path / "out")]) == 0
    first, *lines = [line for line in capsys.readouterr().err.splitlines() if "WARNING" not in line]
    assert re.match(r"2 presets, 2 runs of 3 requests: about \d+ s\. Ctrl-C keeps what has ended", first)
    assert [line.split(":")[0] for line in lines] == ["1/2 orca", "2/2 shoal"]
    assert "output tok/s" in lines[0]
    assert not (tmp_path / "out" / "unfinished").exists()


def test_the_expected_time_counts_arrivals_or_work() -> None:
    plan = make_plan(presets=("orca", "shoal"), rates=(2.0, 8.0))
    assert expected_s(plan, 0.0) == pytest.approx(2 * (24 / 2 + 1 + 24 / 8 + 1))
    assert expected_s(plan, 100.0) == pytest.approx(2 * 2 * 101 + 2 * (12 - 12), rel=0.2)

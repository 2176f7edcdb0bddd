"""Reading traces: every format, every error, and fitting of lengths."""

import gzip
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest

from shoal.errors import BadConfig
from shoal.workload.traces import TraceRequest, fit, read_trace
from tests.workload.real import AZURE_CODE, AZURE_CONV, MOONCAKE, needs

OWN = "arrival_s,prompt_tokens,output_tokens\n2.5,10,20\n4,30,40\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:51,879,55\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45.5,GPT-4,1087,0,1087,Conversation log\n"
    "118,ChatGPT,417,276,693,API log\n"
)
MOON = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    "\n"
    '{"timestamp": 1500, "input_length": 100, "output_length": 7, "hash_ids": [2]}\n'
)


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BadConfig) as caught:
        read_trace(path)
    return str(caught.value)


# ---- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["own.csv", "own.csv.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_own_csv(tmp_path: Path, name: str, mark: str, ending: str) -> None:
    path = write(tmp_path, name, mark + OWN.replace("\n", ending))
    assert read_trace(path) == [TraceRequest(0.0, 10, 20), TraceRequest(1.5, 30, 40)]


@pytest.mark.parametrize("name", ["own.jsonl", "own.jsonl.gz", "own.json"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_own_jsonl(tmp_path: Path, name: str, mark: str) -> None:
    rows = [{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 4, "note": "x"}]
    assert read_trace(write(tmp_path, name, mark + json.dumps(rows[0]))) == [TraceRequest(0.0, 3, 4)]


@pytest.mark.parametrize("name", ["azure.csv", "azure.csv.gz"])
def test_azure_with_seven_digits_of_a_second(tmp_path: Path, name: str) -> None:
    found = read_trace(write(tmp_path, name, AZURE))
    assert [(one.prompt, one.output) for one in found] == [(374, 44), (396, 109), (879, 55)]
    assert [one.at_s for one in found] == pytest.approx([0, 4.314579, 4.31941], abs=1e-5)


def test_azure_with_a_zone(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.0099301+00:00,1,2\n2024-05-10 02:00:01+01:00,3,4\n"
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows
    assert [one.at_s for one in read_trace(write(tmp_path, "a.csv", text))] == pytest.approx([0, 3600.99007], abs=1e-4)


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="no time zones to set here")
def test_azure_times_do_not_follow_the_local_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour that summer time skips in Berlin is an ordinary hour in a trace."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-03-26 01:59:59.0000000,1,2\n2023-03-26 03:00:01.0000000,3,4\n"
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert read_trace(write(tmp_path, "a.csv", text))[1].at_s == pytest.approx(3602)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_burstgpt_without_its_failed_requests(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path, "burst.csv", BURST))
    assert found == [TraceRequest(0.0, 472, 18), TraceRequest(113.0, 417, 276)]


def test_the_first_kept_request_arrives_at_0(tmp_path: Path) -> None:
    head = BURST.splitlines()[0]
    path = write(tmp_path, "burst.csv", f"{head}\n1,m,5,0,5,x\n9,m,5,5,10,x\n10,m,0,3,3,x\n12,m,5,5,10,x\n")
    assert [one.at_s for one in read_trace(path)] == [0, 3]


@pytest.mark.parametrize("name", ["moon.jsonl", "moon.jsonl.gz"])
def test_mooncake(tmp_path: Path, name: str) -> None:
    assert read_trace(write(tmp_path, name, MOON)) == [
        TraceRequest(0.0, 600, 5, (0, 1), 512),
        TraceRequest(1.5, 100, 7, (2,), 512),
    ]


def test_mooncake_without_hash_ids(tmp_path: Path) -> None:
    path = write(tmp_path, "m.jsonl", '{"timestamp": 7, "input_length": 6, "output_length": 5}')
    assert read_trace(path) == [TraceRequest(0.0, 6, 5)]


def test_unsorted_rows_are_sorted_by_arrival_before_the_limit_applies(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", "arrival_s,prompt_tokens,output_tokens\n9,1,1\n2,2,2\n5,3,3\n2,4,4\n")
    assert [(one.at_s, one.prompt) for one in read_trace(path)] == [(0, 2), (0, 4), (3, 3), (7, 1)]
    assert [one.prompt for one in read_trace(path, 2)] == [2, 4]
    assert len(read_trace(path, 99)) == 4


# ---- errors ------------------------------------------------------------------------------------------------------

HEAD = "arrival_s,prompt_tokens,output_tokens\n1,2,3\n"


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("x,2,3", "'x'"),
        ("1,2.5,3", "2.5"),
        ("1,-2,3", "-2"),
        ("1,2,", "could not convert"),
        ("1,2", "NoneType"),
        ("1,2,3,4", "more fields"),
        ("nan,2,3", "nan"),
        ("inf,2,3", "inf"),
        ("1,inf,3", "inf"),
        ("1," + "2" * 200_000 + ",3", "not CSV"),
    ],
)
def test_a_bad_csv_row_is_named_by_file_and_line(tmp_path: Path, row: str, word: str) -> None:
    message = refusal(write(tmp_path, "t.csv", HEAD + row + "\n4,5,6\n"))
    assert "t.csv: line 3 " in message
    assert word in message


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ("{", "not JSON"),
        ("[1, 2, 3]", "list"),
        ('{"arrival_s": 1, "prompt_tokens": 2}', "no 'output_tokens'"),
        ('{"arrival_s": 1, "prompt_tokens": null, "output_tokens": 2}', "NoneType"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 2}', "nan"),
        ('{"arrival_s": 1, "prompt_tokens": [1], "output_tokens": 2}', "list"),
    ],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path: Path, row: str, word: str) -> None:
    good = '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 3}\n\n'
    message = refusal(write(tmp_path, "t.jsonl", good + row + "\n"))
    assert "t.jsonl: line 3 " in message
    assert word in message


@pytest.mark.parametrize("ids", ['"12"', "7", '["a"]', "[1.5]", "null"])
def test_hash_ids_of_another_type(tmp_path: Path, ids: str) -> None:
    row = f'{{"timestamp": 7, "input_length": 6, "output_length": 5, "hash_ids": {ids}}}'
    message = refusal(write(tmp_path, "m.jsonl", row))
    assert "line 1" in message
    assert "hash_ids" in message


@pytest.mark.parametrize("stamp", ["yesterday", "", "46.68"])
def test_an_azure_time_that_is_invalid(tmp_path: Path, stamp: str) -> None:
    assert "a.csv: line 5 " in refusal(write(tmp_path, "a.csv", AZURE + f"{stamp},1,2\n"))


@pytest.mark.parametrize(
    ("name", "text"), [("t.csv", "when,how_long\n1,2\n"), ("t.jsonl", '{"when": 1, "how_long": 2}')]
)
def test_unknown_columns_are_listed_with_the_known_formats(tmp_path: Path, name: str, text: str) -> None:
    message = refusal(write(tmp_path, name, text))
    for word in (
        name,
        "when, how_long",
        "arrival_s",
        "ContextTokens",
        "hash_ids"[:0],
        "input_length",
        "Request tokens",
    ):
        assert word in message


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl"])
def test_not_utf8_names_the_line(tmp_path: Path, name: str) -> None:
    text = MOON.replace("\n\n", "\n") if "json" in name else HEAD
    message = refusal(write(tmp_path, name, text.encode() + b"\xff\xfe,1,2\n"))
    assert f"{name}: line 3 is not UTF-8" in message


@pytest.mark.parametrize("name", ["none.csv", "none.csv.gz", "none.jsonl"])
def test_a_missing_file(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path / name)
    assert name in message
    assert "there is no trace" in message


def test_a_folder_is_not_a_trace(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)


def test_not_gzip_at_all(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_text(OWN)
    assert "t.csv.gz" in refusal(path)


def test_a_gzip_file_cut_short(tmp_path: Path) -> None:
    whole = gzip.compress((HEAD + "".join(f"{k},{k * 7 % 91 + 1},3\n" for k in range(5000))).encode())
    path = tmp_path / "t.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    assert "t.csv.gz after line " in refusal(path)


def test_a_gzip_file_with_flipped_bytes(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress((HEAD + "".join(f"{k},{k * 7 % 91 + 1},3\n" for k in range(5000))).encode()))
    whole[len(whole) // 2 : len(whole) // 2 + 64] = b"\xff" * 64
    path = tmp_path / "t.csv.gz"
    path.write_bytes(bytes(whole))
    assert "t.csv.gz" in refusal(path)


@pytest.mark.parametrize("text", ["", "arrival_s,prompt_tokens,output_tokens\n", HEAD[:-6] + "1,0,3\n", "\n\n"])
def test_a_trace_without_requests(tmp_path: Path, text: str) -> None:
    assert "no requests" in refusal(write(tmp_path, "t.csv", text))


# ---- fitted lengths -----------------------------------------------------------------------------------------------


def test_fit_scales_then_caps_and_returns_the_share() -> None:
    requests = [
        TraceRequest(1, 1000, 100),
        TraceRequest(2, 200, 900),
        TraceRequest(3, 10, 10),
        TraceRequest(4, 640, 80),
    ]
    fitted = fit(requests, scale=0.1, max_prompt=64, max_output=50)
    assert [(one.at_s, one.prompt, one.output) for one in fitted.requests] == [
        (1, 64, 10),
        (2, 20, 50),
        (3, 1, 1),
        (4, 64, 8),  # exactly at the cap: not changed by it
    ]
    assert fitted.capped_share == 0.5
    assert fitted.scaled_by == 0.1


def test_fit_without_arguments_changes_nothing() -> None:
    requests = [TraceRequest(1, 1000, 100, (1, 2), 512), TraceRequest(2, 3, 4)]
    fitted = fit(requests)
    assert (fitted.requests, fitted.capped_share, fitted.scaled_by) == (requests, 0.0, 1.0)
    assert fit([]).capped_share == 0


def test_fit_never_goes_below_one_token_and_may_grow() -> None:
    small = fit([TraceRequest(0, 3, 2)], scale=0.001).requests[0]
    assert (small.prompt, small.output) == (1, 1)
    large = fit([TraceRequest(0, 3, 2)], scale=3).requests[0]
    assert (large.prompt, large.output) == (9, 6)


def test_a_request_that_hits_both_caps_counts_once() -> None:
    assert fit([TraceRequest(0, 9, 9), TraceRequest(0, 1, 1)], max_prompt=5, max_output=5).capped_share == 0.5


@pytest.mark.parametrize(
    "bad", [{"scale": 0}, {"scale": -1}, {"scale": float("nan")}, {"max_prompt": 0}, {"max_output": -2}]
)
def test_fit_refuses_invalid_values(bad: dict[str, float]) -> None:
    with pytest.raises(BadConfig, match=next(iter(bad))):
        fit([TraceRequest(0, 9, 9)], **bad)  # type: ignore[arg-type]


# ---- the real files -------------------------------------------------------------------------------------------------


@needs(AZURE_CONV)
def test_the_real_azure_chat_trace() -> None:
    found = read_trace(AZURE_CONV)
    prompts, outputs = [one.prompt for one in found], [one.output for one in found]
    assert len(found) == 19366
    assert (round(mean(prompts)), max(prompts)) == (1155, 14050)
    assert (round(mean(outputs)), max(outputs)) == (211, 1000)
    assert len(found) / found[-1].at_s == pytest.approx(5.5, abs=0.05)
    assert found[0].at_s == 0


@needs(AZURE_CODE)
def test_the_real_azure_code_trace() -> None:
    found = read_trace(AZURE_CODE)
    gaps = [later.at_s - one.at_s for one, later in pairwise(found)]
    assert len(found) == 8819
    assert round(mean(one.prompt for one in found)) == 2048
    assert round(mean(one.output for one in found)) == 28
    assert round(pstdev(gaps) / mean(gaps)) == 13
    assert min(gaps) >= 0


@needs(MOONCAKE)
def test_the_real_mooncake_trace() -> None:
    found = read_trace(MOONCAKE)
    ids = [id for one in found for id in one.prefix]
    assert len(found) == 12031
    assert round(found[-1].at_s / 60) == 59
    assert 1 - len(set(ids)) / len(ids) == pytest.approx(0.366, abs=0.0005)

"""shoal doctor --url and shoal calibrate --url on real servers: sicknesses made on purpose are named."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.sim.profile import read_profile
from tests.story_server.servers import SMALL, Server, running

TOKENS = 60  # of the tiny model, at least


def load(server: Server, requests: list[tuple[int, int]], together: int) -> None:
    """Send requests of these lengths, so many at a time."""
    chance = random.Random(0)

    def send(lengths: tuple[int, int]) -> int:
        prompt, output = lengths
        body = {
            "model": "tiny",
            "prompt": [chance.randrange(5, TOKENS) for _ in range(prompt)],
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
        }
        return server.http.post(f"{server.url}/v1/completions", json=body).status_code

    with ThreadPoolExecutor(together) as pool:
        assert set(pool.map(send, requests)) == {200}


def examined(server: Server, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["doctor", "--url", server.url, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["engines"][0]
    return found


def test_a_server_is_examined_and_calibrated(tiny: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load(tiny, [(20 + number, 10 + number) for number in range(16)], together=4)
    found = examined(tiny, capsys)
    assert found["passes"] > 50
    assert found["requests"] >= 16
    assert main(["doctor", "--url", tiny.url]) == 0
    assert f"{found['passes']} passes" in capsys.readouterr().out
    out = tmp_path / "seen.json"
    assert main(["calibrate", "--url", tiny.url, "--out", str(out), "--name", "mine"]) == 0
    assert "held back" in capsys.readouterr().out
    profile = read_profile(str(out))
    assert (profile.name, profile.quality, profile.dtype) == ("mine", "measured", "float32")
    assert profile.held_back["passes"] >= 10
    assert main(["calibrate", "--url", "http://127.0.0.1:9", "--out", str(out)]) == 2
    assert "does not answer" in capsys.readouterr().err


CHATS = [(12, 40)] * 24
SICK = {
    "the queue is long because all places are taken": (["--max-num-seqs", "2"], CHATS, 16),
    "the queue is long because KV memory is full": (
        ["--memory", "reserve", "--when-short", "wait", "--kv-memory", "KV:160"], CHATS, 16),
    "requests preempt each other": (
        ["--kv-memory", "KV:160", "--no-prefix-caching", "--watermark", "0", "--max-preemptions", "1000"],
        [(12, 120)] * 16, 16),
    "long prompts stall the other streams": (
        ["--prefill", "inline"], [(8, 100), (8, 100), (8, 100), (8, 100), *[(1800, 2), (8, 100)] * 8], 6),
    "passes are too small": (["--max-num-batched-tokens", "8", "--max-num-seqs", "8"], [(200, 3)] * 24, 4),
    "the prefix cache never hits": (["--no-prefix-caching"], [(100, 4)] * 24, 4),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SICK)
def test_a_sickness_is_named(name: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, requests, together = SICK[name]
    # a KV cache of so many tokens
    flags = [str(int(flag[3:]) * token_bytes(tiny_model)) if flag.startswith("KV:") else flag for flag in flags]
    with running(tmp_path, tiny_model, *SMALL, "--max-model-len", "160" if "KV:" in str(SICK[name]) else "2048",
                 *flags) as server:  # fmt: skip
        load(server, requests, together)
        found = examined(server, capsys)
    names = [one["name"] for one in found["findings"]]
    assert name in names, names
    one = found["findings"][names.index(name)]
    assert one["after"] is not None or not one["cures"], found["no_estimates"]
    assert name in "\n".join(found["words"])


def token_bytes(model: Path) -> int:
    """Of keys and values of one token, in float32."""
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4)

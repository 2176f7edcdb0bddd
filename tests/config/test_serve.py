"""Where a server's options come from, and which are refused."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import make_parser
from shoal.cli.serve import transport_of
from shoal.config.engine import EngineConfig
from shoal.config.serve import SHORTEST_HANG_S, ServeConfig, as_json, read_options, serve_config_from_json
from shoal.engine.host import IDLE_S
from shoal.engine.supervise import BEAT_S
from shoal.errors import BadConfig

DOCS = Path(__file__).parents[2] / "docs"


def options(*flags: str, environ: dict[str, str] | None = None) -> tuple[EngineConfig, ServeConfig]:
    return read_options(make_parser().parse_args(["serve", *flags]), environ or {})


def test_a_flag_overrides_a_variable_and_a_variable_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nblock_size: 8\nserved-model-name: [a, b]\nkv-memory: 1GiB\n")
    flags = ["--config", str(file), "--port", "3"]
    engine, serve = options(*flags, environ={"SHOAL_PORT": "2", "SHOAL_MAX_NUM_SEQS": "5", "PATH": "/bin"})
    assert (serve.port, engine.max_num_seqs, engine.block_size) == (3, 5, 8)
    assert serve.served_model_name == ("a", "b")
    assert engine.kv_memory == 2**30


def test_everything_has_a_default() -> None:
    engine, serve = options()
    assert serve == ServeConfig()
    assert engine == EngineConfig(max_queue=1024)


def test_variables_of_every_kind() -> None:
    engine, serve = options(
        environ={
            "SHOAL_API_KEY": "alice=sk-12345678,sk-abcdefgh",
            "SHOAL_LOG_PROMPTS": "true",
            "SHOAL_PREFIX_CACHING": "no",
            "SHOAL_MAX_BODY": "1MiB",
            "SHOAL_KV_SHARE": "0.25",
        }
    )
    assert serve.keys() == [("alice", "sk-12345678"), ("key-2", "sk-abcdefgh")]
    assert serve.log_prompts
    assert serve.max_body == 2**20
    assert not engine.prefix_caching
    assert engine.kv_share == 0.25


def test_a_key_with_equals_signs_in_it_is_a_key() -> None:
    assert ServeConfig(api_key=("c2VjcmV0IGtleQ==",)).keys() == [("key-1", "c2VjcmV0IGtleQ==")]


def test_flags_that_users_of_other_servers_know() -> None:
    engine, serve = options(
        "model.gguf", "--host", "0.0.0.0", "--gpu-memory-utilization", "0.7", "--max-model-len", "512",
        "--allowed-origins", "*", "--dtype", "float32", "--max-num-batched-tokens", "256", "--seed", "3",
    )  # fmt: skip
    assert (engine.model, engine.kv_share, engine.max_model_len, engine.seed) == ("model.gguf", 0.7, 512, 3)
    assert (serve.host, serve.allowed_origins) == ("0.0.0.0", ("*",))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("- port", "must hold 'option: value' lines"),
        ("port: [1", "is not YAML"),
        ("port: hello", "port must be a number"),
        ("log_prompts: 3", "log_prompts must be true or false"),
        ("api_key: {a: b}", "api_key must be a list of texts"),
        ("memory: lots", "unknown memory 'lots'"),
        ("memory: ondemand\nwhen_short: wait", "which is a deadlock"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(BadConfig, match=reason):
        options("--config", str(file))


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"SHOAL_PROT": "1"}, "did you mean 'port'"),
        ({"SHOAL_PORT": "x"}, "SHOAL_PORT cannot be 'x'"),
        ({"SHOAL_CHECK": "maybe"}, "SHOAL_CHECK must be true or false"),
        ({"SHOAL_KV_MEMORY": "much"}, "cannot read 'much' as a size"),
    ],
)
def test_a_bad_variable_is_refused_by_name(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(BadConfig, match=reason):
        options(environ=environ)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"port": 70000}, "port must be between"),
        ({"api_key": ("short",)}, "at least 8 characters"),
        ({"key_max_concurrent": 0}, "key_max_concurrent must be at least 1"),
        ({"key_tokens_per_minute": 0}, "key_tokens_per_minute must be at least 1"),
        ({"api_key": ("a=sk-123456789", "b=sk-123456789")}, "each must be unique"),
        ({"api_key": ("a=sk-123456789", "a=sk-987654321")}, "each must be unique"),
        ({"ssl_certfile": "x.pem"}, "needs both"),
        ({"ssl_certfile": "x.pem", "ssl_keyfile": "y.pem"}, "cannot read ssl_certfile"),
        ({"api_workers": 0}, "api_workers must be at least 1"),
        ({"drain_timeout": float("nan")}, "drain_timeout must be a number of seconds"),
        ({"max_body": 3}, "max_body must be at least 1024"),
        ({"hang_timeout": 0.5}, r"hang_timeout must be 0 \(never\) or at least 5 seconds, not 0\.5"),
        ({"hang_timeout": 4.9}, r"or at least 5 seconds, not 4\.9"),
        ({"restart_policy": "hope"}, "restart_policy"),
        ({"response_store_size": 1000}, "response_store_size must be 0"),
        ({"response_store_age": 0.0}, "response_store_age must be a number of seconds above 0"),
        ({"response_store": "/nowhere/r.sqlite"}, "response_store cannot be created in /nowhere"),
        ({"response_store": "r.sqlite", "response_store_size": 0}, "leave one of them out"),
    ],
)
def test_a_bad_value_is_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadConfig, match=reason):
        ServeConfig(**given)


def test_the_shortest_hang_timeout_is_more_than_twice_what_a_healthy_idle_process_needs() -> None:
    assert 2 * (BEAT_S + max(IDLE_S, BEAT_S / 2)) < SHORTEST_HANG_S
    for seconds in (0.0, SHORTEST_HANG_S):
        assert ServeConfig(hang_timeout=seconds).hang_timeout == seconds


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(BadConfig, match="cannot read the config file"):
        options("--config", "/nowhere/server.yaml")


def test_a_folder_is_not_a_config_file(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=f"is a folder, not a YAML file; for a model's folder: shoal serve {tmp_path}"):
        options("--config", str(tmp_path))


def test_a_config_can_be_sent_to_another_process() -> None:
    serve = ServeConfig(api_key=("a=sk-123456789",), served_model_name=("x", "y"), port=0)
    assert serve_config_from_json(json.loads(json.dumps(as_json(serve)))) == serve
    engine = EngineConfig(max_num_seqs=3)
    assert EngineConfig(**json.loads(json.dumps(as_json(engine)))) == engine


def test_the_docs_name_every_flag() -> None:
    text = (DOCS / "server.md").read_text()
    for config in (ServeConfig, EngineConfig):
        for item in fields(config):
            flag = "--" + item.name.replace("_", "-")
            assert item.name == "model" or f"`{flag}`" in text, f"docs/server.md does not mention {flag}"


def test_an_unknown_flag_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--max-num-seq", "3"])
    assert "--max-num-seq" in capsys.readouterr().err


def test_engines_of_two_roles() -> None:
    _, serve = options("--prefill", "disaggregated")
    assert serve.roles == ("prefill", "decode")
    _, serve = options("--preset", "splitwise", "--prefill-replicas", "2", "--decode-replicas", "3")
    assert serve.roles == ("prefill",) * 2 + ("decode",) * 3
    assert serve_config_from_json(json.loads(json.dumps(as_json(serve)))).roles == serve.roles
    assert options("--replicas", "2")[1].roles == ("", "")
    _, serve = options("--prefill", "disaggregated", "--cluster", "ray", "--decode-replicas", "70")
    assert (serve.least_replicas, serve.most_replicas) == (71, 71)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--prefill-replicas", "2"), "add --prefill disaggregated"),
        (("--decode-replicas", "2", "--prefill", "chunked"), "add --prefill disaggregated"),
        (("--kv-transport", "tcp"), "add --prefill disaggregated"),
        (("--prefill", "disaggregated", "--prefill-replicas", "0"), "decode engines get the KV"),
        (("--prefill", "disaggregated", "--decode-replicas", "0"), "hand requests over"),
        (("--prefill", "disaggregated", "--decode-replicas", "64"), "at most 64"),
        (("--prefill", "disaggregated", "--replicas", "2"), "--decode-replicas"),
        (("--prefill", "disaggregated", "--cluster", "ray", "--max-replicas", "3"), "is fixed"),
        (("--prefill", "disaggregated", "--cluster", "ray", "--kv-transport", "shm"), "use tcp"),
        (("--prefill", "disaggregated", "--cluster", "ray", "--kv-transport", "cuda-ipc"), "use tcp"),
        (("--prefill", "disaggregated", "--tensor-parallel-size", "2"), "in parts"),
        (("--prefill", "disaggregated", "--no-prefix-caching"), "prefix cache"),
        (("--prefill", "disaggregated", "--when-short", "swap"), "outbox"),
        (("--prefill", "disaggregated", "--batching", "static"), "answered together"),
    ],
)
def test_roles_that_cannot_work_are_refused_with_the_reason(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(BadConfig, match=reason):
        options(*flags)


def test_a_transport_that_is_not_there_is_refused() -> None:
    def chosen(transport: str | None, *gpus: str) -> str | None:
        serve = ServeConfig(prefill_replicas=1, decode_replicas=len(gpus) - 1, kv_transport=transport)
        return transport_of(serve, [{"gpu": gpu} for gpu in gpus])

    assert chosen(None, "", "") == chosen("shm", "", "") == "shm"
    assert chosen(None, "0", "0") == "cuda-ipc"
    assert chosen(None, "0", "1") == chosen(None, "0", "0", "1") == "shm"
    assert chosen("tcp", "", "") == "tcp"
    with pytest.raises(BadConfig, match="compute on CPUs; use shm"):
        chosen("cuda-ipc", "", "")
    with pytest.raises(BadConfig, match="same GPU"):
        chosen("cuda-ipc", "0", "1")


def test_one_engine_cannot_be_disaggregated() -> None:
    from shoal.build import check_roles
    from shoal.disagg.links import KVLinks

    config = EngineConfig(prefill="disaggregated")
    with pytest.raises(BadConfig, match="two roles"):
        check_roles(config, None)
    with pytest.raises(BadConfig, match="two roles"):
        check_roles(config, KVLinks())
    check_roles(config, KVLinks("decode"))
    check_roles(EngineConfig(), None)

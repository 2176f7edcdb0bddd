"""Bad input: every mistake gets the right error, whose text says what to change, and nobody else notices."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from shoal import LLM, SamplingParams
from shoal.errors import (
    BadChat,
    BadConfig,
    BadParameter,
    BadRequest,
    BadWeights,
    EmptyPrompt,
    ModelError,
    ModelNotFound,
    PromptTooLong,
    ShoalError,
    TokenizerMismatch,
    UnknownName,
    UnsafeWeights,
    UnsupportedModel,
)
from tests.story.models import VOCAB, copy, first, greedy, open_llm, save_tokenizer, seeded, small_kv, token_ids

STORY = "Once upon a time there was a little fish"
CHAT = [{"role": "user", "content": "hello"}]


def message(kind: type[ShoalError], call: Callable[[], Any]) -> str:
    """The one line an error says."""
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert text
    assert "\n" not in text, "more than one line"
    return text


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return copy(model, tmp_path / "m")


# ---- one request ----------------------------------------------------------------------------------------------------


def test_an_empty_prompt(llm: LLM) -> None:
    for prompt in ([[]], [[], [5]]):
        assert "at least one" in message(EmptyPrompt, lambda prompt=prompt: llm.generate(prompt, greedy()))
    assert first(llm.generate("", greedy(2))).error == ""  # this tokenizer writes a BOS before nothing


def test_an_empty_text_where_the_tokenizer_writes_no_bos(folder: Path) -> None:
    parts = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**parts, "post_processor": None}))
    with open_llm(folder) as llm:
        assert "no tokens" in message(EmptyPrompt, lambda: llm.generate("", greedy()))
        assert "prompt 1" in message(EmptyPrompt, lambda: llm.generate(["a", ""], greedy()))


def test_an_over_long_prompt_is_refused_with_the_numbers(llm: LLM) -> None:
    text = message(PromptTooLong, lambda: llm.generate([5] * 600, greedy(1)))
    assert "600" in text
    assert "512" in text
    assert message(PromptTooLong, lambda: llm.generate([5] * 512, greedy(1)))


def test_max_tokens_beyond_the_context_is_refused_with_the_numbers(llm: LLM) -> None:
    text = message(BadRequest, lambda: llm.generate([5] * 500, greedy(13)))
    for number in ("500", "13", "512"):
        assert number in text
    assert "max_tokens" in text
    assert len(first(llm.generate([5] * 500, greedy(12))).token_ids) == 12


def test_a_prompt_that_can_never_fit_the_cache_is_refused_with_the_numbers(model: Path) -> None:
    with open_llm(model, kv_memory=small_kv(4)) as llm:
        text = message(PromptTooLong, lambda: llm.generate([5] * 100, greedy(1)))
        assert "100" in text
        assert "64" in text
        assert len(first(llm.generate([5] * 40, greedy(20))).token_ids) == 20


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_token_ids_out_of_range(llm: LLM, token: int) -> None:
    text = message(BadRequest, lambda: llm.generate([5, token], greedy()))
    assert str(token) in text
    assert str(VOCAB) in text or str(VOCAB - 1) in text


@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_a_bias_for_an_id_out_of_range(llm: LLM, token: int) -> None:
    text = message(BadParameter, lambda: llm.generate("a", greedy(3, logit_bias={token: 1.0})))
    assert "logit_bias" in text
    assert str(token) in text


@pytest.mark.parametrize("token", [VOCAB, 2**31 - 1])
@pytest.mark.parametrize("least", [0, 2])
def test_a_stop_token_out_of_range_is_refused(llm: LLM, token: int, least: int) -> None:
    text = message(BadParameter, lambda: llm.generate("a", greedy(3, stop_token_ids=[token], min_tokens=least)))
    assert "stop_token_ids" in text
    assert str(token) in text


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_parameters_as_prompts(llm: LLM, count: int) -> None:
    text = message(BadParameter, lambda: llm.generate(["a", "b"], [greedy()] * count))
    assert "2" in text
    assert str(count) in text


@pytest.mark.parametrize(
    "prompt",
    [5, None, 1.5, True, b"bytes", [None], [1.5], ["a", None], ["a", 5], [5, "a"], [True, 5], [[5, "a"]], len],
    ids=lambda prompt: getattr(prompt, "__name__", repr(prompt)),
)
def test_a_prompt_of_a_wrong_type(llm: LLM, prompt: Any) -> None:
    assert "prompt" in message(BadRequest, lambda: llm.generate(prompt, greedy(2)))


def test_token_ids_in_an_array_are_taken(llm: LLM) -> None:
    want = token_ids(llm.generate([5, 6], greedy(2)))
    assert token_ids(llm.generate(np.array([5, 6]), greedy(2))) == want  # type: ignore[arg-type]
    assert token_ids(llm.generate([np.array([5, 6])], greedy(2))) == want  # type: ignore[list-item]


def test_one_message_alone_is_not_taken_for_two_texts(llm: LLM) -> None:
    message(BadRequest, lambda: llm.generate({"role": "user", "content": "hello"}, greedy(2)))  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, "greedy", ["greedy"], [None], [{"n": 2}]], ids=repr)
def test_parameters_of_a_wrong_type(llm: LLM, params: Any) -> None:
    assert "SamplingParams" in message(BadRequest, lambda: llm.generate(["a"], params))


@pytest.mark.parametrize(
    "chat",
    [
        [{}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "x"}, "y"],
        [{"role": "user", "content": "x"}, 5],
    ],
    ids=str,
)
def test_a_chat_that_is_not_one(llm: LLM, chat: Any) -> None:
    message(BadRequest, lambda: llm.generate(chat, greedy(2)))


def test_a_text_that_is_not_unicode(llm: LLM) -> None:
    message(BadRequest, lambda: llm.generate("\ud800", greedy(2)))


def test_a_chat_without_a_template(folder: Path) -> None:
    save_tokenizer(folder, None)
    with open_llm(folder) as llm:
        assert "template" in message(BadChat, lambda: llm.generate(CHAT, greedy(2)))
        assert len(first(llm.generate("a", greedy(2))).token_ids) == 2


def test_a_template_that_refuses_or_breaks(folder: Path) -> None:
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ messages[0].a.b.c }}", "{{ 1 / 0 }}"):
        save_tokenizer(folder, template)
        with open_llm(folder) as llm:
            message(BadChat, lambda llm=llm: llm.generate(CHAT, greedy(2)))
    save_tokenizer(folder, "{{ raise_exception('roles must alternate') }}")
    with open_llm(folder) as llm:
        assert "roles must alternate" in message(BadChat, lambda: llm.generate(CHAT, greedy(2)))


def test_a_template_cannot_reach_outside(folder: Path) -> None:
    save_tokenizer(folder, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with open_llm(folder) as llm:
        message(BadChat, lambda: llm.generate(CHAT, greedy(2)))


def test_a_text_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with open_llm(folder) as llm:
        for call in (lambda: llm.generate("a", greedy(2)), lambda: llm.generate([5], greedy(2, stop="x"))):
            assert "token" in message(ShoalError, call)


def bad_requests() -> dict[str, Callable[[LLM], Any]]:
    return {
        "empty": lambda llm: llm.generate([[]], greedy()),
        "too long": lambda llm: llm.generate([5] * 600, greedy()),
        "second too long": lambda llm: llm.generate(["a", [5] * 600], greedy(300)),
        "beyond the context": lambda llm: llm.generate("a", greedy(5000)),
        "out of range": lambda llm: llm.generate(["a", [VOCAB]], greedy(300)),
        "negative id": lambda llm: llm.generate([-3], greedy(300)),
        "bias out of range": lambda llm: llm.generate("a", greedy(3, logit_bias={VOCAB: 1.0})),
        "bad chat": lambda llm: llm.generate([STORY, [{}]], greedy(300)),
        "second of a wrong type": lambda llm: llm.generate(["a", None], greedy(300)),  # type: ignore[list-item]
        "mismatch": lambda llm: llm.generate(["a", "b"], [greedy(300)]),
        "second parameters of a wrong type": lambda llm: llm.generate(["a", "b"], [greedy(300), 5]),  # type: ignore[list-item]
        "stream": lambda llm: llm.stream(["a", [5] * 600], greedy(300)),
    }


@pytest.mark.parametrize("name", bad_requests())
def test_a_bad_request_disturbs_no_other_and_leaves_nothing_behind(model: Path, name: str) -> None:
    with open_llm(model, check=True) as llm:
        want = first(llm.generate(STORY, seeded(7, 30))).text
        stream = llm.stream(STORY, seeded(7, 30))
        said = next(stream).text
        with pytest.raises(Exception):  # noqa: B017, PT011 - which one is tested above
            bad_requests()[name](llm)
        said += next(stream).text
        with pytest.raises(Exception):  # noqa: B017, PT011
            bad_requests()[name](llm)
        said += "".join(chunk.text for chunk in stream)
        assert said == want
        assert first(llm.generate("x", greedy(3))).error == ""
        assert llm.loop.scheduler.kv.pool.held == 0
        assert not llm._client.jobs


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 1}], ids=str)
def test_logits_that_are_not_numbers_fail_their_own_request_only(folder: Path, more: dict[str, Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][200] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    good = [list(range(10, 40)), list(range(20, 70)), [5]]
    with open_llm(folder, check=True) as llm:
        want = token_ids(llm.generate(good, greedy(20, logit_bias={200: -100})))
        prompts = [good[0], [7, 200, 8], good[1], [200] * 40, good[2]]
        params = [greedy(20, logit_bias={200: -100})] * 5
        params[1] = params[3] = greedy(20, **more)
        outputs = llm.generate(prompts, params)
        reasons = [one.outputs[0].finish_reason for one in outputs]
        assert reasons == ["length", "error", "length", "error", "length"]
        assert outputs[1].outputs[0].error
        assert token_ids([outputs[0], outputs[2], outputs[4]]) == want
        # what the failed ones left in their blocks hurts nobody who gets these blocks next
        assert token_ids(llm.generate(good, greedy(20, logit_bias={200: -100}))) == want
        assert llm.loop.scheduler.kv.pool.held == 0


def test_a_closed_engine_says_so(model: Path) -> None:
    llm = open_llm(model)
    llm.close()
    llm.close()
    assert "closed" in message(ShoalError, lambda: llm.generate("a", greedy(2)))


# ---- the engine's options -------------------------------------------------------------------------------------------


def test_an_unknown_option_suggests_a_near_name(model: Path) -> None:
    text = message(UnknownName, lambda: LLM(str(model), blok_size=16))
    assert "'blok_size'" in text
    assert "'block_size'" in text


@pytest.mark.parametrize("name", ["batching", "layout", "prefill", "order", "memory", "when_short", "dtype"])
def test_an_unknown_policy_lists_the_known_ones(model: Path, name: str) -> None:
    text = message(UnknownName, lambda: LLM(str(model), kv_memory="64MiB", **{name: "magic"}))
    assert name in text
    assert "'magic'" in text
    assert "known: " in text


@pytest.mark.parametrize("value", ["", None, 5, torch.float32, ["x"]], ids=repr)
@pytest.mark.parametrize("name", ["order", "dtype"])
def test_a_policy_that_is_no_name(model: Path, name: str, value: Any) -> None:
    assert name in message(BadConfig, lambda: LLM(str(model), kv_memory="64MiB", **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("block_size", "16"),
        ("block_size", 1.5),
        ("block_size", None),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 0),
        ("max_model_len", 2.5),
        ("kv_memory", "lots"),
        ("kv_memory", -5),
        ("kv_memory", 0),
        ("kv_memory", []),
        ("kv_share", 0),
        ("kv_share", 1.5),
        ("kv_share", float("nan")),
        ("watermark", 1),
        ("watermark", -0.1),
        ("chunk_tokens", -1),
        ("depth", 0),
        ("threads", 0),
        ("seed", "x"),
        ("prefix_caching", "off"),
        ("prefix_caching", None),
        ("check", "no"),
        ("device", "tpu"),
        ("device", 5),
        ("load_format", "pickle"),
        ("chat_template", "/no/such/file"),
        ("max_model_len", 100_000),
    ],
)
def test_an_option_with_a_bad_value(model: Path, name: str, value: Any) -> None:
    options = {"kv_memory": "64MiB", name: value}
    text = message(BadConfig, lambda: LLM(str(model), **options))
    assert name in text or name.replace("_", "-") in text or str(value) in text


def test_a_cache_too_small_for_one_block(model: Path) -> None:
    text = message(BadConfig, lambda: open_llm(model, kv_memory=100))
    assert "kv" in text.lower()


@pytest.mark.parametrize("name", ["kv_memory", "host_kv_memory"])
def test_a_cache_larger_than_the_machine_is_refused_at_once(model: Path, name: str) -> None:
    """Not after minutes of counting its blocks."""
    text = message(BadConfig, lambda: open_llm(model, **{name: "900TiB"}))
    assert f"{name}= asks for 921600.0 GiB, which do not fit: " in text
    assert text.endswith(f"GiB in total; lower {name}=")


@pytest.mark.parametrize("error", [MemoryError("unable to allocate"), RuntimeError("can't allocate memory: 12")])
def test_a_cache_that_cannot_be_allocated_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def zeros(*args: Any) -> Any:
        raise error

    monkeypatch.setattr("shoal.runner.kvstore.lazy_zeros", zeros)
    text = message(BadConfig, lambda: open_llm(model, kv_memory="64MiB"))
    assert "0.1 GiB for" in text
    assert str(error) in text
    assert text.endswith("lower kv_memory= or kv_share=")


# ---- the model's files ----------------------------------------------------------------------------------------------


def test_no_such_model() -> None:
    assert "/no/such/model" in message(ModelNotFound, lambda: LLM("/no/such/model", kv_memory="64MiB"))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert "config.json" in message(ModelError, lambda: open_llm(tmp_path))


def test_a_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json" in message(ModelError, lambda: open_llm(folder))


def test_a_config_that_lacks_a_number(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        left = {key: value for key, value in config.items() if key != name}
        (folder / "config.json").write_text(json.dumps(left))
        assert name in message(ModelError, lambda: open_llm(folder))


@pytest.mark.parametrize("value", [0, -2, "two", None, 2.5])
def test_a_config_with_a_wrong_number(folder: Path, value: Any) -> None:
    edit_json(folder / "config.json", num_hidden_layers=value)
    assert "num_hidden_layers" in message(ModelError, lambda: open_llm(folder))


def test_an_unknown_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")
    text = message(UnsupportedModel, lambda: open_llm(folder))
    assert "mamba" in text.lower()
    assert "llama" in text.lower()


def test_an_unknown_rope_scaling(folder: Path) -> None:
    edit_json(folder / "config.json", rope_scaling={"rope_type": "spiral", "factor": 2.0}, rope_parameters=None)
    assert "spiral" in message(UnsupportedModel, lambda: open_llm(folder))


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "safetensors" in message(ModelError, lambda: open_llm(folder))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_weights(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep == 0.5 else int(keep)])
    text = message(BadWeights, lambda: open_llm(folder))
    assert "model.safetensors" in text


def test_weights_that_are_something_else(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "model.safetensors" in message(BadWeights, lambda: open_llm(folder))


def test_a_tensor_is_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "layers.1.mlp.up_proj" in message(BadWeights, lambda: open_llm(folder))


def test_a_tensor_of_another_shape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "layers.1.mlp.up_proj" in message(BadWeights, lambda: open_llm(folder))


def test_a_shard_is_missing(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    half = len(names) // 2
    places = {name: f"model-0000{1 + (i >= half)}-of-00002.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for shard in sorted(set(places.values())):
        save_file({n: weights[n].clone() for n in names if places[n] == shard}, folder / shard)
    with open_llm(folder) as llm:
        assert len(first(llm.generate("a", greedy(2))).token_ids) == 2
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in message(BadWeights, lambda: open_llm(folder))


def test_an_index_cannot_point_outside_the_folder(folder: Path, model: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = dict.fromkeys(weights, str(model / "model.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    message(ModelError, lambda: open_llm(folder))


def test_pickled_weights_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    text = message(UnsafeWeights, lambda: open_llm(folder))
    assert "safetensors" in text
    for name in ("pytorch_model.bin", "model.pt", "model.pth"):
        torch.save(weights, folder / name)
        message(UnsafeWeights, lambda name=name: LLM(str(folder / name), kv_memory="64MiB"))


def test_a_tokenizer_bigger_than_the_vocabulary(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(f"<extra {i}>") for i in range(50)])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = message(TokenizerMismatch, lambda: open_llm(folder))
    assert "350" in text or "349" in text
    assert str(VOCAB) in text


def test_a_tokenizer_that_is_not_one(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json" in message(ModelError, lambda: open_llm(folder))


def test_a_generation_config_with_nonsense(folder: Path) -> None:
    for values in ({"temperature": -3}, {"temperature": "warm"}, {"top_p": 7}, {"eos_token_id": "end"}):
        (folder / "generation_config.json").write_text(json.dumps(values))
        text = message(ShoalError, lambda: open_llm(folder).generate("a", SamplingParams(max_tokens=1)))
        assert next(iter(values)) in text
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json" in message(ModelError, lambda: open_llm(folder))

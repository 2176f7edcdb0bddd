"""/v1/completions through the real openai client: every shape of prompt, every option."""

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types import Completion

from tests.story.models import EOS
from tests.story_server.asks import ON, STORY, ascii_piece
from tests.story_server.servers import SMALL, Server, running

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}


def ids_of(tiny: Server, text: str) -> list[int]:
    return list(tiny.post("/tokenize", {"prompt": text}).json()["tokens"])


def texts(done: Completion) -> list[str]:
    return [choice.text for choice in done.choices]


def token_ids(done: Completion, choice: int = 0) -> list[int]:
    return list((done.choices[choice].model_extra or {})["token_ids"])


def greedy(client: OpenAI, prompt: Any = STORY, **more: Any) -> Completion:
    extra = {**ON, "return_token_ids": True, **more.pop("extra_body", {})}
    return client.completions.create(**{**GREEDY, "prompt": prompt, "extra_body": extra, **more})


# ---- the four shapes of prompt --------------------------------------------------------------------------------------


def test_a_text_is_continued(client: OpenAI) -> None:
    done = greedy(client)
    assert done.object == "text_completion"
    assert done.model == "tiny"
    assert [choice.index for choice in done.choices] == [0]
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 12
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12


def test_a_text_and_its_token_ids_are_the_same_prompt(tiny: Server, client: OpenAI) -> None:
    ids = ids_of(tiny, STORY)
    by_ids, by_text = greedy(client, ids), greedy(client)
    assert texts(by_ids) == texts(by_text)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == len(ids)


def test_a_list_of_texts_has_an_answer_for_each_in_order(client: OpenAI) -> None:
    prompts = [STORY, "The quick brown fox", "a shoal of fish"]
    together = greedy(client, prompts)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert texts(together) == [greedy(client, one).choices[0].text for one in prompts]
    assert together.usage is not None
    assert together.usage.completion_tokens == 36


def test_a_list_of_token_id_lists_has_an_answer_for_each_in_order(client: OpenAI) -> None:
    prompts = [[5, 6, 7], [100, 101], [42]]
    together = greedy(client, prompts)
    assert texts(together) == [greedy(client, one).choices[0].text for one in prompts]
    assert together.usage is not None
    assert together.usage.prompt_tokens == 6


def test_several_prompts_with_several_samples_each(client: OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt=["fish", "fox"], n=3, max_tokens=8, seed=1, extra_body=ON)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3, 4, 5]
    alone = client.completions.create(model="tiny", prompt="fish", n=3, max_tokens=8, seed=1, extra_body=ON)
    assert texts(done)[:3] == texts(alone)


# ---- echo, n, best_of, logprobs, suffix -----------------------------------------------------------------------------


def test_echo_puts_the_prompt_before_the_answer(client: OpenAI) -> None:
    assert texts(greedy(client, echo=True)) == [STORY + greedy(client).choices[0].text]


def test_echo_with_logprobs_says_how_likely_the_prompt_was(tiny: Server, client: OpenAI) -> None:
    done = greedy(client, echo=True, logprobs=1, max_tokens=2)
    told = done.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(ids_of(tiny, STORY)) + 2
    assert told.token_logprobs[0] is None, "nothing comes before the first token"
    assert all(value <= 0 for value in told.token_logprobs[1:])


def test_n_samples_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    def asked(seed: int) -> list[str]:
        done = client.completions.create(model="tiny", prompt=STORY, n=4, max_tokens=16, seed=seed, extra_body=ON)
        return texts(done)

    first = asked(7)
    assert len(set(first)) == 4
    assert asked(7) == first
    assert asked(8) != first


def test_best_of_returns_the_likeliest_samples(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": STORY, "max_tokens": 8, "seed": 3, "extra_body": ON}
    every = client.completions.create(**asked, n=4, logprobs=0)

    def likelihood(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs)

    ranked = [choice.text for choice in sorted(every.choices, key=likelihood, reverse=True)]
    best = client.completions.create(**asked, n=2, best_of=4)
    assert texts(best) == ranked[:2]
    assert [choice.index for choice in best.choices] == [0, 1]


def test_best_of_below_n_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="best_of"):
        client.completions.create(model="tiny", prompt=STORY, n=3, best_of=2)


def test_best_of_cannot_be_streamed(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="best_of"):
        client.completions.create(model="tiny", prompt=STORY, n=1, best_of=2, stream=True)


def test_logprobs_are_told_for_every_token(client: OpenAI) -> None:
    done = greedy(client, logprobs=3)
    told = done.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 12
    assert told.text_offset == sorted(told.text_offset)
    for value, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert 1 <= len(top) <= 4
        assert value == pytest.approx(max(top.values())), "greedy takes the likeliest"


def test_suffix_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt=STORY, suffix=" and they lived happily")


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = greedy(client, max_tokens=40).choices[0].text
    stop = ascii_piece(whole, 3)
    cut = greedy(client, max_tokens=40, stop=[stop, "never said"]).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    kept = greedy(client, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == cut.text + stop


def test_usage_ends_where_the_stop_string_was_found(client: OpenAI) -> None:
    whole = greedy(client, max_tokens=40)
    stop = ascii_piece(whole.choices[0].text, 3)
    cut = greedy(client, max_tokens=40, stop=stop)
    assert cut.usage is not None
    assert cut.usage.completion_tokens == len(token_ids(cut))
    assert token_ids(cut) == token_ids(whole)[: len(token_ids(cut))]
    assert len(token_ids(cut)) < 40


def test_a_stop_token_ends_the_answer_but_not_before_min_tokens(client: OpenAI) -> None:
    ids = token_ids(greedy(client, max_tokens=40))
    early = greedy(client, max_tokens=40, extra_body={"stop_token_ids": [ids[3]]})
    assert early.choices[0].finish_reason == "stop"
    assert early.usage is not None
    assert early.usage.completion_tokens == ids.index(ids[3]) + 1
    late = greedy(client, max_tokens=40, extra_body={"stop_token_ids": [ids[3]], "min_tokens": 10})
    assert late.usage is not None
    assert late.usage.completion_tokens >= 10


def test_the_end_token_ends_unless_it_is_ignored(client: OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "prompt": STORY, "logit_bias": {str(EOS): 100}}
    ended = client.completions.create(**asked)
    assert ended.choices[0].finish_reason == "stop"
    assert ended.choices[0].text == ""
    going = client.completions.create(**asked, extra_body=ON)
    assert going.choices[0].finish_reason == "length"
    assert going.choices[0].text == "", "special tokens are skipped"
    shown = client.completions.create(**asked, extra_body={**ON, "skip_special_tokens": False})
    assert shown.choices[0].text == "</s>" * 12


# ---- choosing tokens ------------------------------------------------------------------------------------------------


def test_temperature_zero_repeats_itself(client: OpenAI) -> None:
    assert token_ids(greedy(client, max_tokens=40)) == token_ids(greedy(client, max_tokens=40))


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"min_p": 1.0}], ids=["top_k", "min_p"])
def test_filters_that_leave_one_token_are_greedy(client: OpenAI, extra: dict[str, Any]) -> None:
    hot = greedy(client, temperature=2.0, seed=5, extra_body=extra)
    assert token_ids(hot) == token_ids(greedy(client))


def test_a_tiny_top_p_is_greedy(client: OpenAI) -> None:
    assert token_ids(greedy(client, temperature=2.0, top_p=1e-6)) == token_ids(greedy(client))


def test_repetition_penalty_makes_answers_vary(client: OpenAI) -> None:
    plain = token_ids(greedy(client, max_tokens=60))
    varied = token_ids(greedy(client, max_tokens=60, extra_body={"repetition_penalty": 10.0}))
    assert len(set(varied)) > len(set(plain))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_a_repetitive_answer(client: OpenAI, name: str) -> None:
    plain = token_ids(greedy(client, max_tokens=60))
    assert token_ids(greedy(client, max_tokens=60, **{name: 2.0})) != plain


def test_logit_bias_can_force_a_token(client: OpenAI) -> None:
    assert token_ids(greedy(client, logit_bias={"50": 100})) == [50] * 12


def test_return_token_ids_tells_prompt_and_answer(tiny: Server, client: OpenAI) -> None:
    done = greedy(client)
    extra = {**(done.model_extra or {}), **(done.choices[0].model_extra or {})}
    assert extra["prompt_token_ids"] == ids_of(tiny, STORY)
    assert len(extra["token_ids"]) == 12
    plain = client.completions.create(**GREEDY, prompt=STORY)
    assert "token_ids" not in (plain.choices[0].model_extra or {}) or plain.choices[0].model_extra["token_ids"] is None


@pytest.mark.parametrize("extra", [{"priority": 5}, {"priority": -5}, {"timeout": 60}, {"cache_salt": "s"}], ids=str)
def test_fields_that_do_not_change_the_answer_are_taken(client: OpenAI, extra: dict[str, Any]) -> None:
    assert texts(greedy(client, extra_body=extra)) == texts(greedy(client))


# ---- the prefix cache -----------------------------------------------------------------------------------------------


def cached(done: Completion) -> int:
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    return done.usage.prompt_tokens_details.cached_tokens or 0


def test_a_repeated_prompt_is_cached_but_not_under_another_salt(client: OpenAI) -> None:
    prompt = [(7 * i) % 250 + 5 for i in range(200)]
    assert cached(greedy(client, prompt, max_tokens=1)) == 0
    again = cached(greedy(client, prompt, max_tokens=1))
    assert 100 < again < 200
    salted = {"cache_salt": "somebody else"}
    assert cached(greedy(client, prompt, max_tokens=1, extra_body=salted)) == 0
    assert cached(greedy(client, prompt, max_tokens=1, extra_body=salted)) == again


# ---- other batching systems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["fastertransformer", "classic-dynamic"])
def test_a_group_starts_with_those_that_wait_however_few(preset: str, tiny_model: Path, tmp_path: Path) -> None:
    """A server does not know whether more requests will come."""
    with running(tmp_path, tiny_model, *SMALL, "--preset", preset) as server, server.openai() as client:
        alone = greedy(client).choices[0]
        assert alone.finish_reason == "length"
        assert texts(greedy(client, [STORY] * 3)) == [alone.text] * 3

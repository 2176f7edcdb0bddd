"""/v1/chat/completions through the real openai client: every option but the shape of the answer."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletion

from tests.story_server.asks import ASKED, ON, PARIS, ascii_piece
from tests.story_server.servers import Server

GREEDY: dict[str, Any] = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 12}


def greedy(client: OpenAI, **more: Any) -> ChatCompletion:
    extra = {**ON, "return_token_ids": True, **more.pop("extra_body", {})}
    return client.chat.completions.create(**{**GREEDY, "extra_body": extra, **more})


def said(done: ChatCompletion, choice: int = 0) -> str:
    content = done.choices[choice].message.content
    assert content is not None
    return content


def test_the_default_model_knows_paris(smol_client: OpenAI, smol_name: str) -> None:
    done = smol_client.chat.completions.create(model=smol_name, messages=PARIS, temperature=0, max_tokens=16)
    assert "Paris" in said(done)
    assert done.object == "chat.completion"
    assert done.model == smol_name
    assert done.choices[0].message.role == "assistant"


def test_the_default_model_ends_by_itself(smol_client: OpenAI, smol_name: str) -> None:
    done = smol_client.chat.completions.create(model=smol_name, messages=PARIS, temperature=0, max_tokens=60)
    assert done.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in said(done)


def test_the_chat_template_is_what_the_model_sees(tiny: Server, client: OpenAI) -> None:
    rendered = "<|user|>The quick brown fox<|end|><|assistant|>"  # the template's own <s> is what the tokenizer adds
    ids = tiny.post("/tokenize", {"prompt": rendered}).json()["tokens"]
    done = greedy(client)
    extra = {**(done.choices[0].model_extra or {}), **(done.model_extra or {})}
    assert extra["prompt_token_ids"] == ids
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(ids)


def test_a_system_message_and_turns_change_the_prompt(client: OpenAI) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *ASKED, {"role": "assistant", "content": "jumps"}, *ASKED]
    longer, shorter = greedy(client, messages=turns), greedy(client)
    assert longer.usage is not None
    assert shorter.usage is not None
    assert longer.usage.prompt_tokens > shorter.usage.prompt_tokens


def test_content_in_text_parts_is_content(client: OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "The quick brown fox"}]}]
    assert said(greedy(client, messages=parts)) == said(greedy(client))


def test_a_picture_is_refused_by_name(client: OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]
    with pytest.raises(BadRequestError, match="image_url"):
        greedy(client, messages=parts)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_number_of_tokens_is_limited(client: OpenAI, name: str) -> None:
    asked = {key: value for key, value in GREEDY.items() if key != "max_tokens"}
    done = client.chat.completions.create(**asked, **{name: 5}, extra_body=ON)
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 5


def test_n_samples_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    def asked(seed: int) -> list[str]:
        done = greedy(client, temperature=1, n=3, seed=seed)
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        assert done.usage is not None
        assert done.usage.completion_tokens == 36
        return [said(done, i) for i in range(3)]

    first = asked(11)
    assert len(set(first)) == 3
    assert asked(11) == first
    assert asked(12) != first


def test_logprobs_come_with_bytes_and_alternatives(client: OpenAI) -> None:
    done = greedy(client, logprobs=True, top_logprobs=4)
    assert done.choices[0].logprobs is not None
    told = done.choices[0].logprobs.content
    assert told is not None
    assert len(told) == 12
    for one in told:
        assert len(one.top_logprobs) == 4
        assert one.logprob <= 0
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob), "greedy takes the likeliest"
        values = [other.logprob for other in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert one.bytes is None or all(0 <= byte < 256 for byte in one.bytes)


def test_logprobs_alone_have_no_alternatives(client: OpenAI) -> None:
    done = greedy(client, logprobs=True)
    assert done.choices[0].logprobs is not None
    told = done.choices[0].logprobs.content
    assert told is not None
    assert [one.top_logprobs for one in told] == [[]] * 12
    assert greedy(client).choices[0].logprobs is None


def test_the_bytes_of_all_tokens_are_the_text(smol_client: OpenAI, smol_name: str) -> None:
    done = smol_client.chat.completions.create(
        model=smol_name, messages=PARIS, temperature=0, max_tokens=6, logprobs=True
    )
    assert done.choices[0].logprobs is not None
    told = done.choices[0].logprobs.content or []
    assert bytes(byte for one in told for byte in one.bytes or []).decode() == said(done)
    assert "".join(one.token for one in told) == said(done)


def test_top_logprobs_without_logprobs_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="logprobs"):
        greedy(client, top_logprobs=3)


def test_a_stop_string_ends_the_answer_before_it(client: OpenAI) -> None:
    whole = said(greedy(client, max_tokens=40))
    stop = ascii_piece(whole, 3)
    done = greedy(client, max_tokens=40, stop=stop)
    assert said(done) == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    kept = greedy(client, max_tokens=40, stop=[stop], extra_body={"include_stop_str_in_output": True})
    assert said(kept) == whole[: whole.index(stop)] + stop


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 1},
        {"min_p": 1.0},
        {"priority": 3},
        {"timeout": 60},
        {"cache_salt": "s"},
        {"skip_special_tokens": False},
        {"stop_token_ids": [319]},
        {"min_tokens": 12},
        {"repetition_penalty": 1.0},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_extra_fields_are_taken(client: OpenAI, extra: dict[str, Any]) -> None:
    done = greedy(client, extra_body=extra)
    assert done.usage is not None
    assert 1 <= done.usage.completion_tokens <= 12
    extras = done.choices[0].model_extra or {}
    assert len(extras["token_ids"]) == done.usage.completion_tokens


def test_a_repeated_chat_is_cached_but_not_under_another_salt(client: OpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": "a shoal of a thousand fish, " * 12}]

    def cached(salt: str) -> int:
        done = greedy(client, messages=long, max_tokens=1, extra_body={"cache_salt": salt})
        assert done.usage is not None
        assert done.usage.prompt_tokens_details is not None
        return done.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("one") == 0
    assert cached("one") > 16
    assert cached("two") == 0

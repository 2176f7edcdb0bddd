"""Streaming through the real openai client, sync and async: the same text as without, one event per token."""

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from tests.story_server.asks import ASKED, ON, PARIS, STORY, ascii_piece
from tests.story_server.servers import Server

SEEDED: dict[str, Any] = {"model": "tiny", "seed": 21, "max_tokens": 24, "extra_body": ON}


def streamed(client: OpenAI, **more: Any) -> tuple[dict[int, str], dict[int, str | None], list[Any]]:
    """Text and finish reason of each choice of a completion, and all chunks."""
    chunks = list(client.completions.create(**{**SEEDED, "prompt": STORY, **more}, stream=True))
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            assert choice.index not in ends, "nothing comes after the finish reason"
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return texts, ends, chunks


def chat_streamed(client: OpenAI, **more: Any) -> tuple[dict[int, str], dict[int, str | None], list[Any]]:
    chunks = list(client.chat.completions.create(**{**SEEDED, "messages": ASKED, **more}, stream=True))
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return texts, ends, chunks


def test_a_streamed_completion_says_what_the_whole_one_says(client: OpenAI) -> None:
    whole = client.completions.create(**SEEDED, prompt=STORY)
    texts, ends, chunks = streamed(client)
    assert texts == {0: whole.choices[0].text}
    assert ends == {0: "length"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_a_streamed_chat_says_what_the_whole_one_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(**SEEDED, messages=ASKED)
    texts, ends, chunks = chat_streamed(client)
    assert texts == {0: whole.choices[0].message.content}
    assert ends == {0: "length"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_one_event_per_token(smol_client: OpenAI, smol_name: str) -> None:
    asked = {"model": smol_name, "messages": PARIS, "temperature": 0, "max_tokens": 6, "extra_body": ON}
    _, _, chunks = chat_streamed(smol_client, **asked)
    spoken = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(spoken) == 6


def test_streamed_token_ids_are_those_of_the_whole_answer(client: OpenAI) -> None:
    extra = {**ON, "return_token_ids": True}
    whole = client.completions.create(**{**SEEDED, "extra_body": extra}, prompt=STORY)
    _, _, chunks = streamed(client, extra_body=extra)
    told = [(chunk.choices[0].model_extra or {}).get("token_ids") or [] for chunk in chunks if chunk.choices]
    assert [token for part in told for token in part] == (whole.choices[0].model_extra or {})["token_ids"]
    assert max(map(len, told)) == 1, "one event per token"


def test_several_samples_are_streamed_side_by_side(client: OpenAI) -> None:
    whole = client.completions.create(**SEEDED, prompt=[STORY, "fox"], n=2)
    texts, ends, _ = streamed(client, prompt=[STORY, "fox"], n=2)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert ends == dict.fromkeys(range(4), "length")


def test_several_chat_samples_are_streamed_side_by_side(client: OpenAI) -> None:
    whole = client.chat.completions.create(**SEEDED, messages=ASKED, n=3)
    texts, ends, _ = chat_streamed(client, n=3)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == dict.fromkeys(range(3), "length")


def test_a_stop_string_is_never_streamed(client: OpenAI) -> None:
    asked = {"temperature": 0, "max_tokens": 40}
    texts, _, _ = streamed(client, **asked)
    stop = ascii_piece(texts[0], 3)
    cut, ends, _ = streamed(client, **asked, stop=stop)
    assert cut == {0: texts[0][: texts[0].index(stop)]}
    assert ends == {0: "stop"}


def test_streamed_logprobs_cover_every_token(client: OpenAI) -> None:
    _, _, chunks = chat_streamed(client, logprobs=True, top_logprobs=2)
    told = [one for chunk in chunks for c in chunk.choices if c.logprobs for one in c.logprobs.content or []]
    whole = client.chat.completions.create(**SEEDED, messages=ASKED, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None
    want = whole.choices[0].logprobs.content or []
    assert len(told) == 24
    assert [one.token for one in told] == [one.token for one in want]
    assert [one.logprob for one in told] == pytest.approx([one.logprob for one in want], abs=1e-4)


def test_streamed_echo_begins_with_the_prompt(client: OpenAI) -> None:
    texts, _, _ = streamed(client, echo=True)
    plain, _, _ = streamed(client)
    assert texts == {0: STORY + plain[0]}


# ---- usage ----------------------------------------------------------------------------------------------------------


def test_usage_comes_last_when_asked_for(client: OpenAI) -> None:
    _, _, chunks = chat_streamed(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    whole = client.chat.completions.create(**SEEDED, messages=ASKED)
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_have_usage_last_too(client: OpenAI) -> None:
    _, _, chunks = streamed(client, n=2, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 48


def test_usage_does_not_come_unasked(client: OpenAI) -> None:
    _, _, chunks = chat_streamed(client)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_stream_options_without_a_stream_are_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="stream_options"):
        client.chat.completions.create(**SEEDED, messages=ASKED, stream_options={"include_usage": True})


# ---- on the wire ----------------------------------------------------------------------------------------------------


def test_the_wire_speaks_server_sent_events(tiny: Server) -> None:
    body = {"model": "tiny", "prompt": STORY, "max_tokens": 3, "stream": True, "ignore_eos": True}
    answer = tiny.post("/v1/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-2])


def test_a_refused_stream_is_an_error_status_not_an_event(tiny: Server) -> None:
    body = {"model": "tiny", "prompt": [5] * 5000, "max_tokens": 3, "stream": True}
    answer = tiny.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("application/json")


def test_a_closed_stream_leaves_nothing_behind(tiny: Server, client: OpenAI) -> None:
    stream = client.completions.create(model="tiny", prompt=STORY, max_tokens=1900, extra_body=ON, stream=True)
    next(iter(stream))
    stream.close()
    tiny.wait_until_idle()


# ---- async ----------------------------------------------------------------------------------------------------------


def test_the_async_client_does_all_of_it(tiny: Server, client: OpenAI) -> None:
    async def talk(made: AsyncOpenAI) -> tuple[str, str | None, str, str]:
        completion = await made.completions.create(**SEEDED, prompt=STORY)
        chat = await made.chat.completions.create(**SEEDED, messages=ASKED)
        text, spoken = "", ""
        async for chunk in await made.completions.create(**SEEDED, prompt=STORY, stream=True):
            text += "".join(choice.text for choice in chunk.choices)
        async for piece in await made.chat.completions.create(**SEEDED, messages=ASKED, stream=True):
            spoken += "".join(choice.delta.content or "" for choice in piece.choices)
        assert [model.id async for model in made.models.list()] == ["tiny"]
        return completion.choices[0].text, chat.choices[0].message.content, text, spoken

    async def run() -> tuple[str, str | None, str, str]:
        async with tiny.async_openai() as made:
            return await talk(made)

    completion, chat, text, spoken = asyncio.run(run())
    assert completion == text == client.completions.create(**SEEDED, prompt=STORY).choices[0].text
    assert chat == spoken == client.chat.completions.create(**SEEDED, messages=ASKED).choices[0].message.content


def test_answers_do_not_depend_on_neighbours(tiny: Server, client: OpenAI) -> None:
    prompts = [f"{STORY} {i}" for i in range(24)]

    async def run() -> list[str]:
        async with tiny.async_openai() as made:
            asked = [made.completions.create(**SEEDED, prompt=prompt) for prompt in prompts]
            return [done.choices[0].text for done in await asyncio.gather(*asked)]

    together = asyncio.run(run())
    alone = [client.completions.create(**SEEDED, prompt=prompt).choices[0].text for prompt in prompts[:6]]
    assert together[:6] == alone


def test_a_stream_that_is_cancelled_halfway_hurts_nobody(tiny: Server, client: OpenAI) -> None:
    async def one(made: AsyncOpenAI, i: int) -> str | None:
        text = ""
        stream = await made.completions.create(**{**SEEDED, "max_tokens": 60}, prompt=f"{STORY} {i % 2}", stream=True)
        async with stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if i >= 2 and len(text) > i:
                    return None
        return text

    async def run() -> list[str | None]:
        async with tiny.async_openai() as made:
            return await asyncio.gather(*(one(made, i) for i in range(12)))

    told = asyncio.run(run())
    alone = [
        client.completions.create(**{**SEEDED, "max_tokens": 60}, prompt=f"{STORY} {i}").choices[0].text
        for i in range(2)
    ]
    assert told[:2] == alone
    tiny.wait_until_idle()


def test_plain_http_clients_work_as_well(tiny: Server) -> None:
    with httpx.Client(base_url=tiny.url, timeout=120) as http:  # one connection, several requests
        for _ in range(3):
            answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "fish", "max_tokens": 2})
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["finish_reason"] in ("length", "stop")

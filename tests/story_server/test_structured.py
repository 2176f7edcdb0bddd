"""Answers that must have a shape: response_format and structured_outputs, and what happens to bad ones."""

import asyncio
import json
import re
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, OpenAI, RateLimitError

from tests.story_server.asks import ASKED, ON
from tests.story_server.servers import Server

SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}},
    "required": ["on", "level"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "river": {"type": "boolean"}},
    "required": ["city", "river"],
    "additionalProperties": False,
}
LARK = 'start: "<" word ("," word)* ">"\nword: /[a-c]{1,3}/\n'


def asked(client: OpenAI, shape: dict[str, Any] | None = None, **more: Any) -> str:
    """One answer of the random model at temperature 1, which knows nothing of JSON."""
    done = client.chat.completions.create(
        **{
            "model": "tiny",
            "messages": ASKED,
            "max_tokens": 400,
            "seed": 1,
            **({"extra_body": {"structured_outputs": shape}} if shape is not None else {}),
            **more,
        }
    )
    assert done.choices[0].finish_reason == "stop", done.choices[0]
    content = done.choices[0].message.content
    assert content is not None
    return content


def check_switch(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"on", "level"}
    assert value["on"] in (True, False)
    assert value["level"] in (1, 2, 3)


@pytest.mark.parametrize("seed", range(4))
def test_a_json_schema_binds_even_a_random_model(client: OpenAI, seed: int) -> None:
    check_switch(asked(client, {"json": SWITCH}, seed=seed))


def test_a_json_schema_may_be_given_as_text(client: OpenAI) -> None:
    check_switch(asked(client, {"json": json.dumps(SWITCH)}))


def test_response_format_json_schema(client: OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "switch", "schema": SWITCH, "strict": True}}
    check_switch(asked(client, response_format=wanted))


def test_response_format_text_is_no_shape(client: OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=ASKED, seed=1, max_tokens=8, extra_body=ON)
    text = client.chat.completions.create(
        model="tiny", messages=ASKED, seed=1, max_tokens=8, response_format={"type": "text"}, extra_body=ON
    )
    assert text.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize("seed", range(3))
def test_a_regex_binds(client: OpenAI, seed: int) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-z]{2,4}", asked(client, {"regex": "[0-9]{3}-[a-z]{2,4}"}, seed=seed))


def test_a_choice_binds_and_can_fall_either_way(client: OpenAI) -> None:
    said = {asked(client, {"choice": ["yes", "no, never"]}, seed=seed) for seed in range(12)}
    assert said == {"yes", "no, never"}


def test_a_grammar_binds(client: OpenAI) -> None:
    assert re.fullmatch(r"<[a-c]{1,3}(,[a-c]{1,3})*>", asked(client, {"grammar": LARK}))


def test_a_streamed_answer_has_the_shape_too(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        max_tokens=400,
        seed=1,
        stream=True,
        extra_body={"structured_outputs": {"json": SWITCH}},
    )
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == asked(client, {"json": SWITCH})
    check_switch(text)


def test_every_one_of_n_samples_has_the_shape(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=400, n=4, extra_body={"structured_outputs": {"json": SWITCH}}
    )
    for choice in done.choices:
        check_switch(choice.message.content or "")


def test_completions_take_a_shape_too(client: OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt="fish", max_tokens=40, extra_body={"structured_outputs": {"regex": "[a-f]{5}"}}
    )
    assert re.fullmatch("[a-f]{5}", done.choices[0].text)


def test_shaped_and_free_answers_run_side_by_side(tiny: Server, client: OpenAI) -> None:
    async def run() -> tuple[list[str], list[str]]:
        free: dict[str, Any] = {"model": "tiny", "messages": ASKED, "seed": 4, "max_tokens": 40, "extra_body": ON}
        bound = {**free, "max_tokens": 400, "extra_body": {"structured_outputs": {"json": SWITCH}}}
        async with tiny.async_openai() as made:
            every = await asyncio.gather(
                *(made.chat.completions.create(**(bound if i % 2 else free)) for i in range(12))
            )
        texts = [done.choices[0].message.content or "" for done in every]
        return texts[0::2], texts[1::2]

    free, bound = asyncio.run(run())
    for text in bound:
        check_switch(text)
    alone = client.chat.completions.create(model="tiny", messages=ASKED, seed=4, max_tokens=40, extra_body=ON)
    assert set(free) == {alone.choices[0].message.content}


# ---- the default model ----------------------------------------------------------------------------------------------


def test_the_default_model_fills_in_a_schema(smol_client: OpenAI, smol_name: str) -> None:
    ask: list[Any] = [{"role": "user", "content": "The capital of France and whether it lies on a river, as JSON."}]
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    done = smol_client.chat.completions.create(
        model=smol_name, messages=ask, temperature=0, max_tokens=60, response_format=wanted
    )
    value = json.loads(done.choices[0].message.content or "")
    assert set(value) == {"city", "river"}
    assert len(value["city"]) <= 12
    assert isinstance(value["river"], bool)


def test_json_object_is_any_json_object(smol_client: OpenAI, smol_name: str) -> None:
    ask: list[Any] = [{"role": "user", "content": 'Answer with this JSON object and nothing else: {"a": 1}'}]
    done = smol_client.chat.completions.create(
        model=smol_name, messages=ask, temperature=0, max_tokens=60, response_format={"type": "json_object"}
    )
    text = done.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


# ---- shapes that cannot be had --------------------------------------------------------------------------------------

WIDE = {f"p{i}": {"enum": [f"v{i}_{j}" for j in range(200)]} for i in range(400)}
ENDLESS = "".join(f'a{i}: "x" a{i + 1} | "y" a{i + 1}\n' for i in range(20_000))
FACTORS = [[{"properties": {f"p{i}_{j}": {"const": j}}, "required": [f"p{i}_{j}"]} for j in range(8)] for i in range(6)]
PRODUCT = {"json": {"allOf": [{"anyOf": cases} for cases in FACTORS]}}  # 8 to the power of 6 cases
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "([a-z"}, "regex"),
    "regex-type": ({"regex": 5}, "regex"),
    "json-type": ({"json": {"type": "no such type"}}, "json"),
    "json-text": ({"json": "{not json"}, "json"),
    "json-number": ({"json": 5}, "json"),
    "grammar": ({"grammar": "start: nowhere"}, "grammar"),
    "grammar-empty": ({"grammar": ""}, "grammar"),
    "choice-empty": ({"choice": []}, "choice"),
    "choice-type": ({"choice": [1, 2]}, "choice"),
    "two": ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
    "none": ({}, "structured_outputs"),
    "unknown": ({"yaml": "a: b"}, "yaml"),
    "impossible": ({"json": False}, "json"),
    "product": (PRODUCT, "schema"),
    "huge-grammar": ({"grammar": f"start: a0\n{ENDLESS}a20000: /z/\n"}, "grammar"),
    "huge": ({"json": {"type": "object", "properties": WIDE}}, "structured_outputs has too many values"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_shape_that_cannot_be_used_is_a_400(tiny: Server, client: OpenAI, name: str) -> None:
    shape, word = BAD[name]
    with pytest.raises(BadRequestError, match=f"(?i){word}"):
        client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=4, extra_body={"structured_outputs": shape}
        )
    assert tiny.health() == 200


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "yaml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
        {},
        "json",
    ],
    ids=str,
)
def test_a_bad_response_format_is_a_400(client: OpenAI, wanted: Any) -> None:
    with pytest.raises(BadRequestError, match=r"response_format|schema"):
        client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=4, response_format=wanted)


MONSTERS: list[dict[str, Any]] = [
    PRODUCT,
    {"json": {"type": "string", "pattern": "(.{0,50}a.{0,50}){50}"}},
    {"json": {"type": "array", "items": {"type": "integer", "multipleOf": 999983}, "minItems": 100_000}},
    {"regex": "((a{1,900}){1,900}){1,900}b"},
    {"regex": "(.*x.{400}|.*y.{401})+"},
    {"regex": r"(\p{L}|\p{N}|\w){5000}"},
    {"regex": "|".join(f"w{i}z" for i in range(6000))},
    {"grammar": "start: " + "|".join(f'"w{i}" start "q{i}"' for i in range(1500)) + '|"z"'},
]


def test_others_are_served_while_monsters_are_compiled_and_run(tiny: Server, client: OpenAI) -> None:
    free: dict[str, Any] = {"model": "tiny", "prompt": "fish", "seed": 2, "max_tokens": 30, "extra_body": ON}

    async def monster(made: AsyncOpenAI, shape: dict[str, Any]) -> str:
        try:
            done = await made.chat.completions.create(
                model="tiny", messages=ASKED, max_tokens=60, extra_body={"structured_outputs": shape}
            )
        except BadRequestError:
            return "refused"
        except RateLimitError as error:  # those before it took long
            return f"{error.status_code} {error.code}"
        except InternalServerError as error:  # not compiled in time
            return f"{error.status_code} {error.code} {error.response.headers.get('retry-after')}"
        return str(done.choices[0].finish_reason)

    async def run() -> tuple[list[str], list[str]]:
        async with tiny.async_openai().with_options(timeout=280) as made:
            monsters = [asyncio.ensure_future(monster(made, shape)) for shape in MONSTERS]
            texts = [(await made.completions.create(**free)).choices[0].text for _ in range(5)]
            return await asyncio.gather(*monsters), texts

    ended, texts = asyncio.run(run())
    assert set(ended) <= {"refused", "503 grammar_timeout 2", "429 queue_full", "stop", "length"}
    assert ended[0] == "refused"
    assert set(texts) == {client.completions.create(**free).choices[0].text}
    tiny.wait_until_idle()

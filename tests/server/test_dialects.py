"""Dialects: another API is one class; streams, whole answers, errors and the API's description need to know no more."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from shoal.core.request import Logprobs
from shoal.keys.api_key import ApiKey
from shoal.output.parser import Parsed, ParsedParts, content_of
from shoal.output.sample import Sample
from shoal.server import app
from shoal.server.bodies import GenerationBody, read
from shoal.server.dialects.base import Operation
from shoal.server.dialects.common import encode
from shoal.server.errors import HttpError
from shoal.server.jobs import Call
from shoal.server.logprobs import TokenNames
from shoal.server.prepare import Preparer
from shoal.server.prepared import PreparedRequest
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, ask, chat, error_of, events, front, tokenizer

TEXT = "Once upon a time"


class ShoutRequest(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    words: str


class ShoutAnswer(msgspec.Struct):
    id: str
    loud: list[str]


class ShoutPiece(msgspec.Struct):
    loud: str


class Shout:
    """An API that answers in capitals; its events are not OpenAI's."""

    path = "/shout"
    id_prefix = "shout-"
    operation = Operation("Shout", ShoutRequest, ShoutAnswer, ShoutPiece, {"words": "hi"}, {})
    opens_on_accept = True

    def __init__(self, preparer: Preparer, names: TokenNames) -> None:
        self.preparer = preparer

    async def prepare(self, body: bytes, id: str, key: ApiKey | None) -> PreparedRequest:
        request = await read(ShoutRequest, body)
        params = self.preparer.params(request, n=request.n or 1)
        ids = await self.preparer.encode([request.words])
        return await self.preparer.request(request, id, key, ids, params, model="tiny", keep=params.n, top=None)

    def whole(self, call: Call, id: str, created: int) -> Iterator[bytes]:
        yield encode(ShoutAnswer(id, [content_of(one.parsed).upper() for one in call.outputs.samples[0]]))

    def stream(self, call: Call, id: str, created: int) -> "Shout":
        return self

    def error(self, error: HttpError) -> bytes:
        return error.body()

    def choice(self, job: int, sample: Sample) -> "ShoutPieces":
        return ShoutPieces(sample)

    def last(self, error: HttpError | None) -> bytes:
        return b"event: error\n\n" if error is not None else b"event: over\n\n"


class ShoutPieces:
    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def opening(self) -> bytes:
        return b"event: begin\n\n"

    def delta(self, parsed: Parsed) -> bytes:
        return b"data: %b\n\n" % encode(ShoutPiece(content_of(parsed).upper()))

    def full_delta(self, parsed: Parsed, tokens: list[int], logprobs: Sequence[Logprobs]) -> bytes:
        return self.delta(parsed)

    def end(self, parsed: Parsed) -> bytes:
        return b"event: %b\n\n" % (self.sample.reason or "").encode()


@pytest.fixture(autouse=True)
def shout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "DIALECTS", (*app.DIALECTS, Shout))


def answering(text: str = TEXT) -> FakeClient:
    return FakeClient(lambda job, sample: [*tokenizer().encode(text), EOS])


def test_another_api_answers_as_a_whole() -> None:
    answer = ask(front(answering()), "POST", "/shout", json={"words": "x", "n": 2}).json()
    assert answer["id"].startswith("shout-")
    assert answer["loud"] == [TEXT.upper()] * 2


def test_another_api_streams_its_own_events() -> None:
    answer = ask(front(answering()), "POST", "/shout", json={"words": "x", "stream": True})
    first, *pieces, reason, last, rest = answer.text.split("\n\n")
    assert (first, reason, last, rest) == ("event: begin", "event: stop", "event: over", "")
    texts = [msgspec.json.decode(piece.removeprefix("data: "), type=ShoutPiece).loud for piece in pieces]
    assert texts == [tokenizer().decode([token]).upper() for token in tokenizer().encode(TEXT)]


def test_another_api_has_the_same_errors_and_is_described() -> None:
    error_of(ask(front(), "POST", "/shout", json={"words": "x", "temperature": 1000}), 400)
    error_of(ask(front(), "POST", "/shout", json={"words": "x", "prompt": "y"}), 400)
    error_of(ask(front(), "GET", "/shout"), 405)
    document = ask(front(), "GET", "/openapi.json").json()
    body = document["paths"]["/shout"]["post"]["requestBody"]["content"]["application/json"]
    assert body == {
        "schema": {"$ref": "#/components/schemas/ShoutRequest"},
        "example": {"model": "tiny", "words": "hi"},
    }
    assert {"words", "temperature", "stream"} <= set(document["components"]["schemas"]["ShoutRequest"]["properties"])


class Halves:
    """A parser for which text before the first " a" is reasoning."""

    def __init__(self) -> None:
        self.before = True

    def push(self, text: str) -> Parsed:
        self.before = self.before and text != " a"
        return ParsedParts("", text) if self.before else text

    def finish(self, text: str) -> Parsed:
        return self.push(text)

    def parse(self, text: str) -> Parsed:
        before, mark, after = text.partition(" a")
        return ParsedParts(mark + after, before)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_shows_the_content_that_its_parser_finds(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    whole = Preparer.request

    async def with_parser(self: Preparer, *args: Any, **how: Any) -> PreparedRequest:
        return dataclasses.replace(await whole(self, *args, **how), make_parser=Halves)

    monkeypatch.setattr(Preparer, "request", with_parser)
    answer = chat(front(answering()), stream=stream)
    if stream:
        deltas = [event["choices"][0]["delta"] for event in events(answer)]
        assert "".join(delta.get("content", "") for delta in deltas) == " a time"
    else:
        assert answer.json()["choices"][0]["message"]["content"] == " a time"

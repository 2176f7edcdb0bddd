"""Every error a client can meet: its status, its shape, and that it reveals no internals."""

import inspect
from functools import partial
from typing import Literal

import msgspec
import pytest

from shoal import errors
from shoal.core.job import Refusal
from shoal.server.errors import as_http, bad_body, internal
from shoal.server.field_names import allowed_at, known_at

EXPECTED = {
    "BadRequest": 400, "EmptyPrompt": 400, "PromptTooLong": 400, "BadParameter": 400, "BadGrammar": 400, "BadChat": 400,
    "QueueFull": 429, "RateLimited": 429, "Rejected": 503, "DeadlinePassed": 503, "Draining": 503, "EngineDown": 503,
    "PromiseBroken": 503, "Evicted": 503, "GrammarTimeout": 503, "LedgerDown": 503,
}  # fmt: skip
KINDS = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.ShoalError)]


@pytest.mark.parametrize("name", KINDS)
def test_every_refusal_of_an_engine_has_its_status(name: str) -> None:
    answer = as_http(Refusal(name, "do something else").as_error())
    if name not in EXPECTED:  # an internal error: no details are revealed
        assert answer is None
        return
    assert answer is not None
    assert answer.status == EXPECTED[name]
    assert answer.detail.message == "do something else"


def test_a_refusal_of_an_unknown_kind_is_an_internal_error() -> None:
    for kind in ("NoSuchKind", "annotations", "__name__"):
        assert as_http(Refusal(kind, "secret").as_error()) is None
    assert internal().status == 500
    assert "secret" not in internal().detail.message


@pytest.mark.parametrize(
    ("refusal", "seconds"),
    [
        (Refusal("QueueFull", "x", 2.1), b"3"),
        (Refusal("RateLimited", "x", 0.0), b"1"),
        (Refusal("QueueFull", "x"), b"1"),
        (Refusal("EngineDown", "x"), b"5"),
        (Refusal("DeadlinePassed", "x"), b"1"),
        (Refusal("LedgerDown", "x"), b"5"),
        (Refusal("BadParameter", "x"), None),
    ],
)
def test_retry_after_is_in_whole_seconds(refusal: Refusal, seconds: bytes | None) -> None:
    answer = as_http(refusal.as_error())
    assert answer is not None
    assert dict(answer.headers).get(b"retry-after") == seconds


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature must be between 0 and 100, not -1", "temperature"),
        ("min_tokens 5 is more than max_tokens 3; lower the first", "min_tokens"),
        ("logit_bias[7] must be between -100 and 100", "logit_bias"),
        ("stop strings: at most 64, not 65; give fewer", "stop"),
        ("token id 900 is not in the vocabulary", "prompt"),
        ("something else is wrong", None),
    ],
)
def test_the_field_at_fault_is_found_in_the_message(message: str, param: str | None) -> None:
    answer = as_http(errors.BadParameter(message))
    assert answer is not None
    assert answer.detail.param == param


def test_an_unknown_value_lists_the_allowed_ones() -> None:
    class Fish(msgspec.Struct):
        size: Literal["small", "large"] | None = None
        kinds: list[Literal["cod", "eel"]] = []

    for body, param, allowed in (
        (b'{"size": "huge"}', "size", "large, small"),
        (b'{"kinds": ["cod", "crab"]}', "kinds[1]", "cod, eel"),
    ):
        with pytest.raises(msgspec.ValidationError) as caught:
            msgspec.json.decode(body, type=Fish)
        answer = bad_body(caught.value, {}, partial(known_at, Fish), partial(allowed_at, Fish))
        assert answer.detail.param == param
        assert str(answer).endswith(f"; allowed: {allowed}")

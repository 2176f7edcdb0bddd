"""Sampling parameters: good values are kept, bad ones are refused by name with what would be right."""

from typing import Any

import pytest

from shoal import SamplingParams
from shoal.core.params import DEFAULTS, NEUTRAL, PARAMS
from shoal.errors import BadParameter, BadRequest, ShoalError

NAN, INF = float("nan"), float("inf")

GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.0, "top_p": 1, "top_k": 0, "min_p": 0},
    {"temperature": 2, "top_p": 1e-6, "top_k": 1, "min_p": 1},
    {"top_k": -1},
    {"top_k": 10**6},
    {"repetition_penalty": 1.3, "presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": {5: -100, 6: 100}},
    {"logit_bias": {"5": 1.5}},
    {"logit_bias": {}},
    {"seed": 0},
    {"seed": -1},
    {"seed": 2**63 - 1},
    {"n": 1},
    {"n": 128},
    {"max_tokens": 1},
    {"min_tokens": 3, "max_tokens": 3},
    {"stop": "x"},
    {"stop": ["x", "y"]},
    {"stop": []},
    {"stop_token_ids": [1, 2]},
    {"logprobs": 0},
    {"logprobs": 20, "prompt_logprobs": 5},
]
BAD: list[tuple[str, Any]] = [
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", -INF),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", "0.7"),
    ("temperature", True),
    ("temperature", [1.0]),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_p", NAN),
    ("top_p", "0.9"),
    ("top_k", -2),
    ("top_k", 2.5),
    ("top_k", NAN),
    ("top_k", "5"),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_p", NAN),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", NAN),
    ("repetition_penalty", INF),
    ("presence_penalty", 2.1),
    ("presence_penalty", NAN),
    ("presence_penalty", None),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", INF),
    ("frequency_penalty", None),
    ("logit_bias", {5: 101}),
    ("logit_bias", {5: -101}),
    ("logit_bias", {5: NAN}),
    ("logit_bias", {5: "1"}),
    ("logit_bias", {"five": 1.0}),
    ("logit_bias", {1.5: 1.0}),
    ("logit_bias", [5, 6]),
    ("logit_bias", 5),
    ("seed", 1.5),
    ("seed", "1"),
    ("seed", 2**64),
    ("seed", True),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 1.0),
    ("n", None),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2.0),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", 2**40),
    ("min_tokens", -1),
    ("min_tokens", 1.5),
    ("min_tokens", None),
    ("stop", ""),
    ("stop", ["x", ""]),
    ("stop", [5]),
    ("stop", 5),
    ("stop", b"x"),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.5]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", "12"),
    ("include_stop_str_in_output", "no"),
    ("ignore_eos", "false"),
    ("ignore_eos", 2),
    ("skip_special_tokens", None),
    ("logprobs", -1),
    ("logprobs", 65),
    ("logprobs", True),
    ("logprobs", 1.0),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 65),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_good_values_are_taken(values: dict[str, Any]) -> None:
    assert SamplingParams(**values) == SamplingParams.from_mapping(values)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:24])
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadParameter) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message or name.replace("_", " ") in message
    assert "\n" not in message


def test_a_bad_parameter_is_a_bad_request_and_a_value_error() -> None:
    with pytest.raises(ValueError, match="temperature") as caught:
        SamplingParams(temperature=-1)
    assert isinstance(caught.value, BadRequest)
    assert isinstance(caught.value, ShoalError)


def test_the_message_has_the_limits_and_the_value() -> None:
    with pytest.raises(BadParameter, match=r"top_p must be between 0 and 1, not 1\.5"):
        SamplingParams(top_p=1.5)
    with pytest.raises(BadParameter, match="max_tokens must be at least 1, not 0"):
        SamplingParams(max_tokens=0)


def test_more_min_than_max_tokens_is_refused() -> None:
    with pytest.raises(BadParameter, match=r"min_tokens 5 .* max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_an_unknown_name_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(BadParameter, match=r"'temprature'.*temperature"):
        SamplingParams.from_mapping({"temprature": 1.0})
    with pytest.raises(BadParameter, match=r"did you mean .temperature."):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_parameters_are_frozen_and_comparable() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]
    assert params == SamplingParams(temperature=0.5, stop="a")


def test_later_changes_to_the_callers_lists_do_not_matter() -> None:
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 2.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 1.0})


def test_none_becomes_the_models_default_else_neutral() -> None:
    resolved = SamplingParams(top_p=0.3).resolved({"temperature": 0.6, "top_p": 0.9})
    assert (resolved.temperature, resolved.top_p, resolved.top_k, resolved.min_p) == (0.6, 0.3, 0, 0.0)
    assert resolved.repetition_penalty == 1.0
    zero = SamplingParams(temperature=0, top_k=0).resolved({"temperature": 0.6, "top_k": 40})
    assert (zero.temperature, zero.top_k) == (0, 0)


def test_none_for_a_list_means_none_of_them_as_other_engines_take_it() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == ((), ())


def test_every_parameter_is_declared_and_its_default_and_neutral_value_are_in_range() -> None:
    assert list(PARAMS) == list(DEFAULTS) == list(SamplingParams.__dataclass_fields__)
    for name, default in DEFAULTS.items():
        if default is not None:
            assert getattr(SamplingParams(**{name: type(default)(default)}), name) == default
    SamplingParams(**NEUTRAL)


def test_only_parameters_with_a_neutral_value_come_from_the_model() -> None:
    assert {name for name, param in PARAMS.items() if param.from_model} == set(NEUTRAL)
    assert all(DEFAULTS[name] is None for name in NEUTRAL)

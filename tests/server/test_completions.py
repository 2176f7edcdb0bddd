"""POST /v1/completions, not streamed: what goes to the engine, and what comes back."""

import json
from typing import Any

import pytest

from shoal.core.job import Job
from tests.server.fake_client import FakeClient
from tests.server.fronts import EOS, ask, complete, error_of, front, tokenizer

ONCE = "Once upon a time"
HUGE = "1e400"  # a number that no float holds


def ids(text: str) -> list[int]:
    return tokenizer().encode(text)


def saying(text: str) -> FakeClient:
    return FakeClient(lambda job, sample: [*ids(text), EOS])


def job_of(**body: Any) -> Job:
    """The one job that a request becomes."""
    client = FakeClient()
    answer = complete(front(client), **{"prompt": ONCE, **body})
    assert answer.status_code == 200, answer.text
    assert len(client.submitted) == 1
    assert not client.running
    return client.submitted[0]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (ONCE, [ONCE]),
        ([ONCE, "a b"], [ONCE, "a b"]),
        (ids(ONCE), [ONCE]),
        ([ids(ONCE), ids("a b")], [ONCE, "a b"]),
        ([ids(ONCE), "a b"], [ONCE, "a b"]),
    ],
    ids=["text", "texts", "ids", "lists of ids", "both"],
)
def test_a_prompt_has_any_of_openais_shapes(prompt: Any, texts: list[str]) -> None:
    answer = complete(front(), prompt=prompt).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    tokens = sum(len(ids(text)) for text in texts)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["completion_tokens"] == tokens
    assert answer["usage"]["total_tokens"] == 2 * tokens


def test_the_answer_has_openais_fields() -> None:
    answer = complete(front(saying("a b")), prompt=ONCE, model="other-name").json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "other-name"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "a b", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_prompts_that_mix_ids_and_texts_in_one_list_are_refused() -> None:
    assert error_of(complete(front(), prompt=[1, "a"]), 400)["param"] == "prompt"


@pytest.mark.parametrize("prompt", [[], "", [[]], [""]])
def test_a_prompt_without_tokens_is_refused(prompt: Any) -> None:
    error_of(complete(front(), prompt=prompt), 400)


def test_an_overlong_prompt_is_a_400_with_the_numbers() -> None:
    error = error_of(complete(front(), prompt=[5] * 512), 400)
    assert error["code"] == "context_length_exceeded"
    assert "512 tokens" in error["message"]
    assert "at most 511" in error["message"]


def test_a_token_id_beyond_the_vocabulary_is_refused_with_the_limit() -> None:
    assert "421" in error_of(complete(front(), prompt=[422]), 400)["message"]


def test_too_many_answers_in_one_request_are_refused() -> None:
    error_of(complete(front(max_choices=5), prompt=["a", "b"], n=3), 400)


def test_n_samples_are_one_job_and_keep_their_places() -> None:
    answer = complete(front(), prompt=[ids(ONCE), ids("a b")], n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][1]["text"] == " upon a timeOnce"
    assert answer["usage"]["prompt_tokens"] == len(ids(ONCE)) + len(ids("a b"))


def test_best_of_keeps_the_likeliest_answers_and_counts_them_all() -> None:
    client = FakeClient(lambda job, sample: [[90, 91], [50, 51], [70, 71]][sample])  # lower ids are likelier
    answer = complete(front(client), prompt=ONCE, n=2, best_of=3, return_token_ids=True).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[50, 51], [70, 71]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["logprobs"] is None  # they were needed, but not asked for
    assert client.submitted[0].params.n == 3


@pytest.mark.parametrize(
    ("body", "word"),
    [({"n": 3, "best_of": 2}, "less than n"), ({"best_of": 2, "stream": True}, "streamed"), ({"best_of": 500}, "128")],
)
def test_best_of_that_cannot_be_is_refused(body: dict[str, Any], word: str) -> None:
    error = error_of(complete(front(), prompt=ONCE, **body), 400)
    assert error["param"] == "best_of"
    assert word in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "begins"),
    [
        ({"prompt": ["x"] * 3, "best_of": 4}, "prompt", "prompt and best_of ask for 12 answers, limit 10"),
        ({"prompt": ["x"] * 3, "n": 4}, "prompt", "prompt and n ask for 12 answers, limit 10"),
        ({"prompt": ["x"] * 12}, "prompt", "prompt asks for 12 answers, limit 10"),
        ({"prompt": "x", "best_of": 12}, "best_of", "best_of asks for 12 answers, limit 10"),
    ],
)
def test_too_many_answers_are_refused_by_the_names_of_the_fields_that_ask(
    body: dict[str, Any], param: str, begins: str
) -> None:
    error = error_of(complete(front(max_choices=10), **body), 400)
    assert error["param"] == param
    assert error["message"].startswith(begins)


def test_echo_puts_the_prompt_in_front() -> None:
    assert complete(front(saying(" a")), prompt=ONCE, echo=True).json()["choices"][0]["text"] == f"{ONCE} a"
    assert complete(front(saying(" a")), prompt=ids(ONCE), echo=True).json()["choices"][0]["text"] == f"{ONCE} a"


def test_logprobs_have_the_legacy_shape() -> None:
    client = FakeClient(lambda job, sample: [50, 60])
    choice = complete(front(client), prompt=ONCE, logprobs=2).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["P", "Z"],
        "token_logprobs": [-0.5, -0.6],
        "top_logprobs": [{"<unk>": 0.0, "<s>": -0.01, "P": -0.5}, {"<unk>": 0.0, "<s>": -0.01, "Z": -0.6}],
        "text_offset": [0, 1],
    }


def test_logprobs_of_zero_name_only_what_was_said() -> None:
    client = FakeClient(lambda job, sample: [50])
    logprobs = complete(front(client), prompt=ONCE, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5]
    assert logprobs["top_logprobs"] is None


def test_echo_with_logprobs_includes_those_of_the_prompt() -> None:
    client = FakeClient(lambda job, sample: [50])
    choice = complete(front(client), prompt=ONCE, logprobs=1, echo=True).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["Once", " upon", " a", " time", "P"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert None not in logprobs["token_logprobs"][1:]
    assert logprobs["text_offset"] == [0, 4, 9, 11, 16]
    assert choice["text"] == f"{ONCE}P"


def test_half_a_character_in_logprobs_is_spelt_out() -> None:
    client = FakeClient(lambda job, sample: ids("€"))  # three bytes that were never merged
    logprobs = complete(front(client), prompt=ONCE, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


def test_a_stop_string_cuts_text_tokens_and_usage_and_ends_the_sample() -> None:
    client = saying("Once upon a time there was")
    answer = complete(front(client), prompt="x", stop=["upon a", "zzz"], max_tokens=50, return_token_ids=True).json()
    choice = answer["choices"][0]
    assert choice["text"] == "Once "
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "upon a"
    assert choice["token_ids"] == ids("Once upon a")
    assert answer["usage"]["completion_tokens"] == 3
    assert client.finished_at == [(client.submitted[0].id, 0, 3)]


def test_a_stop_string_can_be_kept() -> None:
    client = saying("Once upon a time")
    answer = complete(front(client), prompt="x", stop="upon", include_stop_str_in_output=True).json()
    assert answer["choices"][0]["text"] == "Once upon"


def test_an_end_token_counts_but_is_not_shown() -> None:
    answer = complete(front(saying("a b")), prompt=ONCE, skip_special_tokens=False).json()
    assert answer["choices"][0]["text"] == "a b"
    assert answer["usage"]["completion_tokens"] == len(ids("a b")) + 1


def test_a_stop_token_is_reported_as_the_reason() -> None:
    client = FakeClient(lambda job, sample: [50, 60, 70])
    choice = complete(front(client), prompt=ONCE, stop_token_ids=[60]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("P", "stop", 60)


def test_cached_tokens_are_reported() -> None:
    answer = complete(front(FakeClient(cached_tokens=3)), prompt=[ONCE, ONCE], n=2).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}  # once for each prompt


# ---- what goes to the engine ---------------------------------------------------------------------------------------


def test_every_sampling_field_reaches_the_job() -> None:
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 11, "n": 2, "max_tokens": 5, "min_tokens": 1, "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    job = job_of(**given, stop=["x"], stop_token_ids=[9], logit_bias={"50": 2.5}, timeout=9, priority=-3)
    assert {name: getattr(job.params, name) for name in given} == given
    assert job.params.stop == ("x",)
    assert job.params.logit_bias == {50: 2.5}
    assert job.stop_ids == {9}  # and not the end token, which is ignored
    assert (job.seed, job.timeout_s, job.priority) == (11, 9, -3)


def test_a_null_is_the_default_everywhere() -> None:
    fields = ("temperature", "top_p", "n", "stop", "max_tokens", "stream", "echo", "logprobs", "best_of", "suffix")
    given = job_of(**dict.fromkeys(fields))
    assert given.params == job_of().params


def test_the_models_defaults_fill_in_what_was_not_asked() -> None:
    client = FakeClient()
    complete(front(client, defaults={"temperature": 0.25, "top_k": 3}), prompt=ONCE, top_k=9)
    params = client.submitted[0].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.25, 9, 1.0, 16)


def test_requests_without_a_seed_get_different_ones() -> None:
    client = FakeClient()
    complete(front(client), prompt=[ONCE] * 20)
    assert len({job.seed for job in client.submitted}) == 20
    assert len({job.id for job in client.submitted}) == 20


def test_the_end_token_ends_a_sample_unless_it_is_ignored() -> None:
    assert job_of().stop_ids == {EOS}
    assert job_of(stop_token_ids=[9]).stop_ids == {9, EOS}
    assert job_of(ignore_eos=True).stop_ids == frozenset()


def test_cache_salt_reaches_the_job_under_the_servers_secret() -> None:
    assert job_of().salt == ""
    asked = {"prompt": "x", "cache_salt": "pepper"}
    client = FakeClient()
    app, other = front(client), front(client)
    for one in (app, app, other):
        assert complete(one, **asked).status_code == 200
    first, again, elsewhere = [job.salt for job in client.submitted]
    assert first == again != elsewhere, "the secret is the server's own"
    assert "pepper" not in first


# ---- what is refused or ignored ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("min_p", 2),
        ("repetition_penalty", 0), ("presence_penalty", 3), ("frequency_penalty", -2.5), ("n", 0), ("n", 129),
        ("n", 10**30), ("n", True), ("max_tokens", 0), ("max_tokens", 2.5), ("min_tokens", -1), ("seed", 2**70),
        ("stop", [""]), ("stop", ["x"] * 65), ("stop", 5), ("stop_token_ids", [-1]), ("stop_token_ids", "x"),
        ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"9" * 5000: 1}), ("logprobs", -1), ("logprobs", 65), ("logprobs", True), ("timeout", 0),
        ("timeout", -1), ("priority", 1.5), ("cache_salt", ""), ("cache_salt", "x" * 300), ("stream", "yes"),
        ("echo", 1), ("stream_options", {"x": 1}), ("ignore_eos", "no"), ("response_format", {"type": "xml"}),
        ("response_format", "json"), ("prompt", 5), ("prompt", [5.5]), ("prompt", [True]), ("prompt", [-1]),
        ("prompt", None), ("model", 5), ("temperature", HUGE),
    ],
)  # fmt: skip
def test_a_bad_value_is_a_400_that_names_the_field(name: str, value: Any) -> None:
    client = FakeClient()
    text = json.dumps({"prompt": ONCE, name: value}).replace(f'"{HUGE}"', HUGE)
    answer = ask(front(client), "POST", "/v1/completions", content=text, headers={"content-type": "application/json"})
    error = error_of(answer, 400)
    assert error["param"] is not None
    assert error["param"].startswith(name)
    assert name in error["message"] or "stop string" in error["message"]
    assert len(error["message"]) < 500
    assert not client.submitted


@pytest.mark.parametrize("name", ["suffix", "tools", "functions", "modalities"])
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    error = error_of(complete(front(), prompt=ONCE, **{name: "x"}), 400)
    assert error["param"] == name
    assert error["code"] == "unsupported_field"
    assert "remove it" in error["message"]


def test_an_unknown_field_is_refused_by_name() -> None:
    error = error_of(complete(front(), prompt=ONCE, temprature=1), 400)
    assert error["param"] == "temprature"
    assert error["code"] == "unknown_field"


def test_ignored_fields_are_accepted_and_named_in_a_header() -> None:
    answer = complete(front(), prompt=ONCE, user={"any": "thing"}, store=True, metadata={"a": "b"})
    assert answer.status_code == 200
    assert answer.headers["x-shoal-warning"] == "ignored: user, metadata, store"
    assert "x-shoal-warning" not in complete(front(), prompt=ONCE).headers


def test_an_unknown_model_is_a_404_that_lists_the_known() -> None:
    error = error_of(complete(front(), prompt=ONCE, model="gpt-9"), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]


def test_stream_options_without_stream_are_refused() -> None:
    error_of(complete(front(), prompt=ONCE, stream_options={"include_usage": True}), 400)


# ---- without a tokenizer -------------------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_takes_ids_and_answers_with_ids() -> None:
    choice = complete(front(without_tokenizer=True), prompt=[50, 60]).json()["choices"][0]
    assert choice["text"] == ""
    assert choice["token_ids"] == [50, 60]
    assert choice["prompt_token_ids"] == [50, 60]


@pytest.mark.parametrize(
    "body", [{"prompt": ONCE}, {"prompt": [5], "stop": "x"}, {"prompt": [5], "echo": True},
             {"prompt": [5], "response_format": {"type": "json_object"}}]
)  # fmt: skip
def test_a_model_without_a_tokenizer_refuses_what_needs_one(body: dict[str, Any]) -> None:
    assert "no tokenizer" in error_of(complete(front(without_tokenizer=True), **body), 400)["message"]


def test_logprobs_without_a_tokenizer_name_tokens_by_number() -> None:
    choice = complete(front(without_tokenizer=True), prompt=[50], logprobs=1).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:50"]

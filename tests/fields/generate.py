"""Checks of SGLang's /generate: each of its fields does what the completion's field of that meaning does, which has a
check of its own; and what it shows is right."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.fields.apart import in_order
from tests.fields.registry import COMPLETIONS, GENERATE, GENERATE_SAMPLING, checks
from tests.fields.server import GREEDY, STORY, FieldServer, encoded
from tests.story.models import BOS, EOS, backend

ENUM = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
TAG = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</n>"}
LIKELY_END = {"logit_bias": {str(EOS): 50}}
# a field of it, its value, the completion's name of it, what both need beside it
SAME: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("temperature", 0, "temperature", {}), ("top_p", 1e-6, "top_p", {}), ("top_k", 1, "top_k", {}),
    ("min_p", 1, "min_p", {}), ("frequency_penalty", 2, "frequency_penalty", GREEDY),
    ("presence_penalty", 2, "presence_penalty", GREEDY), ("repetition_penalty", 3, "repetition_penalty", GREEDY),
    ("stop", ["\x00", "e", "o", "s"], "stop", {}), ("stop_token_ids", list(range(5, 200)), "stop_token_ids", {}),
    ("stop_regex", "[a-z]", "stop_regex", {}), ("no_stop_trim", True, "no_stop_trim", {"stop": ["e", "o", "s"]}),
    ("ignore_eos", True, "ignore_eos", LIKELY_END), ("logit_bias", {"60": 100}, "logit_bias", {}),
    ("skip_special_tokens", False, "skip_special_tokens", {**LIKELY_END, "ignore_eos": True}),
    ("json_schema", ENUM, "json_schema", {}), ("regex", "[ab]{6}", "regex", {}),
    ("ebnf", "root ::= [ef] [ef] [ef]", "ebnf", {}),
]  # fmt: skip


def generated(server: FieldServer, params: dict[str, Any], **body: Any) -> Any:
    return server.ask(GENERATE, sampling_params={"max_new_tokens": 24, "sampling_seed": 3, **params}, **body)


@checks(GENERATE_SAMPLING, *(name for name, *_ in SAME))
def as_in_completions(server: FieldServer, path: str) -> None:
    for theirs, value, ours, more in SAME:
        found = generated(server, {**more, theirs: value})
        expected = server.choice(COMPLETIONS, **{"seed": 3, **more, ours: value})
        assert (found["text"], found["output_ids"]) == (expected["text"], expected["token_ids"]), theirs
        plain = generated(server, more)
        assert (plain["text"], plain["output_ids"]) != (found["text"], found["output_ids"]), f"{theirs} has no effect"


@checks(GENERATE_SAMPLING, "max_new_tokens", "min_new_tokens", "sampling_seed", "n", "structural_tag")
def under_other_names(server: FieldServer, path: str) -> None:
    cut = generated(server, {"max_new_tokens": 5, "ignore_eos": True})
    assert len(cut["output_ids"]) == cut["meta_info"]["completion_tokens"] == 5
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert len(server.ask(path.split()[0], sampling_params={"ignore_eos": True})["output_ids"]) == 128
    ended = generated(server, LIKELY_END)["meta_info"]["finish_reason"]
    assert ended == {"type": "stop", "matched": EOS}
    assert len(generated(server, {**LIKELY_END, "min_new_tokens": 4})["output_ids"]) > 4
    assert generated(server, {"sampling_seed": 4})["text"] != generated(server, {})["text"]
    assert generated(server, {"sampling_seed": 4})["text"] == generated(server, {"sampling_seed": 4})["text"]
    several = generated(server, {"n": 3})
    expected = server.ask(COMPLETIONS, n=3, seed=3)["choices"]
    assert [one["text"] for one in several] == [one["text"] for one in expected]
    text = generated(server, {"structural_tag": {"format": TAG}})["text"]
    assert text.startswith("<n>")
    assert text.endswith("</n>")


@checks(GENERATE, "text", "input_ids", "sampling_params", "return_prompt_token_ids", "rid")
def prompts(server: FieldServer, path: str) -> None:
    by_text = generated(server, {}, return_prompt_token_ids=True, rid="mine")
    meta = by_text["meta_info"]
    assert meta["prompt_token_ids"] == [BOS, *encoded(STORY)]
    assert meta["prompt_tokens"] == len(meta["prompt_token_ids"])
    assert meta["id"] == "mine"
    by_ids = generated(server, {}, text=None, input_ids=[BOS, *encoded(STORY)])
    assert by_ids["output_ids"] == by_text["output_ids"]
    assert "prompt_token_ids" not in by_ids["meta_info"]
    texts = generated(server, GREEDY, text=["a fish", "the dog"])
    lists = generated(server, GREEDY, text=None, input_ids=[[BOS, *encoded("a fish")], [BOS, *encoded("the dog")]])
    assert [one["text"] for one in texts] == [one["text"] for one in lists]
    assert texts[0]["text"] == generated(server, GREEDY, text="a fish")["text"]
    assert server.refused(path, text=None)["param"] == "text"
    assert server.refused(path, input_ids=[5])["param"] == "text"


@checks(GENERATE, "return_logprob", "top_logprobs_num", "logprob_start_len", "token_ids_logprob")
@checks(GENERATE, "return_text_in_logprobs")
def logprobs(server: FieldServer, path: str) -> None:
    assert "output_token_logprobs" not in generated(server, GREEDY)["meta_info"]
    shown = generated(server, GREEDY, return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
    expected = server.choice(COMPLETIONS, **GREEDY, logprobs=2, prompt_logprobs=2)
    meta = shown["meta_info"]
    own = expected["logprobs"]["token_logprobs"]
    assert [one[0] for one in meta["output_token_logprobs"]] == pytest.approx(own)
    assert [one[1:] for one in meta["output_token_logprobs"]] == [[token, None] for token in shown["output_ids"]]
    assert [len(one) for one in meta["output_top_logprobs"]] == [2] * 24
    for (logprob, token, _), tops in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert tops[0][:2] == [logprob, token], "the greedy token is the likeliest"
    prompt = [BOS, *encoded(STORY)]
    assert [one[1] for one in meta["input_token_logprobs"]] == prompt
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_top_logprobs"][0] is None
    for one, known in zip(meta["input_token_logprobs"][1:], expected["prompt_logprobs"][1:], strict=True):
        assert one[0] == pytest.approx(known[str(one[1])]["logprob"])
    later = generated(server, GREEDY, return_logprob=True, logprob_start_len=5)["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][5:]
    named = generated(server, GREEDY, return_logprob=True, return_text_in_logprobs=True, token_ids_logprob=[7, 9])
    (first, *_) = named["meta_info"]["output_token_ids_logprobs"]
    assert [one[1] for one in first] == [7, 9]
    for _, token, text in named["meta_info"]["output_token_logprobs"]:
        assert text == backend().decode([token])


@checks(GENERATE, "stream")
def streamed(server: FieldServer, path: str) -> None:
    """Each event has all that there is so far."""
    params = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0}
    whole = generated(server, params, return_logprob=True)
    events = server.events(path, sampling_params=params, return_logprob=True)
    for one, next_one in pairwise(events):
        assert next_one["text"].startswith(one["text"])
        assert next_one["output_ids"][: len(one["output_ids"])] == one["output_ids"]
        assert one["meta_info"]["finish_reason"] is None
        assert len(one["meta_info"]["output_token_logprobs"]) == len(one["output_ids"])
    assert [len(one["output_ids"]) for one in events[:64]] == list(range(1, 65))
    assert len(events) < 250
    last = events[-1]
    for one in (last, whole):
        one["meta_info"] = {**one["meta_info"], "id": "", "e2e_latency": 0, "cached_tokens": 0}
    assert last == whole
    both = server.events(path, text=["a fish", "the dog"])
    assert {one["index"] for one in both} == {0, 1}


@checks(GENERATE, "cache_salt")
def cache_salt(server: FieldServer, path: str) -> None:
    def cached(salt: str) -> int:
        return int(generated(server, {}, text=f"{path} {STORY}", cache_salt=salt)["meta_info"]["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


@checks(GENERATE, "priority")
def priority(server: FieldServer, path: str) -> None:
    ended = asyncio.run(in_order(server, path))
    assert ended.index("soon") < ended.index("late")

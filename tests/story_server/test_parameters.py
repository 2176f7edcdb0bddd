"""Parameters of vLLM's and SGLang's servers on a real one: tokens that may be drawn, logprobs, ends and prompts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.story.models import backend
from tests.story_server.asks import ON, STORY
from tests.story_server.servers import Server, assert_error_shape, events_of

PROMPT = [0, 40, 41, 42, 43, 44, 45, 46, 50, 60, 70, 80, 90]


def choice(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.complete(**{"prompt": PROMPT, "max_tokens": 24, "seed": 3, "return_token_ids": True, **ON, **body})
    assert answer.status_code == 200, answer.text[:1000]
    (found,) = answer.json()["choices"]
    return dict(found)


def encoded(text: str) -> list[int]:
    return list(backend().encode(text, add_special_tokens=False).ids)


def logprobs_of(model: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' own, of all tokens after each position."""
    with torch.inference_mode():
        hf = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        return hf(torch.tensor([tokens])).logits[0].log_softmax(-1)


def test_prompt_logprobs_are_those_of_transformers(tiny: Server, tiny_model: Path) -> None:
    expected = logprobs_of(tiny_model, PROMPT)
    for max_tokens in (0, 4):
        found = choice(tiny, prompt_logprobs=3, max_tokens=max_tokens)
        assert len(found["token_ids"]) == max_tokens
        assert found["prompt_logprobs"][0] is None
        assert len(found["prompt_logprobs"]) == len(PROMPT)
        for position, one in enumerate(found["prompt_logprobs"][1:]):
            line = expected[position]
            likeliest = line.topk(3).indices.tolist()
            assert {int(id) for id in one} == {*likeliest, PROMPT[position + 1]}
            for id, each in one.items():
                assert each["logprob"] == pytest.approx(line[int(id)].item(), abs=1e-4)
                assert each["rank"] == int((line > line[int(id)]).sum()) + 1


def test_echo_without_output_has_transformers_logprobs(tiny: Server, tiny_model: Path) -> None:
    expected = logprobs_of(tiny_model, PROMPT)
    shown = choice(tiny, max_tokens=0, echo=True, logprobs=0)["logprobs"]
    own = [expected[position, token].item() for position, token in enumerate(PROMPT[1:])]
    assert shown["token_logprobs"][0] is None
    assert shown["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)


def test_logprobs_of_certain_tokens(tiny: Server, tiny_model: Path) -> None:
    ids = [7, 300, 45]
    found = choice(
        tiny, logprobs=0, logprob_token_ids=ids, return_tokens_as_token_ids=True, temperature=0, max_tokens=5
    )
    expected = logprobs_of(tiny_model, PROMPT + found["token_ids"])
    for number, (token, tops) in enumerate(zip(found["token_ids"], found["logprobs"]["top_logprobs"], strict=True)):
        line = expected[len(PROMPT) - 1 + number]
        assert set(tops) == {f"token_id:{id}" for id in [*ids, token]}
        for id in ids:
            assert tops[f"token_id:{id}"] == pytest.approx(line[id].item(), abs=1e-4)


def test_only_allowed_tokens_are_drawn(tiny: Server) -> None:
    allowed = [60, 61, 62, 63, 200]
    tokens = choice(tiny, allowed_token_ids=allowed, max_tokens=60)["token_ids"]
    assert set(tokens) <= set(allowed)
    assert len(set(tokens)) > 1
    assert choice(tiny, allowed_token_ids=[66], max_tokens=3, ignore_eos=False)["token_ids"] == [66, 66, 66]
    assert "allowed_token_ids" in tiny.complete(allowed_token_ids=[5000]).json()["error"]["message"]


def test_the_end_token_can_be_the_only_one_that_is_allowed(tiny: Server) -> None:
    found = choice(tiny, allowed_token_ids=[1], ignore_eos=False)
    assert found["token_ids"] == [1]
    assert found["finish_reason"] == "stop"
    held = choice(tiny, allowed_token_ids=[1, 66], ignore_eos=False, min_tokens=4)["token_ids"]
    assert held[:4] == [66] * 4


@pytest.mark.parametrize("text", ["b", "aab"])
def test_a_grammar_that_allowed_tokens_cannot_follow_is_the_request_s_fault(tiny: Server, text: str) -> None:
    """At once, and after some tokens: then a stream ends with the error, unless its first tokens and the error came to
    the front together, which sends no status before it has looked at both."""
    body: dict[str, Any] = {"prompt": PROMPT, "allowed_token_ids": encoded("a"), "guided_regex": text, "max_tokens": 9}
    answer = tiny.complete(**body)
    assert answer.status_code == 400
    refused = assert_error_shape(answer)
    assert "leave no token" in refused["message"]
    streamed = tiny.complete(**body, stream=True)
    if streamed.status_code == 400:
        assert assert_error_shape(streamed) == refused
        return
    assert text != "b"
    events = list(events_of(iter(streamed.text.split("\n"))))
    assert events[-1]["error"] == refused
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text[:-1]


@pytest.mark.parametrize("seed", range(3))
def test_bad_words_are_not_drawn(tiny: Server, seed: int) -> None:
    """Also those of several tokens, whose parts may be drawn."""
    q, x, z = encoded("q") + encoded("x") + encoded("z")
    assert encoded("qx") == [q, x]  # no token of its own
    body: dict[str, Any] = {"allowed_token_ids": [q, x, z], "max_tokens": 80, "seed": seed, "temperature": 2}
    plain = choice(tiny, **body)["text"]
    assert "qx" in plain
    assert "zzq" in plain
    held = choice(tiny, **body, bad_words=["qx", "zzq"])["text"]
    assert "qx" not in held
    assert "zzq" not in held
    assert {*held} == {"q", "x", "z"}
    assert {*choice(tiny, **body, bad_words=["z", "qx"])["text"]} == {"q", "x"}


def test_a_stop_regex_ends_the_answer(tiny: Server) -> None:
    plain = choice(tiny, max_tokens=200)["text"]
    first = re.search("[a-z]{2}", plain)
    assert first is not None
    found = choice(tiny, max_tokens=200, stop_regex="[a-z]{2}")
    assert found["text"] == plain[: first.end()]
    assert found["finish_reason"] == "stop"
    assert found["stop_reason"] == "[a-z]{2}"


def test_a_grammar_within_token_rules(tiny: Server) -> None:
    found = choice(tiny, structured_outputs={"regex": "[ab]{12}"}, bad_words=["a"], ignore_eos=False, temperature=0.9)
    assert found["text"] == "b" * 12


def test_gbnf_and_structural_tags(tiny: Server) -> None:
    grammar = 'root ::= item ("," item)*\nitem ::= "[" root? "]" | [x-z]{2}'
    for body in ({"structured_outputs": {"grammar": grammar}}, {"ebnf": grammar}):
        text = choice(tiny, ignore_eos=False, max_tokens=300, **body)["text"]
        assert re.fullmatch(r"[\[\],x-z]+", text), text
    tag = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</n>"}
    format = {"type": "sequence", "elements": [tag, {"type": "const_string", "value": "!"}]}
    body = {"response_format": {"type": "structural_tag", "format": format}}
    assert re.fullmatch("<n>[0-9]{3}</n>!", choice(tiny, ignore_eos=False, **body)["text"])
    error = tiny.complete(structured_outputs={"grammar": "root ::= x"}).json()["error"]
    assert "line 1: there is no rule 'x'" in error["message"]


def test_a_prompt_is_cut(tiny: Server) -> None:
    whole = choice(tiny, prompt=PROMPT[-5:], temperature=0)
    cut = choice(tiny, truncate_prompt_tokens=5, temperature=0)
    assert cut["prompt_token_ids"] == PROMPT[-5:]
    assert cut["token_ids"] == whole["token_ids"]
    fits = choice(tiny, prompt=[5] * 5000, truncate_prompt_tokens=-1, max_tokens=3)
    assert len(fits["prompt_token_ids"]) == 2048 - 3


def test_a_chat_is_continued_where_its_last_message_ends(tiny: Server) -> None:
    messages = [{"role": "user", "content": "The quick"}, {"role": "assistant", "content": STORY}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 8, "return_token_ids": True, **ON}
    answer = tiny.post("/v1/chat/completions", {**body, "temperature": 0, "echo": True}).json()
    text = f"<s><|user|>The quick<|end|><|assistant|>{STORY}"
    assert answer["prompt_token_ids"] == encoded(text)
    assert answer["choices"][0]["message"]["content"].startswith(STORY)
    same = choice(tiny, prompt=encoded(text), temperature=0, max_tokens=8)
    assert answer["choices"][0]["token_ids"] == same["token_ids"]


def cached_tokens(server: Server) -> int:
    answer = server.complete(prompt=PROMPT * 10, max_tokens=1).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_prefix_cache_can_be_emptied(tiny: Server) -> None:
    cached_tokens(tiny)
    assert cached_tokens(tiny) > 100
    tiny.wait_until_idle()
    answer = tiny.http.post(f"{tiny.url}/reset_prefix_cache")
    assert answer.status_code == 200, answer.text
    assert answer.json()["forgotten_blocks"] >= 8
    assert cached_tokens(tiny) == 0
    assert tiny.http.post(f"{tiny.url}/reset_prefix_cache").json()["forgotten_blocks"] >= 8
    load = tiny.http.get(f"{tiny.url}/load").json()
    assert load["server_load"] == load["running"] + load["waiting"]
    assert tiny.http.get(f"{tiny.url}/server_info").json()["vocab_size"] == 320
    assert tiny.http.post(f"{tiny.url}/ping").status_code == 200


def test_a_batch_of_chats_is_answered_as_the_chats_are(tiny: Server) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("The quick", "Once upon", "a fish")]
    more = {"model": "tiny", "max_tokens": 8, "temperature": 0, **ON}
    together = tiny.post("/v1/chat/completions/batch", {"messages": chats, **more}).json()["choices"]
    for found, chat in zip(together, chats, strict=True):
        alone = tiny.post("/v1/chat/completions", {"messages": chat, **more}).json()["choices"][0]
        assert found["message"] == alone["message"]


@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_those_of_transformers(tiny: Server, tiny_model: Path, width: int) -> None:
    with torch.inference_mode():
        hf = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        made = hf.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), pad_token_id=5,
            num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=8, min_new_tokens=8,
        )  # fmt: skip
    expected = [line[len(PROMPT) :] for line in made.tolist()]
    body = {"prompt": PROMPT, "n": width, "use_beam_search": True, "max_tokens": 8, "return_token_ids": True, **ON}
    answer = tiny.complete(**body)
    assert answer.status_code == 200, answer.text
    assert [one["token_ids"] for one in answer.json()["choices"]] == expected
    tiny.wait_until_idle()

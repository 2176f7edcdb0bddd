"""Checks of the fields that decide where an answer ends."""

import re

import pytest

from tests.fields.registry import BOTH, CHAT, COMPLETIONS, MESSAGES, RESPONSES, THREE, checks
from tests.fields.server import GREEDY, FieldServer, encoded, text_of
from tests.story.models import EOS
from tests.story_server.asks import ascii_piece

Q, X = encoded("q")[0], encoded("x")[0]


@checks(THREE, "stop")
@checks(MESSAGES, "stop_sequences")
def stop(server: FieldServer, path: str) -> None:
    plain = server.text(path, **GREEDY)
    piece, name = ascii_piece(plain, 3), "stop_sequences" if path == MESSAGES else "stop"
    values = [["never", piece]] if path == MESSAGES else [["never", piece], piece]
    for value in values:
        answer = server.ask(path, **GREEDY, **{name: value})
        assert text_of(answer) == plain[: plain.index(piece)]
        if path == MESSAGES:
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", piece)
        elif path == RESPONSES:
            assert answer["status"] == "completed"
        else:
            assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", piece)


@checks(BOTH, "max_tokens")
@checks(CHAT, "max_completion_tokens")
@checks(RESPONSES, "max_output_tokens")
@checks(MESSAGES, "max_tokens")
def limit(server: FieldServer, path: str) -> None:
    names = {CHAT: ("max_tokens", "max_completion_tokens"), RESPONSES: ("max_output_tokens",)}.get(
        path, ("max_tokens",)
    )
    for name in names:
        answer = server.ask(path, **GREEDY, **{"max_tokens": None, name: 5})
        usage = answer["usage"]
        assert usage.get("output_tokens", usage.get("completion_tokens")) == 5
        if path == RESPONSES:
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        elif path == MESSAGES:
            assert answer["stop_reason"] == "max_tokens"
        else:
            assert answer["choices"][0]["finish_reason"] == "length"
    if path == COMPLETIONS:
        assert len(server.tokens(path, max_tokens=None, ignore_eos=True)) == 16


@checks(BOTH, "ignore_eos", "min_tokens")
def past_the_end_token(server: FieldServer, path: str) -> None:
    only = {"allowed_token_ids": [EOS]}
    assert server.tokens(path, **only) == [EOS]
    assert server.tokens(path, **only, ignore_eos=True, max_tokens=4) == [EOS] * 4
    likely = {"allowed_token_ids": [EOS, Q], "logit_bias": {str(EOS): 50}}
    assert server.tokens(path, **likely) == [EOS]
    assert server.tokens(path, **likely, min_tokens=3) == [Q, Q, Q, EOS]


@checks(BOTH, "stop_token_ids")
def stop_tokens(server: FieldServer, path: str) -> None:
    found = server.choice(path, allowed_token_ids=[Q, X], stop_token_ids=[X], temperature=2, seed=1, max_tokens=200)
    assert found["token_ids"][-1] == X
    assert set(found["token_ids"][:-1]) <= {Q}
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", X)


@checks(BOTH, "stop_regex")
def stop_regex(server: FieldServer, path: str) -> None:
    plain = server.text(path, **GREEDY, max_tokens=100)
    first = re.search("[a-z]", plain)
    assert first is not None
    found = server.ask(path, **GREEDY, max_tokens=100, stop_regex="[a-z]")
    assert text_of(found) == plain[: first.end()]
    assert found["choices"][0]["stop_reason"] == "[a-z]"


@checks(BOTH, "include_stop_str_in_output", "no_stop_trim")
def the_stop_string_is_kept(server: FieldServer, path: str) -> None:
    plain = server.text(path, **GREEDY)
    piece = ascii_piece(plain, 3)
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        assert server.text(path, **GREEDY, stop=piece, **{name: True}) == plain[: plain.index(piece) + len(piece)]
        assert server.text(path, **GREEDY, stop=piece, **{name: False}) == plain[: plain.index(piece)]


@checks(BOTH, "skip_special_tokens")
def special_tokens(server: FieldServer, path: str) -> None:
    body = {"allowed_token_ids": [EOS], "ignore_eos": True, "max_tokens": 2}
    assert server.text(path, **body, skip_special_tokens=False) == "</s></s>"
    for more in ({}, {"skip_special_tokens": True}):
        assert server.text(path, **body, **more) == ""


@checks(RESPONSES, "truncation")
def truncation(server: FieldServer, path: str) -> None:
    """The oldest turns of a conversation that does not fit are left out."""
    long = [{"role": "user", "content": f"{word} " * 1500} for word in ("fish", "dog", "fox")]
    assert "tokens" in server.refused(path, input=long)["message"]
    assert "tokens" in server.refused(path, input=long, truncation="disabled")["message"]
    used = server.ask(path, input=long, truncation="auto")["usage"]["input_tokens"]
    alone = server.ask(path, input=long[2:])["usage"]["input_tokens"]
    assert alone <= used < 4096


@checks(RESPONSES, "max_tool_calls")
def tools_of_the_server(server: FieldServer, path: str) -> None:
    """There are none: any limit holds, and comes back."""
    assert server.ask(path, max_tool_calls=2)["max_tool_calls"] == 2
    with pytest.raises(AssertionError):
        server.ask(path, max_tool_calls=-1)

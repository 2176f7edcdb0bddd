"""Reasoning of a chat: apart from the answer, whole and streamed; its fields, and its limit in the job."""

from typing import Any

import httpx
import pytest

from shoal.server.app import Front
from shoal.text.reasoning import REASONING
from tests.server.fake_client import FakeClient
from tests.server.fronts import chat, error_of, events, front, tokenizer
from tests.server.test_tools import CALL, TOOLS, Recorded, says

SAYS = "<think>\nHm, 7.\n</think>\n\nYes."


def made(text: str = SAYS, **settings: Any) -> tuple[Front, FakeClient]:
    client = says(text)
    return front(client, grammars=Recorded(), reasoning_format="think", **settings), client


def ask(app: Front, **body: Any) -> httpx.Response:
    return chat(app, **{"max_tokens": 1000, **body})


def test_reasoning_is_told_apart_from_the_answer() -> None:
    app, client = made()
    message = ask(app).json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Hm, 7."
    assert message["content"] == "Yes."
    assert client.submitted[0].grammar is None, "nothing constrains it"
    plain = ask(front(says(SAYS))).json()["choices"][0]["message"]
    assert plain["content"] == SAYS, "a template that speaks of no reasoning"
    assert "reasoning" not in plain
    hidden = ask(made()[0], include_reasoning=False).json()["choices"][0]["message"]
    assert hidden == {"role": "assistant", "content": "Yes.", "refusal": None}


@pytest.mark.parametrize("shown", [True, False])
def test_streamed_reasoning_comes_in_pieces_of_its_own(shown: bool) -> None:
    deltas = [one["choices"][0]["delta"] for one in events(ask(made()[0], stream=True, include_reasoning=shown))]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == ("Hm, 7." if shown else "")
    assert "".join(one.get("reasoning", "") for one in deltas) == ("Hm, 7." if shown else "")
    assert "".join(one.get("content", "") for one in deltas) == "Yes."
    assert not any(one.get("content") and one.get("reasoning") for one in deltas)


def test_reasoning_that_is_cut_is_no_answer() -> None:
    cut = tokenizer().encode("<think>Hm", add_special=False)
    (one,) = ask(front(FakeClient(lambda job, sample: cut), reasoning_format="think")).json()["choices"]
    assert one["message"]["content"] is None
    assert one["message"]["reasoning"] == "Hm"
    assert one["finish_reason"] == "length"


def test_a_prompt_that_opens_the_reasoning_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    app, client = made("Hm.</think>Yes.")
    message = ask(app, chat_template_kwargs={"mood": "x"}, messages=[{"role": "user", "content": "<think>"}]).json()
    assert message["choices"][0]["message"]["content"] == "Hm.</think>Yes.", "the user's text opens nothing"
    monkeypatch.setattr(app.preparer, "reasoning", REASONING["think"])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    monkeypatch.setattr(app.preparer, "templates", Fixed(template))
    message = ask(app).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Yes.")
    assert client.submitted


class Fixed:
    def __init__(self, source: str) -> None:
        from shoal.text.chat import ChatRenderer

        self.renderer = ChatRenderer(source, {}, tokenizer().names)

    async def render(self, messages: Any, add_generation_prompt: bool, variables: Any) -> Any:
        return self.renderer.render(messages, add_generation_prompt, variables)


def test_tools_and_schemas_follow_the_reasoning() -> None:
    app, client = made(f"<think>Hm</think>\n{CALL}")
    client._info = says("")._info
    choice = ask(app, tools=TOOLS, tool_choice="required").json()["choices"][0]
    assert choice["message"]["reasoning"] == "Hm"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"
    assert client.submitted[0].grammar is not None
    assert "TEXT" in client.submitted[0].grammar.text
    app, client = made('<think>Hm</think>{"a": 1}')
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    message = ask(app, response_format=format).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm", '{"a": 1}')
    assert client.submitted[0].grammar is not None
    assert "@answer" in client.submitted[0].grammar.text


def test_a_budget_travels_with_the_grammar() -> None:
    app, client = made()
    assert ask(app, thinking_token_budget=40).status_code == 200
    grammar = client.submitted[0].grammar
    assert grammar is not None
    assert grammar.thinking is not None
    assert (grammar.thinking.tokens, grammar.thinking.begun) == (40, False)
    answer = ask(front(says("Hi"), grammars=Recorded()), thinking_token_budget=40)
    assert "thinking_token_budget" in answer.headers["x-shoal-warning"], "this model does not reason"
    for bad in (-1, "many"):
        assert error_of(ask(made()[0], thinking_token_budget=bad), 400)["param"] == "thinking_token_budget"
    assert error_of(ask(made()[0], thinking_token_budget=4, ignore_eos=True), 400)["param"] == "ignore_eos"


def test_effort_is_for_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    app, client = made()
    monkeypatch.setattr(app.preparer, "templates", Fixed("{{ reasoning_effort }} {{ enable_thinking }} {{ mood }}"))
    ask(app, reasoning_effort="none", chat_template_kwargs={"mood": "glad"})
    assert tokenizer().decode(client.submitted[0].prompt) == "none False glad"
    ask(app, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False, "mood": ""})
    assert tokenizer().decode(client.submitted[1].prompt) == "high False "

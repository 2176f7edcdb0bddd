"""Checks of the fields that decide what the model reads."""

from typing import Any

from tests.fields.registry import BOTH, CHAT, COMPLETIONS, COUNT, DETOKENIZE, MESSAGES, RESPONSES, TOKENIZE, checks
from tests.fields.server import ASKED, GREEDY, OPEN, STORY, FieldServer, encoded, text_of
from tests.story.models import BOS, EOS, backend

HALF = [{"role": "user", "content": "The quick"}, {"role": "assistant", "content": "Once upon"}]


def decoded(tokens: list[int]) -> str:
    return str(backend().decode(tokens, skip_special_tokens=False))


def read(answer: dict[str, Any]) -> int:
    """The tokens that a message's prompt has, of which Anthropic counts those from the cache apart."""
    return int(answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"])


@checks(COMPLETIONS, "prompt", "add_special_tokens")
def prompt(server: FieldServer, path: str) -> None:
    assert server.prompt(path) == f"<s>{STORY}"
    assert server.prompt(path, add_special_tokens=False) == STORY
    assert server.prompt(path, prompt=[5, 6, 7]) == decoded([5, 6, 7])
    both = server.ask(path, prompt=["a fish", [9, 8]], return_token_ids=True)["choices"]
    assert [one["prompt_token_ids"] for one in both] == [[BOS, *encoded("a fish")], [9, 8]]
    alone = [server.text(path, **GREEDY, prompt=one) for one in ("a fish", "the dog")]
    together = server.ask(path, **GREEDY, prompt=["a fish", "the dog"])["choices"]
    assert [one["text"] for one in together] == alone


@checks(CHAT, "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message")
def messages(server: FieldServer, path: str) -> None:
    start = "<s><|user|>The quick<|end|><|assistant|>Once upon"
    assert server.prompt(path, messages=HALF) == f"{start}<|end|>{OPEN}"
    assert server.prompt(path, messages=HALF, add_special_tokens=False) == f"{start}<|end|>{OPEN}"
    assert server.refused(path, add_special_tokens=True)["param"] == "add_special_tokens"
    assert server.prompt(path, messages=HALF, add_generation_prompt=False) == f"{start}<|end|>"
    assert server.prompt(path, messages=HALF, continue_final_message=True, add_generation_prompt=False) == start


@checks(BOTH, "echo")
def echo(server: FieldServer, path: str) -> None:
    body = {} if path == COMPLETIONS else {"messages": HALF, "continue_final_message": True}
    plain = server.text(path, **body, **GREEDY)
    repeated = STORY if path == COMPLETIONS else "Once upon"
    assert server.text(path, **body, **GREEDY, echo=True) == repeated + plain


@checks(BOTH, "truncate_prompt_tokens", "truncation_side")
def cut(server: FieldServer, path: str) -> None:
    whole = server.prompt(path)
    last = server.prompt(path, truncate_prompt_tokens=6)
    assert whole.endswith(last)
    assert len(last) < len(whole)
    assert server.prompt(path, truncate_prompt_tokens=6, truncation_side="left") == last
    first = server.prompt(path, truncate_prompt_tokens=6, truncation_side="right")
    assert whole.startswith(first)
    assert first.startswith("<s>")
    assert server.prompt(path, truncate_prompt_tokens=-1) == whole


@checks(CHAT, "chat_template_kwargs")
def template_variables(server: FieldServer, path: str) -> None:
    assert server.prompt(path, chat_template_kwargs={"mood": "(glad)"}).endswith(f"(glad){OPEN}")
    assert server.refused(path, chat_template_kwargs={"messages": []})["param"] == "chat_template_kwargs"


@checks(RESPONSES, "chat_template_kwargs", "input", "instructions")
@checks(MESSAGES, "messages", "system")
def input_tokens(server: FieldServer, path: str) -> None:
    """What is read is what a chat with the same messages reads: as many tokens, and the same answer."""

    def same_as_chat(shown: list[dict[str, str]], **body: Any) -> None:
        kwargs = {"chat_template_kwargs": body["chat_template_kwargs"]} if "chat_template_kwargs" in body else {}
        chat = server.ask(CHAT, **GREEDY, messages=shown, **kwargs)
        answer = server.ask(path, **GREEDY, **body)
        assert text_of(answer) == text_of(chat)
        used = read(answer) if path == MESSAGES else answer["usage"]["input_tokens"]
        assert used == chat["usage"]["prompt_tokens"]

    parts = [{"role": "user", "content": [{"type": "input_text" if path == RESPONSES else "text", "text": STORY}]}]
    system = [{"role": "system", "content": "Be brief."}, *ASKED]
    if path == RESPONSES:
        same_as_chat(ASKED, input=STORY)
        same_as_chat(ASKED, input=parts)
        same_as_chat(system, input=STORY, instructions="Be brief.")
        same_as_chat(ASKED, input=STORY, chat_template_kwargs={"mood": "(glad)"})
        return
    same_as_chat(ASKED, messages=parts)
    same_as_chat([*HALF, *ASKED], messages=[*HALF, *ASKED])
    same_as_chat(system, system="Be brief.")
    same_as_chat(system, system=[{"type": "text", "text": "Be brief."}])


@checks(COUNT, "messages", "system", "model")
def counted(server: FieldServer, path: str) -> None:
    """As many as a message with the same fields uses."""
    for body in ({"messages": ASKED}, {"messages": HALF[:1]}, {"messages": ASKED, "system": "Be brief."}):
        used = read(server.ask(MESSAGES, **{**body, "max_tokens": 1}))
        assert server.ask(path, **body) == {"input_tokens": used}
    assert server.ask(path, messages=ASKED, model="other-name")
    assert server.post(path, messages=ASKED, model="unknown").status_code == 404


@checks(TOKENIZE, "prompt", "add_special_tokens", "return_token_strs", "model")
def tokenized(server: FieldServer, path: str) -> None:
    found = server.ask(path, prompt=STORY)
    assert found == {"count": len(found["tokens"]), "max_model_len": 4096, "tokens": [BOS, *encoded(STORY)]}
    assert server.ask(path, prompt=STORY, add_special_tokens=False)["tokens"] == encoded(STORY)
    both = server.ask(path, prompt=[STORY, "a fish"], return_token_strs=True)
    assert both["tokens"] == [[BOS, *encoded(STORY)], [BOS, *encoded("a fish")]]
    assert both["count"] == [len(one) for one in both["tokens"]] == [len(one) for one in both["token_strs"]]
    named = server.ask(path, prompt="a fish", return_token_strs=True)
    assert named["token_strs"] == [backend().id_to_token(token) for token in named["tokens"]]
    assert server.ask(path, prompt=STORY, model="other-name") == found
    assert server.post(path, prompt=STORY, model="unknown").status_code == 404


@checks(TOKENIZE, "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
@checks(TOKENIZE, "tool_choice", "reasoning_effort")
def tokenized_chats(server: FieldServer, path: str) -> None:
    """The ids are those that a chat with the same fields reads."""
    tool = {"type": "function", "function": {"name": "count_fish", "parameters": {"type": "object", "properties": {}}}}
    fields: list[dict[str, Any]] = [
        {}, {"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"mood": "(glad)"}}, {"tools": [tool]}, {"reasoning_effort": "low"},
    ]  # fmt: skip
    read = set()
    for body in fields:
        ids = server.ask(path, messages=HALF, **body)["tokens"]
        assert decoded(ids) == server.prompt(CHAT, messages=HALF, **body)
        read.add(decoded(ids))
    assert len(read) == len(fields)
    hidden = server.ask(path, messages=HALF, tools=[tool], tool_choice="none")["tokens"]
    assert hidden == server.ask(path, messages=HALF)["tokens"]


@checks(DETOKENIZE, "tokens", "skip_special_tokens", "model")
def detokenized(server: FieldServer, path: str) -> None:
    tokens = [BOS, *encoded(STORY), EOS]
    assert server.ask(path, tokens=tokens) == {"prompt": f"<s>{STORY}</s>", "text": f"<s>{STORY}</s>"}
    assert server.ask(path, tokens=tokens, skip_special_tokens=True)["prompt"] == STORY
    assert server.ask(path, tokens=[tokens, [5]], skip_special_tokens=True)["text"][0] == STORY
    assert server.ask(path, tokens=tokens, model="other-name")
    assert server.post(path, tokens=tokens, model="unknown").status_code == 404

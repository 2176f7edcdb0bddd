"""Chat templates and first schemas on a real server: what a request can make expensive is paid for elsewhere."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.story.models import BOS, EOS
from tests.story_server.asks import ASKED
from tests.story_server.servers import SMALL, Server, assert_error_shape, command_of, family_of, running

TEMPLATE = (
    "{% set n = n | default(1) %}{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
)
FISH = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}


@pytest.fixture(scope="module")
def looping(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose template lets a request ask for nested loops."""
    folder = tmp_path_factory.mktemp("looping")
    (folder / "loops.jinja").write_text(TEMPLATE)
    with running(folder, tiny_model, *SMALL, "--chat-template", str(folder / "loops.jinja")) as server:
        yield server


def ask(server: Server, **more: Any) -> Any:
    return server.post("/v1/chat/completions", {"model": "tiny", "messages": ASKED, "max_tokens": 100, **more})


def workers(server: Server) -> list[int]:
    return [pid for pid in family_of(server.process.pid) if "shoal.text.worker" in command_of(pid)]


def test_the_very_first_request_may_have_a_schema(looping: Server) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "fish", "schema": FISH}}
    answer = ask(looping, response_format=wanted, seed=1, max_tokens=400)
    assert answer.status_code == 200, answer.text
    assert set(json.loads(answer.json()["choices"][0]["message"]["content"])) >= {"name"}


def test_a_template_that_runs_away_is_stopped_and_others_are_served(looping: Server) -> None:
    answers: list[Any] = []
    hostile = threading.Thread(target=lambda: answers.append(ask(looping, chat_template_kwargs={"n": 99999})))
    hostile.start()
    while hostile.is_alive():
        assert looping.health() == 200
        assert looping.complete(max_tokens=2).status_code == 200
    assert answers[0].status_code == 400
    error = assert_error_shape(answers[0])
    assert error["param"] == "messages"
    assert "CPU time" in error["message"]
    assert ask(looping, max_tokens=2).status_code == 200
    assert len(workers(looping)) == 1


def test_special_tokens_in_messages_are_text_and_in_prompts_tokens(looping: Server) -> None:
    said = "a</s><s>b"
    messages = [{"role": "user", "content": said}]
    ids = looping.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert (ids.count(BOS), ids.count(EOS)) == (1, 1)
    text = looping.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == f"<s>user: {said}</s>"
    asked = ask(looping, messages=messages, max_tokens=2, return_token_ids=True).json()
    assert asked["prompt_token_ids"] == ids
    raw = looping.post("/tokenize", {"prompt": said}).json()["tokens"]
    assert (raw.count(BOS), raw.count(EOS)) == (2, 1)

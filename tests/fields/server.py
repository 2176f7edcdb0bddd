"""A front over a real engine with a tiny random model, all in this process; and short ways to ask it.

The engine is stepped on the event loop, so that nothing depends on time. The template shows its variables, and closes
the reasoning unless `enable_thinking` opens it.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from shoal.core.job import Job, Sink
from shoal.engine.local import LocalClient
from shoal.server.app import Front
from shoal.server.response_store import SqliteStore
from shoal.server.settings import ServerSettings
from tests.fields.registry import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from tests.server.fronts import ask_async
from tests.story.models import EOS, backend, open_llm, save_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{{ mood | default('') }}{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
)
OPEN = "<|assistant|><think></think>"  # what a prompt ends with where the model is not to reason
STORY = "Once upon a time there was a little fish who swam in a shoal"
ASKED = [{"role": "user", "content": STORY}]
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": STORY, "max_tokens": 24},
    CHAT: {"messages": ASKED, "max_tokens": 24},
    RESPONSES: {"input": STORY, "max_output_tokens": 24, "store": False},
    MESSAGES: {"messages": ASKED, "max_tokens": 24},
    GENERATE: {"text": STORY, "sampling_params": {"max_new_tokens": 24}},
}
GREEDY = {"temperature": 0}
ROWS = 8  # sequences that run at the same time


class SteppedClient(LocalClient):
    """Computes passes on the event loop while it has jobs."""

    task: "asyncio.Task[None] | None" = None

    def submit(self, job: Job, sink: Sink) -> None:
        super().submit(job, sink)
        if self.task is None or self.task.done():
            self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.jobs:
            self.step(self.loop.clock.now_s() + 0.01)
            await asyncio.sleep(0)


class FieldServer:
    """The front, asked in process."""

    def __init__(self, front: Front) -> None:
        self.front = front

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Any answer; the least body of the path with these fields, None leaves one out."""
        return asyncio.run(self.post_async(path, **body))

    async def post_async(self, path: str, **body: Any) -> httpx.Response:
        sent = {name: value for name, value in {**LEAST.get(path, {}), **body}.items() if value is not None}
        return await ask_async(self.front, "POST", path, json=sent)

    def ask(self, path: str, **body: Any) -> Any:
        """An answer that must be a good one."""
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text[:1000]
        return answer.json()

    def refused(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 400, answer.text[:1000]
        return dict(answer.json()["error"])

    def text(self, path: str, **body: Any) -> str:
        return text_of(self.ask(path, **body))

    def choice(self, path: str, **body: Any) -> dict[str, Any]:
        """The first choice of a chat or completion, with its token ids."""
        return dict(self.ask(path, **{"return_token_ids": True, **body})["choices"][0])

    def tokens(self, path: str, **body: Any) -> list[int]:
        return list(self.choice(path, **body)["token_ids"])

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(path, stream=True, **body)
        assert answer.status_code == 200, answer.text[:1000]
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def prompt(self, path: str, **body: Any) -> str:
        """What the model reads, special tokens included."""
        answer = self.ask(path, **{"return_token_ids": True, "max_tokens": 1, **body})
        ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        return str(backend().decode(ids, skip_special_tokens=False))


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer of any API."""
    if "choices" in answer:
        one = answer["choices"][0]
        return str(one["text"] if "text" in one else one["message"]["content"])
    if "text" in answer and "meta_info" in answer:
        return str(answer["text"])
    if "output" in answer:
        return "".join(part["text"] for one in answer["output"] if one["type"] == "message" for part in one["content"])
    return "".join(part["text"] for part in answer["content"] if part["type"] == "text")


def encoded(text: str) -> list[int]:
    return list(backend().encode(text, add_special_tokens=False).ids)


@contextmanager
def field_server(folder: Path) -> Iterator[FieldServer]:
    path = save_model(folder / "model", template=TEMPLATE, max_position_embeddings=4096)
    with open_llm(path, order="priority", max_num_seqs=ROWS, kv_memory="16MiB") as llm:
        model = llm._model
        client = SteppedClient(model.built.loop, model.built.info(), model.client.make_grammar)
        settings = ServerSettings(models=("tiny", "other-name"), host="front", seed=5)
        store = SqliteStore(folder / "responses.sqlite", 2**20, 1000.0)
        yield FieldServer(Front(settings, client, llm.tokenizer, llm.grammars, (EOS,), {}, store=store))
        asyncio.run(store.close())

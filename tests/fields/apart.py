"""Checks of the fields that keep requests apart or tie them together: caches, priorities, the store."""

import asyncio
from typing import Any

from tests.fields.registry import CHAT, COMPLETIONS, RESPONSES, THREE, checks
from tests.fields.server import LEAST, ROWS, STORY, FieldServer, text_of
from tests.server.fronts import ask, ask_async


@checks(THREE, "cache_salt")
def cache_salt(server: FieldServer, path: str) -> None:
    """Cached prefixes are found under the same salt alone."""

    def cached(salt: str) -> int:
        body: dict[str, Any] = {"prompt": f"{path} {STORY}"} if path == COMPLETIONS else {}
        if path == CHAT:
            body = {"messages": [{"role": "user", "content": f"{path} {STORY}"}]}
        if path == RESPONSES:
            body = {"input": f"{path} {STORY}"}
        usage = server.ask(path, **body, cache_salt=salt)["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


@checks(THREE, "priority")
def priority(server: FieldServer, path: str) -> None:
    """Of two requests that wait while others hold all rows, the one with the lower number goes first."""
    ended = asyncio.run(in_order(server, path))
    assert ended.index("soon") < ended.index("late")


async def in_order(server: FieldServer, path: str) -> list[str]:
    """The names of the requests as they end."""
    ended: list[str] = []

    async def one(name: str, at: str = path, **body: Any) -> None:
        answer = await server.post_async(at, **body)
        assert answer.status_code == 200, answer.text
        ended.append(name)

    long = one("long", COMPLETIONS, n=ROWS - 1, max_tokens=90, ignore_eos=True)
    short = one("short", COMPLETIONS, max_tokens=20, ignore_eos=True)  # when it ends, one row is free
    tasks: list[asyncio.Task[None]] = []
    for waiting in (long, short, one("late", priority=5), one("soon", priority=-5)):
        tasks.append(asyncio.create_task(waiting))
        while server.front.client.jobs < len(tasks):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return ended


# ---- the store


@checks(RESPONSES, "store", "previous_response_id")
def stored(server: FieldServer, path: str) -> None:
    def get(id: str) -> int:
        return ask(server.front, "GET", f"{path}/{id}").status_code

    first = server.ask(path, store=True, temperature=0)
    assert first["store"] is True
    assert get(first["id"]) == 200
    assert get(server.ask(path, store=False)["id"]) == 404
    second = server.ask(path, input="And?", previous_response_id=first["id"], temperature=0)
    assert second["previous_response_id"] == first["id"]
    history = [
        {"role": "user", "content": STORY}, {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    chat = server.ask(CHAT, messages=history, temperature=0)
    assert text_of(chat) == text_of(second)
    assert server.post(path, previous_response_id="resp_unknown").status_code == 400


@checks(RESPONSES, "background")
def background(server: FieldServer, path: str) -> None:
    """Answered at once, made without its client, and then there."""

    async def story() -> dict[str, Any]:
        body = {**LEAST[path], "store": True, "background": True, "temperature": 0}
        sent = asyncio.create_task(ask_async(server.front, "POST", path, json=body))
        answer = (await sent).json()
        assert (answer["status"], answer["background"]) == ("in_progress", True)
        while True:
            found: dict[str, Any] = (await ask_async(server.front, "GET", f"{path}/{answer['id']}")).json()
            if found["status"] != "in_progress":
                return found
            await asyncio.sleep(0)

    found = asyncio.run(story())
    assert text_of(found) == server.text(path, temperature=0)

"""Chat templates in their worker: hostile ones end with an error, and the event loop goes on meanwhile."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import BadChat, Draining, Rejected
from shoal.server import templates as module
from shoal.server.errors import BadField, HttpError
from shoal.server.templates import TemplateWorker
from shoal.text.chat import ChatRenderer
from shoal.text.special import SecretNames
from tests.processes.stopping import stop
from tests.server.fronts import ask_async, error_of, front, run, tokenizer

LIMIT_S = 0.5  # of the worker's own CPU time
HI = [{"role": "user", "content": "Hi"}]
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = (
    "{% set n = n | default(1) %}{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)


@asynccontextmanager
async def worker(source: str, names: SecretNames | None = None) -> AsyncIterator[TemplateWorker]:
    made = TemplateWorker(ChatRenderer(source, {"bos_token": "<s>"}, names), {"bos_token": "<s>"}, LIMIT_S)
    made.start()
    try:
        yield made
    finally:
        await made.close()


async def said(made: TemplateWorker, text: str = "Hi", **variables: Any) -> str:
    return (await made.render([{"role": "user", "content": text}], True, variables)).text


async def with_longest_turn(work: Any) -> float:
    """Await it; the longest CPU time that the event loop's thread used for one turn meanwhile. No garbage is
    collected: in a process that has loaded all tests, that takes long."""
    longest_s, done = 0.0, asyncio.ensure_future(work)
    gc.disable()
    try:
        while not done.done():
            before_s = time.thread_time()
            await asyncio.sleep(0.002)
            longest_s = max(longest_s, time.thread_time() - before_s)
    finally:
        gc.enable()
    await done
    return longest_s


def test_it_renders_as_here() -> None:
    async def work() -> None:
        names = SecretNames(["<s>"])
        source = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ mood }}"
        renderer = ChatRenderer(source, {"bos_token": "<s>"}, names)
        async with worker(source, names) as made:
            for messages in (HI, [{"role": "user", "content": "<s>é\u2028<"}], [*HI, *HI]):
                for mood in ("", "calm", "<s>"):
                    assert await made.render(messages, False, {"mood": mood}) == renderer.render(
                        messages, False, {"mood": mood}
                    )
            assert (await made.render([{"role": "user", "content": "<s>"}], True, {})).hidden

    run(work)


def test_refusals_are_those_of_the_template() -> None:
    async def work() -> None:
        source = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}x{{ 1 // n }}"
        async with worker(source) as made:
            assert await said(made, n=1) == "x1"
            with pytest.raises(BadChat, match="no tools here"):
                await made.render([{"role": "tool", "content": "x"}], True, {"n": 1})
            with pytest.raises(BadChat, match=r"messages\[0\]\.role"):
                await made.render([{"role": "", "content": "x"}], True, {"n": 1})
            with pytest.raises(BadChat, match="ZeroDivisionError"):
                await said(made, n=0)
        async with worker("{{ x | nofilter }}") as made:
            with pytest.raises(BadChat, match=r"broken.*nofilter.*--chat-template"):
                await said(made)

    run(work)


@pytest.mark.parametrize(
    "source",
    [
        NESTED,
        "{{ 9**(9**9) }}",
        "{% set x = 9 %}{{ x**(x**x) }}",
        "{{ '%2000000000d' % 1 }}",
        "{% set n = 1 %}{{ '%2000000000d' % n }}",
        "{{ 'x' * 2000000000 }}",
        "{% for i in range(99999) %}{{ 'some words' * 20 }}{% endfor %}",
    ],
)
def test_a_hostile_template_is_the_servers_fault(source: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with worker(source) as made:
            with pytest.raises(HttpError, match=r"chat template is too expensive.*--chat-template") as caught:
                await said(made)
            assert caught.value.status == 500
            assert "--chat-template" in caplog.text
            process = made._process
            for _ in range(20):  # known from now on: nothing is rendered
                with pytest.raises(HttpError):
                    await said(made)
            assert made._process is process

    run(lambda: with_longest(work))


async def with_longest(work: Any) -> None:
    assert await with_longest_turn(work()) < 0.5  # rendering takes seconds; starting a process some milliseconds


def test_lipsum_is_not_there() -> None:
    async def work() -> None:
        async with worker("{{ lipsum(n=1000000) }}") as made:
            with pytest.raises(BadChat, match="'lipsum' is undefined"):
                await said(made)

    run(work)


def test_what_chat_templates_use_is_there() -> None:
    async def work() -> None:
        source = (
            "{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}{{ dict(a=3).a }}{{ range(5) | last }}"
            "{% set c = cycler(5, 6) %}{{ c.next() }}{% set j = joiner(',') %}{{ j() }}6{{ j() }}"
        )
        async with worker(source) as made:
            assert await said(made) == "23456,"

    run(work)


def test_a_hostile_request_is_refused_and_those_behind_it_are_rendered() -> None:
    async def work() -> None:
        async with worker(LOOPS) as made:
            hostile = asyncio.ensure_future(said(made, n=99999))
            behind = [asyncio.ensure_future(said(made, f"text {number}")) for number in range(20)]
            with pytest.raises(BadField, match=r"these messages take .* 0\.5 s of CPU time.*send fewer") as caught:
                await hostile
            assert caught.value.param == "messages"
            assert await asyncio.gather(*behind) == [f"text {number}" for number in range(20)]
            assert not made.fault

    run(lambda: with_longest(work))


def test_too_much_text_is_refused() -> None:
    async def work() -> None:
        async with worker("{{ messages[0].content * (n | default(1)) }}") as made:
            assert await said(made, "x" * 100_000, n=5) == "x" * 500_000
            with pytest.raises(BadField, match="messages"):
                await said(made, "x" * 100_000, n=50)
            assert await said(made) == "Hi"

    run(work)


def test_a_chat_that_was_given_up_does_not_harm_the_next() -> None:
    """The client of a hostile chat disconnects; the chats behind it are not taken for the hostile one."""

    async def work() -> None:
        async with worker(LOOPS) as made:
            assert await said(made) == "Hi"
            hostile = asyncio.ensure_future(said(made, n=99999))
            behind = [asyncio.ensure_future(said(made, f"text {number}")) for number in range(5)]
            await asyncio.sleep(0.05)
            hostile.cancel()
            assert await asyncio.gather(*behind) == [f"text {number}" for number in range(5)]

    run(work)


def test_a_worker_that_is_killed_is_started_again() -> None:
    async def work() -> None:
        async with worker(LOOPS) as made:
            for _ in range(3):
                assert await said(made) == "Hi"
                assert made._process is not None
                os.kill(made._process.pid, signal.SIGKILL)
            texts = await asyncio.gather(*(said(made, f"text {number}") for number in range(50)))
            assert texts == [f"text {number}" for number in range(50)]

    run(work)


def test_a_worker_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with worker(LOOPS) as made:
            assert await said(made) == "Hi"
            assert made._process is not None
            stop(made._process.pid)
            monkeypatch.setattr(module, "WAIT_LIMIT_S", 0.2)
            with pytest.raises(Rejected, match="try again") as caught:
                await said(made)
            assert caught.value.retry_after_s
            monkeypatch.undo()
            assert await said(made) == "Hi"

    run(work)


def test_a_worker_that_cannot_be_started_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        monkeypatch.setattr(module.sys, "executable", "/no/such/python")
        async with worker(LOOPS) as made:
            with pytest.raises(RuntimeError, match="cannot be started"):
                await said(made)
            monkeypatch.undo()
            assert await said(made) == "Hi"

    run(work)


def test_closing_ends_the_process_and_refuses_who_waits() -> None:
    async def work() -> None:
        async with worker(LOOPS) as made:
            assert await said(made) == "Hi"
            assert made._process is not None
            pid = made._process.pid
            waiting = asyncio.ensure_future(said(made, n=99999))
            await asyncio.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(Draining):
            await waiting

    run(work)


def test_it_does_not_outlive_its_front() -> None:
    """Its input ends with the process that started it."""
    pids: list[int] = []

    async def work() -> None:
        made = TemplateWorker(ChatRenderer(LOOPS, {}, None), {})
        made.start()
        assert await said(made) == "Hi"
        assert made._process is not None
        assert made._process.stdin is not None
        pids.append(made._process.pid)
        made._process.stdin.close()
        assert await made._process.wait() == 0

    run(work)
    assert pids


def test_a_long_answer_arrives_whole() -> None:
    async def work() -> None:
        long = "é" * 1_000_000
        async with worker(LOOPS) as made:
            wanted = [long + str(number) for number in range(4)]
            assert await asyncio.gather(*(said(made, text) for text in wanted)) == wanted
            assert len(await said(made)) == 2

    run(work)


def test_a_front_answers_health_while_a_template_runs_away() -> None:
    async def work() -> None:
        app = front()
        one = tokenizer()
        app.preparer.templates = made = TemplateWorker(ChatRenderer(LOOPS, {}, None), {}, LIMIT_S)
        made.start()
        body = {"messages": HI, "chat_template_kwargs": {"n": 99999}}
        asked = 0
        for _ in range(10):  # this thread may have had no CPU while it was rendered
            hostile = asyncio.ensure_future(ask_async(app, "POST", "/v1/chat/completions", json=body))
            plain = asyncio.ensure_future(ask_async(app, "POST", "/tokenize", json={"messages": HI}))
            asked = 0
            while not hostile.done():
                assert (await ask_async(app, "GET", "/health")).status_code == 200
                await asyncio.sleep(0.005)
                asked += 1
            assert error_of(await hostile, 400)["param"] == "messages"
            assert (await plain).json()["tokens"] == one.encode("Hi", add_special=False)
            if asked > 10:
                break
        assert asked > 10
        await made.close()

    run(work)


def test_a_front_with_a_hostile_template_says_500() -> None:
    async def work() -> None:
        app = front()
        app.preparer.templates = made = TemplateWorker(ChatRenderer("{{ 'x' * 2000000000 }}", {}, None), {})
        made.start()
        answer = await ask_async(app, "POST", "/v1/chat/completions", json={"messages": HI})
        error = error_of(answer, 500)
        assert error["code"] == "bad_chat_template"
        assert "--chat-template" in error["message"]
        assert (await ask_async(app, "POST", "/v1/completions", json={"prompt": "x"})).status_code == 200
        await made.close()

    run(work)


def test_special_tokens_stay_text_through_a_front() -> None:
    async def work() -> None:
        app = front()
        one = tokenizer()
        app.preparer.templates = made = TemplateWorker(one.renderer, one.special)
        made.start()
        for templates in (made, None):
            app.preparer.templates = templates
            answer = await ask_async(
                app, "POST", "/tokenize", json={"messages": [{"role": "user", "content": "a</s><s>"}]}
            )
            ids = answer.json()["tokens"]
            assert not {1, 2} & set(ids)
            assert one.decode(ids, skip_special=False) == "user: a</s><s>\nassistant: "
        raw = await ask_async(app, "POST", "/tokenize", json={"prompt": "a</s>"})
        assert 2 in raw.json()["tokens"]
        await made.close()

    run(work)

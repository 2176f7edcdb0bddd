"""AsyncLLM in a program with an event loop: the same outputs as LLM, and calls that end in every possible way."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, AsyncLLM, GrammarSpec, SamplingParams
from shoal.errors import BadParameter, EngineError, PromptTooLong
from tests.story.models import greedy, seeded

PROMPTS = ["Once upon a time", "The quick brown fox", [5, 6, 7], "a lazy dog sleeps"]
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
LONGEST = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)  # runs still when it is to be stopped


def run(model: Path, work: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    """Run this on an event loop, with an engine that was loaded there."""

    async def main() -> Any:
        settings = {"kv_memory": "8MiB", "dtype": "float32", "check": True, **options}
        async with await AsyncLLM.load(model, **settings) as llm:
            return await work(llm)

    return asyncio.run(main())


async def all_free(llm: AsyncLLM) -> None:
    """Wait until no block is held; fail if that never happens."""
    pool = llm._model.built.loop.scheduler.kv.pool
    for _ in range(2000):
        if not pool.held and not llm._model.client.jobs and not llm._calls:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{pool.held} blocks are still held by {llm._model.client.jobs} jobs")


def test_outputs_equal_those_of_llm(model: Path, llm: LLM) -> None:
    params = [greedy(12), seeded(3, 20), seeded(4, 9, n=2, logprobs=2), greedy(15, stop="a", prompt_logprobs=1)]
    want = llm.generate(PROMPTS, params)
    found = run(model, lambda one: one.generate(PROMPTS, params))
    assert [one.prompt for one in found] == [one.prompt for one in want]
    for one, other in zip(found, want, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        for got, expected in zip(one.outputs, other.outputs, strict=True):
            assert (got.index, got.text, got.token_ids) == (expected.index, expected.text, expected.token_ids)
            assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
            assert (got.logprobs is None) == (expected.logprobs is None)
            assert got.metrics.first_token_s is not None
            assert 0 < got.metrics.first_token_s <= got.metrics.total_s


def test_streams_side_by_side_yield_what_generate_yields(model: Path, llm: LLM) -> None:
    want = [llm.generate(prompt, seeded(number, 25))[0].outputs[0] for number, prompt in enumerate(PROMPTS)]

    async def read(one: AsyncLLM, number: int) -> tuple[str, list[int], str | None]:
        text, tokens, reason = "", [], None
        async for chunk in one.stream(PROMPTS[number], seeded(number, 25)):
            text, tokens, reason = text + chunk.text, tokens + chunk.token_ids, chunk.finish_reason
        return text, tokens, reason

    async def work(one: AsyncLLM) -> list[tuple[str, list[int], str | None]]:
        return list(await asyncio.gather(*(read(one, number) for number in range(len(PROMPTS)))))

    assert run(model, work) == [(one.text, one.token_ids, one.finish_reason) for one in want]


def test_the_event_loop_goes_on_while_the_engine_computes(model: Path) -> None:
    """A task that only sleeps gets its turns while tokens are generated in the engine's thread."""

    async def work(llm: AsyncLLM) -> tuple[int, str]:
        ticks, names = 0, set()
        before = llm._model.client.step

        def step(until_s: float | None = None) -> None:
            names.add(threading.current_thread().name)
            before(until_s)

        llm._model.client.step = step  # type: ignore[method-assign]
        task = asyncio.create_task(llm.generate(PROMPTS, LONG))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0)
        await task
        return ticks, *names

    ticks, *names = run(model, work)
    assert ticks > 10
    assert names == ["shoal-engine"]


async def _close(stream: Any) -> None:
    await stream.aclose()


async def _leave(stream: Any) -> None:
    async with stream:
        pass


@pytest.mark.parametrize("leave", [_close, _leave], ids=["aclose", "async with"])
def test_a_stream_left_early_frees_its_blocks(model: Path, leave: Callable[[Any], Awaitable[None]]) -> None:
    async def work(llm: AsyncLLM) -> list[int]:
        stream = llm.stream(PROMPTS, LONG)
        await anext(stream)
        await leave(stream)
        await all_free(llm)
        assert len([chunk async for chunk in stream]) < 100 * len(PROMPTS)  # at most what had come before
        return (await llm.generate("x", greedy(3)))[0].outputs[0].token_ids

    assert len(run(model, work)) == 3


def test_a_stream_that_is_dropped_frees_its_blocks(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        async for _ in llm.stream(PROMPTS, LONG):
            break
        gc.collect()
        await all_free(llm)
        stream = llm.stream(PROMPTS, LONG)  # never begun
        del stream
        gc.collect()
        await all_free(llm)

    run(model, work)


def test_a_cancelled_task_ends_its_requests(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate(PROMPTS, LONGEST))
        while not llm._model.client.jobs:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await all_free(llm)

    run(model, work)


def test_a_bad_call_fails_alone(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        other = asyncio.create_task(llm.generate(PROMPTS, seeded(1, 30)))
        with pytest.raises(PromptTooLong):
            await llm.generate([PROMPTS[0], [1] * 10_000], greedy(3))
        with pytest.raises(BadParameter, match=r"found 1\.5"):
            await llm.generate([1, 1.5], greedy(3))  # type: ignore[list-item]
        with pytest.raises(PromptTooLong):
            async for _ in llm.stream([1] * 10_000, greedy(3)):
                pass
        assert len(await other) == len(PROMPTS)
        assert await llm.generate([], greedy(3)) == []
        await all_free(llm)

    run(model, work)


def test_a_grammar_holds(model: Path) -> None:
    async def work(llm: AsyncLLM) -> list[str]:
        found = await llm.generate(PROMPTS, seeded(2, 20), grammar=GrammarSpec("choice", '["yes", "no"]'))
        return [one.outputs[0].text for one in found]

    assert set(run(model, work)) <= {"yes", "no"}


def test_close_fails_what_runs_and_what_comes_later(model: Path) -> None:
    async def main() -> None:
        llm = await AsyncLLM.load(model, kv_memory="8MiB", dtype="float32")
        running = asyncio.create_task(llm.generate(PROMPTS, LONGEST))
        while not llm._model.client.jobs:
            await asyncio.sleep(0.001)
        await llm.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await llm.generate("x", greedy(3))
        with pytest.raises(EngineError, match="closed"):
            await anext(llm.stream("x", greedy(3)))
        await llm.close()

    asyncio.run(main())


def test_an_engine_that_stops_fails_its_calls(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        def broken(until_s: float | None = None) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(llm._model.client, "step", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            await llm.generate("x", greedy(3))
        with pytest.raises(EngineError):
            await llm.generate("x", greedy(3))

    run(model, work)


def test_two_event_loops_share_one_engine(model: Path, llm: LLM) -> None:
    """Each call comes back on the loop it was made on."""
    want = llm.generate(PROMPTS, seeded(9, 20))
    shared = AsyncLLM(model, kv_memory="8MiB", dtype="float32")
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(asyncio.run(shared.generate(PROMPTS, seeded(9, 20)))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(shared.close())
    assert len(found) == 2
    for one in found:
        assert [got.outputs[0].token_ids for got in one] == [expected.outputs[0].token_ids for expected in want]


def test_an_idle_engine_wakes_up_at_once(model: Path) -> None:
    """It sleeps a second at a time when idle; a call must not wait for the end of that."""

    async def work(llm: AsyncLLM) -> float:
        await llm.generate("x", greedy(2))
        waits = []
        for _ in range(5):
            await asyncio.sleep(0.02)  # it is asleep by now
            began_s = time.monotonic()
            await llm.generate("x", greedy(2))
            waits.append(time.monotonic() - began_s)
        return min(waits)

    assert run(model, work) < 0.9


def test_a_reader_ends_when_another_task_closes_its_stream(model: Path) -> None:
    async def work(llm: AsyncLLM) -> int:
        stream = llm.stream(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True))
        await anext(stream)

        async def read() -> int:
            return len([chunk async for chunk in stream])

        reader = asyncio.create_task(read())
        while not reader.done():
            await asyncio.sleep(0)
            if stream._change._waiters:  # it waits for the next chunk
                await stream.aclose()
                break
        count = await asyncio.wait_for(reader, 30)
        await all_free(llm)
        return count

    assert run(model, work) < 400 * len(PROMPTS)


def test_a_closed_stream_has_no_chunks(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream(PROMPTS, LONG)
        await anext(stream)
        await asyncio.sleep(0.05)  # more have come meanwhile
        await stream.aclose()
        assert [chunk async for chunk in stream] == []
        with pytest.raises(EngineError, match="closed"):
            await stream.results()

    run(model, work)


def test_a_stream_closed_while_its_prompts_are_read_never_starts(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        gate = threading.Event()
        before = llm._model.collect

        def slow(*args: Any, **more: Any) -> Any:
            gate.wait(30)
            return before(*args, **more)

        llm._model.collect = slow  # type: ignore[method-assign]
        stream = llm.stream(PROMPTS, LONG)
        reader = asyncio.create_task(anext(stream, None))  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        await stream.aclose()
        gate.set()
        assert await asyncio.wait_for(reader, 30) is None
        assert not llm._model.client.jobs
        await all_free(llm)

    run(model, work)


def test_two_readers_of_one_stream_start_it_once(model: Path) -> None:
    async def work(llm: AsyncLLM) -> int:
        stream = llm.stream("x", greedy(8, ignore_eos=True))

        async def read() -> int:
            return sum([len(chunk.token_ids) async for chunk in stream])

        return sum(await asyncio.wait_for(asyncio.gather(read(), read()), 30))

    assert run(model, work) == 8


def test_a_stream_is_dropped_without_a_lock(model: Path) -> None:
    """A finalizer may run in a thread that holds any lock of the engine."""

    async def work(llm: AsyncLLM) -> None:
        stream = llm.stream(PROMPTS, LONG)
        await anext(stream)
        dropped = threading.Event()

        def drop() -> None:
            with llm._engine._lock, llm._engine._clock._event._cond:  # type: ignore[attr-defined]
                stream.__del__()
            dropped.set()

        threading.Thread(target=drop, daemon=True).start()
        assert await asyncio.to_thread(dropped.wait, 30)
        await all_free(llm)

    run(model, work)


def test_a_group_starts_with_those_that_wait(model: Path) -> None:
    """Other threads may always ask for more; whether they will is not known."""

    async def work() -> None:
        async with AsyncLLM(model, kv_memory="8MiB", dtype="float32", preset="transformers") as llm:
            assert await asyncio.wait_for(llm.generate("x", greedy(2)), 120)

    asyncio.run(work())


def test_an_engine_that_is_dropped_stops(model: Path) -> None:
    llm = AsyncLLM(model, kv_memory="8MiB", dtype="float32")
    thread, client = llm._engine._thread, llm._model.client
    assert asyncio.run(llm.generate("x", greedy(2)))
    del llm
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert client.info is None


def test_the_event_loop_is_woken_once_per_pass(model: Path) -> None:
    """However many prompts a call has."""

    async def work(llm: AsyncLLM) -> tuple[int, int]:
        passes = calls = 0
        step = llm._model.client.step

        def counted(until_s: float | None = None) -> None:
            nonlocal passes
            passes += 1
            step(until_s)

        llm._model.client.step = counted  # type: ignore[method-assign]
        stream = llm.stream(["x"] * 16, greedy(10, ignore_eos=True))
        take = stream._take

        def taken(*args: Any) -> None:
            nonlocal calls
            calls += 1
            take(*args)

        stream._take = taken  # type: ignore[method-assign]
        count = len([chunk async for chunk in stream])
        assert count == 16 * 11
        return calls, passes

    calls, passes = run(model, work)
    assert calls <= passes

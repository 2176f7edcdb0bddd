"""Host and client over a real socket, with the fake device: what crosses processes, and what survives a restart."""

import asyncio
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from shoal.core import turns
from shoal.core.job import GrammarSpec, Job, requests_of
from shoal.core.params import SamplingParams
from shoal.core.request import Logprobs
from shoal.core.token_rules import TokenRules
from shoal.engine import client as client_module
from shoal.engine import host as host_module
from shoal.engine import wire
from shoal.errors import EngineDown
from tests.engine.hosts import EngineThread, Notes, connected, expected, make_job, run, until
from tests.fakes import VOCAB


class AnyText:
    """A grammar that allows everything."""

    ended = False
    error = ""

    def accept(self, token: int) -> bool:
        return True

    def fill(self, line: Any) -> None:
        line[:] = 2**32 - 1


TWELVE_JOBS = [make_job(f"job-{k}", [k + 1] * (k + 1), n=1 + k % 3) for k in range(12)]
SAMPLES_OF_JOBS = [(job, sample) for job in TWELVE_JOBS for sample in range(job.params.n)]


def test_tokens_arrive_as_if_there_were_no_wire(tmp_path: Path) -> None:
    engine = EngineThread(tmp_path)

    async def story() -> None:
        async with connected(tmp_path) as client:
            assert client.info is not None
            assert client.info.max_model_len == 200
            jobs = TWELVE_JOBS
            notes = [Notes(job.params.n) for job in jobs]
            for job, note in zip(jobs, notes, strict=True):
                client.submit(job, note)
            for job, note in zip(jobs, notes, strict=True):
                await note.done.wait()
                assert note.tokens == {sample: expected(job, sample) for sample in range(job.params.n)}
                assert note.was_accepted == 1
                assert {ending.reason for ending in note.endings.values()} <= {"stop", "length"}
            assert client.jobs == 0
            state = await client.ask("state")
            assert state["running"] == state["waiting"] == state["owners"] == state["blocks"]["held"] == 0
            assert state["fronts"] == {"front": 0}
            assert await client.ask("metrics") == "passes 1\n"

    run(story())
    engine.kill()
    first, second = engine.observers
    assert first.records == second.records > 0, "every observer is shown every record"
    assert first.tokens == second.tokens == sum(len(expected(job, sample)) for job, sample in SAMPLES_OF_JOBS)


def test_logprobs_cross_the_wire(tmp_path: Path) -> None:
    engine = EngineThread(tmp_path)

    async def story() -> None:
        async with connected(tmp_path) as client:
            note = Notes()
            client.submit(make_job(logprobs=0, prompt_logprobs=0), note)
            await note.done.wait()
            assert [one.token for one in note.logprobs] == note.tokens[0]
            assert [one.token for one in note.of_prompt] == [2, 3, 4, 5]

    run(story())
    engine.kill()


def test_others_have_turns_while_a_long_message_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", -1.0)  # every step is long
    engine = EngineThread(tmp_path)

    async def story() -> None:
        ticks = 0
        job, at = make_job(n=8, logprobs=0, prompt_logprobs=0), list[int]()

        class Noting(Notes):
            def token(self, sample: int, token: int, logprobs: Logprobs | None) -> None:
                super().token(sample, token, logprobs)
                at.append(ticks)

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async with connected(tmp_path) as client:
            ticking, note = asyncio.create_task(tick()), Noting(8)
            client.submit(job, note)
            await note.done.wait()
            ticking.cancel()
            assert note.tokens == {sample: expected(job, sample) for sample in range(8)}
            assert len(note.of_prompt) == 4
        assert len(set(at)) == len(at), "no two tokens in the same turn"

    run(story())
    engine.kill()


def test_jobs_aborted_together_are_aborted_in_one_message(tmp_path: Path) -> None:
    gate = threading.Semaphore(0)
    engine = EngineThread(tmp_path, gate=gate)

    async def story() -> None:
        async with connected(tmp_path) as client:
            for number in range(5):
                client.submit(make_job(f"job-{number}"), Notes())
            sent: list[wire.Message] = []
            link = client._links[0]
            send = link.send
            monkey = pytest.MonkeyPatch()
            monkey.setattr(link, "send", lambda message: [sent.append(message), send(message)][1])
            for number in range(5):
                client.abort(f"job-{number}")
            await asyncio.sleep(0.05)
            monkey.undo()
            assert [len(one.numbers) for one in sent if isinstance(one, wire.Abort)] == [5]
            for _ in range(20):
                gate.release()
            await until(lambda: not engine.host.owners, "all are aborted")

    run(story())
    engine.kill()


@pytest.mark.parametrize(
    ("job", "kind", "says"),
    [
        (make_job(prompt=[1] * 300), "PromptTooLong", "300 tokens"),
        (make_job(prompt=[VOCAB]), "BadParameter", "not in the vocabulary"),
        (
            Job(id="g", prompt=[1], params=SamplingParams(), seed=1, grammar=GrammarSpec("regex", "a")),
            "BadGrammar",
            "no tokenizer",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_alone(tmp_path: Path, job: Job, kind: str, says: str) -> None:
    engine = EngineThread(tmp_path)

    async def story() -> None:
        async with connected(tmp_path) as client:
            fine, bad = Notes(), Notes()
            client.submit(make_job("fine"), fine)
            client.submit(job, bad)
            await bad.done.wait()
            assert bad.refusal is not None
            assert bad.refusal.kind == kind
            assert says in bad.refusal.message
            assert not bad.was_accepted
            await fine.done.wait()
            assert fine.tokens[0] == expected(make_job("fine"))
            assert client.jobs == 0

    run(story())
    engine.kill()


def test_an_aborted_job_sends_nothing_more_and_holds_nothing(tmp_path: Path) -> None:
    engine = EngineThread(tmp_path, gate=(gate := threading.Semaphore(3)))

    async def story() -> None:
        async with connected(tmp_path) as client:
            note = Notes(2)
            client.submit(make_job(n=2, max_tokens=100, min_tokens=100), note)
            await note.grew.wait()
            client.abort("a")
            before = {sample: list(tokens) for sample, tokens in note.tokens.items()}
            assert client.jobs == 0
            for _ in range(10):
                gate.release()
            await until(lambda: engine.loop.idle, "the engine is idle")
            await asyncio.sleep(0.05)
            assert note.tokens == before
            state = await client.ask("state")
            assert state["owners"] == state["queue_s"] == state["blocks"]["held"] == 0
            client.abort("a")  # once more does no harm
            client.abort("unknown")

    run(story())
    engine.kill()


def test_a_stop_string_ends_one_sample_where_the_front_found_it(tmp_path: Path) -> None:
    engine = EngineThread(tmp_path, gate=(gate := threading.Semaphore(4)))

    async def story() -> None:
        async with connected(tmp_path) as client:
            note = Notes(2)
            client.submit(make_job(n=2, max_tokens=190, min_tokens=190), note)
            await note.grew.wait()
            client.finish_at("a", 0, 1)
            while 0 not in note.endings:
                gate.release()
                await asyncio.sleep(0.05)
            gate.release(400)
            await note.done.wait()
            assert note.endings[0].reason == "stop"
            assert len(note.tokens[0]) < 190
            assert note.endings[1].reason == "length"
            assert len(note.tokens[1]) == 190

    run(story())
    engine.kill()


def test_jobs_go_on_where_they_were_when_the_engine_is_started_again(tmp_path: Path) -> None:
    first = EngineThread(tmp_path, gate=(gate := threading.Semaphore(9)))

    async def story() -> None:
        async with connected(tmp_path) as client:
            jobs = [make_job(f"job-{k}", [k + 1] * 4, n=2, max_tokens=40, min_tokens=k * 4) for k in range(6)]
            notes = [Notes(2) for _ in jobs]
            for job, note in zip(jobs, notes, strict=True):
                client.submit(job, note)
            await notes[0].grew.wait()
            await asyncio.to_thread(first.kill)
            await until(lambda: client.info is None, "the client notices")
            with pytest.raises(EngineDown):
                await client.ask("state")
            second = EngineThread(tmp_path, epoch=1)
            for job, note in zip(jobs, notes, strict=True):
                await note.done.wait()
                assert note.tokens == {sample: expected(job, sample) for sample in range(2)}
                assert note.was_accepted == 1
            assert client.info is not None
            assert client.info.epoch == 1
            assert client.jobs == 0
            await asyncio.to_thread(second.kill)

    run(story())
    del gate


def test_a_job_that_sees_the_engine_die_too_often_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MOST_RESUMES", 3)

    async def story() -> None:
        engine = EngineThread(tmp_path, gate=threading.Semaphore(2))
        async with connected(tmp_path) as client:
            note = Notes()
            client.submit(make_job(max_tokens=100, min_tokens=100), note)
            for epoch in range(1, 5):
                await asyncio.to_thread(engine.kill)
                await until(lambda: client.info is None, "the client notices")
                engine = EngineThread(tmp_path, epoch=epoch, gate=threading.Semaphore(1))
                await until(lambda: client.info, "the next engine answers")
            await note.done.wait()
            assert note.endings[0].reason == "error"
            assert "died several times" in note.endings[0].error
            assert client.jobs == 0
            await asyncio.to_thread(engine.kill)

    run(story())


def test_a_silent_front_is_forgotten_and_its_jobs_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "IDLE_S", 0.05)
    engine = EngineThread(tmp_path, gate=(gate := threading.Semaphore(0)))
    context = zmq.Context()
    front = context.socket(zmq.DEALER)
    front.connect(f"ipc://{tmp_path / wire.ADDRESS}")
    front.send(wire.pack(wire.Hello()))
    assert isinstance(wire.read_engine(front.recv()), wire.Ready)
    front.send(wire.pack(wire.Submit.of(1, make_job(max_tokens=100, min_tokens=100))))
    front.close(linger=1000)

    async def story() -> None:
        await until(lambda: engine.host.owners, "the job has arrived")
        monkeypatch.setattr(host_module, "SILENCE_S", 0.3)
        for _ in range(100):
            gate.release()
            await asyncio.sleep(0.01)
        await until(lambda: not engine.host.owners and not engine.host.fronts, "the front is forgotten")
        await until(lambda: engine.loop.idle, "its requests are gone")

    run(story())
    engine.kill()
    context.term()


def test_a_front_that_cannot_be_reached_is_named_once_in_each_of_its_absences(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = EngineThread(tmp_path, gate=(gate := threading.Semaphore(0)))
    context = zmq.Context()

    def passes_without_it(times: int) -> None:
        """It comes under its old name, has a job, and is gone while passes go on."""
        front = context.socket(zmq.DEALER)
        front.setsockopt(zmq.IDENTITY, b"front-0.0")
        front.connect(f"ipc://{tmp_path / wire.ADDRESS}")
        front.send(wire.pack(wire.Hello()))
        gate.release()
        while not isinstance(wire.read_engine(front.recv()), wire.Ready):
            pass  # tokens of its old job, sent while it connected
        front.send(wire.pack(wire.Submit.of(times, make_job(f"job{times}", max_tokens=190, min_tokens=190))))
        for _ in range(3):
            gate.release()
        assert isinstance(wire.read_engine(front.recv()), wire.Pass)
        front.close(linger=0)
        end_s = time.monotonic() + 30
        while caplog.text.count("front-0.0 cannot be reached") < times and time.monotonic() < end_s:
            gate.release()
            time.sleep(0.05)
        for _ in range(20):
            gate.release()
            time.sleep(0.005)
        assert caplog.text.count("front-0.0 cannot be reached") == times

    passes_without_it(1)
    passes_without_it(2)
    gate.release()
    engine.kill()
    context.term()


def test_a_front_that_was_only_stuck_hands_its_jobs_over_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "SILENCE_S", 0.3)
    monkeypatch.setattr(host_module, "IDLE_S", 0.05)
    monkeypatch.setattr(client_module, "PING_S", 0.1)
    engine = EngineThread(tmp_path, gate=(gate := threading.Semaphore(2)))

    async def story() -> None:
        async with connected(tmp_path) as client:
            job, note = make_job(max_tokens=60, min_tokens=60), Notes()
            client.submit(job, note)
            await note.grew.wait()
            end_s = time.monotonic() + 30
            while engine.host.fronts and time.monotonic() < end_s:  # this front's event loop stands still
                gate.release()
                time.sleep(0.02)
            assert not engine.host.owners, "the front was forgotten"
            for _ in range(200):
                gate.release()
            await note.done.wait()
            assert note.tokens[0] == expected(job)
            assert note.was_accepted == 1

    run(story())
    engine.kill()


def test_jobs_that_wait_for_an_engine_are_refused_when_none_will_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PING_S", 0.05)
    engine = EngineThread(tmp_path, gate=(gate := threading.Semaphore(2)))

    async def story() -> None:
        async with connected(tmp_path) as client:
            begun, fresh = Notes(), Notes()
            client.submit(make_job("begun", max_tokens=100, min_tokens=100), begun)
            await begun.grew.wait()
            client.submit(make_job("fresh", max_tokens=100, min_tokens=100), fresh)
            await asyncio.to_thread(engine.kill)
            await until(lambda: client.info is None, "the client notices")
            late = Notes()
            client.submit(make_job("late"), late)
            (tmp_path / wire.GIVEN_UP).touch()
            for note in (begun, fresh, late):
                await note.done.wait()
                assert note.refusal is not None
                assert note.refusal.kind == "EngineDown"
                assert "must be restarted" in note.refusal.message
                assert not note.endings
            assert client.jobs == 0
            assert not client.accepting
            with pytest.raises(EngineDown, match="must be restarted"):
                client.submit(make_job("late"), Notes())

    run(story())
    del gate


def test_noise_on_the_socket_is_dropped(tmp_path: Path) -> None:
    engine = EngineThread(tmp_path)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"ipc://{tmp_path / wire.ADDRESS}")
    for noise in (
        b"",
        b"\x93",
        b"x" * 1000,
        msgspec.msgpack.encode(["Submit", 1]),
        msgspec.msgpack.encode([["Hello"]]),
    ):
        stranger.send(noise)
    stranger.send_multipart([b"a", b"b", b"c"])
    stranger.send(wire.pack(wire.Abort([99])))
    stranger.send(wire.pack(wire.FinishAt(99, 1)))

    async def story() -> None:
        async with connected(tmp_path) as client:
            note = Notes()
            client.submit(make_job(), note)
            await note.done.wait()
            assert note.tokens[0] == expected(make_job())

    run(story())
    engine.kill()
    stranger.close(linger=0)
    context.term()


def test_jobs_are_packed_without_loss() -> None:
    params = SamplingParams(
        temperature=0.5, top_k=3, stop=["a", "b"], logit_bias={5: -1.5}, seed=2**64 - 1, n=4, stop_token_ids=[1]
    )
    job = Job(
        id="x", prompt=[1, 2], params=params, seed=-(2**63), stop_ids=frozenset({4, 5}), tenant="t", salt="s",
        priority=-3, timeout_s=1.5, grammar=GrammarSpec("choice", '["a"]'), tier="gold",
    )  # fmt: skip
    message = wire.read_front(wire.pack(wire.Submit.of(3, job, {1: [7]})))
    assert isinstance(message, wire.Submit)
    assert (message.number, message.job(), message.outputs) == (3, job, {1: [7]})
    assert isinstance(message.job().stop_ids, frozenset)


def test_every_field_of_a_job_reaches_its_requests() -> None:
    """One value apart from the default per field, so that a field that requests_of() forgets is found."""
    job = Job(
        id="x", prompt=[1, 2], params=SamplingParams(n=2, max_tokens=9), seed=5, stop_ids=frozenset({4}), tenant="t",
        salt="s", priority=-3, tier="gold", timeout_s=1.5, waited_s=0.5,
        grammar=GrammarSpec("regex", "a"), bad_words=((7, 8), (9,)),
    )  # fmt: skip
    defaults = {item.name: item.default for item in fields(Job)}
    assert all(getattr(job, name) != value for name, value in defaults.items()), "give the new field a value here"
    grammars = {sample: AnyText() for sample in range(2)}
    requests = requests_of(job, grammars=grammars)
    assert [request.id for request in requests] == ["x.0", "x.1"]
    for sample, request in enumerate(requests):
        assert request.tokens == job.prompt
        assert isinstance(request.grammar, TokenRules)  # around the sample's own, and with the bad words
        assert request.grammar._inner is grammars[sample]
        assert request.grammar._sets.never == {9}
        assert request.grammar._sets.forbidden((7,), 1) == {8}
        assert request.sample == sample
        for name in defaults.keys() - {"id", "prompt", "grammar", "bad_words"}:
            assert getattr(request, name) == getattr(job, name), name
    assert requests[0].group is requests[1].group is not None
    (resumed,) = requests_of(job, {1: [8, 9]})
    assert (resumed.id, resumed.output_tokens, resumed.group) == ("x.1", [8, 9], None)


def packed_job(**changes: Any) -> bytes:
    """A Submit whose job has these values instead of its own; dots lead into its parameters."""
    job = msgspec.msgpack.decode(msgspec.msgpack.encode(make_job("bad")))
    for name, value in changes.items():
        part, _, inner = name.partition("__")
        if inner:
            job[part][inner] = value
        else:
            job[part] = value
    return wire.pack(wire.Submit(1, msgspec.Raw(msgspec.msgpack.encode(job))))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"params__temperature": 1000.0}, "temperature must be between 0 and 100, not 1000"),
        ({"params__temperature": "hot"}, "params.temperature"),
        ({"params__logit_bias": {5: 1e9}}, "logit_bias[5]"),
        ({"params__temprature": 1.0}, "'temprature'"),
        ({"prompt": "text"}, "prompt"),
        ({"pirority": 3}, "'pirority'"),
    ],
)
def test_a_bad_job_is_refused_by_its_number_with_what_is_wrong(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    engine = EngineThread(tmp_path)
    context = zmq.Context()
    front = context.socket(zmq.DEALER)
    front.setsockopt(zmq.RCVTIMEO, 20_000)
    front.connect(f"ipc://{tmp_path / wire.ADDRESS}")
    front.send(wire.pack(wire.Hello()))
    assert wire.read_engine(front.recv()) == wire.Ready(engine.host.info)
    front.send(packed_job(**changes))
    answer = wire.read_engine(front.recv())
    assert isinstance(answer, wire.Pass)
    ((key, refusal),) = answer.refused
    assert key == wire.SAMPLES
    assert refusal.kind == "BadParameter"
    assert named in refusal.message
    front.send(packed_job())
    answer = wire.read_engine(front.recv())
    assert isinstance(answer, wire.Pass)
    assert answer.keys[0] == wire.SAMPLES, "a good one after it is computed"
    engine.kill()
    front.close(linger=0)
    context.term()


def test_an_unknown_question_is_dropped_and_a_known_one_answered(tmp_path: Path) -> None:
    engine = EngineThread(tmp_path)
    context = zmq.Context()
    front = context.socket(zmq.DEALER)
    front.setsockopt(zmq.RCVTIMEO, 20_000)
    front.connect(f"ipc://{tmp_path / wire.ADDRESS}")
    for message in (wire.Hello(), wire.Ask(1, "weather"), wire.Ask(2, "metrics")):
        front.send(wire.pack(message))
    assert isinstance(wire.read_engine(front.recv()), wire.Ready)
    assert wire.read_engine(front.recv()) == wire.Reply(2, "metrics", b"passes 1\n")
    engine.kill()
    front.close(linger=0)
    context.term()

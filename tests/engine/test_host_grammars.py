"""Jobs whose grammars are being compiled: what happens to them meanwhile is not lost."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.core.grammar import Grammar
from shoal.core.job import GrammarSpec
from shoal.engine import wire
from shoal.engine.host_grammars import HostGrammars
from tests.engine.hosts import EngineThread, Notes, connected, make_job, run, until
from tests.fakes import FakeGrammar

FORM = GrammarSpec("regex", "a+")


class SlowCompiler:
    """Compiles when a test says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.compiled = 0

    def __call__(self, spec: GrammarSpec, outputs: Sequence[int]) -> Grammar:
        assert self.gate.wait(30)
        self.compiled += 1
        return FakeGrammar(1, 30)


def test_a_stop_string_found_while_the_grammar_compiles_ends_its_sample(tmp_path: Path) -> None:
    engine, compiler = EngineThread(tmp_path), SlowCompiler()
    engine.host.make_grammar = compiler

    async def story() -> None:
        async with connected(tmp_path) as client:
            note = Notes(2)
            client.submit(replace(make_job(n=2, max_tokens=20), grammar=FORM, stop_ids=frozenset()), note)
            await until(lambda: len(engine.host.grammars), "the grammar is being compiled")
            client.finish_at("a", 0, 0)
            state = await client.ask("state")  # messages are read in order
            assert state["compiling"] == 1
            compiler.gate.set()
            await note.done.wait()
            assert note.endings[0].reason == "stop"
            assert note.tokens[0] == []
            assert len(note.tokens[1]) == 20

    run(story())
    engine.kill()


def test_an_aborted_job_does_not_start_when_its_grammar_is_there(tmp_path: Path) -> None:
    engine, compiler = EngineThread(tmp_path), SlowCompiler()
    engine.host.make_grammar = compiler

    async def story() -> None:
        async with connected(tmp_path) as client:
            notes = [Notes(), Notes()]
            for note, name in zip(notes, "ab", strict=True):
                client.submit(replace(make_job(name, max_tokens=5), grammar=FORM, stop_ids=frozenset()), note)
            await until(lambda: len(engine.host.grammars) == 2, "both are being compiled")
            client.abort("a")
            await until(lambda: len(engine.host.grammars) == 1, "the abort was read")
            compiler.gate.set()
            await notes[1].done.wait()
            assert len(notes[1].tokens[0]) == 5
            assert not notes[0].was_accepted

    run(story())
    engine.kill()


def test_a_number_that_is_used_again_is_the_later_job() -> None:
    waiting, compiler = HostGrammars(), SlowCompiler()
    for name in ("first", "second"):
        job = replace(make_job(name), grammar=FORM)
        waiting.forget(b"front", 7)
        waiting.add(b"front", wire.Submit.of(7, job, None), job, compiler)
    assert [one["id"] for one in waiting.view(9)] == ["second"]
    compiler.gate.set()
    found = []
    while not found:
        found = waiting.ready()
    assert [one.job.id for one in found] == ["second"]
    assert set(found[0].grammars.result()) == {0}
    assert not waiting.ready()
    waiting.close()

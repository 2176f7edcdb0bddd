"""A run that is cut off, and taken up by another engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.request import Group, Reason, State
from shoal.errors import PromptTooLong
from tests.effort import examples
from tests.engine.traffic import Move, Run, configs, moves, play
from tests.fakes import make_request, make_scheduler, oracle


@given(configs, configs, st.integers(1, 3), st.lists(moves, min_size=15, max_size=40), st.sampled_from([0, 2, 3, 5, 8]))
@examples(80, of=300)
def test_a_request_resumed_on_a_fresh_engine_generates_what_it_would_have(
    config: dict[str, object], other: dict[str, object], depth: int, traffic: list[Move], passes: int
) -> None:
    """The first engine dies at a random moment; what its requests were told is all that is left of them."""
    first = Run(make_scheduler(**config), depth)  # type: ignore[arg-type]
    play(first, [*traffic, *[("finish",)] * passes], drain=False)
    second = Run(make_scheduler(**other, max_queue=1), depth)  # type: ignore[arg-type]
    groups: dict[str, Group] = {}
    for id, old in first.requests.items():
        if id in first.ended:
            continue
        told = first.told[id]
        if told and old.needs_prompt_logprobs:
            assert first.prompts_seen.get(id, []) == old.tokens[1 : old.prompt_len], "it will not be told again"
        group = groups.setdefault(old.group.name, Group(old.group.name)) if old.group else None
        more = {"seed": old.seed, "sample": old.sample, "stop_ids": old.stop_ids, "salt": old.salt, "group": group}
        prompt = old.tokens[: old.prompt_len]
        again = make_request(id, prompt, params=old.params, output=told, tenant="a", **more)
        if old.state is State.FINISHED and old.reason in (Reason.STOP, Reason.LENGTH):
            continue  # it has ended, and that is about to be told
        try:
            second.submit(again, resumed=True)
        except PromptTooLong:
            assert old.end > second.scheduler.tables.admission.kv_tokens
    play(second, [])
    second.verify()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_engine_that_dies_again_and_again_changes_no_tokens(depth: int) -> None:
    stop = frozenset({41, 42, 43})
    prompts = {f"r{number}": [number % 3] * 5 + [number % 7, number % 5] * (1 + number % 4) for number in range(30)}
    told: dict[str, list[int]] = {id: [] for id in prompts}
    left = set(prompts)
    lives = resumed = 0
    while left:
        run = Run(make_scheduler(blocks=14, max_num_seqs=6, max_num_batched_tokens=24), depth)
        for seed, (id, prompt) in enumerate(prompts.items()):
            if id in left:
                resumed += bool(told[id])
                run.submit(
                    make_request(id, prompt, 4 + seed % 20, seed=seed, stop_ids=stop, output=told[id]), resumed=True
                )
        for _ in range(5):
            while run.begin():
                pass
            run.finish()
        told |= run.told
        left -= run.ended.keys()
        lives += 1
    assert lives > 5
    assert resumed > 30
    for seed, (id, prompt) in enumerate(prompts.items()):
        assert told[id] == oracle(prompt, 4 + seed % 20, stop, seed, 0), f"{id} got wrong tokens"

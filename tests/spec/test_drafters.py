"""Drafters: what they propose, for whom, and how much they keep. The suffix structures against naive searches."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.speculate import Speculate
from shoal.core.drafts import Draft, Drafter
from shoal.core.request import Request
from shoal.errors import BadConfig
from shoal.spec.combined import Combined, joined
from shoal.spec.grammar import GrammarDrafter
from shoal.spec.make import DRAFTERS, make_drafter
from shoal.spec.matches import LONGEST
from shoal.spec.ngram import NgramDrafter
from shoal.spec.suffix import ANSWER_TOKENS, MOST_HISTORIES, SuffixDrafter
from shoal.spec.synthetic import SyntheticDrafter
from tests.fakes import FakeGrammar, make_request


def ask(drafter: Drafter, request: Request, most: int = 4) -> list[int]:
    draft = drafter.propose({request: most}).get(request)
    if draft is None:
        return []
    assert 0 < len(draft.tokens) <= most
    assert len(draft.confidence) == len(draft.tokens) == sum(count for _, count in draft.drafters)
    assert all(0 <= sure <= 1 for sure in draft.confidence)
    assert {name for name, _ in draft.drafters} <= set(drafter.names)
    return list(draft.tokens)


def generate(request: Request, tokens: list[int]) -> Request:
    request.tokens += tokens
    return request


BOTH = pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])


@BOTH
def test_what_followed_the_same_tokens_is_proposed(make: type[Drafter]) -> None:
    drafter = make()
    request = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    assert ask(drafter, request) == [4, 5, 6, 7]
    generate(request, [4])
    assert ask(drafter, request, 2) == [5, 6]
    generate(request, [9, 9])
    assert ask(drafter, generate(request, [30])) == []


@BOTH
def test_the_latest_of_two_continuations_is_proposed(make: type[Drafter]) -> None:
    request = make_request("a", [1, 2, 3, 7, 7, 1, 2, 3, 8, 8, 1, 2, 3])
    assert ask(make(), request, 2) == [8, 8]


@BOTH
def test_a_longer_match_is_surer(make: type[Drafter]) -> None:
    short, long = make_request("s", [5, 6, 7, 9, 1, 6]), make_request("l", [*range(20), *range(12)])
    generate(short, [7])
    drafts = make().propose({short: 3, long: 3})
    assert drafts[short].confidence[0] < drafts[long].confidence[0]


@BOTH
def test_a_long_prompt_is_read_in_parts(make: type[Drafter]) -> None:
    """So many tokens in one call; until all are read nothing is proposed."""
    drafter = make(feed=50)  # type: ignore[call-arg]
    request = make_request("a", [*range(180), *range(5)])
    others = [make_request(f"r{number}", [7, 8, 9, number, 7, 8]) for number in range(20)]
    answers = []
    for _ in range(5):
        drafts = drafter.propose(dict.fromkeys([*others, request], 4))
        assert all(other in drafts for other in others), "short requests do not wait for a long one"
        answers.append(list(drafts[request].tokens) if request in drafts else [])
    assert answers[:3] == [[], [], []]
    assert answers[-1] == [5, 6, 7, 8]


@BOTH
def test_a_request_is_forgotten_when_it_ends(make: type[Drafter]) -> None:
    drafter = make()
    request = make_request("a", [1, 2, 3, 1, 2])
    assert ask(drafter, request)
    drafter.ended(request, by_itself=False)
    kept = drafter.indexed if isinstance(drafter, NgramDrafter) else drafter.held  # type: ignore[attr-defined]
    assert kept == 0


def test_ngram_keeps_no_more_tokens_than_it_may() -> None:
    drafter = NgramDrafter(most_tokens=40)
    requests = [make_request(f"r{number}", [1, 2, 3] * 10) for number in range(3)]
    assert [bool(ask(drafter, request)) for request in requests] == [True, False, False]
    assert drafter.indexed <= 40
    drafter.ended(requests[0], by_itself=True)
    assert ask(drafter, requests[2])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_ngram_agrees_with_a_naive_search(text: list[int], most: int, step: int) -> None:
    """The latest earlier occurrence of the last three tokens, else of the last two."""
    drafter, request = NgramDrafter(), make_request("a", text[:1])
    for start in range(1, len(text), step):
        generate(request, text[start : start + step])
        tokens, want = request.tokens, []
        for size in (3, 2):
            found = follows(tokens, tokens[-size:], inside=True) if len(tokens) > 2 and len(tokens) > size else []
            if found:
                want = found[-1][:most]
                break
        assert ask(drafter, request, most) == want


# ---- suffix ---------------------------------------------------------------------------------------------------------


def test_answers_of_the_same_tenant_are_history() -> None:
    drafter = SuffixDrafter()
    drafter.ended(generate(make_request("a", [1, 2], tenant="x", salt="s"), [5, 6, 7, 8]), by_itself=True)
    assert ask(drafter, make_request("b", [9, 9, 5, 6], tenant="x", salt="s"), 2) == [7, 8]
    assert ask(drafter, make_request("c", [9, 4, 5, 6], tenant="y", salt="s"), 2) == []
    assert ask(drafter, make_request("d", [9, 4, 5, 6], tenant="x", salt="t"), 2) == []


def test_an_answer_that_was_aborted_is_no_history() -> None:
    drafter = SuffixDrafter()
    drafter.ended(generate(make_request("a", [1, 2]), [5, 6, 7, 8]), by_itself=False)
    assert ask(drafter, make_request("b", [9, 4, 5, 6])) == []


def test_prompts_are_no_history() -> None:
    drafter = SuffixDrafter()
    drafter.ended(generate(make_request("a", [5, 6, 7, 8]), [1]), by_itself=True)
    assert ask(drafter, make_request("b", [9, 4, 5, 6])) == []


def test_drafts_do_not_run_from_one_answer_into_the_next() -> None:
    drafter = SuffixDrafter()
    for answer in ([5, 6, 7], [8, 9]):
        drafter.ended(generate(make_request("a", [1]), answer), by_itself=True)
    assert ask(drafter, make_request("b", [4, 4, 5, 6])) == [7]


def test_an_old_generation_gives_way_to_a_younger_one() -> None:
    drafter = SuffixDrafter(history_tokens=20)
    for start in range(10, 60, 5):
        drafter.ended(generate(make_request("a", [1]), [*range(start, start + 5)]), by_itself=True)
        drafter.propose({})
        drafter.check()
    assert ask(drafter, make_request("old", [0, 10, 11])) == []
    assert ask(drafter, make_request("new", [0, 55, 56])) == [57, 58, 59]


def test_the_history_of_the_tenant_not_asked_for_is_evicted_first() -> None:
    drafter = SuffixDrafter(most_tokens=60)
    for name in ("a", "b"):
        drafter.ended(generate(make_request("r", [1], tenant=name), [5, 6, 7, 8]), by_itself=True)
    drafter.propose({})
    asked = make_request("q", [5, 6], tenant="a")
    assert ask(drafter, asked) == [7, 8]
    drafter.propose({make_request("big", [*range(49)], tenant="c"): 1})
    drafter.check()
    assert ask(drafter, generate(asked, [])) == [7, 8]
    assert ask(drafter, make_request("z", [5, 6], tenant="b")) == []


def test_a_full_memory_means_no_drafts_and_not_more_memory() -> None:
    drafter = SuffixDrafter(most_tokens=30)
    first, second = make_request("a", [1, 2, 3] * 8), make_request("b", [1, 2, 3] * 8)
    assert ask(drafter, first)
    assert ask(drafter, second) == []
    drafter.check()
    drafter.ended(first, by_itself=False)
    assert ask(drafter, second)


def test_of_a_very_long_request_the_last_tokens_are_read() -> None:
    drafter = SuffixDrafter(own_tokens=10)
    request = make_request("a", [1, 2, 3, 4, *range(10, 30), 2, 3])
    assert ask(drafter, request) == []
    assert drafter.held == 10


def test_unread_answers_are_bounded() -> None:
    drafter = SuffixDrafter()
    for _ in range(20):
        drafter.ended(generate(make_request("a", [1]), [7] * 2 * ANSWER_TOKENS), by_itself=True)
    assert drafter.held <= 2 * ANSWER_TOKENS
    drafter.check()


def test_the_number_of_histories_is_bounded() -> None:
    """A client may choose another salt for every request."""
    drafter = SuffixDrafter()
    for number in range(MOST_HISTORIES + 50):
        drafter.ended(generate(make_request("a", [1], salt=str(number)), [5, 6]), by_itself=True)
        drafter.propose({})
        drafter.check()
    assert ask(drafter, make_request("new", [9, 5], salt=str(MOST_HISTORIES + 49))) == [6]
    assert ask(drafter, make_request("old", [9, 5], salt="0")) == []


class Naive:
    """As SuffixDrafter where memory is ample: every occurrence is searched for in the texts themselves."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.histories: dict[str, deque[list[int]]] = {}

    def add(self, tenant: str, answer: list[int]) -> None:
        history = self.histories.setdefault(tenant, deque([[]], maxlen=2))
        answer = answer[: self.generation - 1]
        if history[-1] and len(history[-1]) + len(answer) >= self.generation:
            history.append([])
        history[-1].extend([*answer, -3])

    def matches(self, request: Request) -> tuple[int, int]:
        """The longest match in its own text and in its tenant's history, up to LONGEST."""
        text = request.tokens
        most = min(LONGEST, len(text))
        own = next((n for n in range(min(most, len(text) - 1), 0, -1) if follows(text, text[-n:], inside=True)), 0)
        olds = self.histories.get(request.tenant, ())
        return own, next((n for n in range(most, 0, -1) if any(follows(old, text[-n:]) for old in olds)), 0)

    def followed(self, request: Request, match: int) -> list[list[int]]:
        """What followed each occurrence of the last `match` tokens in the history."""
        olds = self.histories.get(request.tenant, ())
        return [rest for old in olds for rest in follows(old, request.tokens[-match:])]


def follows(text: list[int], part: list[int], inside: bool = False) -> list[list[int]]:
    """What follows each occurrence of a part in a text; `inside`: not the one at its end."""
    size = len(part)
    last = len(text) - size - inside
    return [text[start + size :] for start in range(last + 1) if text[start : start + size] == part]


events = st.one_of(
    st.tuples(st.just("start"), st.sampled_from("xy"), st.lists(st.integers(0, 3), min_size=1, max_size=12)),
    st.tuples(st.just("grow"), st.integers(0, 9), st.lists(st.integers(0, 3), min_size=1, max_size=6)),
    st.tuples(st.just("end"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("ask"), st.integers(0, 9), st.integers(1, 5)),
)


@given(st.lists(events, max_size=60), st.sampled_from([12, 40, 400]))
@settings(max_examples=300, deadline=None)
def test_suffix_agrees_with_a_naive_search(traffic: list[tuple[str, object, object]], history: int) -> None:
    drafter, naive = SuffixDrafter(history_tokens=history), Naive(history // 2)
    live: list[Request] = []
    for number, (what, which, how) in enumerate(traffic):
        if what == "start":
            live.append(make_request(f"r{number}", how, tenant=which))  # type: ignore[arg-type]
            continue
        if not live:
            continue
        request = live[which % len(live)]  # type: ignore[operator]
        if what == "grow":
            generate(request, how)  # type: ignore[arg-type]
        elif what == "end":
            live.remove(request)
            drafter.ended(request, by_itself=bool(how))
            drafter.propose({})  # reads the answer
            if how:
                naive.add(request.tenant, request.output_tokens)
        else:
            check_against(drafter, naive, request, int(how))  # type: ignore[call-overload]
        drafter.check()


def check_against(drafter: SuffixDrafter, naive: Naive, request: Request, most: int) -> None:
    draft = drafter.propose({request: most}).get(request)
    own, old = naive.matches(request)
    here = follows(request.tokens, request.tokens[-own:], inside=True) if own else []
    there = naive.followed(request, old) if old > own else []
    ended = [rest for rest in there if rest[0] == -3]
    if draft is None:
        assert not own
        assert ended or not there
    elif there and any(agrees(rest[: rest.index(-3)], draft, most) for rest in there):
        pass
    else:
        assert ended or not there
        assert any(agrees(rest, draft, most, repeats=True) for rest in here)


def agrees(rest: list[int], draft: Draft, most: int, repeats: bool = False) -> bool:
    """The draft is what followed, as much of it as there is; or repeats it, up to the end of the text."""
    if repeats and rest and len(rest) < most:
        rest = (rest * most)[:most]
    return list(draft.tokens) == rest[:most]


@given(st.lists(events, max_size=80))
@settings(max_examples=200, deadline=None)
def test_a_tenant_never_sees_anothers_tokens_and_memory_stays_bounded(
    traffic: list[tuple[str, object, object]],
) -> None:
    """Each tenant's answers are in tokens of its own, and its prompts in tokens that all share."""
    drafter = SuffixDrafter(most_tokens=60, history_tokens=30, feed=20)
    live: list[Request] = []
    for number, (what, which, how) in enumerate(traffic):
        if what == "start":
            live.append(make_request(f"r{number}", how, tenant=which))  # type: ignore[arg-type]
        elif live:
            request = live[which % len(live)]  # type: ignore[operator]
            secret = 100 if request.tenant == "x" else 200
            if what == "grow":
                generate(request, [token if token < 2 else secret + token for token in how])  # type: ignore[attr-defined]
            elif what == "end":
                live.remove(request)
                drafter.ended(request, by_itself=bool(how))
            else:
                for token in ask(drafter, request, int(how)):  # type: ignore[call-overload]
                    assert token < 4 or secret <= token < secret + 4
        drafter.check()
    for request in live:
        drafter.ended(request, by_itself=False)
    drafter.check()
    assert not drafter._readers


# ---- grammar, combinations, synthetic -------------------------------------------------------------------------------


def test_grammar_proposes_what_is_forced_and_nothing_else() -> None:
    grammars = [FakeGrammar(seed, 30) for seed in range(40)]
    forced = [grammar.forced() for grammar in grammars]
    assert any(forced)
    assert not all(forced)
    for seed, tokens in enumerate(forced):
        request = make_request("a", [1], grammar=FakeGrammar(seed, 30))
        assert ask(GrammarDrafter(), request, 3) == tokens[:3]
    assert ask(GrammarDrafter(), make_request("b", [1])) == []


class Says:
    """Proposes fixed tokens."""

    ahead = False
    by_chance = False

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.names = [name]
        self.tokens = tokens
        self.forgotten = 0

    def propose(self, wanted):  # type: ignore[no-untyped-def]
        found = {request: self.tokens[:most] for request, most in wanted.items()}
        return {
            request: Draft(tokens, [0.5] * len(tokens), ((self.names[0], len(tokens)),))
            for request, tokens in found.items()
            if tokens
        }

    def cost_s(self, rows: int, tokens: int) -> float:
        return 1.0 * rows

    def ended(self, request: Request, by_itself: bool) -> None:
        self.forgotten += 1


@pytest.mark.parametrize(
    ("first", "second", "drafters"),
    [
        ([1, 2], [1, 2, 3, 4], [("a", 2), ("b", 2)]),
        ([1, 2], [9, 2, 3, 4], [("a", 2)]),
        ([], [5, 6], [("b", 2)]),
        ([1, 2], [1], [("a", 2)]),
        ([1, 2], [], [("a", 2)]),
    ],
)
def test_the_first_drafter_wins_and_the_second_continues_it(
    first: list[int], second: list[int], drafters: list[tuple[str, int]]
) -> None:
    one, two = Says("a", first), Says("b", second)
    combined, request = Combined([one, two]), make_request("r", [1])
    draft = combined.propose({request: 4})[request]
    assert list(draft.drafters) == drafters
    assert list(draft.tokens) == (second if drafters[-1][0] == "b" else first)
    assert combined.cost_s(3, 0) == 6
    assert combined.names == ("a", "b")
    combined.ended(request, by_itself=True)
    assert one.forgotten == two.forgotten == 1


def test_three_drafters_continue_each_other() -> None:
    one, two = Draft([1], [0.9], (("a", 1),)), Draft([1, 2, 3], [0.1, 0.2, 0.3], (("b", 3),))
    both = joined(joined(one, two), Draft([1, 2, 3, 4], [0.5] * 4, (("c", 4),)))
    assert both == Draft([1, 2, 3, 4], [0.9, 0.2, 0.3, 0.5], (("a", 1), ("b", 2), ("c", 1)))
    assert both.shares(2) == [("a", 1, 1), ("b", 2, 1), ("c", 1, 0)]


def test_synthetic_drafts_have_the_asked_length_and_confidence() -> None:
    request = make_request("a", [1, 2, 3])
    assert SyntheticDrafter(0.7).propose({request: 3})[request] == Draft([3, 3, 3], (0.7,) * 3, (("synthetic", 3),))


# ---- by name --------------------------------------------------------------------------------------------------------


def test_every_name_makes_its_drafter() -> None:
    for name in DRAFTERS:
        assert list(make_drafter(Speculate.read(name)).names) == [name]
    assert list(make_drafter(Speculate.read("grammar+suffix")).names) == ["grammar", "suffix"]
    assert list(make_drafter(Speculate.read("synthetic:0.5")).names) == ["synthetic"]
    assert list(make_drafter(Speculate()).names) == []


def test_a_draft_model_is_not_made_by_its_name() -> None:
    assert list(make_drafter(Speculate.read("draft")).names) == []
    assert list(make_drafter(Speculate.read("draft+suffix")).names) == ["suffix"]
    assert Speculate.read("suffix+draft").model
    assert not Speculate.read("suffix").model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sufix", "unknown drafter 'sufix'.*ngram, suffix, grammar"),
        ("", "unknown drafter ''"),
        ("suffix+off", "off cannot be combined"),
        ("suffix+synthetic:0.5", "cannot be combined"),
        ("suffix+suffix", "twice"),
        ("synthetic", "probability"),
        ("synthetic:", "probability"),
        ("synthetic:1.5", "between 0 and 1"),
        ("synthetic:nan", "between 0 and 1"),
        ("synthetic:x", "between 0 and 1"),
    ],
)
def test_a_wrong_name_is_refused_with_those_that_exist(text: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        Speculate.read(text)

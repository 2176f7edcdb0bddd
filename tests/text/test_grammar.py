"""Grammars on real tokenizers: what they allow, where they end, what is refused and how, and that nothing hangs."""

import gc
import json
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from shoal.core.grammar import Grammar
from shoal.core.job import GRAMMARS, GrammarSpec
from shoal.errors import BadGrammar, GrammarTimeout, QueueFull
from shoal.text import grammar as module
from shoal.text.grammar import KEPT, MAX_TEXT_BYTES, WHAT, Grammars
from shoal.text.matcher import Matcher
from shoal.text.tokenizer import Tokenizer
from tests.text.tiny import byte_level, metaspace, sentencepiece

VOCAB = 450  # more than the tokenizers have, and no multiple of 32
EOS = 2
OTHER_EOS = 1
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def spec(kind: str, text: Any = "") -> GrammarSpec:
    return GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text))


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(byte_level(), VOCAB, [EOS, OTHER_EOS])


def allowed(matcher: Grammar) -> set[int]:
    line = np.full(-(-VOCAB // 32), 0xFFFFFFFF, dtype=np.uint32)
    matcher.fill(line)
    return set(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist())


def spelled(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token; none for those that are no text."""
    if tokenizer.pieces.is_silent(token, skip_special=True):
        return b""
    if tokenizer.pieces.is_byte_token(token):
        return bytes.fromhex(tokenizer.backend.id_to_token(token)[3:5])
    if tokenizer.pieces.may_split_characters:
        return tokenizer.pieces.bytes_of(token)
    return tokenizer.backend.id_to_token(token).replace("▁", " ").encode()


def say(matcher: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    """Say a text with the longest tokens that are allowed; False if it could not be said to its end."""
    left = text.encode()
    while left:
        fitting = [(len(spelled(tokenizer, one)), one) for one in allowed(matcher)]
        fitting = [(size, one) for size, one in fitting if size and left.startswith(spelled(tokenizer, one))]
        if not fitting:
            return False
        size, token = max(fitting)
        assert matcher.accept(token)
        left = left[size:]
    return True


def walk(matcher: Grammar, seed: int, most: int = 400) -> list[int]:
    """Random tokens that the grammar allows, until it has ended."""
    draw = np.random.default_rng(seed)
    said: list[int] = []
    while not matcher.ended and len(said) < most:
        choices = sorted(allowed(matcher))
        assert choices, matcher.error
        said.append(int(draw.choice(choices)))
        assert matcher.accept(said[-1])
    return said


# ---- what is allowed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize(
    ("kind", "text", "good", "wrong"),
    [
        ("regex", "[0-9]{2,4}", ["12", "1234"], ["1", "12345", "a"]),
        ("choice", ["yes", "no", 'q"u\\o\nte', "é🐟"], ["yes", "no", 'q"u\\o\nte', "é🐟"], ["ye", "maybe"]),
        ("grammar", 'start: "a" b\nb: "b" | "(" b ")"', ["ab", "a((b))"], ["a(b", "b"]),
        ("json_object", "", ["{}", '{"a": [1, {"b": null}]}'], ["[]", "3", '{"a"']),
        ("json", {"enum": [1, "two"]}, ["1", '"two"'], ["2", "two"]),
        ("json", PERSON, ['{"name": "Bob", "age": 7}'], ['{"name": "Bob", "age": 100}', '{"age": 7}', "{}"]),
    ],
)
def test_only_what_follows_the_grammar_is_allowed(
    tokenizer: Tokenizer, kind: str, text: Any, good: list[str], wrong: list[str]
) -> None:
    grammars = Grammars(tokenizer, VOCAB, [EOS])
    grammars.check(spec(kind, text))
    for answer in good:
        matcher = grammars.make(spec(kind, text))
        assert say(matcher, answer, tokenizer), answer
        assert EOS in allowed(matcher)
    for answer in wrong:
        matcher = grammars.make(spec(kind, text))
        assert not (say(matcher, answer, tokenizer) and EOS in allowed(matcher)), answer


def test_every_end_token_of_the_model_ends_it(grammars: Grammars) -> None:
    for token in (EOS, OTHER_EOS):
        matcher = grammars.make(spec("regex", "a+"))
        assert allowed(matcher).isdisjoint({EOS, OTHER_EOS}), "it may not end before it has begun"
        assert say(matcher, "aa", byte_level())
        assert {EOS, OTHER_EOS} < allowed(matcher)
        assert not matcher.ended
        assert matcher.accept(token)
        assert matcher.ended


def test_it_has_ended_as_soon_as_nothing_can_follow(grammars: Grammars) -> None:
    matcher = grammars.make(spec("choice", ["yes", "no"]))
    assert say(matcher, "yes", byte_level())
    assert matcher.ended
    assert allowed(matcher) == {EOS, OTHER_EOS}


def test_it_ends_without_any_end_token() -> None:
    matcher = Grammars(byte_level(), VOCAB, []).make(spec("regex", "[0-9]{3}"))
    assert len(walk(matcher, 0)) == 3


def test_ids_that_are_no_text_are_never_allowed(grammars: Grammars) -> None:
    """Neither special tokens nor the model's spare ids, even where every text is."""
    matcher = grammars.make(spec("regex", "(.|\n)*"))
    tokenizer = byte_level()
    assert max(allowed(matcher)) < tokenizer.vocab_size < VOCAB
    assert allowed(matcher) & tokenizer.pieces.special_ids == {EOS, OTHER_EOS}


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_random_walk_through_a_schema_is_valid(grammars: Grammars, seed: int) -> None:
    matcher = grammars.make(spec("json", PERSON))
    said = walk(matcher, seed)
    assert matcher.ended
    person = json.loads(byte_level().decode([token for token in said if token not in (EOS, OTHER_EOS)]))
    assert list(person) == ["name", "age"]
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 99


def test_whitespace_in_json_does_not_go_on_forever(grammars: Grammars) -> None:
    matcher, space = grammars.make(spec("json_object")), byte_level().encode(" ", add_special=False)[0]
    assert say(matcher, "{", byte_level())
    spaces = 0
    while space in allowed(matcher):
        assert matcher.accept(space)
        spaces += 1
    assert 4 <= spaces <= 40
    assert say(matcher, '"a": 1}', byte_level())


def test_the_text_of_an_end_token_cannot_be_asked_for(grammars: Grammars) -> None:
    """llguidance would spell it with the end token itself, and half an answer would look whole."""
    with pytest.raises(BadGrammar, match="end token"):
        grammars.check(spec("regex", "</s>x"))


# ---- one matcher per sample -----------------------------------------------------------------------------------------


def test_matchers_of_one_grammar_do_not_know_each_other(grammars: Grammars) -> None:
    one, other = (grammars.make(spec("choice", ["yes", "no"])) for _ in range(2))
    before = allowed(other)
    assert say(one, "ye", byte_level())
    assert allowed(other) == before
    assert say(other, "no", byte_level())
    assert say(one, "s", byte_level())


def test_a_matcher_can_begin_in_the_middle(grammars: Grammars) -> None:
    output = byte_level().encode('{"name": "Bo', add_special=False)
    whole, resumed = grammars.make(spec("json", PERSON)), grammars.make(spec("json", PERSON), output)
    assert say(whole, '{"name": "Bo', byte_level())
    assert allowed(resumed) == allowed(whole)
    assert say(resumed, '", "age": 3}', byte_level())
    assert resumed.ended


def test_a_matcher_that_begins_with_what_is_not_allowed_says_so(grammars: Grammars) -> None:
    matcher = grammars.make(spec("regex", "[0-9]+"), byte_level().encode("1x", add_special=False))
    assert "does not follow the grammar" in matcher.error
    assert not allowed(matcher)
    assert not matcher.accept(byte_level().encode("1", add_special=False)[0])


def test_a_token_that_is_not_allowed_ends_it_for_good(grammars: Grammars) -> None:
    for wrong in (byte_level().encode("x", add_special=False)[0], EOS, 430, 0):
        matcher = grammars.make(spec("regex", "[0-9]{3}"))
        assert not matcher.accept(wrong)
        assert str(wrong) in matcher.error
        assert not allowed(matcher)


@pytest.mark.parametrize("end", [[], [EOS]])
def test_nothing_but_the_end_follows_the_end(grammars: Grammars, end: list[int]) -> None:
    """Not even where the grammar could have gone on, once the sample has ended it."""
    letter = byte_level().encode("a", add_special=False)[0]
    matcher = grammars.make(spec("regex", "a{1,3}" if end else "a"), [letter, *end])
    assert matcher.ended
    assert allowed(matcher) == {EOS, OTHER_EOS}
    assert matcher.accept(OTHER_EOS)
    assert not matcher.accept(letter)
    assert "after the end" in matcher.error


def test_few_grammars_are_kept_and_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[GrammarSpec] = []
    source_of = module.source_of

    def counted(one: GrammarSpec) -> str:
        compiled.append(one)
        return source_of(one)

    monkeypatch.setattr(module, "source_of", counted)
    many = [spec("choice", [f"a{number}"]) for number in range(KEPT)]
    for one in [*many, *many]:
        grammars.check(one)
        grammars.make(one)
    assert compiled == many
    grammars.make(spec("choice", ["one more"]))
    grammars.make(many[0])  # the one that was used longest ago
    assert compiled == [*many, spec("choice", ["one more"]), many[0]]


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("jsn", "", "unknown kind of grammar 'jsn'"),
        ("json", "{", "is not JSON"),
        ("json", "[" * 60_000, "is not JSON"),
        ("json", "[1]", "is a JSON object"),
        ("json", {"type": "strin"}, "strin"),
        ("json", {"type": "array", "uniqueItems": True}, "uniqueItems.*not supported"),
        ("json", False, "is a JSON object"),
        ("json", {"type": "integer", "minimum": 5, "maximum": 3}, "no text can satisfy it"),
        ("json", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf.*branches overlap.*anyOf"),
        ("json", {"$ref": "#/nowhere"}, "nowhere"),
        ("json", {"$ref": "https://example.com/schema"}, "example.com"),
        ("json", {"$ref": "#"}, "cannot be used"),
        ("regex", "[a", "unclosed character class"),
        ("regex", "(?=a)b", "without look-around"),
        ("regex", "x" * (MAX_TEXT_BYTES + 1), f"limit is {MAX_TEXT_BYTES}"),
        ("regex", "\ud800", "Unicode"),
        ("choice", [], "at least one"),
        ("choice", ["a", ""], "none that is empty"),
        ("choice", ["a", 1], "list of strings"),
        ("choice", "yes", "is not JSON"),
        ("grammar", "", "Empty grammar"),
        ("grammar", "start (", "Expected token"),
        ("grammar", 'start: "a" missing', "missing"),
        ("grammar", "start: start", "cannot be used"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_reason(grammars: Grammars, kind: str, text: Any, message: str) -> None:
    with pytest.raises(BadGrammar, match=message) as caught:
        grammars.check(spec(kind, text))
    assert len(str(caught.value)) < 700
    grammars.check(spec("choice", ["fine"]))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((a{1000}){1000}){1000}"),
        ("regex", "b{3}((a{1000}){1000}){1000}"),
        ("regex", "(" * 30_000 + "a" + ")" * 30_000),
        ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        ("grammar", 'start: (((x{1000}){1000}){1000}){1000}\nx: "a"'),
        ("json", '{"type": "array", "items": ' * 2000 + "{}" + "}" * 2000),
        ("json", {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]}),
        ("json", {"type": "object", "properties": {f"property {i}": {"type": "integer"} for i in range(1500)}}),
    ],
    ids=["power", "late power", "parentheses", "nested rules", "repeated rules", "deep", "exponential", "wide"],
)
def test_a_grammar_made_to_hurt_is_refused_in_time(grammars: Grammars, kind: str, text: Any) -> None:
    with pytest.raises(BadGrammar, match=r"smaller or simpler|cannot be used|not JSON"):
        grammars.check(spec(kind, text))
    assert not grammars._kept


def test_a_refused_grammar_is_freed_at_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matcher, which takes megabytes, is not left to the garbage collector by the error's traceback."""
    made: list[weakref.ref[Matcher]] = []

    class Noted(Matcher):
        def __init__(self, *args: Any) -> None:
            made.append(weakref.ref(self))
            super().__init__(*args)

    monkeypatch.setattr(module, "Matcher", Noted)
    gc.disable()
    try:
        with pytest.raises(BadGrammar) as caught:
            grammars.check(spec("regex", "b{3}((a{1000}){1000}){1000}"))
        del caught
        for thread in threading.enumerate():
            if thread.name == "shoal-grammar":
                thread.join(60)
        assert [one() for one in made] == [None]
    finally:
        gc.enable()


def test_many_choices_are_fine(grammars: Grammars) -> None:
    many = spec("choice", [f"some words {number}" for number in range(3000)])
    grammars.check(many)
    matcher = grammars.make(many)
    assert say(matcher, "some words 2999", byte_level())
    assert matcher.ended


class Stuck:
    """Stands in for a compilation that llguidance does not end by itself: the CPU time it has used is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.used_s = 0.0
        monkeypatch.setattr(module, "source_of", self.wait)
        monkeypatch.setattr(module, "LOOK_S", 0.01)
        monkeypatch.setattr(module.Compilation, "cpu_s", lambda compilation: self.used_s)

    def wait(self, one: GrammarSpec) -> str:
        self.go_on.wait(60)
        return 'start: "a"' if one.text != "no" else 'start: "a" missing'


def test_a_compilation_that_takes_too_long_is_not_waited_for(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(monkeypatch)
    stuck.used_s = 2.5
    monkeypatch.setattr(module, "COMPILER_WAIT_S", 0.05)
    slow = [spec("regex", "a"), spec("regex", "no")]
    assert len(slow) == module.COMPILERS
    for one in [*slow, slow[0]]:  # asked for again, it does not occupy another compiler
        with pytest.raises(GrammarTimeout, match=r"within 2 s; try again") as caught:
            grammars.check(one)
        assert caught.value.retry_after_s == 2.0
    with pytest.raises(QueueFull, match="try again"):  # all compilers are still busy with the others
        grammars.check(spec("regex", "b"))
    stuck.go_on.set()
    while grammars._compiling:
        time.sleep(0.01)
    monkeypatch.setattr(module, "source_of", Stuck.wait)  # nothing is compiled again: what came of it was kept
    grammars.check(slow[0])
    with pytest.raises(BadGrammar, match="missing"):
        grammars.check(slow[1])
    monkeypatch.undo()
    for number in range(4):  # a compiler that was stuck is released
        grammars.check(spec("regex", f"c{number}"))


def test_only_the_compilers_own_time_counts(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no CPU time is waited for."""
    stuck = Stuck(monkeypatch)
    stuck.used_s = 1.9
    threading.Timer(0.3, stuck.go_on.set).start()
    grammars.check(spec("regex", "a"))


def test_a_compilation_knows_its_cpu_time() -> None:
    compilation = module.Compilation()
    ended = threading.Event()

    def work() -> None:
        compilation.begin()
        while compilation.cpu_s() < 0.05:
            pass
        compilation.end(None)
        ended.wait(60)

    threading.Thread(target=work, daemon=True).start()
    assert compilation.wait()
    assert compilation.cpu_s() >= 0.05
    ended.set()


def test_a_slow_set_up_is_not_charged_to_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    read, limit_s = module.read_vocabulary, 0.5

    def slowly(*args: Any) -> Any:
        until_s = time.thread_time() + 2 * limit_s
        while time.thread_time() < until_s:
            pass
        return read(*args)

    monkeypatch.setattr(module, "read_vocabulary", slowly)
    monkeypatch.setattr(module, "COMPILE_LIMIT_S", limit_s)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    Grammars(byte_level(), VOCAB, [EOS]).check(spec("json", schema))


def test_warming_reads_the_vocabulary_once_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed = Grammars(byte_level(), VOCAB, [EOS])
    warmed.warm()
    monkeypatch.setattr(module, "read_vocabulary", None)  # not to be called again
    warmed.check(spec("regex", "a"))
    monkeypatch.undo()
    Grammars(metaspace(), VOCAB, [EOS]).warm()


def test_a_panic_while_compiling_is_a_refusal(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As pyo3's, which is no Exception."""

    def panic(one: GrammarSpec) -> str:
        raise Panic("index out of bounds")

    monkeypatch.setattr(module, "source_of", panic)
    for _ in range(module.COMPILERS + 1):
        with pytest.raises(BadGrammar, match="index out of bounds"):
            grammars.check(spec("regex", "a"))
    with pytest.raises(BadGrammar, match="index out of bounds"):  # in the engine, whose thread must survive it
        grammars.make(spec("regex", "a"))


def test_a_tokenizer_that_cannot_be_used_is_named() -> None:
    with pytest.raises(BadGrammar, match="tokenizer cannot be used with grammars"):
        Grammars(metaspace(), VOCAB, [EOS]).check(spec("regex", "a"))


def test_the_tokenizers_own_padding_and_truncation_do_not_matter() -> None:
    backend = Backend.from_str(byte_level().backend.to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    matcher = Grammars(Tokenizer(backend), VOCAB, [EOS]).make(spec("choice", ["stop the stream"]))
    assert say(matcher, "stop the stream", byte_level())
    assert matcher.ended


def test_added_tokens_spell_their_text(grammars: Grammars) -> None:
    """An added token that is not special is as good as its text."""
    backend = Backend.from_str(byte_level().backend.to_str())
    backend.add_tokens([AddedToken("yes", special=False)])
    tokenizer = Tokenizer(backend)
    matcher = Grammars(tokenizer, VOCAB, [EOS]).make(spec("choice", ["yes"]))
    assert backend.token_to_id("yes") in allowed(matcher)


def test_threads_may_check_and_make_at_the_same_time(grammars: Grammars) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for round in range(20):
                one = spec("regex", f"[a-{'xyz'[round % 3]}]{{{1 + number % 2},9}}")
                grammars.check(one)
                walk(grammars.make(one), round)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_kind_has_a_name() -> None:
    assert set(WHAT) == set(GRAMMARS)

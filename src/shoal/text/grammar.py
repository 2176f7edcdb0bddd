"""Grammars: which tokens may come next in a constrained sample.

Owns the use of llguidance: a GrammarSpec becomes a compiled grammar, within limits of size and time, and a matcher for
each sample. A front calls check(), the engine's process make(). Knows nothing of HTTP, requests or logits.
"""

import contextlib
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer as Backend

from shoal.core.job import GrammarSpec
from shoal.core.names import pick
from shoal.errors import BadGrammar, GrammarTimeout, QueueFull, UnknownName
from shoal.files.source import ModelFiles, eos_ids
from shoal.text.gbnf import is_gbnf, lark_of
from shoal.text.matcher import Matcher, shortened
from shoal.text.thinking import ThinkingMatcher
from shoal.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_TEXT_BYTES = 64 * 1024  # of a schema, regex, choice or grammar
MAX_COMPOSED_BYTES = 512 * 1024  # of one that is made of the schemas of many tools
COMPILE_LIMIT_S = 2.0  # of the compiler's own CPU time, from the grammar's text to its first few masks
COMPILE_WALL_LIMIT_S = 60.0  # … and of wall time, for a compiler that gets no CPU time
LOOK_S = 0.05  # how often the compiler's time is looked at
COMPILERS = 2  # grammars compiled at the same time
COMPILER_WAIT_S = 10.0  # how long others wait for one of them
TRIAL_TOKENS = 8  # tokens a grammar is followed for before it is accepted: most that are too complex fail early
KEPT = 16  # most recently used compiled grammars that are cached
MAX_LEXER_STATES = 25_000  # of one grammar, at 1 to 2 kB each: the cache takes well under a gigabyte at worst
INITIAL_FUEL = (
    200_000  # work units for the first lexer states: some tens of milliseconds; a fifth of llguidance's default
)
STEP_FUEL = 100_000  # … and for one mask; half the default
MAX_GRAMMAR_SIZE = 100_000  # symbols in all productions; a fifth of the default
# Whitespace between the parts of JSON is up to the model, within a limit: small models can loop in it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"

WHAT = {
    "json_object": "JSON object",
    "json": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "Lark grammar",
    "structural_tag": "structural tag",
    "composed": "grammar of tools and answer",
}
HINTS = {  # pattern in llguidance's message → what to change
    r"oneOf": "its branches overlap: tell them apart by a required property with a const, or use anyOf",
    r"[Uu]nimplemented": "remove these keywords, they are not supported",
    r"[Uu]nsatisfiable|NoExtension": "no text can satisfy it; change it",
    r"look-around|backreference": "rewrite it without look-around and backreferences",
    r"too (many|large|deep|complex)|limit|max is|fuel": "make it smaller or simpler",
}


class Grammars:
    """Compiles grammars for one model's vocabulary. May be used from several threads.

    A running compilation cannot be interrupted, so there are three limits: on the size of the text, on llguidance's own
    work units (LLParserLimits), and on the CPU time that check() waits for, COMPILE_LIMIT_S. After a timeout the thread
    runs on until llguidance gives up, occupies one of the compilers until then, and keeps what came of it for the next
    try. Reading the vocabulary is no part of any compilation: warm() does it at start. Nothing bounds the time of a
    single mask: a grammar that was built to be slow took 0.2 s for one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = sorted({token for token in eos_ids if 0 <= token < vocab_size})
        self._ends = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        for token in self.eos_ids:
            self._ends[token // 32] |= np.uint32(1) << np.uint32(token % 32)
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held while the vocabulary is read
        self._compilers = threading.BoundedSemaphore(COMPILERS)
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[GrammarSpec, LLMatcher] = OrderedDict()
        self._compiling: dict[GrammarSpec, Compilation] = {}
        self._refused: OrderedDict[GrammarSpec, BadGrammar] = OrderedDict()  # found bad after a timeout

    def check(self, spec: GrammarSpec) -> None:
        """Raise BadGrammar, with what to change, if this cannot be followed. Blocks: call it off the event loop.

        Raises GrammarTimeout or QueueFull where that could not be found out in time.
        """
        spec = replace(spec, thinking=None)  # which changes nothing about the grammar
        if self._known(spec) is not None:
            return
        check_text(spec)
        self._for_llguidance()
        compilation = self._begin(spec)
        if not compilation.wait():
            raise GrammarTimeout(
                f"the {WHAT[spec.kind]} was not compiled within {COMPILE_LIMIT_S:g} s; try again soon, or make it "
                "smaller or simpler",
                retry_after_s=COMPILE_LIMIT_S,
            )

    def make(self, spec: GrammarSpec, output: Sequence[int] = ()) -> Matcher:
        """A matcher for one sample whose output so far is `output`. Raises BadGrammar as check() does."""
        limit, spec = spec.thinking, replace(spec, thinking=None)
        compiled = self._known(spec)
        if compiled is None:
            check_text(spec)
            compiled = self._compiled(spec)
        matcher = Matcher(compiled.deep_copy(), self._ends)
        if limit is not None:
            closing = self.tokenizer.encode(f"\n{limit.closes}", add_special=False)
            matcher = ThinkingMatcher(compiled.deep_copy(), self._ends, limit, closing, self.tokenizer.bytes_of)
        for token in output:
            matcher.accept(token)
        return matcher

    def warm(self) -> None:
        """Read the vocabulary now, not with the first grammar (it takes half a second for 50,000 tokens).

        Without a word where that fails: the first grammar will be refused with the reason.
        """
        with contextlib.suppress(BadGrammar):
            self._for_llguidance()

    # ---- compiling ------------------------------------------------------------------------------------------------

    def _known(self, spec: GrammarSpec) -> "LLMatcher | None":
        with self._lock:
            if spec in self._kept:
                self._kept.move_to_end(spec)
            return self._kept.get(spec)

    def _begin(self, spec: GrammarSpec) -> "Compilation":
        """The compilation of this grammar, begun now unless it already runs."""
        with self._lock:
            running, refused = self._compiling.get(spec), self._refused.get(spec)
        if refused is not None:
            raise BadGrammar(str(refused))
        if running is not None:
            return running
        if not self._compilers.acquire(timeout=COMPILER_WAIT_S):
            raise QueueFull("too many grammars are being compiled; try again soon", retry_after_s=COMPILE_LIMIT_S)
        compilation = Compilation()
        with self._lock:
            self._compiling[spec] = compilation
        threading.Thread(target=self._check, args=(spec, compilation), name="shoal-grammar", daemon=True).start()
        return compilation

    def _check(self, spec: GrammarSpec, compilation: "Compilation") -> None:
        """Runs on a thread of its own; always completes the compilation and releases the compiler."""
        refusal: BadGrammar | None = None
        compilation.begin()
        try:
            compiled = self._compiled(spec, keep=False)
            self._try(spec, compiled)
            self._keep(spec, compiled)
        except BaseException as error:  # a panic inside llguidance is not an Exception
            refusal = detached(error if isinstance(error, BadGrammar) else bad(spec, str(error)))
        with self._lock:
            self._compiling.pop(spec, None)
            if refusal is not None and compilation.given_up:
                self._refused[spec] = refusal
                while len(self._refused) > KEPT:
                    self._refused.popitem(last=False)
        self._compilers.release()
        compilation.end(refusal)

    def _compiled(self, spec: GrammarSpec, keep: bool = True) -> "LLMatcher":
        vocabulary = self._for_llguidance()
        from llguidance import LLMatcher

        try:
            compiled = LLMatcher(vocabulary, source_of(spec), limits=limits(), log_level=0)
        except (KeyboardInterrupt, SystemExit, BadGrammar):
            raise
        except BaseException as error:  # a panic inside llguidance is not an Exception, and must not end the engine
            raise bad(spec, str(error)) from error
        if compiled.is_error():
            raise bad(spec, compiled.get_error())
        if keep:
            self._keep(spec, compiled)
        return compiled

    def _keep(self, spec: GrammarSpec, compiled: "LLMatcher") -> None:
        with self._lock:
            self._kept[spec] = compiled
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def _try(self, spec: GrammarSpec, compiled: "LLMatcher") -> None:
        """Follow it for a few tokens: much of the work, and so of its limits, comes with the masks."""
        matcher = Matcher(compiled.deep_copy(), self._ends)
        mask = np.zeros_like(self._ends)
        draw = np.random.default_rng(0)
        for _ in range(TRIAL_TOKENS):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not matcher.error and not len(allowed):
                matcher.error = "no token of the model's vocabulary can continue it"
            if matcher.error or not matcher.accept(int(draw.choice(allowed))):
                raise bad(spec, matcher.error)
            if matcher.ended:
                return

    def _for_llguidance(self) -> "LLTokenizer":
        """The vocabulary in llguidance's form, read once."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(self.tokenizer.backend, self.vocab_size, self.eos_ids)
            return self._vocabulary


class Compilation:
    """One grammar being compiled on a thread, and the CPU time that this thread has used.

    CPU time, because a grammar is not to be refused for what else the machine computes.
    """

    def __init__(self) -> None:
        self.given_up = False  # a caller stopped waiting
        self._done: Future[BadGrammar | None] = Future()
        self._clock: int | None = None
        self._began_s = time.monotonic()

    def begin(self) -> None:
        """Called by the thread that compiles, first."""
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS, where the wall time alone counts
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def end(self, refusal: BadGrammar | None) -> None:
        self._done.set_result(refusal)

    def wait(self) -> bool:
        """False: it took too long, and goes on. Raises BadGrammar where it cannot be compiled."""
        while True:
            try:
                refusal = self._done.result(LOOK_S)
            except TimeoutError:
                if self.cpu_s() > COMPILE_LIMIT_S or self.wall_s() > COMPILE_WALL_LIMIT_S:
                    self.given_up = True
                    return False
            else:
                if refusal is not None:
                    raise detached(refusal)
                return True

    def wall_s(self) -> float:
        return time.monotonic() - self._began_s

    def cpu_s(self) -> float:
        try:
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0
        except OSError:  # the thread has ended
            return 0.0


def detached(refusal: BadGrammar) -> BadGrammar:
    """The same without what it was raised in: an error that is kept, or raised again, would keep the matcher in the
    frames of its traceback, megabytes, until a collection."""
    return copy(refusal)


def read_vocabulary(backend: Backend, vocab_size: int, eos_ids: list[int]) -> "LLTokenizer":
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise BadGrammar("grammars need the llguidance package; pip install 'shoal[server]'") from error
    if backend.truncation is not None or backend.padding is not None:
        backend = Backend.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    try:
        return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=eos_ids or None)
    except ValueError as error:
        raise BadGrammar(
            f"this model's tokenizer cannot be used with grammars ({shortened(str(error))}); leave the grammar out"
        ) from error


def grammars_of(files: ModelFiles, tokenizer: Tokenizer) -> Grammars:
    """Grammars for the vocabulary of this model."""
    return Grammars(tokenizer, int(files.config.get("vocab_size") or tokenizer.vocab_size), eos_ids(files))


def warming(files: ModelFiles, tokenizer: Tokenizer) -> Grammars:
    """grammars_of(…), whose vocabulary is being read in a thread."""
    made = grammars_of(files, tokenizer)
    threading.Thread(target=made.warm, name="shoal-grammar-warm", daemon=True).start()
    return made


def limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=INITIAL_FUEL,
        step_lexer_fuel=STEP_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,  # they would write a user's grammar into the log
    )


def check_text(spec: GrammarSpec) -> None:
    """Checks that need no compilation."""
    try:
        pick(WHAT, spec.kind, "kind of grammar")
    except UnknownName as error:
        raise BadGrammar(str(error)) from error
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError as error:
        raise bad(spec, f"it is not valid Unicode: {error.reason}") from error
    most = MAX_COMPOSED_BYTES if spec.kind == "composed" else MAX_TEXT_BYTES
    if size > most:
        raise BadGrammar(f"the {WHAT[spec.kind]} has {size} bytes, the limit is {most}; make it smaller")
    if spec.kind == "choice":
        choices_of(spec)
    if spec.kind == "json" and not isinstance(read_json(spec), dict):
        raise BadGrammar("a JSON schema is a JSON object; give one, or use json_object for any JSON object")


def read_json(spec: GrammarSpec) -> object:
    try:
        return json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the {WHAT[spec.kind]} is not JSON: {error}; correct it") from error


def source_of(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if spec.kind in ("json", "json_object"):
        schema = spec.text if spec.kind == "json" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":  # one terminal, which may have far more alternatives than a rule
        quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices_of(spec))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(quoted)}")
    if spec.kind == "composed":
        return spec.text
    return LLMatcher.grammar_from_lark(lark_of(spec.text) if is_gbnf(spec.text) else spec.text)


def choices_of(spec: GrammarSpec) -> list[str]:
    """The alternatives of a choice.

    >>> choices_of(GrammarSpec("choice", '["yes", "no"]'))
    ['yes', 'no']
    """
    found = read_json(spec)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise BadGrammar("a choice is a JSON list of strings; give at least one, and none that is empty")
    return found


def bad(spec: GrammarSpec, why: str) -> BadGrammar:
    hint = next((hint for words, hint in HINTS.items() if re.search(words, why)), "correct it")
    what = "GBNF grammar" if spec.kind == "grammar" and is_gbnf(spec.text) else WHAT[spec.kind]
    return BadGrammar(f"the {what} cannot be used: {shortened(why)}; {hint}")

"""Answers that follow a grammar, through the whole engine: tiny random models, and SmolLM2 with random schemas; all of
it with and without drafts."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from shoal import LLM, GrammarSpec, SamplingParams
from shoal.errors import BadGrammar, ModelError
from tests.drafting import drafting
from tests.story.models import VOCAB, copy, first, open_llm, seeded, small_kv, token_ids
from tests.story.test_golden import default_model_is_there

STORY = "Once upon a time there was a little fish"
FISH = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "fins": {"type": "integer", "minimum": 0, "maximum": 20},
        "friends": {"type": "array", "items": {"enum": ["crab", "whale", "eel"]}, "maxItems": 3},
    },
    "required": ["name", "fins", "friends"],
    "additionalProperties": False,
}
SPECS = {
    "regex": GrammarSpec("regex", "[0-9]{3}-[0-9]{4}"),
    "choice": GrammarSpec("choice", json.dumps(["a whale", "an eel", "a crab"])),
    "json": GrammarSpec("json", json.dumps(FISH)),
    "json_object": GrammarSpec("json_object"),
    "grammar": GrammarSpec("grammar", 'start: "<" word ("," word)* ">"\nword: /[a-z]{1,5}/'),
}


DRAFTS = "grammar+suffix"


@pytest.fixture(scope="module", params=["off", DRAFTS])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with open_llm(model, check=True, speculate=request.param) as opened, drafting(opened) as drafts:
        yield opened
    if request.param == DRAFTS:
        assert min(drafts.accepted[name] for name in ("grammar", "suffix")) > 50
        assert drafts.rejected > 50


def follows(name: str, text: str) -> bool:
    if name == "regex":
        return re.fullmatch("[0-9]{3}-[0-9]{4}", text) is not None
    if name == "choice":
        return text in ("a whale", "an eel", "a crab")
    if name == "grammar":
        return re.fullmatch("<[a-z]{1,5}(,[a-z]{1,5})*>", text) is not None
    if name == "json_object":
        return isinstance(json.loads(text), dict)
    return jsonschema_rs.is_valid(FISH, json.loads(text))


# ---- a tiny random model, which has no idea of JSON -----------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SPECS if name != "json_object"])
@pytest.mark.parametrize("values", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_every_answer_follows_the_grammar(llm: LLM, name: str, values: dict[str, Any]) -> None:
    params = [seeded(seed, 400, repetition_penalty=1.3, **values) for seed in range(6)]
    for output in llm.generate([STORY] * 6, params, grammar=SPECS[name]):
        one = output.outputs[0]
        assert one.finish_reason == "stop", one
        assert follows(name, one.text)


def test_any_json_object_will_do(llm: LLM) -> None:
    """A model without sense may well not come to an end; what came to one is an object."""
    assert llm.tokenizer is not None
    ends = dict.fromkeys(llm.tokenizer.encode('{}"', add_special=False), 3.0)
    output = llm.generate(STORY, seeded(1, 60, n=24, logit_bias=ends), grammar=SPECS["json_object"])[0]
    whole = [one for one in output.outputs if one.finish_reason == "stop"]
    assert whole
    assert all(follows("json_object", one.text) for one in whole)


@pytest.mark.parametrize("speculate", ["off", DRAFTS])
def test_neighbours_without_a_grammar_say_what_they_say_alone(model: Path, speculate: str) -> None:
    plain = [list(range(9, 40)), list(range(50, 60)), [7]]
    with open_llm(model, check=True, speculate=speculate) as llm, drafting(llm):
        alone = token_ids(llm.generate(plain, seeded(5, 30)))
        bound = [llm.stream(STORY, seeded(seed, 60), grammar=spec) for seed, spec in enumerate(SPECS.values())]
        assert token_ids(llm.generate(plain, seeded(5, 30))) == alone
        texts = ["".join(chunk.text for chunk in stream) for stream in bound]
    assert all(follows(name, text) for name, text in zip(SPECS, texts, strict=True) if name in ("regex", "choice"))


@pytest.mark.parametrize(("depth", "speculate"), [(1, "off"), (2, "off"), (3, "off"), (1, DRAFTS), (2, DRAFTS)])
def test_preemption_and_depth_change_no_token(model: Path, depth: int, speculate: str) -> None:
    prompts = [list(range(10 + i, 40 + i)) for i in range(6)]
    params = [seeded(i, 60, repetition_penalty=1.2) for i in range(6)]
    with open_llm(model, depth=1) as llm:
        roomy = llm.generate(prompts, params, grammar=SPECS["json"])
    opened = open_llm(model, kv_memory=small_kv(12), depth=depth, check=True, speculate=speculate)
    with opened as llm, drafting(llm) as drafts:
        tight = llm.generate(prompts, params, grammar=SPECS["json"])
        assert llm.loop.scheduler.kv.pool.held == 0
    assert speculate == "off" or drafts.accepted["grammar"] > 10
    assert token_ids(tight) == token_ids(roomy)
    assert [one.outputs[0].text for one in tight] == [one.outputs[0].text for one in roomy]
    assert any(one.outputs[0].metrics.preemptions for one in tight)


def test_samples_of_one_prompt_each_follow_it(llm: LLM) -> None:
    output = llm.generate(STORY, seeded(3, 40, n=12), grammar=SPECS["choice"])[0]
    texts = [one.text for one in output.outputs]
    assert all(follows("choice", text) for text in texts)
    assert len(set(texts)) > 1


def test_the_grammar_ends_the_answer_whatever_else_is_asked(llm: LLM) -> None:
    params = seeded(1, 300, min_tokens=200, ignore_eos=True)
    one = first(llm.generate(STORY, params, grammar=SPECS["choice"]))
    assert one.finish_reason == "stop"
    assert follows("choice", one.text)


def test_max_tokens_cuts_it_short(llm: LLM) -> None:
    one = first(llm.generate(STORY, seeded(1, 3), grammar=SPECS["regex"]))
    assert one.finish_reason == "length"
    assert re.fullmatch("[0-9]{3}", one.text)


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    params = seeded(1, 20, logprobs=3)
    one = first(llm.generate(STORY, params, grammar=SPECS["regex"]))
    assert one.logprobs is not None
    assert [entry.token for entry in one.logprobs] == one.token_ids
    free = first(llm.generate(STORY, seeded(1, 1, logprobs=3)))
    assert free.logprobs is not None
    assert one.logprobs[0].top_tokens == free.logprobs[0].top_tokens
    assert any(entry.rank > 1 for entry in one.logprobs)


def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(BadGrammar, match="regex"):
        llm.generate(["a", "b"], grammar=GrammarSpec("regex", "["))
    assert llm.loop.idle


def test_without_a_tokenizer_there_is_no_grammar(model: Path, tmp_path: Path) -> None:
    bare = copy(model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with open_llm(bare) as llm, pytest.raises(ModelError, match=r"tokenizer\.json"):
        llm.generate([[1, 2]], grammar=SPECS["regex"])


def test_spare_ids_of_the_model_are_never_said(llm: LLM) -> None:
    """The model has more ids than the tokenizer; a bias for one of them must not bring it in."""
    assert llm.tokenizer is not None
    assert llm.tokenizer.vocab_size < VOCAB
    bias = {VOCAB - 1: 100.0, VOCAB - 2: 100.0}
    one = first(llm.generate(STORY, seeded(1, 60, logit_bias=bias), grammar=SPECS["grammar"]))
    assert max(one.token_ids) < llm.tokenizer.vocab_size


# ---- SmolLM2 and random schemas -------------------------------------------------------------------------------------


def random_schema(source: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "enum", "boolean"] + (["array", "object", "object"] if depth else [])
    kind = source.choice(kinds)
    if kind == "string":
        longest = source.randint(1, 12)
        return {"type": "string", "minLength": source.randint(0, min(2, longest)), "maxLength": longest}
    if kind == "integer":
        low = source.randint(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + source.choice([0, 1, 7, 90, 4000])}
    if kind == "enum":
        return {"enum": source.sample(["red", "sea green", "", 'a "quote"', "ünï", 7, -1, True, None], 3)}
    if kind == "array":
        least = source.randint(0, 2)
        items = random_schema(source, 0)
        return {"type": "array", "items": items, "minItems": least, "maxItems": source.randint(max(1, least), 3)}
    return random_object(source, depth) if kind == "object" else {"type": "boolean"}


def random_object(source: random.Random, depth: int) -> dict[str, Any]:
    names = source.sample(["name", "size", "is it?", "tags", "ünï", "x_1"], source.randint(1, 3))
    required = [name for name in names if source.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: random_schema(source, depth - 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def valid_answers(count: int, seed: int, speculate: str = "off") -> list[str]:
    """So many answers at temperature 1, each to its own schema; all run at the same time."""
    schemas = [random_object(random.Random(seed + number), 2) for number in range(count)]
    chat = [{"role": "user", "content": "Make up some JSON."}]
    with LLM(kv_memory="512MiB", max_num_seqs=64, check=True, speculate=speculate) as llm, drafting(llm) as drafts:
        streams = [
            llm.stream(
                [chat],
                SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_tokens=900, seed=number),
                grammar=GrammarSpec("json", json.dumps(schema)),
            )
            for number, schema in enumerate(schemas)
        ]
        answers = [list(stream) for stream in streams]
        assert llm.loop.scheduler.kv.pool.held == 0
    assert speculate == "off" or drafts.accepted["grammar"] > count
    assert len(answers) == count
    texts = ["".join(chunk.text for chunk in chunks) for chunks in answers]
    for schema, text, chunks in zip(schemas, texts, answers, strict=True):
        assert chunks[-1].finish_reason == "stop", (schema, text, chunks[-1])
        jsonschema_rs.validate(schema, json.loads(text))
    return texts


@pytest.mark.skipif(not default_model_is_there(), reason="the default model is not installed")
def test_8_random_schemas_get_valid_json_from_smollm2() -> None:
    valid_answers(8, seed=1)


@pytest.mark.skipif(not default_model_is_there(), reason="the default model is not installed")
def test_drafts_change_no_answer_of_smollm2() -> None:
    """Its own schema for each of them, and the answers without drafts."""
    assert valid_answers(2, seed=40, speculate=DRAFTS) == valid_answers(2, seed=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("speculate", ["off", DRAFTS])
@pytest.mark.skipif(not default_model_is_there(), reason="the default model is not installed")
def test_200_random_schemas_get_valid_json_from_smollm2(speculate: str) -> None:
    valid_answers(200, seed=1000, speculate=speculate)

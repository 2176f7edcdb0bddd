"""The same tokens come out, whatever the engine does around them.

In float32, for greedy and seeded requests in one batch: any chunk size, any block size, prefix cache on or off, a
roomy KV cache or one so small that most requests are preempted, one or two passes in flight, any order of arrival,
with and without drafts.
"""

import itertools
import random
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from tests.drafting import drafting
from tests.effort import covering
from tests.models.test_families import SIZES, saved

CHUNKS = [1, 7, 64, 0]
BLOCKS = [1, 16, 32]
AXES = (CHUNKS, BLOCKS, [True, False], ["roomy", "tiny"], [1, 2])
SOME = [(1, 16, True, "tiny", 1), (7, 1, True, "tiny", 2), (0, 32, False, "roomy", 1), (64, 16, True, "roomy", 2)]
TINY_TOKENS = 96  # one or two of the requests below fit at the end, and all of them want to run
BYTES_PER_TOKEN = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * 16 * 4
ROOMY = 2**21  # all of them fit twice over; check=True goes through all blocks after each pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    saved("llama", path)
    return path


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Short and long prompts, half of them with a common beginning; greedy, seeded, with penalties, n = 2. A bias lets
    some of them repeat themselves, so that there are drafts which are right."""
    source = random.Random(7)
    common = [source.randrange(SIZES["vocab_size"]) for _ in range(18)]
    found = []
    for number in range(10):
        prompt = common[: 18 * (number % 2)] + [source.randrange(SIZES["vocab_size"]) for _ in range(1 + number)]
        chance = {} if number % 3 else {"top_p": 0.9, "top_k": 50, "min_p": 0.01}
        penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3} if number % 4 == 1 else {}
        biases = {"logit_bias": {"3": 9.0, "5": 9.0, "8": 9.0}} if number % 5 > 2 else {}
        params = SamplingParams(
            temperature=0.0 if number % 2 else 1.0,
            seed=number,
            max_tokens=40 + 3 * (number % 5),
            n=2 if number == 4 else 1,
            ignore_eos=True,
            **chance,
            **penalties,  # type: ignore[arg-type]
            **biases,  # type: ignore[arg-type]
        )
        found.append((prompt, params))
    return found


Answers = dict[tuple[int, int], list[int]]


def run(folder: Path, places: list[int], **options: object) -> tuple[Answers, int, int]:
    """Tokens by request and sample; how many sequences there were and how many of them were preempted."""
    all_requests = requests()
    made = LLM(str(folder), dtype="float32", max_num_seqs=10, watermark=0.0, check=True, **options)
    with made as llm, drafting(llm) as drafts:
        outputs = llm.generate([all_requests[i][0] for i in places], [all_requests[i][1] for i in places])
        while not llm.loop.idle:  # blocks of those who have ended may be on their way to host memory
            llm.step()
        assert llm.loop.scheduler.kv.pool.held == 0
    assert llm.config.speculate == "off" or min(drafts.accepted.total(), drafts.rejected) > 3
    answers: Answers = {}
    preempted = 0
    for place, output in zip(places, outputs, strict=True):
        for one in output.outputs:
            answers[place, one.index] = one.token_ids
            preempted += one.metrics.preemptions > 0
    return answers, len(answers), preempted


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """Each request alone in the engine, everything at its simplest."""
    answers: Answers = {}
    for number in range(len(requests())):
        alone, _, _ = run(folder, [number], depth=1, prefix_caching=False, kv_memory=ROOMY)
        answers |= alone
    return answers


@pytest.mark.parametrize(("chunk", "block", "caching", "memory", "depth"), covering(*AXES, ways=3))
def test_same_tokens(
    chunk: int, block: int, caching: bool, memory: str, depth: int, folder: Path, expected: Answers
) -> None:
    compare(folder, expected, chunk, block, caching, memory, depth)


@pytest.mark.parametrize(("chunk", "block", "caching", "memory", "depth"), SOME)
@pytest.mark.parametrize("speculate", ["ngram", "suffix"])
def test_same_tokens_with_drafts(
    speculate: str, chunk: int, block: int, caching: bool, memory: str, depth: int, folder: Path, expected: Answers
) -> None:
    compare(folder, expected, chunk, block, caching, memory, depth, speculate=speculate)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "block", "caching", "memory", "depth"), list(itertools.product(*AXES)))
def test_same_tokens_with_drafts_in_every_combination(
    chunk: int, block: int, caching: bool, memory: str, depth: int, folder: Path, expected: Answers
) -> None:
    compare(folder, expected, chunk, block, caching, memory, depth, speculate="grammar+ngram+suffix", draft_tokens=12)


def compare(
    folder: Path,
    expected: Answers,
    chunk: int,
    block: int,
    caching: bool,
    memory: str,
    depth: int,
    **more: object,
) -> None:
    order = list(range(len(requests())))
    random.Random(chunk * 100 + block + depth).shuffle(order)
    size = TINY_TOKENS * BYTES_PER_TOKEN if memory == "tiny" else ROOMY
    answers, count, preempted = run(
        folder,
        order,
        chunk_tokens=chunk,
        block_size=block,
        prefix_caching=caching,
        kv_memory=size,
        depth=depth,
        max_num_batched_tokens=300,
        **more,
    )
    assert answers == expected
    if memory == "tiny":
        assert preempted > count / 2, f"only {preempted} of {count} were preempted; the test has lost its point"
    else:
        assert preempted == 0


POLICIES: list[dict[str, object]] = [
    {"when_short": "swap", "host_kv_memory": ROOMY},
    {"when_short": "swap", "host_kv_memory": 20 * 16 * BYTES_PER_TOKEN},  # not enough for everybody
    {"when_short": "auto", "host_kv_memory": ROOMY},
    {"when_short": "swap", "host_kv_memory": ROOMY, "max_preemptions": 1},
    {"order": "slo", "tiers": "{premium: {ttft: 0.05, itl: 0.01, longest: 30}, batch: {}}", "budget": "promise"},
    {"order": "sjf", "lane_tokens": 20, "headroom": 0.2, "headroom_tokens": 20},
]


@pytest.mark.parametrize(("caching", "speculate"), [(True, "off"), (False, "off"), (True, "grammar+suffix")])
@pytest.mark.parametrize("number", range(len(POLICIES)))
def test_no_policy_changes_a_token(folder: Path, expected: Answers, number: int, caching: bool, speculate: str) -> None:
    options = {"speculate": speculate, **POLICIES[number]}
    order = list(range(len(requests())))
    random.Random(number).shuffle(order)
    memory = TINY_TOKENS * BYTES_PER_TOKEN
    answers, _, preempted = run(folder, order, prefix_caching=caching, kv_memory=memory, **options)
    assert answers == expected
    assert preempted >= 3

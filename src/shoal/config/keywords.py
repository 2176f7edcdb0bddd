"""The engine's options as keyword arguments, for editors and type checkers.

Owns no option: names, defaults and meanings are those of EngineConfig, and a test compares the two.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of LLM and AsyncLLM: every option of EngineConfig but the model."""

    load_format: Literal["auto", "dummy"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["none", "int8", "fp8", "int4"]
    device: Literal["auto", "cpu", "cuda"]
    chat_template: str | None
    special_tokens_in_messages: Literal["text", "tokens"]
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    block_size: int
    kv_memory: int | str | None
    kv_dtype: Literal["auto", "fp8"]
    kv_share: float | None
    host_kv_memory: int | str | None
    prefix_caching: bool
    watermark: float
    preset: (
        Literal[
            "transformers",
            "fastertransformer",
            "classic-dynamic",
            "orca",
            "tgi",
            "vllm",
            "sglang",
            "trtllm-no-evict",
            "trtllm-max-utilization",
            "lmdeploy",
            "sarathi",
            "splitwise",
            "shoal",
        ]
        | None
    )
    batching: Literal["continuous", "static", "dynamic"]
    group_size: int
    window_ms: float
    layout: Literal["ragged", "padded", "shrink"]
    prefill: Literal["chunked", "inline", "exclusive", "disaggregated"]
    order: Literal["fcfs", "priority", "sjf", "fair", "slo"]
    tiers: str | Mapping[str, Any] | None
    budget: Literal["fixed", "promise"]
    lane_tokens: int
    long_share: float
    headroom: float
    headroom_tokens: int
    priority_age: float
    sjf_age: float
    memory: Literal["ondemand", "reserve", "predict"]
    quantile: float
    when_short: Literal["recompute", "swap", "auto", "drop", "wait"]
    max_preemptions: int
    chunk_tokens: int
    depth: int | None
    tensor_parallel_size: int
    threads: int | None
    cpu_kernels: Literal["auto", "amx", "avx512", "avx2", "neon", "portable", "off"]
    batch_invariant: bool
    speculate: str
    draft_tokens: int
    draft_model: str | None
    draft_layers: int | None
    draft_quantization: Literal["none", "int8"] | None
    seed: int | None
    max_queue: int
    max_wait: float | None
    check: bool

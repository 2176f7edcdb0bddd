"""Fields of OpenAI's, vLLM's and SGLang's APIs that have no effect here, or only at their default.

Owns the tables; bodies.py declares the fields. A field that stands in none of them and in no body is unknown.
"""

from typing import Any

# Refused, and why. A null is accepted for all of them.
REFUSED: dict[str, str] = {
    "suffix": "is not supported: text cannot be inserted before a suffix; remove it",
    "audio": "is not supported: answers are text only; remove it",
    "modalities": "may only be ['text']; remove it",
    "chat_template": "cannot be set per request; start the server with --chat-template",
}
# … where the body does not have them
ELSEWHERE = dict.fromkeys(
    ("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"),
    "belongs to chats; send it to /v1/chat/completions, or remove it",
)
# Accepted with any value and without effect; the answer's X-Shoal-Warning header names those that were sent.
IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "session_id", "guided_decoding_backend", "stream_interval", "custom_labels",
)  # fmt: skip
# Those that have no meaning here but their default, which clients send, too.
DEFAULT_ONLY: dict[str, Any] = {
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "routed_experts_start_len": 0,
    "routed_experts_prompt_start": 0,
    "return_cached_tokens_details": False,
    "return_meta_info": False,
    "return_prompt_text": False,
    "return_token_offsets": False,
    "return_mm_kwargs": True,
    "use_audio_in_video": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "skip_reading_prefix_cache": False,
    "logits_processors": [],
    **dict.fromkeys(
        (
            *("documents", "mm_processor_kwargs", "media_io_kwargs", "images_config", "max_dynamic_patch"),
            *("min_dynamic_patch", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "prompt_embeds"),
            *("web_search_options", "prediction", "moderation", "lora_path", "session_params", "watermarking"),
            *("custom_logit_processor", "custom_params", "repetition_detection", "guided_whitespace_pattern", "task"),
            *("input_ids", "extra_key", "ngram_corpus_id", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
            *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
        )
    ),
}
NULL_ONLY = {name: "is not supported; remove it" for name, default in DEFAULT_ONLY.items() if default is None}

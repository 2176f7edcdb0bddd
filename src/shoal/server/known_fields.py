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
# Why not, for each of them.
REASONS: dict[str, tuple[str, ...]] = {
    "a beam search ends when no beam can become one of the best": ("early_stopping",),
    "only text is read": (
        *("mm_processor_kwargs", "media_io_kwargs", "images_config", "max_dynamic_patch", "min_dynamic_patch"),
        *("use_audio_in_video", "return_mm_kwargs", "prompt_embeds"),
    ),
    "no code or setting of a request reaches the engine": (
        *("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs"),
    ),
    "no adapters are loaded": ("lora_path",),
    "which engine computes what is the server's own decision": (
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("data_parallel_rank", "kv_transfer_params", "ec_transfer_params"),
    ),
    "the inside of the model is not returned": (
        *("return_hidden_states", "return_routed_experts", "routed_experts_start_len", "routed_experts_prompt_start"),
    ),
    "usage and metrics have what is known": ("return_cached_tokens_details", "return_meta_info"),
    "ask /tokenize": ("return_prompt_text", "return_token_offsets"),
    "special tokens are written as the tokenizer has them": ("spaces_between_special_tokens",),
    "reasoning always comes apart from the answer, and is streamed": ("separate_reasoning", "stream_reasoning"),
    "cached prefixes give the same tokens": ("skip_reading_prefix_cache",),
    "use cache_salt": ("extra_key",),
    "conversations are kept by clients": ("session_params",),
    "write documents into a message": ("documents",),
    "the grammar engine decides about whitespace": ("guided_whitespace_pattern",),
    "drafts come from the request's own text": ("prediction", "ngram_corpus_id"),
    "there is no such tool here": ("web_search_options",),
    "answers are neither marked nor judged": ("watermarking", "moderation"),
    "use stop or max_tokens": ("repetition_detection",),
    "it belongs to models that are not served": ("task",),
    "send ids as the prompt of /v1/completions": ("input_ids",),
}
WHY = {name: reason for reason, names in REASONS.items() for name in names}
NULL_ONLY = {
    name: f"is not supported: {WHY[name]}; remove it" for name, default in DEFAULT_ONLY.items() if default is None
}
# Fields of some bodies that others do not have: why they are refused, and their default, which is accepted. Of SGLang's
# /generate alone:
OF_GENERATE: dict[str, tuple[tuple[str, ...], Any]] = {
    "only text is read": (
        (
            *("input_embeds", "image_data", "video_data", "audio_data", "mm_hashes", "mm_content_hashes"),
            *("video_config", "positional_embed_overrides", "image_max_dynamic_patch", "video_max_dynamic_patch"),
            *("need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls", "modalities"),
        ),
        None,
    ),
    "the inside of the model is not returned": (("return_indexer_topk", "return_entropy"), False),
    "what was drawn from is not returned": (("return_sampling_mask",), None),
    "logprobs come in one form": (("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64"), False),
    "answers are text only": (("return_bytes",), False),
    "no adapter is loaded": (("lora_id",), None),
    "the server decides which engine computes what": (
        ("bootstrap_pair_key", "decode_tp_size", "kv_router_hint", "http_worker_ipc"), None,
    ),
    "only chats and responses reason": (("max_thinking_tokens",), None),
    "a chat's template decides it": (("require_reasoning",), False),
    "only /v1/responses has it": (("background",), False),
    "send the header traceparent": (("external_trace_header",), None),
    "the server's clock decides it": (("received_time",), None),
    "send each item as a prompt": (("multi_item_delimiter_indices",), None),
}  # fmt: skip
# … and all of them
ABSENT: dict[str, tuple[Any, str]] = {
    **{name: (default, why) for why, (names, default) in OF_GENERATE.items() for name in names},
    "enable_response_messages": (False, "rendered messages are not returned"),
    "previous_input_messages": (None, "send them as input"),
    "previous_response": (None, "use previous_response_id, or send its items as input"),
    "return_prompt_token_ids": (False, "use return_token_ids"),
    "reasoning": (None, "use reasoning_effort"),
    "use_beam_search": (False, "only chats and completions take it"),
    "length_penalty": (1.0, "only chats and completions take it"),
    "logit_bias": (None, "only chats and completions take it"),
    "skip_special_tokens": (True, "special tokens are never shown here"),
    "include_stop_str_in_output": (False, "only chats and completions take it"),
    "ignore_eos": (False, "only chats and completions take it"),
    "structured_outputs": (None, "use text.format"),
    "request_id": (None, "send the header X-Request-Id"),
    "session_id": (None, "nothing is kept of a session"),
    "chat_template_kwargs": (None, "thinking and output_config set what templates know"),
    "reasoning_effort": (None, "use chat_template_kwargs"),
    "tool_choice": (None, "belongs to chats"),
    "thinking_token_budget": (None, "only chats take it"),
    **{name: (default, WHY[name]) for name, default in DEFAULT_ONLY.items()},
}

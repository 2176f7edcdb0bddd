"""What vLLM's and SGLang's HTTP servers accept: endpoints, and the fields of their bodies with their defaults.

Owns these lists and nothing else: what Shoal does with each is decided by its own bodies; compat.py writes it down.
A field stands as name=default (JSON without spaces), or as its name alone where it is required.
"""

# ---- fields of generation requests

VLLM_SAMPLING = """
frequency_penalty=null logit_bias=null max_tokens=null n=1 presence_penalty=null response_format=null seed=null stop=[]
stream=false stream_options=null temperature=null top_p=null user=null use_beam_search=false top_k=null min_p=null
repetition_penalty=null watermarking=null length_penalty=1.0 stop_token_ids=[] include_stop_str_in_output=false
ignore_eos=false min_tokens=0 skip_special_tokens=true spaces_between_special_tokens=true truncate_prompt_tokens=null
truncation_side=null prompt_logprobs=null logprob_token_ids=null allowed_token_ids=null bad_words=[]
structured_outputs=null priority=0 request_id=null session_id=null return_tokens_as_token_ids=null
return_token_ids=null routed_experts_prompt_start=0 return_token_offsets=false return_mm_kwargs=true cache_salt=null
kv_transfer_params=null ec_transfer_params=null vllm_xargs=null repetition_detection=null thinking_token_budget=null
stream_interval=null logits_processors=[] guided_json=null guided_regex=null guided_choice=null guided_grammar=null
"""
SGLANG_SAMPLING = """
frequency_penalty=0.0 logit_bias=null n=1 presence_penalty=0.0 response_format=null seed=null stop=null stream=false
stream_options=null temperature=null top_p=null user=null return_hidden_states=false return_routed_experts=false
routed_experts_start_len=0 return_cached_tokens_details=false return_token_ids=false top_k=-1 min_p=0.0 min_tokens=0
regex=null ebnf=null repetition_penalty=1.0 stop_token_ids=null stop_regex=null no_stop_trim=false ignore_eos=false
skip_special_tokens=true lora_path=null session_id=null session_params=null custom_params=null
custom_logit_processor=null images_config=null bootstrap_host=null bootstrap_port=null bootstrap_room=null
routed_dp_rank=null disagg_prefill_dp_rank=null data_parallel_rank=null rid=null extra_key=null cache_salt=null
ngram_corpus_id=null priority=null
"""
VLLM_TOKENIZE = """
model=null prompt=null messages=null add_special_tokens=true return_token_strs=false add_generation_prompt=true
continue_final_message=false chat_template=null chat_template_kwargs=null media_io_kwargs=null mm_processor_kwargs=null
tools=null
"""
SGLANG_TOKENIZE = """
model=null prompt=null messages=null tools=null tool_choice=null reasoning_effort=null continue_final_message=false
chat_template_kwargs=null add_special_tokens=true
"""

FIELDS: dict[str, dict[str, str]] = {  # path → server → fields
    "/v1/completions": {
        "vLLM": VLLM_SAMPLING
        + "model=null prompt echo=false logprobs=null suffix=null prompt_embeds=null add_special_tokens=true",
        "SGLang": SGLANG_SAMPLING
        + "model=null prompt best_of=null echo=false logprobs=null max_tokens=16 suffix=null json_schema=null "
        + "custom_labels=null",
    },
    "/v1/chat/completions": {
        "vLLM": VLLM_SAMPLING
        + "model=null messages logprobs=false top_logprobs=0 max_completion_tokens=null tools=null "
        + 'tool_choice="none" reasoning_effort=null include_reasoning=true parallel_tool_calls=true echo=false '
        + "add_generation_prompt=true continue_final_message=false add_special_tokens=false documents=null "
        + "chat_template=null chat_template_kwargs=null media_io_kwargs=null mm_processor_kwargs=null "
        + "return_prompt_text=null",
        "SGLang": SGLANG_SAMPLING
        + "model=null messages logprobs=false top_logprobs=null max_tokens=null max_completion_tokens=null tools=null "
        + "tool_choice=null parallel_tool_calls=true return_prompt_token_ids=false return_meta_info=false "
        + "reasoning_effort=null reasoning=null task=null continue_final_message=false separate_reasoning=true "
        + "stream_reasoning=true chat_template_kwargs=null max_dynamic_patch=null min_dynamic_patch=null "
        + "use_audio_in_video=false input_ids=null",
    },
    "/v1/responses": {
        "vLLM": "background=false include=null input instructions=null max_output_tokens=null max_tool_calls=null "
        + "metadata=null model=null logit_bias=null parallel_tool_calls=true previous_response_id=null prompt=null "
        + 'reasoning=null service_tier="auto" store=true stream=false temperature=null text=null tool_choice="auto" '
        + 'tools=[] top_logprobs=0 top_p=null top_k=null truncation="disabled" user=null skip_special_tokens=true '
        + "include_stop_str_in_output=false prompt_cache_key=null request_id=null mm_processor_kwargs=null "
        + "priority=0 cache_salt=null enable_response_messages=false previous_input_messages=null "
        + "previous_response=null structured_outputs=null repetition_penalty=null seed=null stop=[] "
        + "ignore_eos=false vllm_xargs=null",
        "SGLang": "background=false include=null input instructions=null max_output_tokens=null max_tool_calls=null "
        + "metadata=null model=null parallel_tool_calls=true previous_response_id=null reasoning=null "
        + 'service_tier="auto" store=true stream=false temperature=null text=null tool_choice="auto" tools=[] '
        + 'top_logprobs=0 top_p=null truncation="disabled" user=null chat_template_kwargs=null request_id=null '
        + "session_id=null priority=0 extra_key=null cache_salt=null ngram_corpus_id=null frequency_penalty=0.0 "
        + "presence_penalty=0.0 stop=null top_k=null min_p=null repetition_penalty=null",
    },
    "/v1/messages": {
        "vLLM": "model messages max_tokens metadata=null output_config=null stop_sequences=null stream=false "
        + "system=null temperature=null tool_choice=null tools=null top_k=null top_p=null kv_transfer_params=null "
        + "chat_template_kwargs=null",
        "SGLang": "model messages max_tokens metadata=null stop_sequences=null stream=false system=null "
        + "temperature=null tool_choice=null tools=null top_k=null top_p=null thinking=null output_config=null",
    },
    "/v1/messages/count_tokens": {
        "vLLM": "model messages system=null tool_choice=null tools=null chat_template_kwargs=null",
        "SGLang": "model messages system=null tool_choice=null tools=null thinking=null",
    },
    "/tokenize": {"vLLM": VLLM_TOKENIZE, "SGLang": SGLANG_TOKENIZE},
    "/detokenize": {"vLLM": "model=null tokens", "SGLang": "model=null tokens skip_special_tokens=true"},
}

ENDPOINTS: dict[str, str] = {  # "METHOD path" → servers that have it
    "POST /v1/completions": "vLLM SGLang",
    "POST /v1/chat/completions": "vLLM SGLang",
    "POST /v1/chat/completions/batch": "vLLM",
    "POST /v1/completions/render": "vLLM",
    "POST /v1/chat/completions/render": "vLLM",
    "POST /v1/responses": "vLLM SGLang",
    "GET /v1/responses/{id}": "vLLM SGLang",
    "POST /v1/responses/{id}/cancel": "vLLM SGLang",
    "POST /v1/messages": "vLLM SGLang",
    "POST /v1/messages/count_tokens": "vLLM SGLang",
    "GET /v1/models": "vLLM SGLang",
    "GET /v1/models/{model}": "SGLang",
    "POST /tokenize": "vLLM SGLang",
    "POST /detokenize": "vLLM SGLang",
    "POST /v1/tokenize": "SGLang",
    "POST /v1/detokenize": "SGLang",
    "GET /tokenizer_info": "vLLM",
    "POST /api/chat": "SGLang",
    "POST /api/generate": "SGLang",
    "GET /api/tags": "SGLang",
    "POST /api/show": "SGLang",
    "GET /health": "vLLM SGLang",
    "GET /health_generate": "SGLang",
    "GET /ping": "vLLM",
    "POST /ping": "vLLM",
    "GET /load": "vLLM",
    "GET /get_load": "SGLang",
    "GET /version": "vLLM",
    "GET /server_info": "vLLM SGLang",
    "GET /get_server_info": "SGLang",
    "GET /model_info": "SGLang",
    "GET /get_model_info": "SGLang",
    "GET /metrics": "vLLM SGLang",
    "POST /reset_prefix_cache": "vLLM",
    "POST /flush_cache": "SGLang",
    "POST /generate": "SGLang",
    "POST /inference/v1/generate": "vLLM",
    "POST /invocations": "vLLM SGLang",
    "POST /v1/embeddings": "vLLM SGLang",
    "POST /v2/embed": "vLLM",
    "POST /encode": "SGLang",
    "POST /pooling": "vLLM",
    "POST /classify": "vLLM SGLang",
    "POST /v1/classify": "SGLang",
    "POST /score": "vLLM",
    "POST /v1/score": "vLLM SGLang",
    "POST /rerank": "vLLM",
    "POST /v1/rerank": "vLLM SGLang",
    "POST /v2/rerank": "vLLM",
    "POST /v1/decisions": "vLLM SGLang",
    "POST /v1/audio/transcriptions": "vLLM SGLang",
    "POST /v1/audio/translations": "vLLM",
    "GET /v1/realtime": "vLLM SGLang",
    "POST /v1/load_lora_adapter": "vLLM",
    "POST /v1/unload_lora_adapter": "vLLM",
    "POST /load_lora_adapter": "SGLang",
    "POST /unload_lora_adapter": "SGLang",
    "POST /reset_mm_cache": "vLLM",
    "POST /reset_encoder_cache": "vLLM",
    "POST /sleep": "vLLM",
    "POST /wake_up": "vLLM",
    "GET /is_sleeping": "vLLM",
    "POST /pause": "vLLM",
    "POST /resume": "vLLM",
    "POST /pause_generation": "SGLang",
    "POST /continue_generation": "SGLang",
    "POST /abort_request": "SGLang",
    "POST /scale_elastic_ep": "vLLM",
    "POST /collective_rpc": "vLLM",
    "POST /start_profile": "vLLM SGLang",
    "POST /stop_profile": "vLLM SGLang",
    "POST /update_weights_from_disk": "SGLang",
    "POST /update_weights_from_tensor": "SGLang",
    "POST /update_weights_from_distributed": "SGLang",
    "POST /release_memory_occupation": "SGLang",
    "POST /resume_memory_occupation": "SGLang",
    "POST /open_session": "SGLang",
    "POST /close_session": "SGLang",
    "POST /set_internal_state": "SGLang",
    "POST /start_expert_distribution_record": "SGLang",
    "POST /stop_expert_distribution_record": "SGLang",
    "POST /dump_expert_distribution_record": "SGLang",
    "POST /parse_function_call": "SGLang",
    "POST /separate_reasoning": "SGLang",
}

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
SGLANG_GENERATE = """
rid=null session_id=null text=null input_ids=null input_embeds=null image_data=null video_data=null audio_data=null
mm_hashes=null mm_content_hashes=null use_audio_in_video=false video_config=null sampling_params=null
return_logprob=null logprob_start_len=null top_logprobs_num=null token_ids_logprob=null return_sampling_mask=null
return_text_in_logprobs=false return_flat_raw_top_logprobs=false return_flat_raw_top_logprobs_b64=false stream=false
log_metrics=true return_hidden_states=false return_routed_experts=false routed_experts_start_len=0
return_indexer_topk=false modalities=null session_params=null lora_path=null lora_id=null custom_logit_processor=null
positional_embed_overrides=null bootstrap_host=null bootstrap_port=null bootstrap_room=null bootstrap_pair_key=null
decode_tp_size=null routed_dp_rank=null data_parallel_rank=null disagg_prefill_dp_rank=null kv_router_hint=null
routing_key=null conversation_id=null http_worker_ipc=null background=false require_reasoning=false
max_thinking_tokens=null priority=null extra_key=null no_logs=false custom_labels=null return_bytes=false
return_entropy=false return_prompt_token_ids=false external_trace_header=null received_time=null
need_wait_for_mm_inputs=null num_items_assigned=null encoder_urls=null max_dynamic_patch=null min_dynamic_patch=null
image_max_dynamic_patch=null video_max_dynamic_patch=null images_config=null multi_item_delimiter_indices=null
cache_salt=null
"""
SGLANG_GENERATE_SAMPLING = """
max_new_tokens=128 stop=null stop_token_ids=null stop_regex=null temperature=1.0 top_p=1.0 top_k=-1 min_p=0.0
frequency_penalty=0.0 presence_penalty=0.0 repetition_penalty=1.0 min_new_tokens=0 n=1 json_schema=null regex=null
ebnf=null structural_tag=null ignore_eos=false skip_special_tokens=true spaces_between_special_tokens=true
no_stop_trim=false custom_params=null stream_interval=null logit_bias=null sampling_seed=null
"""

FIELDS: dict[str, dict[str, str]] = {  # path, and a field of its body → server → fields
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
    "/generate": {"SGLang": SGLANG_GENERATE},
    "/generate sampling_params": {"SGLang": SGLANG_GENERATE_SAMPLING},
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
    "GET /ping": "vLLM SGLang",
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
    "POST /generate_from_file": "SGLang",
    "POST /vertex_generate": "SGLang",
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
    "POST /abort_requests": "vLLM",
    "GET /is_paused": "vLLM",
    "POST /scale_elastic_ep": "vLLM",
    "POST /is_scaling_elastic_ep": "vLLM",
    "POST /fault_tolerance/apply": "vLLM",
    "GET /fault_tolerance/status": "vLLM",
    "POST /init_weight_transfer_engine": "vLLM",
    "POST /start_weight_update": "vLLM",
    "POST /start_draft_weight_update": "vLLM",
    "POST /update_weights": "vLLM",
    "POST /finish_weight_update": "vLLM",
    "POST /update_weight_version": "vLLM SGLang",
    "GET /weight_info": "vLLM",
    "POST /weight_checker": "vLLM",
    "GET /get_world_size": "vLLM",
    "POST /collective_rpc": "vLLM",
    "POST /start_profile": "vLLM SGLang",
    "POST /stop_profile": "vLLM SGLang",
    "POST /update_weights_from_disk": "SGLang",
    "POST /update_weights_from_tensor": "SGLang",
    "POST /update_weights_from_distributed": "SGLang",
    "POST /update_weights_from_ipc": "SGLang",
    "POST /init_weights_update_group": "SGLang",
    "POST /destroy_weights_update_group": "SGLang",
    "POST /init_weights_send_group_for_remote_instance": "SGLang",
    "POST /send_weights_to_remote_instance": "SGLang",
    "POST /get_weights_by_name": "SGLang",
    "GET /get_weight_version": "SGLang",
    "GET /weight_version": "SGLang",
    "POST /weights_checker": "SGLang",
    "POST /release_memory_occupation": "SGLang",
    "POST /resume_memory_occupation": "SGLang",
    "POST /open_session": "SGLang",
    "POST /close_session": "SGLang",
    "POST /set_internal_state": "SGLang",
    "POST /configure_logging": "SGLang",
    "POST /set_trace_level": "SGLang",
    "POST /freeze_gc": "SGLang",
    "POST /slow_down": "SGLang",
    "POST /hicache/storage-backend/clear": "SGLang",
    "PUT /hicache/storage-backend": "SGLang",
    "DELETE /hicache/storage-backend": "SGLang",
    "GET /hicache/storage-backend": "SGLang",
    "POST /clear_hicache_storage_backend": "SGLang",
    "POST /add_external_corpus": "SGLang",
    "POST /remove_external_corpus": "SGLang",
    "GET /list_external_corpora": "SGLang",
    "POST /load_lora_adapter_from_tensors": "SGLang",
    "GET /v1/loads": "SGLang",
    "POST /start_expert_distribution_record": "SGLang",
    "POST /stop_expert_distribution_record": "SGLang",
    "POST /dump_expert_distribution_record": "SGLang",
    "POST /parse_function_call": "SGLang",
    "POST /separate_reasoning": "SGLang",
}

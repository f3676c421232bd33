"""What vLLM's users can give, with vLLM's defaults: keywords of `LLM(...)`, flags of `vllm serve`. From memory of its 0.11."""

from __future__ import annotations

import json
from typing import Any

# Keywords of LLM(...), which are those of its EngineArgs; some are of versions before.
LLM: dict[str, Any] = dict(
    additional_config={}, allowed_local_media_path="", allowed_media_domains=None, async_scheduling=False, block_size=None,
    calculate_kv_scales=False, code_revision=None, collect_detailed_traces=None, compilation_config={}, config_format="auto",
    convert="auto", cpu_offload_gb=0, cuda_graph_sizes=[], data_parallel_address=None, data_parallel_backend="mp",
    data_parallel_external_lb=False, data_parallel_hybrid_lb=False, data_parallel_rank=None, data_parallel_rpc_port=None,
    data_parallel_size=1, data_parallel_size_local=None, data_parallel_start_rank=None, decode_context_parallel_size=1,
    default_mm_loras=None, disable_async_output_proc=False, disable_cascade_attn=False, disable_chunked_mm_input=False,
    disable_custom_all_reduce=False, disable_hybrid_kv_cache_manager=False, disable_log_stats=False,
    disable_mm_preprocessor_cache=False, disable_sliding_window=False, distributed_executor_backend=None, download_dir=None,
    dtype="auto", enable_chunked_prefill=None, enable_dbo=False, enable_eplb=False, enable_expert_parallel=False,
    enable_lora=False, enable_lora_bias=False, enable_multimodal_encoder_data_parallel=False, enable_prefix_caching=None,
    enable_prompt_adapter=False, enable_prompt_embeds=False, enable_sleep_mode=False, enforce_eager=False, eplb_config={},
    fully_sharded_loras=False, generation_config="auto", gpu_memory_utilization=0.9, guided_decoding_backend="auto",
    hf_config_path=None, hf_overrides={}, hf_token=None, ignore_patterns=None, interleave_mm_strings=False,
    kv_cache_dtype="auto", kv_cache_memory_bytes=None, kv_events_config=None, kv_sharing_fast_prefill=False,
    kv_transfer_config=None, limit_mm_per_prompt={}, load_format="auto", logits_processor_pattern=None, logits_processors=None,
    logprobs_mode="raw_logprobs", long_prefill_token_threshold=0, lora_dtype="auto", lora_extra_vocab_size=256,
    mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", max_cpu_loras=None, max_logprobs=20, max_long_partial_prefills=1,
    max_lora_rank=16, max_loras=1, max_model_len=None, max_num_batched_tokens=None, max_num_partial_prefills=1,
    max_num_seqs=None, max_parallel_loading_workers=None, max_seq_len_to_capture=8192, media_io_kwargs={},
    mm_encoder_tp_mode="weights", mm_processor_cache_gb=4, mm_processor_kwargs=None, model_impl="auto",
    model_loader_extra_config={}, multi_step_stream_outputs=True, num_gpu_blocks_override=None, num_lookahead_slots=0,
    num_redundant_experts=0, num_scheduler_steps=1, otlp_traces_endpoint=None, override_attention_dtype=None,
    override_generation_config={}, override_neuron_config={}, override_pooler_config=None, pipeline_parallel_size=1,
    pooler_config=None, preemption_mode=None, prefix_caching_hash_algo="sha256", pt_load_map_location="cpu",
    quantization=None, ray_workers_use_nsight=False, reasoning_parser="", revision=None, rope_scaling={}, rope_theta=None,
    runner="auto", safetensors_load_strategy="lazy", scheduler_delay_factor=0.0, scheduling_policy="fcfs", seed=0,
    served_model_name=None, show_hidden_metrics_for_version=None, skip_mm_profiling=False, skip_tokenizer_init=False,
    speculative_config=None, stream_interval=1, structured_outputs_config=None, swap_space=4, task="auto",
    tensor_parallel_size=1, tokenizer=None, tokenizer_mode="auto", tokenizer_pool_extra_config=None, tokenizer_pool_size=0,
    tokenizer_pool_type="ray", tokenizer_revision=None, trust_remote_code=False, use_tqdm_on_load=True,
    use_v2_block_manager=True, worker_cls="auto", worker_extension_cls="",
)  # fmt: skip
# What `vllm serve` has besides.
SERVE: dict[str, Any] = dict(
    allow_credentials=False, allowed_headers=["*"], allowed_methods=["*"], allowed_origins=["*"], api_key=None,
    api_server_count=1, chat_template=None, chat_template_content_format="auto",
    disable_fastapi_docs=False, disable_frontend_multiprocessing=False, disable_log_requests=False,
    disable_uvicorn_access_log=False, enable_auto_tool_choice=False, enable_force_include_usage=False,
    enable_log_outputs=False, enable_log_requests=False, enable_prompt_tokens_details=False, enable_request_id_headers=False,
    enable_server_load_tracking=False, enable_ssl_refresh=False, enable_tokenizer_info_endpoint=False,
    exclude_tools_when_tool_choice_none=False, headless=False, host=None, log_config_file=None, lora_modules=None,
    max_log_len=None, middleware=[], port=8000, prompt_adapters=None, response_role="assistant",
    return_tokens_as_token_ids=False, root_path=None, ssl_ca_certs=None, ssl_cert_reqs=0, ssl_certfile=None,
    ssl_keyfile=None, tool_call_parser=None, tool_parser_plugin="", tool_server=None, trust_request_chat_template=False,
    uds=None, uvicorn_log_level="info",
)  # fmt: skip


def flags(name: str, default: Any) -> list[str]:
    """The default as words of a command line; none where only leaving the flag out says it."""
    flag = name.replace("_", "-")
    if default in (None, "", []):
        return []
    if isinstance(default, bool):
        return [f"--{flag}" if default else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(default) if isinstance(default, list) else str(default)]

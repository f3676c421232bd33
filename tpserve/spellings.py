"""By which names settings go: flags, keys of a file, keywords in Python; and the names other engines have besides.

A *key* is a name with underscores and without leading dashes: `--max-num-seqs` and `max-num-seqs` are `max_num_seqs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from tpserve.settings import Flag, Settings, UserError

# Settings of other engines without counterpart here, by key. Of each kind there are switches and others.
# These change nothing that a client sees, or only what is not built: taken whatever is given, with a note.
SWITCHES_WITHOUT_EFFECT = {
    "async_scheduling", "disable_async_output_proc", "disable_cascade_attn", "disable_chunked_mm_input",
    "disable_custom_all_reduce", "disable_frontend_multiprocessing", "disable_hybrid_kv_cache_manager",
    "disable_log_requests", "disable_log_stats", "disable_mm_preprocessor_cache", "disable_uvicorn_access_log",
    "enable_auto_tool_choice", "enable_log_outputs", "enable_log_requests", "enable_prompt_tokens_details",
    "enable_request_id_headers", "enforce_eager", "multi_step_stream_outputs", "ray_workers_use_nsight",
    "skip_mm_profiling", "use_tqdm_on_load", "use_v2_block_manager",
}  # fmt: skip
WITHOUT_EFFECT = {
    "api_server_count", "attention_backend", "code_revision", "compilation_config", "cuda_graph_sizes",
    "cudagraph_capture_sizes", "data_parallel_address", "data_parallel_rpc_port", "guided_decoding_backend",
    "ignore_patterns", "limit_mm_per_prompt", "long_lora_scaling_factors", "lora_dtype", "lora_extra_vocab_size",
    "mamba_cache_dtype", "mamba_ssm_cache_dtype", "master_addr", "master_port", "max_cpu_loras",
    "max_cudagraph_capture_size", "max_log_len", "max_lora_rank", "max_loras", "max_parallel_loading_workers",
    "max_prompt_adapter_token", "max_prompt_adapters", "max_seq_len_to_capture", "media_io_kwargs", "mm_encoder_tp_mode",
    "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_kwargs", "num_scheduler_steps",
    "prefix_caching_hash_algo", "preemption_mode", "pt_load_map_location", "safetensors_load_strategy", "swap_space",
    "tokenizer_pool_extra_config", "tokenizer_pool_size", "tokenizer_pool_type", "uvicorn_log_level",
}  # fmt: skip
# These values ask for what happens here anyway; others are refused.
NEUTRAL: dict[str, tuple[str, ...]] = {
    "allowed_headers": ('["*"]', "['*']", "*"),
    "allowed_methods": ('["*"]', "['*']", "*"),
    "chat_template_content_format": ("auto", "string"),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": ("0",),
    "data_parallel_backend": ("mp",),
    "data_parallel_rank": ("0",),
    "data_parallel_size": ("1",),
    "data_parallel_size_local": ("1",),
    "decode_context_parallel_size": ("1",),
    "distributed_executor_backend": ("mp", "uni"),
    "generation_config": ("auto",),
    "logprobs_mode": ("raw_logprobs",),
    "long_prefill_token_threshold": ("0",),
    "max_logprobs": ("20",),
    "max_long_partial_prefills": ("1",),
    "max_num_partial_prefills": ("1",),
    "model_impl": ("auto",),
    "nnodes": ("1",),
    "node_rank": ("0",),
    "num_lookahead_slots": ("0",),
    "num_redundant_experts": ("0",),
    "pipeline_parallel_size": ("1",),
    "prefill_context_parallel_size": ("1",),
    "response_role": ("assistant",),
    "runner": ("auto", "generate"),
    "scheduler_delay_factor": ("0",),
    "ssl_cert_reqs": ("0",),
    "stream_interval": ("1",),
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "worker_cls": ("auto",),
}
# These are refused by name, unless they are off or empty.
SWITCHES_NOT_BUILT = {
    "allow_credentials", "calculate_kv_scales", "data_parallel_external_lb", "data_parallel_hybrid_lb",
    "disable_fastapi_docs", "disable_sliding_window", "enable_dbo", "enable_eplb", "enable_expert_parallel",
    "enable_force_include_usage", "enable_lora", "enable_lora_bias", "enable_multimodal_encoder_data_parallel",
    "enable_prompt_adapter", "enable_prompt_embeds", "enable_server_load_tracking", "enable_sleep_mode",
    "enable_ssl_refresh", "enable_tokenizer_info_endpoint", "exclude_tools_when_tool_choice_none",
    "fully_sharded_loras", "headless", "interleave_mm_strings",
    "kv_sharing_fast_prefill", "mm_encoder_only", "return_tokens_as_token_ids", "skip_tokenizer_init",
    "trust_request_chat_template",
}  # fmt: skip
NOT_BUILT = {
    "additional_config", "allowed_local_media_path", "allowed_media_domains", "collect_detailed_traces",
    "data_parallel_start_rank", "default_mm_loras",
    "eplb_config", "hf_config_path", "hf_overrides", "io_processor_plugin", "kv_events_config", "kv_transfer_config",
    "log_config_file", "logits_processor_pattern", "logits_processors", "lora_modules", "middleware",
    "model_loader_extra_config", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min", "num_gpu_blocks_override",
    "num_speculative_tokens", "otlp_traces_endpoint",
    "override_attention_dtype", "override_generation_config", "override_neuron_config", "override_pooler_config",
    "pooler_config", "prompt_adapters", "quantization", "quantization_param_path",
    "reasoning_parser_plugin", "rope_scaling", "rope_theta", "root_path", "scheduler_cls",
    "show_hidden_metrics_for_version", "speculative_config", "speculative_draft_model_path", "speculative_eagle_topk",
    "speculative_model", "speculative_num_draft_tokens", "speculative_num_steps", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile",
    "structured_outputs_config", "tokenizer", "tokenizer_revision", "tool_parser_plugin",
    "tool_server", "uds", "worker_extension_cls",
}  # fmt: skip
_SHORT = {
    "-O": "compilation_config", "-asc": "api_server_count", "-dp": "data_parallel_size",
    "-pp": "pipeline_parallel_size", "-q": "quantization",
}  # fmt: skip

_SWITCHES = SWITCHES_WITHOUT_EFFECT | SWITCHES_NOT_BUILT
FOREIGN = _SWITCHES | WITHOUT_EFFECT | NEUTRAL.keys() | NOT_BUILT
_NOTHING = {"", "none", "{}", "[]", "()", "false"}  # what asks for nothing, in Python's spelling or as text
_OFF = _NOTHING | {"0", "no", "off"}


def key(name: str) -> str:
    """The name without what a flag adds to it."""
    return name.lstrip("-").replace("-", "_")


def _flag(field: str) -> Flag:
    return next(detail for detail in Settings.model_fields[field].metadata if isinstance(detail, Flag))


FLAGS = {field: _flag(field) for field in Settings.model_fields}
FIELDS = {key(name): field for field, flag in FLAGS.items() for name in flag.names}  # every key and its setting


def is_foreign(name: str) -> bool:
    """Whether it is a setting of other engines that has no counterpart here."""
    return _foreign_key(name) in FOREIGN


def foreign_flags() -> dict[tuple[str, ...], bool]:
    """The flags of each foreign setting, and whether it is a switch."""
    short = {name: flag for flag, name in _SHORT.items()}
    flags = {name: f"--{name.replace('_', '-')}" for name in sorted(FOREIGN)}
    return {(flag, *filter(None, [short.get(name)])): name in _SWITCHES for name, flag in flags.items()}


def foreign_note(name: str, value: object, model: str | None = None) -> str | None:
    """What to tell who gives a foreign setting, if anything; `model` is the model as it is given beside it.

    Raises UserError for a value that would change something.
    """
    setting, text = _foreign_key(name), str(value).strip()
    if text.lower() in (_OFF if setting in _SWITCHES else _NOTHING) or (setting == "tokenizer" and text == model):
        return None
    if setting in SWITCHES_WITHOUT_EFFECT | WITHOUT_EFFECT:
        return f"{name} has no effect here"
    neutral = NEUTRAL.get(setting)
    if neutral is None:
        raise unknown(name)
    if _plain_number(text) not in neutral:
        raise UserError(f"{name} {text:.100} is not supported yet, only {' or '.join(neutral)}")
    return None


def _foreign_key(name: str) -> str:
    return _SHORT.get(name, key(name))


def _plain_number(text: str) -> str:
    """1.0 as 1; other text in small letters."""
    return text.removesuffix(".0").lower()


def unknown(name: str, known: Iterable[str] = FIELDS, cutoff: float = 0.75) -> UserError:
    """The refusal of a name that is no setting, with the nearest of the known ones, of a likeness of `cutoff` at least."""
    if is_foreign(name):
        instead = ", only speculative ngram is" if "specul" in name or "ngram" in name else ""
        return UserError(f"{name} is not supported yet{instead}")
    if key(name) == "hf_token":
        return UserError(f"{name}: others could read a token that stands there; set HF_TOKEN, or run hf auth login")
    nearest = get_close_matches(name, known, 1, cutoff)
    meant = f"did you mean {nearest[0]}?" if nearest else "tpserve launch --help lists the settings"
    return UserError(f"no such setting: {name}; {meant}")

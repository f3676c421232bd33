"""The kinds of model that are read from GGUF files: their tensors' names, their configs, and what the format changes.

Sources: the format's own tables (gguf.constants, gguf.tensor_mapping), and what llama.cpp computes where a file is silent.
"""

from __future__ import annotations

import torch

from tpserve.checkpoint.gguf import rotary
from tpserve.checkpoint.gguf.family import Config, Family
from tpserve.checkpoint.gguf.file import Content
from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.settings import UserError

ROPE_FACTORS = "rope_freqs.weight"
_RMS_EPS, _LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


def of(metadata: Metadata) -> Family:
    """The family of a file. Raises UserError for another architecture."""
    if metadata.architecture not in FAMILIES:
        kind, known = metadata.architecture, ", ".join(FAMILIES)
        raise UserError(f"{metadata.file}: GGUF architecture {kind!r} is not supported; those that are: {known}")
    return FAMILIES[metadata.architecture]


def _sizes(metadata: Metadata) -> Config:
    heads = metadata.size("attention.head_count")
    config = {
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "max_position_embeddings": metadata.size("context_length"),
    }
    config["head_dim"] = metadata.size("attention.key_length", config["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := metadata.size(key, config["head_dim"])) != config["head_dim"]:
            raise UserError(f"{metadata.file}: {key} is {size} in heads of {config['head_dim']}; only all of it is supported")
    return config


def _llama(content: Content) -> Config:
    metadata = content.metadata
    config = _sizes(metadata) | {"hidden_act": "silu", "rms_norm_eps": metadata.number(_RMS_EPS)}
    rope = rotary.parameters(metadata)
    if ROPE_FACTORS in content.tensors:
        if rope["rope_type"] != "default":
            raise UserError(f"{metadata.file}: has two rotary scalings, {rope['rope_type']} and tensor {ROPE_FACTORS}")
        rope = rotary.llama3(rope["rope_theta"], content.tensors[ROPE_FACTORS].rows()[0], metadata.file)
    return config | {"rope_parameters": rope}


def _qwen(content: Content) -> Config:
    metadata = content.metadata
    return _sizes(metadata) | {
        "hidden_act": "silu",
        "rms_norm_eps": metadata.number(_RMS_EPS),
        "rope_parameters": rotary.parameters(metadata),
        "use_sliding_window": False,  # the format has no key for Qwen's window
    }


def _gemma3(content: Content) -> Config:
    metadata = content.metadata
    config = _sizes(metadata)
    layers, period = config["num_hidden_layers"], metadata.size("attention.sliding_window_pattern", 6)
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    # The 27B, known by its 62 layers, is the only one of its kind to scale by hidden / heads.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": metadata.number(_RMS_EPS),
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)],
        "rope_parameters": {"full_attention": rotary.parameters(metadata), "sliding_attention": local},
    }


def _command_r(content: Content) -> Config:
    metadata = content.metadata
    return _sizes(metadata) | {
        "hidden_act": "silu",
        "layer_norm_eps": metadata.number(_LAYER_EPS),
        "logit_scale": metadata.number("logit_scale"),
        "rope_parameters": rotary.parameters(metadata),
    }


def _gptneox(content: Content) -> Config:
    metadata = content.metadata
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim, rotated = metadata.size("attention.key_length", hidden // heads), metadata.size("rope.dimension_count")
    part = rotated / head_dim
    if int(head_dim * part) != rotated:  # which is how transformers reads it
        part = (rotated + 0.5) / head_dim
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": metadata.size("context_length"),
        "hidden_act": "gelu",
        "layer_norm_eps": metadata.number(_LAYER_EPS),
        "use_parallel_residual": metadata.of_model("use_parallel_residual", bool, True),
        "rope_parameters": rotary.parameters(metadata) | {"partial_rotary_factor": part},
    }


def pairs_in_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys (heads * d, ...) with each head's rotary pairs in two halves.

    In the format's Llama files the two rows of a pair are neighbours (2 i and 2 i + 1); Hugging Face's are i and i + d / 2.
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of all queries, then all keys, then all values (3 * heads * d, ...) as query, key and value of each head in turn."""
    return rows.reshape(3, heads, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ATTENTION_BIAS = {"attention_bias": tuple(f"{module}.bias" for module in _ATTENTION)}

FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        outer=_OUTER,
        layers="model.layers",
        blocks=_NORMS | _ATTENTION | _MLP,
        config=_llama,
        optional=_ATTENTION_BIAS | {"mlp_bias": tuple(f"{module}.bias" for module in _MLP)},
        aside=(ROPE_FACTORS,),
        keys=(_RMS_EPS,),
        rows={
            "attn_q": lambda rows, config: pairs_in_halves(rows, config["num_attention_heads"]),
            "attn_k": lambda rows, config: pairs_in_halves(rows, config["num_key_value_heads"]),
        },
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        outer=_OUTER,
        layers="model.layers",
        blocks=_NORMS | _ATTENTION | _MLP,
        config=_qwen,
        biased=("attn_q", "attn_k", "attn_v"),
        keys=(_RMS_EPS,),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        outer=_OUTER,
        layers="model.layers",
        blocks=_NORMS | _ATTENTION | _QK_NORMS | _MLP,
        config=_qwen,
        optional=_ATTENTION_BIAS,
        keys=(_RMS_EPS,),
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        outer=_OUTER,
        layers="model.layers",
        blocks={
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
        | _ATTENTION
        | _QK_NORMS
        | _MLP,
        config=_gemma3,
        optional=_ATTENTION_BIAS,
        keys=(_RMS_EPS, "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"),
        norm_offset=-1.0,  # the format keeps 1 + weight, by which the layer multiplies
    ),
    "command-r": Family(
        architecture="CohereForCausalLM",
        model_type="cohere",
        outer=_OUTER,
        layers="model.layers",
        blocks={"attn_norm": "input_layernorm"} | _ATTENTION | _QK_NORMS | _MLP,
        config=_command_r,
        optional=_ATTENTION_BIAS | {"use_qk_norm": tuple(f"{module}.weight" for module in _QK_NORMS)},
        keys=(_LAYER_EPS, "logit_scale"),
    ),
    "gptneox": Family(
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        outer={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        layers="gpt_neox.layers",
        blocks={
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        config=_gptneox,
        biased=("output_norm", "attn_norm", "ffn_norm", "ffn_up", "ffn_down"),
        optional={"attention_bias": ("attn_qkv.bias", "attn_output.bias")},
        keys=(_LAYER_EPS, "use_parallel_residual"),
        rows={"attn_qkv": lambda rows, config: by_head(rows, config["num_attention_heads"])},
    ),
}

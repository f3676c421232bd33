"""A GGUF file written as a Hugging Face folder: config, bfloat16 weights in safetensors, tokenizer.

Reads Llama models with SmolLM's byte-level tokenizer and without rotary scaling; all else is refused by
name. Quantized weights are expanded in float32 and rounded once to bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from tpserve.settings import UserError

Read = Callable[[str], Any]  # metadata key -> value

_WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, which exists. Raises UserError for what is not read yet."""
    reader = GGUFReader(source)

    def read(key: str) -> Any:
        return reader.fields[key].contents()

    _refuse_unknown(source.name, reader)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    special = {f"{name}_token": read(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL.items()}
    ids = {f"{name}_id": id for name, id in special.items() if name != "unk_token"}
    config = _config(read) | ids | {"tie_word_embeddings": tied}

    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(read, special))
    _tokenizer(read).save(str(folder / "tokenizer.json"))
    weights = _weights(reader, config["num_attention_heads"], config["num_key_value_heads"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _refuse_unknown(name: str, reader: GGUFReader) -> None:
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        found = reader.fields[key].contents() if key in reader.fields else None
        if found != value:
            raise UserError(f"{name}: {key} is {found}; only {value} is read so far")
    for key in reader.fields:
        if ".rope.scaling." in key:
            raise UserError(f"{name}: rotary scaling ({key}) is not read yet")


def _config(read: Read) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": read("llama.embedding_length"),
        "intermediate_size": read("llama.feed_forward_length"),
        "num_hidden_layers": read("llama.block_count"),
        "num_attention_heads": read("llama.attention.head_count"),
        "num_key_value_heads": read("llama.attention.head_count_kv"),
        "head_dim": read("llama.rope.dimension_count"),
        "vocab_size": len(read("tokenizer.ggml.tokens")),
        "max_position_embeddings": read("llama.context_length"),
        "rope_theta": _shortest(read("llama.rope.freq_base")),
        "rope_scaling": None,
        "rms_norm_eps": _shortest(read("llama.attention.layer_norm_rms_epsilon")),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same in float32, as which GGUF keeps it: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))


def _weights(reader: GGUFReader, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Every tensor by its Hugging Face name, in bfloat16."""
    out = {}
    for tensor in tqdm(reader.tensors, desc="convert", unit="tensor", disable=None):  # None: only on a terminal
        # GGUF lists dimensions fastest first; in memory that is the (out, in) row-major matrix.
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = unpermute(weight, heads if "attn_q" in tensor.name else kv_heads)
        out[hf_name(tensor.name)] = torch.tensor(weight).to(torch.bfloat16)
    return out


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. Raises UserError for a tensor that no Llama has."""
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER:
        raise UserError(f"GGUF tensor {name} is not known")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Query or key weights (heads * d, in) with each head's rows in halves again.

    In GGUF's Llama files the two rows of a rotary pair are neighbours (row 2 i and 2 i + 1); Hugging
    Face's rotary embedding pairs row i with row i + d / 2.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tokenizer(read: Read) -> Tokenizer:
    """SmolLM's tokenizer: each digit by itself first, then GPT-2's split into bytes' words.

    Without the first, spaces before a digit would be split otherwise than in training.
    """
    tokens = read("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, read("tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == TokenType.CONTROL])
    return tokenizer


def _tokenizer_config(read: Read, special: dict[str, int]) -> dict[str, Any]:
    tokens = read("tokenizer.ggml.tokens")
    return {
        # GPT2Tokenizer, a likely name, would make transformers drop the digits rule.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": read("llama.context_length"),
        **{name: tokens[id] for name, id in special.items()},
        "chat_template": read("tokenizer.chat_template"),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

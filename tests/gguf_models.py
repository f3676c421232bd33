"""A tiny model of every kind that is read from GGUF files, with only such settings as the format has keys for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import random_model, write

_SIZES: dict[str, Any] = dict(
    vocab_size=211, hidden_size=54, intermediate_size=103, num_hidden_layers=2, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=256, bos_token_id=None, eos_token_id=0, pad_token_id=None,
)  # fmt: skip
_NEOX = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"} | dict(
    hidden_size=80, num_attention_heads=5, rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
)
# Seven layers: the sixth is the first to see the whole text. GGUF has no key for the scale of the scores.
_GEMMA = dict(
    head_dim=16, num_attention_heads=4, num_key_value_heads=1, hidden_size=48, sliding_window=8, num_hidden_layers=7,
    query_pre_attn_scalar=16,
)  # fmt: skip
_LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)

# Name -> model_type and what differs from the sizes above.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", dict(head_dim=8, tie_word_embeddings=True)),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True, rope_parameters={"rope_theta": 1e6})),
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "llama-llama3": ("llama", dict(head_dim=64, rope_parameters=_LLAMA3 | dict(original_max_position_embeddings=64))),
    "mistral": ("mistral", dict(head_dim=16, sliding_window=None)),
    "qwen2": ("qwen2", dict(use_sliding_window=False)),
    "qwen2-yarn": (
        "qwen2",
        dict(max_position_embeddings=64, rope_parameters=_YARN | dict(beta_fast=16.0, attention_factor=1.2)),
    ),
    "qwen3": ("qwen3", dict(head_dim=16, tie_word_embeddings=True)),
    "gemma3": ("gemma3_text", _GEMMA),
    "gemma3-linear": (
        "gemma3_text",
        _GEMMA | dict(rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e5, factor=8.0))),
    ),
    "cohere": ("cohere", dict(logit_scale=0.3)),
    "cohere-qk-norm": ("cohere", dict(use_qk_norm=True, num_attention_heads=3)),
    "gpt-neox": ("gpt_neox", _NEOX),
    "gpt-neox-sequential": ("gpt_neox", _NEOX | dict(use_parallel_residual=False, attention_bias=False)),
}


def write_folder(name: str, folder: Path) -> Path:
    """Write the model as a Hugging Face folder in float32. Returns the folder."""
    from transformers import AutoConfig

    model_type, changes = MODELS[name]
    write(random_model(AutoConfig.for_model(model_type, **_SIZES | changes)), folder)
    _add_merge(folder / "tokenizer.json")
    return folder


def _add_merge(path: Path) -> None:
    """Give the tokenizer a merge, in place of its last letter: a file without any is none that is read."""
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    vocab["th"] = vocab.pop(last)
    content["model"]["merges"] = [["t", "h"]]
    path.write_text(json.dumps(content))

"""A tiny model of every family, as a config of transformers; nothing in them is even, windows are short."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny import Tiny, random_model, write

WINDOW = 8
ORIGINAL = 16  # tokens before rotary scaling

_SIZES: dict[str, Any] = dict(
    vocab_size=211, hidden_size=48, intermediate_size=3 * 32 + 7, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=0, pad_token_id=None,
)  # fmt: skip
_NEOX = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"} | dict(
    hidden_size=40, num_attention_heads=5, num_hidden_layers=2
)
_GEMMA = dict(
    head_dim=16, num_attention_heads=4, num_key_value_heads=1, sliding_window=WINDOW, query_pre_attn_scalar=24,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)  # fmt: skip

# Sizes at which ranks hold unequal parts: of 3 groups, 7 blocks and a short one, a prime vocabulary; one KV head
# for all ranks; one head, so that the other ranks hold nothing of attention.
LLAMAS = {
    "llama": Tiny(heads=9, kv_heads=3, hidden=54, intermediate=7 * 32 + 5, vocab=211),
    "one-kv-head": Tiny(
        heads=4, kv_heads=1, hidden=40, intermediate=3 * 32 + 1, vocab=131, attention_bias=False, mlp_bias=False, tie=True
    ),
    "one-head": Tiny(heads=1, kv_heads=1, head_dim=16, hidden=48, intermediate=5 * 32 + 3, vocab=127, tie=True),
}

# Name -> model_type and what differs from the sizes above.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", dict(sliding_window=WINDOW, head_dim=16)),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)),
    "qwen3": ("qwen3", dict(head_dim=16, attention_bias=False, tie_word_embeddings=True)),
    "gemma3": ("gemma3_text", _GEMMA),
    "cohere": ("cohere", dict(logit_scale=0.3)),
    "cohere-qk-norm": ("cohere", dict(use_qk_norm=True, attention_bias=True, num_attention_heads=3, num_key_value_heads=3)),
    "gpt-neox": ("gpt_neox", _NEOX | dict(rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5})),
    "gpt-neox-sequential": ("gpt_neox", _NEOX | dict(use_parallel_residual=False, attention_bias=False)),
}
FAMILIES = (*LLAMAS, *OTHERS)

_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)
_YARN = dict(factor=4.0, original_max_position_embeddings=ORIGINAL)

# Name -> model and its rotary scaling; positions in the tests reach beyond ORIGINAL.
ROTARIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", {}, dict(rope_type="linear", factor=4.0)),
    "llama3": ("llama", dict(head_dim=16), dict(rope_type="llama3", rope_theta=500.0, **_LLAMA3)),
    "yarn": ("qwen2", dict(head_dim=16), dict(rope_type="yarn", rope_theta=1000.0, **_YARN)),
    "yarn-untruncated": (
        "mistral",
        dict(head_dim=16, sliding_window=None),
        dict(rope_type="yarn", truncate=False, beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.3, **_YARN),
    ),
    "dynamic": ("llama", {}, dict(rope_type="dynamic", factor=2.0)),
    "partial-linear": ("gpt_neox", _NEOX, dict(rope_type="linear", factor=3.0, partial_rotary_factor=0.5)),
    "cohere-llama3": ("cohere", {}, dict(rope_type="llama3", **_LLAMA3)),
    "gemma3-linear": ("gemma3_text", _GEMMA, dict(full_attention=dict(rope_type="linear", rope_theta=1e5, factor=8.0))),
}


def write_family(name: str, folder: Path) -> Path:
    """Write the tiny model of that name; returns its folder."""
    if name in LLAMAS:
        return LLAMAS[name].write(folder)
    return write(random_model(_config(*OTHERS[name])), folder)


def write_rotary(name: str, folder: Path) -> Path:
    """Write a tiny model with that rotary embedding, spelled as transformers 5 does; returns its folder."""
    model_type, changes, rope = ROTARIES[name]
    return write(random_model(_config(model_type, changes | dict(rope_parameters=rope))), folder)


def spell_as_before(folder: Path) -> None:
    """Spell config.json's rotary parameters as transformers 4 did: `rope_theta` apart, `type` for `rope_type`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    names = ("rotary_emb_base", "rotary_pct") if config["model_type"] == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    for old, new in zip(names, ("rope_theta", "partial_rotary_factor")):
        if new in rope:
            config[old] = rope.pop(new)
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    path.write_text(json.dumps(config))


def _config(model_type: str, changes: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **_SIZES | changes)

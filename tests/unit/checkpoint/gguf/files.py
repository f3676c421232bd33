"""A tiny Llama as a GGUF file, with whatever a test wants to be different in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH = 4, 2, 16, 64, 96
TOKENS = ["<end>", "Ġ", "a", "1", "ĠĠ", "<end_of_turn>"]
KEYS: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDTH,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [TokenType.CONTROL, *[TokenType.NORMAL] * 4, TokenType.CONTROL],
    "tokenizer.ggml.merges": ["Ġ Ġ"],
    "tokenizer.ggml.eos_token_id": 0,
}
Raw = tuple[np.ndarray, GGMLQuantizationType]  # a tensor's bytes (rows, bytes of a row) and their type


def random_tensors(hidden: int = HIDDEN) -> dict[str, np.ndarray]:
    """All tensors of the model with a tied head, in float32, as Hugging Face orders their rows."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(TOKENS), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, hidden),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, hidden),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, hidden),
        "blk.0.attn_output": (hidden, HEADS * HEAD_DIM),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_gate": (WIDTH, hidden),
        "blk.0.ffn_up": (WIDTH, hidden),
        "blk.0.ffn_down": (hidden, WIDTH),
    }
    random = np.random.default_rng(5)
    return {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, tensors: Mapping[str, np.ndarray | Raw] | None = None, **changes: Any) -> Path:
    """Write the file: `tensors` instead of random ones, KEYS with `changes` ("__" for "."; None leaves a key out)."""
    keys = KEYS | {name.replace("__", "."): value for name, value in changes.items()}
    writer = GGUFWriter(path, keys.pop("general.architecture", "llama"))
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(
                key, value, _type(value), GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            )
    for name, tensor in (random_tensors() if tensors is None else tensors).items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type(value: Any) -> GGUFValueType:
    return GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)

"""A tiny GGUF file converted, against values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tpserve.checkpoint.gguf_conversion import convert, hf_name, unpermute
from tpserve.settings import UserError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, WIDTH = 4, 2, 16, 64, 96
TOKENS = ["<end>", "Ġ", "a", "1", "ĠĠ", "Ġ1"]
Q4_1, Q8_0 = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as GGUF keeps them: row i and row i + d / 2 become neighbours."""
    out = np.empty_like(weight)
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        rows = weight[head * 2 * half : (head + 1) * 2 * half]
        out[head * 2 * half : (head + 1) * 2 * half : 2] = rows[:half]
        out[head * 2 * half + 1 : (head + 1) * 2 * half : 2] = rows[half:]
    return out


def expand_q4_1(data: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Q4_1 by its definition: blocks of 32 weights d * q + m; d, m in half, then 16 bytes of low and high nibbles."""
    blocks = data.reshape(-1, 20)
    scales = blocks[:, :4].copy().view("<f2").astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scales[:, :1] * nibbles + scales[:, 1:]).reshape(shape).astype(np.float32)


def write_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, Any]], **changes: Any) -> None:
    writer = GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if "rope_scaling" in changes:
        writer.add_rope_scaling_factor(changes["rope_scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (len(TOKENS) - 1)])
    writer.add_token_merges(["Ġ Ġ", "Ġ 1"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(0)
    writer.add_chat_template("{{ messages }}")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    return {
        "token_embd": draw(len(TOKENS), HIDDEN),
        "output_norm": draw(HIDDEN),
        "blk.0.attn_norm": draw(HIDDEN),
        "blk.0.attn_q": draw(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": draw(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": draw(KV_HEADS * HEAD_DIM, HIDDEN),
    }


@pytest.fixture
def converted(tmp_path: Path, weights: dict[str, np.ndarray]) -> Path:
    """The folder: q, k and v in Q4_1, all else in float32."""
    tensors: dict[str, tuple[np.ndarray, Any]] = {}
    for name, weight in weights.items():
        heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS}.get(name)
        stored = weight if heads is None else permuted(weight, heads)
        is_quantized = "attn_" in name and weight.ndim == 2
        tensors[f"{name}.weight"] = (quantize(stored, Q4_1), Q4_1) if is_quantized else (stored, None)
    write_gguf(tmp_path / "tiny.gguf", tensors)
    folder = tmp_path / "model"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)
    return folder


def test_convert_names_and_rounds_every_tensor(converted: Path, weights: dict[str, np.ndarray]) -> None:
    names = {
        "model.embed_tokens.weight": "token_embd",
        "model.norm.weight": "output_norm",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v",
    }
    written = load_file(converted / "model.safetensors")
    assert written.keys() == names.keys()
    for name, source in names.items():
        expected = weights[source]
        if "proj" in name:  # a row is quantized by itself, so its place does not matter
            expected = expand_q4_1(quantize(expected, Q4_1), (expected.shape[0], expected.shape[1]))
        assert torch.equal(written[name], torch.from_numpy(expected).bfloat16()), name


def test_convert_writes_config_and_special_ids(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    expected = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    expected |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 6, "max_position_embeddings": 128}
    assert config.items() >= expected.items()
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert json.loads((converted / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def test_convert_splits_digits_off_before_bytes_are_merged(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("  1").tokens == ["ĠĠ", "1"]  # without the rule: "Ġ", "Ġ1"
    assert tokenizer.encode("a<end>").ids == [2, 0]


def test_convert_with_a_head_of_its_own_is_not_tied(tmp_path: Path) -> None:
    embedding, head = np.ones((6, HIDDEN), np.float32), np.zeros((6, HIDDEN), np.float32)
    write_gguf(tmp_path / "x.gguf", {"token_embd.weight": (quantize(embedding, Q8_0), Q8_0), "output.weight": (head, None)})
    convert(tmp_path / "x.gguf", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].abs().max() == 0


def test_unpermute_puts_the_halves_of_each_head_together() -> None:
    rows = np.array([[0], [4], [1], [5], [2], [6], [3], [7]])  # one head of 8: pairs (0, 4), (1, 5), ...
    assert unpermute(np.vstack([rows, rows + 8]), 2).ravel().tolist() == list(range(16))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architecture": "qwen2"}, "general.architecture is qwen2; only llama"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is llama-bpe; only smollm"),
        ({"rope_scaling": 2.0}, "rotary scaling"),
    ],
)
def test_convert_of_another_kind_of_model_is_refused_by_name(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    write_gguf(tmp_path / "x.gguf", {"token_embd.weight": (np.ones((6, HIDDEN), np.float32), None)}, **change)
    with pytest.raises(UserError, match=text):
        convert(tmp_path / "x.gguf", tmp_path)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q_norm.weight"])
def test_hf_name_of_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=name):
        hf_name(name)

"""A tiny GGUF file converted, against values worked out by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES, Keys
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from safetensors.torch import load_file

from tests.unit.checkpoint.gguf import files
from tpserve.checkpoint import generation
from tpserve.checkpoint.gguf import weights
from tpserve.checkpoint.gguf.convert import convert, describe, sampling, token_ids, write_weights
from tpserve.checkpoint.gguf.families import by_head, pairs_in_halves
from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.sampling import SamplingDefaults
from tpserve.settings import UserError

Kind = GGMLQuantizationType
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder to convert into."""
    made = tmp_path / "model"
    made.mkdir()
    return made


def config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as GGUF keeps them: row i and row i + d / 2 become neighbours."""
    out = np.empty_like(weight)
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        rows = weight[head * 2 * half : (head + 1) * 2 * half]
        out[head * 2 * half : (head + 1) * 2 * half : 2] = rows[:half]
        out[head * 2 * half + 1 : (head + 1) * 2 * half : 2] = rows[half:]
    return out


def expand_q4_1(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Q4_1 by its definition: blocks of 32 weights d * q + m; d, m in half, then 16 bytes of low and high nibbles."""
    blocks = data.reshape(-1, 20)
    scales = blocks[:, :4].copy().view("<f2").astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scales[:, :1] * nibbles + scales[:, 1:]).reshape(shape).astype(np.float32)


def test_convert_names_reorders_and_rounds_every_tensor(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 5 * files.HIDDEN)  # rows at once: the last are fewer
    original = files.random_tensors()
    heads = {"blk.0.attn_q.weight": files.HEADS, "blk.0.attn_k.weight": files.KV_HEADS}
    stored = {name: permuted(weight, heads[name]) if name in heads else weight for name, weight in original.items()}
    is_matrix = {name: weight.ndim == 2 for name, weight in original.items()}
    tensors = {name: (quantize(weight, Kind.Q4_1), Kind.Q4_1) if is_matrix[name] else weight for name, weight in stored.items()}
    convert([files.write(tmp_path / "x.gguf", tensors)], folder)
    written = load_file(folder / "model.safetensors")
    assert written.keys() == set(NAMES.values())
    for name, weight in original.items():  # a row is quantized by itself, so its place does not matter
        expected = expand_q4_1(quantize(weight, Kind.Q4_1), weight.shape) if is_matrix[name] else weight
        assert torch.equal(written[NAMES[name]], torch.from_numpy(expected).bfloat16()), name


def test_convert_writes_config_and_special_ids(tmp_path: Path, folder: Path) -> None:
    convert([files.write(tmp_path / "x.gguf", tokenizer__ggml__padding_token_id=2)], folder)
    assert config(folder) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 6,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 2,
        "dtype": "float32",
    }
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 0, "pad_token_id": 2}
    assert (folder / "tokenizer.json").is_file()


def test_sampling_parameters_of_the_makers_are_those_of_generation_config(tmp_path: Path, folder: Path) -> None:
    given = dict(temp=0.3, top_p=0.8, top_k=20, min_p=0.05, penalty_repeat=1.1, mirostat=2)
    path = files.write(tmp_path / "x.gguf", **{f"general__sampling__{name}": value for name, value in given.items()})
    describe([path], folder)
    found = generation.defaults(folder)
    assert found == SamplingDefaults(temperature=0.3, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1)
    shown, missed = generation.notes(folder, found)
    assert "temperature 0.3, top_p 0.8, top_k 20, min_p 0.05, repetition_penalty 1.1" in shown
    assert missed.endswith("not applied: mirostat")


def test_every_sampling_parameter_of_the_format_is_applied_or_noted(folder: Path) -> None:
    names = [value for name, value in vars(Keys.General).items() if name.startswith("SAMPLING_")]
    assert len(names) > 10
    for name in names:
        written = sampling(Metadata("x.gguf", {name: 0.5}))
        (folder / generation.FILE).write_text(json.dumps(dict.fromkeys(written, 1)))
        assert written.keys() <= {"xtc_threshold", "mirostat_tau", "mirostat_eta"} or generation.notes(
            folder, generation.defaults(folder)
        ), name  # those three do nothing by themselves


def test_convert_with_a_head_of_its_own_is_not_tied(tmp_path: Path, folder: Path) -> None:
    head = np.zeros((len(files.TOKENS), files.HIDDEN), np.float32)
    convert([files.write(tmp_path / "x.gguf", files.random_tensors() | {"output.weight": head})], folder)
    assert config(folder)["tie_word_embeddings"] is False
    assert load_file(folder / "model.safetensors")["lm_head.weight"].abs().max() == 0


BLOCKS = [kind for kind in Kind if kind.name[0] in "QT" or kind.name.startswith(("IQ", "MX", "NV"))]
REFUSED = (Kind.Q8_1, Kind.Q8_K, Kind.Q1_0, Kind.I8)


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind not in REFUSED], ids=lambda kind: kind.name)
def test_convert_expands_every_block_type(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 1)
    elements, size = GGML_QUANT_SIZES[kind]
    width = 256 // elements * size
    data = np.random.default_rng(1).integers(0, 60, (files.WIDTH, width), np.uint8)  # scales in half precision stay finite
    tensors = files.random_tensors(256) | {"blk.0.ffn_up.weight": (data, kind)}
    sizes = dict(llama__embedding_length=256, llama__attention__key_length=files.HEAD_DIM)
    convert([files.write(tmp_path / "x.gguf", tensors, **sizes)], folder)
    written = load_file(folder / "model.safetensors")[NAMES["blk.0.ffn_up.weight"]]
    assert torch.equal(written, torch.from_numpy(dequantize(data, kind)).to(written.dtype))
    assert written.abs().max() > 0


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_convert_of_another_block_type_is_refused_by_name(tmp_path: Path, folder: Path, kind: Kind) -> None:
    elements, size = GGML_QUANT_SIZES[kind]
    data = np.zeros((files.WIDTH, 256 // elements * size), np.int8 if kind == Kind.I8 else np.uint8)
    path = files.write(tmp_path / "x.gguf", files.random_tensors() | {"blk.0.ffn_up.weight": (data, kind)})
    with pytest.raises(UserError, match=f"{path}: block type {kind.name} is not supported"):
        convert([path], folder)
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ({"token_embd": Kind.F16, "blk": Kind.F16}, torch.float16),
        ({"token_embd": Kind.F32, "blk": Kind.F16}, torch.float16),
        ({"token_embd": Kind.F16, "blk": Kind.BF16}, torch.bfloat16),
        ({"token_embd": Kind.F16, "blk": Kind.Q8_0}, torch.bfloat16),
        ({"token_embd": Kind.Q8_0, "blk": Kind.F32}, torch.float32),
    ],
)
def test_convert_keeps_the_precision_of_most_weights(
    tmp_path: Path, folder: Path, kinds: dict[str, Kind], dtype: torch.dtype
) -> None:
    tensors: dict[str, Any] = files.random_tensors()
    for name, weight in tensors.items():
        if weight.ndim == 2:
            kind = kinds[name.split(".")[0]]
            tensors[name] = (quantize(weight, kind), kind)
    convert([files.write(tmp_path / "x.gguf", tensors)], folder)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    assert config(folder)["dtype"] == str(dtype).removeprefix("torch.")


def test_convert_of_a_large_model_writes_several_files_and_their_index(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SHARD_BYTES", 30_000)
    convert([files.write(tmp_path / "x.gguf")], folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    assert len(shards) > 3
    assert set(index["weight_map"].values()) == set(shards)
    total = 0
    for name, weight in files.random_tensors().items():
        with safe_open(folder / index["weight_map"][NAMES[name]], "pt") as file:
            assert file.get_tensor(NAMES[name]).shape == weight.shape
        total += weight.nbytes
    assert index["metadata"]["total_size"] == total


def test_convert_without_room_on_the_disk_is_refused_with_both_numbers(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int = 1234

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    needed = sum(weight.nbytes for weight in files.random_tensors().values())
    with pytest.raises(UserError, match=f"take {needed:,} bytes once converted, .* has 1,234 free; .*TPSERVE_CACHE"):
        write_weights([files.write(tmp_path / "x.gguf")], folder)
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            dict(general__architecture="phi3"),
            "architecture 'phi3' is not supported; those that are: llama, qwen2, qwen3, gemma3",
        ),
        (dict(llama__expert_count=8), r"llama\.expert_count = 8 is not supported"),
        (dict(llama__attention__sliding_window=32), r"llama\.attention\.sliding_window = 32 is not supported"),
        (dict(llama__rope__dimension_count=8), r"rope\.dimension_count is 8 in heads of 16"),
        (dict(llama__attention__value_length=8), r"attention\.value_length is 8 in heads of 16"),
        (dict(llama__attention__head_count=[4, 2]), r"llama\.attention\.head_count is \[4, 2\]; only one number"),
        (dict(llama__context_length=None), r"has no llama\.context_length"),
        (dict(llama__block_count=2), r"has no tensor blk\.1\.attn_norm\.weight"),
        (dict(llama__rope__scaling__type="su", llama__rope__scaling__factor=2.0), "rotary scaling of type 'su'"),
    ],
)
def test_convert_of_another_kind_of_model_is_refused_by_name(
    tmp_path: Path, folder: Path, changes: dict[str, Any], text: str
) -> None:
    path = files.write(tmp_path / "x.gguf", **changes)
    with pytest.raises(UserError, match=f"^{path}: .*{text}"):
        convert([path], folder)
    assert not any(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("blk.0.ffn_gate_exps.weight", r"blk\.0\.ffn_gate_exps\.weight is none of a LlamaForCausalLM"),
        ("blk.1.attn_q.weight", r"blk\.1\.attn_q\.weight is none"),
        ("rope_freqs.weight", r"factors in tensor rope_freqs\.weight"),
    ],
)
def test_convert_with_another_tensor_is_refused_by_name(tmp_path: Path, folder: Path, name: str, text: str) -> None:
    path = files.write(tmp_path / "x.gguf", files.random_tensors() | {name: np.ones(8, np.float32)})
    with pytest.raises(UserError, match=text):
        convert([path], folder)
    assert not any(folder.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_convert_without_a_tensor_is_refused_by_its_name(tmp_path: Path, folder: Path, name: str) -> None:
    tensors = files.random_tensors()
    del tensors[name]
    with pytest.raises(UserError, match=f"has no tensor {name}"):
        convert([files.write(tmp_path / "x.gguf", tensors)], folder)


def test_convert_with_a_bias_in_one_place_only_is_refused(tmp_path: Path, folder: Path) -> None:
    bias = np.ones(files.HEADS * files.HEAD_DIM, np.float32)
    with pytest.raises(UserError, match=r"has no tensor blk\.0\.attn_k\.bias"):
        convert([files.write(tmp_path / "x.gguf", files.random_tensors() | {"blk.0.attn_q.bias": bias})], folder)


def test_pairs_in_halves_puts_the_halves_of_each_head_together() -> None:
    rows = torch.tensor([[0], [4], [1], [5], [2], [6], [3], [7]])  # one head of 8: pairs (0, 4), (1, 5), ...
    assert pairs_in_halves(torch.cat([rows, rows + 8]), 2).flatten().tolist() == list(range(16))
    assert pairs_in_halves(rows.flatten(), 1).tolist() == list(range(8))  # a bias


def test_by_head_gives_each_head_its_query_key_and_value() -> None:
    rows = torch.tensor(
        [0, 1, 10, 11, 20, 21, 100, 101, 110, 111, 120, 121, 200, 201, 210, 211, 220, 221]
    )  # q, k, v of 3 heads
    assert by_head(rows, 3).tolist() == [0, 1, 100, 101, 200, 201, 10, 11, 110, 111, 210, 211, 20, 21, 120, 121, 220, 221]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"ggml.eos_token_id": 1, "ggml.bos_token_id": 2}, {"bos_token_id": 2, "eos_token_id": 1}),
        ({"ggml.eos_token_id": 4, "ggml.eot_token_id": 3, "ggml.eom_token_id": 4}, {"eos_token_id": [3, 4]}),
        ({"ggml.eos_token_id": 1, "chat_template": "{{ m }}<end_of_turn>"}, {"eos_token_id": [1, 5]}),
        ({"ggml.eos_token_id": 1, "chat_template": "{{ m }}</s>"}, {"eos_token_id": 1}),
    ],
)
def test_token_ids_end_an_answer_where_the_template_ends_a_turn(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    values = {f"tokenizer.{name}": value for name, value in keys.items()}
    assert token_ids(Metadata("x.gguf", values | {"tokenizer.ggml.tokens": files.TOKENS})) == expected

"""Config to spec, and the declared tensors against those that transformers really makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import Tiny
from tpserve.checkpoint import folder, headers
from tpserve.model import families
from tpserve.model.families import llama
from tpserve.model.spec import LayerSpec, Rotary
from tpserve.settings import UserError

CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}


@pytest.mark.parametrize(
    "tiny",
    [
        Tiny(),
        Tiny(attention_bias=False, mlp_bias=False, tie=True),
        Tiny(attention_bias=True, mlp_bias=False, heads=4, kv_heads=1, hidden=32),
        Tiny(attention_bias=False, mlp_bias=True, heads=4, kv_heads=4, hidden=32, layers=3),
    ],
)
def test_declared_tensors_are_those_of_transformers(tiny_folder: Callable[[Tiny], Path], tiny: Tiny) -> None:
    path = tiny_folder(tiny)
    spec = llama.spec(folder.read_json(path / "config.json"))
    declared = {name: param.shape for name, param, _ in families.tensors(spec)}
    assert declared == {name: stored.shape for name, stored in headers.scan(path).items()}


def test_spec_has_the_configs_values() -> None:
    spec = llama.spec(
        CONFIG
        | {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "mlp_bias": True}
        | {"tie_word_embeddings": True, "max_position_embeddings": 77, "attention_bias": True}
    )
    assert (spec.vocab_size, spec.hidden_size, spec.num_layers, spec.num_heads) == (100, 64, 2, 4)
    assert (spec.num_kv_heads, spec.head_dim, spec.intermediate_size, spec.max_position) == (2, 8, 96, 77)
    assert (spec.norm_eps, spec.layers) == (1e-5, (LayerSpec(Rotary(8, 5e5)),) * 2)
    assert (spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias, spec.tied) == (True, True, True, True)


def test_spec_fills_in_the_defaults_of_transformers() -> None:
    spec = llama.spec(CONFIG | {"head_dim": None, "num_key_value_heads": None})
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps) == (4, 16, 1e-6)
    assert spec.layers[0] == LayerSpec(Rotary(16, 10_000.0))
    assert not any((spec.qkv_bias, spec.attention_out_bias, spec.mlp_bias, spec.tied))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "wide"}, "hidden_size 'wide': must be a valid integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: must be greater"),
        ({"vocab_size": None}, "vocab_size None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": 7}, "rope_parameters 7"),
        ({"num_key_value_heads": 3}, "not a multiple of 3 key-value heads"),
        ({"num_attention_heads": 5}, "hidden_size 64 is not a multiple of 5"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
    ],
)
def test_invalid_values_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: ") as refusal:
        llama.spec(CONFIG | changes)
    assert named in str(refusal.value)


@pytest.mark.parametrize("field", CONFIG)
def test_missing_size_is_refused_by_name(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} is missing"):
        llama.spec({name: value for name, value in CONFIG.items() if name != field})

"""Rotary scaling from GGUF's keys and factors, against the formula of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tpserve.checkpoint.gguf import rotary
from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.settings import UserError


def metadata(**keys: Any) -> Metadata:
    values = {f"llama.rope.{name.replace('__', '.')}": value for name, value in keys.items()}
    return Metadata("x.gguf", values | {"general.architecture": "llama"})


def factors(theta: float, head_dim: int, **scaling: Any) -> np.ndarray:
    """By what transformers divides the frequencies, as GGUF keeps it."""
    rope = {"rope_type": "llama3", "rope_theta": theta, **scaling}
    config = LlamaConfig(
        head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=2**17, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize(
    ("theta", "head_dim", "factor", "high", "context"),
    [(5e5, 128, 8.0, 4.0, 8192), (5e5, 64, 32.0, 4.0, 8192), (1e4, 96, 3.0, 6.0, 1000)],  # the first two are published
)
def test_llama3_factors_give_the_scaling_that_made_them(
    theta: float, head_dim: int, factor: float, high: float, context: int
) -> None:
    scaling = dict(factor=factor, low_freq_factor=1.0, high_freq_factor=high, original_max_position_embeddings=context)
    found = rotary.llama3(theta, factors(theta, head_dim, **scaling), "x.gguf")
    assert found.pop("rope_type") == "llama3"
    assert found == pytest.approx({"rope_theta": theta, **scaling}, rel=1e-6)


def test_llama3_limits_are_found_up_to_a_common_factor() -> None:
    scaling = dict(factor=8.0, low_freq_factor=2.0, high_freq_factor=8.0, original_max_position_embeddings=8192)
    made = factors(5e5, 128, **scaling)
    found = rotary.llama3(5e5, made, "x.gguf")
    assert (found["high_freq_factor"], found["original_max_position_embeddings"]) == (4.0, 4096)
    names = [name for name in found if name not in ("rope_type", "rope_theta")]
    np.testing.assert_allclose(factors(5e5, 128, **{name: found[name] for name in names}), made, rtol=1e-6)


@pytest.mark.parametrize(
    "others",
    [
        np.ones(32),
        np.full(32, 4.0),
        np.linspace(1, 8, 32),
        np.linspace(8, 1, 32),
        np.where(np.arange(32) < 20, 1.0, 8.0),
    ],
)
def test_llama3_of_other_factors_is_refused(others: np.ndarray) -> None:
    with pytest.raises(UserError, match=r"^x\.gguf: the factors in tensor rope_freqs\.weight are not those"):
        rotary.llama3(5e5, others.astype(np.float32), "x.gguf")


def test_parameters_default_is_what_the_format_says() -> None:
    assert rotary.parameters(metadata()) == {"rope_type": "default", "rope_theta": 10_000.0}
    assert rotary.parameters(metadata(freq_base=5e5, scaling__type="none"))["rope_theta"] == 5e5


def test_parameters_name_linear_and_yarn_as_transformers_does() -> None:
    linear = metadata(scaling__type="linear", scaling__factor=4.0)
    assert rotary.parameters(linear) == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    yarn = metadata(
        scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=4096, scaling__yarn_beta_fast=16.0
    )
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0}
    assert rotary.parameters(yarn) == expected | {"rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (dict(scaling__type="longrope", scaling__factor=4.0), "'longrope' is not supported; those that are: linear, yarn"),
        (dict(scaling__type="linear"), r"has no llama\.rope\.scaling\.factor"),
        (dict(scaling__type="yarn", scaling__factor=4.0), r"has no llama\.rope\.scaling\.original_context_length"),
        (dict(scaling__type="linear", scaling__factor=0.0), r"llama\.rope\.scaling\.factor is 0\.0"),
    ],
)
def test_parameters_of_what_is_not_supported_are_refused_by_name(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        rotary.parameters(metadata(**keys))

"""Whatever a config.json holds: a model that can be computed, or one line of refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tpserve.model import families
from tpserve.model.families.config import Config
from tpserve.model.rotary import frequencies
from tpserve.model.spec import ModelSpec
from tpserve.settings import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "cohere", "gpt_neox")
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
REFUSED_IF_SET = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention", "mlp_bias")
ROPE = (
    "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned",
    "short_factor",
)  # fmt: skip

LISTS: list[Any] = [[], [0], ["full_attention"] * 4, ["sliding_attention"] * 4, [[["full_attention"]]]]
NUMBERS = [-1, 0, 1, 4, 2**31 - 1, 2**31, 10**30, 1.5, 1e308, -1e308, 5e-324, float("nan"), float("inf")]
ODD = st.sampled_from([None, True, False, "x", "", "1e308", *NUMBERS, *LISTS, {}, {"a": {"b": [1]}}])
VALUES = ODD | st.integers(1, 4096) | st.floats(0.5, 16.0)
KINDS = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn"]) | ODD
ROPES = st.fixed_dictionaries({}, optional={"rope_type": KINDS} | dict.fromkeys(ROPE, VALUES))
BY_KIND = st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), ROPES | ODD, max_size=2)
PLACES = st.sampled_from(["rope_scaling", "rope_parameters"])


def kinds(base: type[Config]) -> Iterator[type[Config]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


families.by_architecture()  # imports them all
FIELDS = sorted({field for kind in kinds(Config) for field in kind.model_fields}.union(REFUSED_IF_SET))


def check(family: str, config: dict[str, Any]) -> None:
    try:
        spec = families.family(family).spec(config)
    except UserError as error:
        refusal = str(error)
    else:
        return check_computes(spec)
    assert refusal.startswith("config.json: ")
    assert "\n" not in refusal


def check_computes(spec: ModelSpec) -> None:
    assert 1 <= spec.max_position < 2**31
    assert all(layer.window is None or 1 <= layer.window < 2**31 for layer in spec.layers)
    adapter = TypeAdapter(ModelSpec)
    assert adapter.validate_json(adapter.dump_json(spec)) == spec
    for rotary in {layer.rotary for layer in spec.layers}:
        assert torch.isfinite(frequencies(rotary)).all()


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def test_odd_values_are_computed_with_or_refused_in_a_line(family: str, changes: dict[str, Any]) -> None:
    check(family, SIZES | changes)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)
@given(place=PLACES, rope=ROPES | BY_KIND, theta=VALUES)
def test_odd_rotary_values_are_computed_with_or_refused_in_a_line(family: str, place: str, rope: Any, theta: Any) -> None:
    check(family, SIZES | {place: rope, "rope_theta": theta})


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)
@given(
    kind=st.sampled_from(["linear", "dynamic", "llama3", "yarn"]),
    rope=st.fixed_dictionaries(
        {},
        optional={
            "factor": st.floats(0.001, 10_000),
            "original_max_position_embeddings": st.integers(1, 2**31 - 1),
            "low_freq_factor": st.floats(0.001, 10_000),
            "high_freq_factor": st.floats(0.001, 10_000),
            "beta_fast": st.floats(0.001, 10_000),
            "beta_slow": st.floats(0.001, 10_000),
            "truncate": st.booleans(),
            "mscale": st.floats(0, 10_000),
            "mscale_all_dim": st.floats(0, 10_000),
            "rope_theta": st.floats(1, 1e15),
        },
    ),
)
def test_every_scaling_that_is_accepted_can_be_computed(family: str, kind: str, rope: dict[str, Any]) -> None:
    place = {"full_attention": rope | {"rope_type": kind}} if family == "gemma3" else rope | {"rope_type": kind}
    check(family, SIZES | {"rope_parameters": place})

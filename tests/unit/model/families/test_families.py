"""What holds for every family: its tensors are those of transformers, split without gap; what is not built is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.families import FAMILIES, ROTARIES, WINDOW, spell_as_before, write_family, write_rotary
from tpserve.checkpoint import folder, headers
from tpserve.model import families
from tpserve.model.spec import Linear, ModelSpec, Rotary
from tpserve.parallel.partition import largest_size, partition
from tpserve.settings import UserError

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "head_dim": 16,
}


LINEAR = {"rope_type": "linear", "factor": 8.0}
LOCAL = Rotary(16, 1e4)


def spec(family: str, **changes: Any) -> ModelSpec:
    return families.family(family).spec(SIZES | changes)


def spec_of(path: Path) -> ModelSpec:
    config = folder.read_json(path / "config.json")
    return families.for_architecture(folder.architecture(config), config).spec(config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("families")
    return {name: write_family(name, parent / name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_declared_tensors_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    declared = {tensor: param.shape for tensor, param, _ in families.tensors(spec_of(folders[name]))}
    assert declared == {tensor: stored.shape for tensor, stored in headers.scan(folders[name]).items()}


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(FAMILIES), data=st.data())
def test_held_parts_of_each_split_tile_the_tensor(folders: dict[str, Path], name: str, data: st.DataObject) -> None:
    spec = spec_of(folders[name])
    shards = partition(spec, data.draw(st.integers(1, min(5, largest_size(spec)))))
    for tensor, param, layer in families.tensors(spec):
        spans = [families.held(spec, shard, param, layer) for shard in shards]
        size = param.shape[param.dim]
        if param.split is None:
            assert all((span.start, span.stop) == (0, size) for span in spans), tensor
        elif param.split == "kv_heads":  # copied where there are fewer than ranks
            assert {i for span in spans for i in range(span.start, span.stop)} == set(range(size)), tensor
        else:
            assert [i for span in spans for i in range(span.start, span.stop)] == list(range(size)), tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_spec_survives_json(folders: dict[str, Path], name: str) -> None:
    adapter = TypeAdapter(ModelSpec)
    spec = spec_of(folders[name])
    assert adapter.validate_json(adapter.dump_json(spec)) == spec


@pytest.mark.parametrize("name", ROTARIES)
def test_both_spellings_of_rotary_scaling_are_one_model_and_survive_json(name: str, tmp_path: Path) -> None:
    path = write_rotary(name, tmp_path)
    spec = spec_of(path)
    assert any(layer.rotary.scaling for layer in spec.layers)
    spell_as_before(path)
    assert spec_of(path) == spec
    adapter = TypeAdapter(ModelSpec)
    assert adapter.validate_json(adapter.dump_json(spec)) == spec


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_found_by_architecture(folders: dict[str, Path], name: str) -> None:
    config = folder.read_json(folders[name] / "config.json")
    found = families.for_architecture(folder.architecture(config), config)
    assert found is families.family(spec_of(folders[name]).family)


def test_unknown_architecture_is_refused_with_those_that_work() -> None:
    with pytest.raises(UserError, match=r"'NoSuchLM' is not supported; supported: LlamaForCausalLM, .*GPTNeoXForCausalLM$"):
        families.for_architecture("NoSuchLM", {})


@pytest.mark.parametrize(("name", "instead"), [("QWenLMHeadModel", "Qwen3"), ("ChatGLMModel", "Llama")])
def test_architecture_that_needs_code_is_refused_with_what_to_use_instead(name: str, instead: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' needs code from its model folder, which is never run; use .*{instead}"):
        families.for_architecture(name, {})


def test_unknown_architecture_with_code_of_its_own_is_refused_as_such() -> None:
    config = {"auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}}
    with pytest.raises(UserError, match=r"'NewForCausalLM' needs code from its model folder, which is never run; use .*Qwen3"):
        families.for_architecture("NewForCausalLM", config)
    assert families.for_architecture("LlamaForCausalLM", config) is families.family("llama")


@pytest.mark.parametrize(
    ("name", "config", "instead"),
    [
        ("Gemma3ForConditionalGeneration", {"text_config": {"model_type": "gemma3_text"}}, "a Gemma3ForCausalLM model"),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "mistral"}}, "a MistralForCausalLM model"),
        ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {}}, "a model of a supported family"),
        ("AnyForConditionalGeneration", {"text_config": 5}, "a model of a supported family"),
        ("AnyForConditionalGeneration", {"text_config": {"model_type": ["llama"]}}, "a model of a supported family"),
    ],
)
def test_model_that_also_sees_is_refused_with_what_to_use_instead(name: str, config: dict[str, Any], instead: str) -> None:
    with pytest.raises(
        UserError, match=f"'{name}' is not of text only, and its text part alone is not read yet; use {instead}"
    ):
        families.for_architecture(name, config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [4096] * 4),
        ({"sliding_window": WINDOW}, [WINDOW] * 4),
        ({"sliding_window": None}, [None] * 4),
    ],
)
def test_windows_of_mistral_are_on_all_layers(changes: dict[str, Any], expected: list[int | None]) -> None:
    assert [layer.window for layer in spec("mistral", **changes).layers] == expected


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sliding_window": WINDOW}, [None] * 4),
        ({"sliding_window": WINDOW, "use_sliding_window": True}, [None] * 4),  # from layer 28 on
        ({"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [WINDOW]),
        (
            {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            [5, None] * 2,
        ),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
        ({"sliding_window": 0, "use_sliding_window": False}, [None] * 4),  # a window that is not used may be any
        ({"sliding_window": -1, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4),
    ],
)
def test_windows_of_qwen_begin_at_a_layer(family: str, changes: dict[str, Any], expected: list[int | None]) -> None:
    assert [layer.window for layer in spec(family, **changes).layers] == expected


def test_layers_of_gemma_are_local_but_for_every_sixth() -> None:
    layers = spec("gemma3", num_hidden_layers=7, sliding_window=WINDOW).layers
    assert [layer.window for layer in layers] == [WINDOW] * 5 + [None, WINDOW]
    assert [layer.rotary.theta for layer in layers] == [1e4] * 5 + [1e6, 1e4]


@pytest.mark.parametrize(
    ("changes", "full", "local"),
    [
        ({"rope_theta": 7e5, "rope_local_base_freq": 3.0}, Rotary(16, 7e5), Rotary(16, 3.0)),
        ({"rope_parameters": {"full_attention": LINEAR}, "rope_theta": 7e5}, Rotary(16, 7e5, Linear(8.0, 131_072)), LOCAL),
        ({"rope_scaling": LINEAR, "rope_parameters": {}}, Rotary(16, 1e6, Linear(8.0, 131_072)), LOCAL),
        ({"rope_scaling": LINEAR, "rope_parameters": {"full_attention": None}}, Rotary(16, 1e6, Linear(8.0, 131_072)), LOCAL),
        (
            {"rope_scaling": {"factor": 2}, "rope_parameters": {"full_attention": LINEAR | {"rope_theta": 9.0}}},
            Rotary(16, 9.0, Linear(2.0, 131_072)),
            LOCAL,
        ),
        ({"rope_scaling": {}, "rope_parameters": {"sliding_attention": {"rope_theta": 5.0}}}, Rotary(16, 1e6), Rotary(16, 5.0)),
    ],
)
def test_rotary_scaling_of_gemma_adds_to_the_global_layers(changes: dict[str, Any], full: Rotary, local: Rotary) -> None:
    layers = spec("gemma3", num_hidden_layers=6, **changes).layers
    assert [layer.rotary for layer in layers] == [local] * 5 + [full]


@pytest.mark.parametrize("places", [{"rope_theta": 5.0, "partial_rotary_factor": 0.25}, {}])
def test_rotary_of_neox_goes_by_its_own_names(places: dict[str, Any]) -> None:
    assert spec("gpt_neox", rotary_pct=0.5, rotary_emb_base=700.0, **places).layers[0].rotary == Rotary(8, 700.0)


@pytest.mark.parametrize(("rope", "expected"), [("dynamic", 8192), ("linear", 131_072), ("yarn", 131_072)])
def test_length_of_cohere_with_scaling_is_what_it_was_made_for_unless_that_changes_frequencies(
    rope: str, expected: int
) -> None:
    scaling = {"type": rope, "factor": 2.0}
    found = spec("cohere", max_position_embeddings=8192, model_max_length=131_072, rope_scaling=scaling)
    assert found.max_position == expected


def test_length_of_cohere_is_the_one_it_was_made_for() -> None:
    assert spec("cohere", max_position_embeddings=8192, model_max_length=131_072).max_position == 131_072


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("llama", {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters of type 'longrope'"),
        ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope_scaling of type 'mrope'"),
    ],
)
def test_what_is_not_built_is_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: .*not supported yet") as refusal:
        spec(family, **changes)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen2", {"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "there is no sliding_window"),
        ("gpt_neox", {"rotary_pct": 0.01}, "0 of 16 dimensions"),
        ("gpt_neox", {"rotary_pct": 0.2}, "3 of 16 dimensions"),
        ("gpt_neox", {"num_attention_heads": 5}, "hidden_size 64 is not a multiple of 5"),
        ("gpt_neox", {"rotary_pct": 2.0}, "rotary_pct 2.0: must be less than or equal to 1"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0 must be 1 to 2147483647, or null for none"),
        ("mistral", {"sliding_window": -1}, "sliding_window -1 must be"),
        ("qwen2", {"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window 0 must be"),
        ("gemma3", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers 2147483647: must be less than or equal to 10000"),
        ("gemma3", {"rope_parameters": {"full_attention": 5}}, "rope_parameters: full_attention 5: must be an object"),
        ("gemma3", {"rope_parameters": {"full": {}}}, "rope_parameters has 'full', but must have 'full_attention'"),
        ("gemma3", {"rope_parameters": LINEAR}, "rope_parameters has 'factor', but must have 'full_attention'"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"factor": 2.0}}},
            "rope_parameters: sliding_attention has 'factor', which is not known for type 'default'",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: ") as refusal:
        spec(family, **changes)
    assert named in str(refusal.value)

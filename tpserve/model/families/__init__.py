"""The model families. A family is a declaration: how its config becomes a `ModelSpec`, and what its tensors are.

The loader reads tensors by it, the checks compare a checkpoint with it, and the memory arithmetic adds it up.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard, Span
from tpserve.settings import UserError

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "cohere", "gpt_neox")  # modules of this package

_QWEN, _OTHER = "a Qwen2, Qwen2.5 or Qwen3 model", "a model of a supported family, such as Qwen3 or Llama"
_NEEDS_CODE = {  # architectures that transformers itself does not have, and what to use instead
    "QWenLMHeadModel": _QWEN,
    "ChatGLMModel": _OTHER,
    "ChatGLMForConditionalGeneration": _OTHER,
    "BaichuanForCausalLM": _OTHER,
    "BaiChuanForCausalLM": _OTHER,
    "InternLMForCausalLM": _OTHER,
    "InternLM2ForCausalLM": _OTHER,
    "InternLM3ForCausalLM": _OTHER,
    "XverseForCausalLM": _OTHER,
    "AquilaForCausalLM": _OTHER,
    "OrionForCausalLM": _OTHER,
    "TeleChatForCausalLM": _OTHER,
    "MiniCPMForCausalLM": _OTHER,
}


# How the rows of a checkpoint's tensor lie, where that differs from the decoder's (heads, head_dim):
# pairs: (heads * head_dim, ...), dimensions that rotate together are neighbours, and not in their head's two halves
# norm_pairs: the same for (heads, head_dim)
# qkv_by_head: (heads, [query, key, value], head_dim), and not first all queries, then all keys, then all values
Layout = Literal["plain", "pairs", "norm_pairs", "qkv_by_head"]


@dataclass(frozen=True)
class Param:
    """One of the decoder's parameters, and the tensor of the checkpoint that holds it."""

    name: str  # the decoder's
    tensor: str  # the checkpoint's, with "{layer}" for parameters of a layer
    shape: tuple[int, ...]  # of the whole model
    split: Literal["q_heads", "kv_heads", "columns", "vocab"] | None  # what the ranks divide; None: each holds it whole
    dim: int = 0  # the dimension that is divided
    offset: float = 0.0  # what the model adds to the tensor before it uses it
    layout: Layout = "plain"


class Family(Protocol):
    """What a family's module declares."""

    ARCHITECTURES: tuple[str, ...]  # as config.json names them

    def spec(self, config: dict[str, Any]) -> ModelSpec:
        """The model that a config.json describes. Raises UserError for what is invalid or not built."""

    def params(self, spec: ModelSpec) -> list[Param]:
        """Parameters outside the layers: embed, norm, head."""

    def layer_params(self, spec: ModelSpec) -> list[Param]:
        """Parameters of each layer, biases only where the model has them."""


def family(name: str) -> Family:
    """The family of `ModelSpec.family`."""
    return cast(Family, importlib.import_module(f"{__name__}.{name}"))


def by_architecture() -> dict[str, Family]:
    """The families by the names that config.json may give in `architectures`."""
    return {name: module for module in map(family, _FAMILIES) for name in module.ARCHITECTURES}


def for_architecture(name: str, config: Mapping[str, Any]) -> Family:
    """The family of the architecture that a config.json names. Raises UserError if none has it."""
    known = by_architecture()
    if name in known:
        return known[name]
    if name in _NEEDS_CODE or config.get("auto_map"):
        instead = _NEEDS_CODE.get(name, _OTHER)
        raise UserError(
            f"config.json: architecture {name!r} needs code from its model folder, which is never run; use {instead}"
        )
    if config.keys() & {"text_config", "vision_config", "audio_config"}:
        raise UserError(
            f"config.json: architecture {name!r} is not of text only, and its text part alone is not read yet;"
            f" use {_text_model(config.get('text_config'))}"
        )
    raise UserError(f"config.json: architecture {name!r} is not supported; supported: {', '.join(known)}")


def _text_model(text_config: Any) -> str:
    """What to use instead of a model that this is the text part of."""
    kind = text_config.get("model_type") if isinstance(text_config, dict) else None
    name = str(kind).removesuffix("_text")
    return f"a {family(name).ARCHITECTURES[0]} model" if name in _FAMILIES else _OTHER


def tensors(spec: ModelSpec) -> Iterator[tuple[str, Param, int | None]]:
    """Every tensor that the model needs: its name, parameter, and layer (None outside the layers)."""
    module = family(spec.family)
    for param in module.params(spec):
        yield param.tensor, param, None
    for layer in range(spec.num_layers):
        for param in module.layer_params(spec):
            yield param.tensor.format(layer=layer), param, layer


def embedding(spec: ModelSpec) -> str:
    """The name of the tensor that holds the embedding."""
    return next(param.tensor for param in family(spec.family).params(spec) if param.name == "embed")


def held(spec: ModelSpec, shard: Shard, param: Param, layer: int | None) -> Span:
    """The part of dimension `param.dim` that the rank holds; `layer` is None outside the layers."""
    if param.split is None:
        return Span(0, param.shape[param.dim])
    if layer is None:
        return shard.vocab
    if param.split == "columns":
        return shard.layers[layer].columns
    heads, total = (
        (shard.layers[layer].q_heads, spec.num_heads)
        if param.split == "q_heads"
        else (shard.layers[layer].kv_heads, spec.num_kv_heads)
    )
    rows = param.shape[param.dim] // total  # of a head
    return Span(heads.start * rows, heads.stop * rows)

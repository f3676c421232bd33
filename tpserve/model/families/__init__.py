"""The model families. A family is a declaration: how its config becomes a `ModelSpec`, and what its tensors are.

The loader reads tensors by it, the checks compare a checkpoint with it, and the memory arithmetic adds it up.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard, Span
from tpserve.settings import UserError

_FAMILIES = ("llama",)  # modules of this package


@dataclass(frozen=True)
class Param:
    """One of the decoder's parameters, and the tensor of the checkpoint that holds it."""

    name: str  # the decoder's
    tensor: str  # the checkpoint's, with "{layer}" for parameters of a layer
    shape: tuple[int, ...]  # of the whole model
    split: Literal["q_heads", "kv_heads", "columns", "vocab"] | None  # what the ranks divide; None: each holds it whole
    dim: int = 0  # the dimension that is divided


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


def for_architecture(name: str) -> Family:
    """The family of an architecture. Raises UserError if none has it."""
    known = by_architecture()
    if name not in known:
        raise UserError(f"config.json: architecture {name!r} is not supported; supported: {', '.join(known)}")
    return known[name]


def tensors(spec: ModelSpec) -> Iterator[tuple[str, Param, int | None]]:
    """Every tensor that the model needs: its name, parameter, and layer (None outside the layers)."""
    module = family(spec.family)
    for param in module.params(spec):
        yield param.tensor, param, None
    for layer in range(spec.num_layers):
        for param in module.layer_params(spec):
            yield param.tensor.format(layer=layer), param, layer


def held(spec: ModelSpec, shard: Shard, param: Param, layer: int | None) -> Span:
    """The part of dimension `param.dim` that the rank holds; `layer` is None outside the layers."""
    if param.split is None:
        return Span(0, param.shape[param.dim])
    if layer is None:
        return shard.vocab
    if param.split == "columns":
        return shard.layers[layer].columns
    heads = shard.layers[layer].q_heads if param.split == "q_heads" else shard.layers[layer].kv_heads
    return Span(heads.start * spec.head_dim, heads.stop * spec.head_dim)

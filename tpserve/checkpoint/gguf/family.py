"""What is said of a kind of model in GGUF files, and the names of its tensors by that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tpserve.checkpoint.gguf.file import Content
from tpserve.settings import UserError

# Keys that all families may have. The last three change nothing in what is computed.
_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "vocab_size",
    "tensor_data_layout",
)

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How one of the format's architectures becomes a model of transformers."""

    architecture: str  # transformers' class
    model_type: str
    outer: Mapping[str, str]  # GGUF's name of a module -> Hugging Face's
    layers: str  # what Hugging Face's names of a layer's modules begin with
    blocks: Mapping[str, str]  # as `outer`, within a layer
    config: Callable[[Content], Config]
    biased: tuple[str, ...] = ()  # modules that always have a bias
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # flag of config.json -> tensors of a layer with it
    aside: tuple[str, ...] = ()  # tensors that `config` uses
    keys: tuple[str, ...] = ()  # the model's keys besides those of all
    rows: Mapping[str, Callable[[torch.Tensor, Config], torch.Tensor]] = field(default_factory=dict)  # order within a module
    norm_offset: float = 0.0  # what to add to norms


def check(family: Family, content: Content) -> None:
    """Raise UserError for a key of the model that nothing here knows, as it may change what is to be computed.

    And for more layers than there can be: what follows is done for each.
    """
    metadata = content.metadata
    layers, count = metadata.size("block_count"), len(content.tensors)
    if layers > count:
        raise UserError(f"{metadata.file}: has {count} tensors for {layers} layers; download or convert it again")
    known = {f"{metadata.architecture}.{key}" for key in (*_KEYS, *family.keys)}
    for key, value in metadata.values.items():
        if key.startswith(f"{metadata.architecture}.") and key not in known:
            raise UserError(f"{metadata.file}: {key} = {value!r:.60} is not supported")


def names(family: Family, content: Content, layers: int) -> tuple[dict[str, str], dict[str, bool]]:
    """The Hugging Face name of every tensor to be written, and the config's flags that follow from which there are.

    Raises UserError for a tensor that is missing, and for one that the family does not have.
    """
    found, file = content.tensors, content.metadata.file
    flags = {flag: f"blk.0.{parts[0]}" in found for flag, parts in family.optional.items()}
    optional = {part: flags[flag] for flag, parts in family.optional.items() for part in parts}
    wanted: dict[str, str] = {}
    for module, name in family.outer.items():
        wanted |= {f"{module}.{kind}": f"{name}.{kind}" for kind in _kinds(family, module, optional)}
    for module, name in family.blocks.items():
        for kind in _kinds(family, module, optional):
            wanted |= {f"blk.{i}.{module}.{kind}": f"{family.layers}.{i}.{name}.{kind}" for i in range(layers)}
    flags["tie_word_embeddings"] = "output.weight" not in found
    if flags["tie_word_embeddings"]:
        del wanted["output.weight"]
    if missing := [name for name in wanted if name not in found]:
        raise UserError(f"{file}: has no tensor {missing[0]}; download or convert it again")
    if unknown := [name for name in found if name not in wanted and name not in family.aside]:
        raise UserError(f"{file}: tensor {unknown[0]} is none of a {family.architecture}; a model with it is not supported")
    return {name: wanted[name] for name in found if name in wanted}, flags


def _kinds(family: Family, module: str, optional: Mapping[str, bool]) -> list[str]:
    has = {"weight": True, "bias": module in family.biased}
    return [kind for kind, default in has.items() if optional.get(f"{module}.{kind}", default)]

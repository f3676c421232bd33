"""How many bytes things take: the one place of memory arithmetic.

What refuses a request or a setting and what allocates both ask here, so they cannot disagree.
"""

from __future__ import annotations

from math import prod

from tpserve.model.families import held, tensors
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOST_KV_BYTES = 2 * 1024**3  # of the default budget


def page_bytes(spec: ModelSpec, shard: Shard, dtype: str, page_size: int) -> int:
    """Bytes of one page in this rank's pool: keys and values of `page_size` tokens in all layers."""
    heads = sum(len(layer.kv_heads) for layer in shard.layers)
    return 2 * heads * spec.head_dim * page_size * ITEM_BYTES[dtype]


def host_page_bytes(spec: ModelSpec, shards: tuple[Shard, ...], dtype: str, page_size: int) -> int:
    """Bytes of one page in the pools of all ranks together, which are on one host."""
    return sum(page_bytes(spec, shard, dtype, page_size) for shard in shards)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens of one sequence."""
    return -(-tokens // page_size)


def default_kv_bytes(available_bytes: int) -> int:
    """Budget of a CPU host's KV pools when the user gives none."""
    return min(_MOST_KV_BYTES, available_bytes // 4)


def weight_bytes(spec: ModelSpec, shard: Shard, dtype: str) -> int:
    """Bytes of this rank's weights, what every rank holds included; a tied head counts apart from the embedding."""
    items = 0
    for _, param, layer in tensors(spec):
        items += prod(param.shape) // param.shape[param.dim] * len(held(spec, shard, param, layer))
    return items * ITEM_BYTES[dtype]


def model_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the whole model, each tensor once: the least that it takes on a host."""
    return ITEM_BYTES[dtype] * sum({name: prod(param.shape) for name, param, _ in tensors(spec)}.values())


def show(size_bytes: int) -> str:
    """For people: '2.00 GiB (2147483648 bytes)'."""
    return f"{size_bytes / 1024**3:.2f} GiB ({size_bytes} bytes)"

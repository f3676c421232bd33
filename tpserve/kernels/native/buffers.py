"""The buffers of a native program: how large each is, for those that make them and for the arithmetic of memory. Torch-free."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard

BLOCK = 16  # columns of a packed weight
PAD = 32  # of a packed weight's inner dimension, and so of the lines that are multiplied
_ALONE_BYTES = 1 << 20  # of the buffer in which partial sums are added up where there is one rank
_FLOAT_BYTES = 4


class Buffer(NamedTuple):
    """Of so many lines, each of so many values."""

    lines: int
    columns: int
    item_bytes: int

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return prod(self)


def buffers(
    spec: ModelSpec, shard: Shard, compute_bytes: int, most_tokens: int, most_rows: int, is_alone: bool
) -> dict[str, Buffer]:
    """By what is in them and how many columns of that.

    For steps of up to `most_tokens` tokens and logits of up to `most_rows` rows at once. Values that products read take
    `compute_bytes` and their lines are padded, all others are float32; who `is_alone` shares no memory to add up in.
    """
    made: dict[str, Buffer] = {}

    def make(name: str, columns: int, *, item_bytes: int = _FLOAT_BYTES, lines: int = most_tokens, pad: int = 1) -> None:
        made[f"{name}.{columns}"] = Buffer(lines, padded(columns, pad), item_bytes)

    layer = shard.layers[0]  # heads are the same in all of them
    make("x", spec.hidden_size, pad=PAD)
    make("hidden", spec.hidden_size, item_bytes=compute_bytes, pad=PAD)
    if layer.q_heads:
        width = len(layer.q_heads) * spec.head_dim
        make("qkv", width + 2 * len(layer.kv_heads) * spec.head_dim, pad=PAD)
        make("queries", width, item_bytes=compute_bytes)
        make("mixed", width, item_bytes=compute_bytes, pad=PAD)
        for number, rotary in enumerate(dict.fromkeys(layer.rotary for layer in spec.layers)):
            make(f"cos{number}", rotary.dims // 2)
            make(f"sin{number}", rotary.dims // 2)
    for columns in {len(layer.columns) for layer in shard.layers} - {0}:
        make("up", columns, item_bytes=compute_bytes, pad=PAD)
    if is_alone:
        make("partial", spec.hidden_size, lines=sum_lines(spec, _ALONE_BYTES, most_tokens))
    make("last", spec.hidden_size, item_bytes=compute_bytes, lines=most_rows, pad=PAD)
    make("logits", len(shard.vocab), lines=most_rows)
    return made


def sum_lines(spec: ModelSpec, slot_bytes: int, most_tokens: int) -> int:
    """How many tokens' partial sums, float32, are added up at once."""
    return min(slot_bytes // (_FLOAT_BYTES * spec.hidden_size), most_tokens)


def padded(count: int, unit: int) -> int:
    """The least multiple of a unit that is no less."""
    return -(-count // unit) * unit

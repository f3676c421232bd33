"""How many bytes things take: the one place of memory arithmetic.

What refuses a request or a setting and what allocates both ask here, so they cannot disagree.
"""

from __future__ import annotations

from math import prod

from tpserve.deployment import RankMemory
from tpserve.kernels.native.buffers import buffers
from tpserve.limits import Limits, most_samples
from tpserve.model.families import held, tensors
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard
from tpserve.parallel.segment import CAPACITY_BYTES, shared_memory_bytes
from tpserve.settings import Settings

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_PAGE_NUMBER_BYTES = 8  # in a slot's table
_ID_BYTES = 4
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


def rank_memory(
    spec: ModelSpec,
    shards: tuple[Shard, ...],
    dtype: str,
    sizes: Limits,
    settings: Settings,
    *,
    pages: int,
    table: str | None,
) -> tuple[RankMemory, ...]:
    """What each rank on a CPU holds. Plain torch makes its buffers anew at each step; they are about as large.

    `table` is the dtype of the embedding in the file that all ranks map, None where each has its own.
    """
    slot_bytes = pages_for(sizes.max_model_len, settings.block_size) * _PAGE_NUMBER_BYTES
    slot_bytes += sizes.max_model_len * _ID_BYTES if settings.speculates else 0  # ids, to look drafts up
    fixed_bytes = sizes.max_num_seqs * slot_bytes
    if len(shards) > 1:
        fixed_bytes += shared_memory_bytes(len(shards), CAPACITY_BYTES) // len(shards)
    computed = ITEM_BYTES["float32" if dtype == "float16" else dtype]
    ids = spec.vocab_size * spec.hidden_size
    mapped_bytes = 0 if table is None else ids * ITEM_BYTES[dtype] - ids * ITEM_BYTES[table] // len(shards)
    samples = most_samples(settings, sizes.max_num_seqs)

    def of(shard: Shard) -> RankMemory:
        made = buffers(spec, shard, computed, sizes.max_num_batched_tokens, samples, len(shards) == 1)
        return RankMemory(
            weights=weight_bytes(spec, shard, dtype) - mapped_bytes,
            pool=pages * page_bytes(spec, shard, dtype, settings.block_size),
            buffers=fixed_bytes + sum(buffer.size_bytes for buffer in made.values()),
        )

    return tuple(map(of, shards))


def host_memory(ranks: tuple[RankMemory, ...]) -> RankMemory:
    """What all ranks hold together."""
    parts = RankMemory.model_fields
    return RankMemory(**{part: sum(getattr(rank, part) for rank in ranks) for part in parts})


def show(size_bytes: int) -> str:
    """For people: '2.00 GiB (2147483648 bytes)'."""
    return f"{size_bytes / 1024**3:.2f} GiB ({size_bytes} bytes)"

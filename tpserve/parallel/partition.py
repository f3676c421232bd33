"""Who holds what: a pure function of the model's spec and the number of ranks.

Loader, worker, memory arithmetic and error texts all read this one answer, and so any number of ranks
works at which every rank holds something:

- attention is split by KV groups (a KV head with its query heads), unevenly if need be; with fewer KV
  heads than ranks a group's query heads are split over several ranks, each with a copy of the KV head;
- the MLP is split by blocks of columns, each given to the rank with the fewest weight bytes so far, which
  evens out what attention could not;
- the vocabulary is split by units of ids, without padding.

A step waits for its fullest rank, so bytes are balanced, not counts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpserve.model.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np  # not for the launcher, which needs none of it

MLP_BLOCK = 32  # columns
VOCAB_UNIT = 32  # ids


class ImpossibleSize(ValueError):
    """At this number of ranks some rank would hold nothing; the text names the sizes that work."""


@dataclass(frozen=True)
class Span:
    """The half-open range [start, stop) of something that is split."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.stop > self.start

    def holds(self, places: np.ndarray) -> np.ndarray:
        """Which of these are in here, as bools of the same shape."""
        return (places >= self.start) & (places < self.stop)


@dataclass(frozen=True)
class LayerShard:
    """What one rank holds of one layer; spans may be empty. All its query heads read its own KV heads."""

    q_heads: Span
    kv_heads: Span
    columns: Span  # of the MLP's intermediate size


@dataclass(frozen=True)
class Shard:
    """What one rank holds. Norms, the embedding and biases of row-parallel layers are on every rank."""

    rank: int
    vocab: Span
    layers: tuple[LayerShard, ...]


def partition(spec: ModelSpec, ranks: int) -> tuple[Shard, ...]:
    """The shard of every rank. Raises ImpossibleSize if one would hold no query head and no MLP column of a layer."""
    largest = largest_size(spec)
    if ranks > largest:
        works = f"1 to {largest}" if largest > 1 else "1"
        raise ImpossibleSize(f"at --tp {ranks} some rank would hold no part of the model; sizes that work: {works}")
    vocab = _spans(_even(-(-spec.vocab_size // VOCAB_UNIT), ranks), VOCAB_UNIT, spec.vocab_size)
    heads = _heads(spec, ranks)
    held = [len(span) * spec.hidden_size for span in vocab]
    layers: list[list[LayerShard]] = [[] for _ in range(ranks)]
    for _ in range(spec.num_layers):
        for rank, layer in enumerate(heads):
            held[rank] += _attention_params(spec, layer)
        columns = _columns(spec, held, [not layer.q_heads for layer in heads])
        for rank, span in enumerate(columns):
            held[rank] += len(span) * _column_params(spec)
            layers[rank].append(LayerShard(heads[rank].q_heads, heads[rank].kv_heads, span))
    return tuple(Shard(rank, vocab[rank], tuple(layers[rank])) for rank in range(ranks))


def largest_size(spec: ModelSpec) -> int:
    """The largest number of ranks at which, as at every smaller one, all hold something.

    Heads go to different ranks before any rank is left without one, and such a rank gets a block of the MLP.
    """
    return spec.num_heads + _blocks(spec)


def _heads(spec: ModelSpec, ranks: int) -> list[LayerShard]:
    """Query and KV heads per rank (columns left empty)."""
    none = Span(0, 0)
    if spec.num_kv_heads >= ranks:
        groups = _spans(_even(spec.num_kv_heads, ranks), 1, spec.num_kv_heads)
        size = spec.group_size
        return [LayerShard(Span(g.start * size, g.stop * size), g, none) for g in groups]
    out = []
    # Groups are of one size, so the largest remainders fall on the first ones.
    for group, share in enumerate(_even(ranks, spec.num_kv_heads)):
        for part in _spans(_even(spec.group_size, share), 1, spec.group_size):
            first = group * spec.group_size
            kv = Span(group, group + 1) if part else none
            out.append(LayerShard(Span(first + part.start, first + part.stop), kv, none))
    return out


def _columns(spec: ModelSpec, held: list[int], headless: list[bool]) -> list[Span]:
    """Blocks of one MLP, each to the rank that holds the fewest parameters so far (the lowest at a tie).

    Ranks without a query head get one first, so that they hold something of every layer.
    """
    block = MLP_BLOCK * _column_params(spec)
    counts = [int(none) for none in headless]
    fewest = [(params + counts[rank] * block, rank) for rank, params in enumerate(held)]
    heapq.heapify(fewest)
    for _ in range(_blocks(spec) - sum(counts)):
        params, rank = fewest[0]
        counts[rank] += 1
        heapq.heapreplace(fewest, (params + block, rank))
    return _spans(counts, MLP_BLOCK, spec.intermediate_size)


def _even(units: int, parts: int) -> list[int]:
    return [units // parts + (part < units % parts) for part in range(parts)]


def _spans(counts: list[int], unit: int, total: int) -> list[Span]:
    """Contiguous spans of `counts` units each; the last unit may be short."""
    spans, start = [], 0
    for count in counts:
        stop = min(start + count * unit, total)
        spans.append(Span(start, stop))
        start = stop
    return spans


def _attention_params(spec: ModelSpec, layer: LayerShard) -> int:
    return 2 * (len(layer.q_heads) + len(layer.kv_heads)) * spec.head_dim * spec.hidden_size


def _column_params(spec: ModelSpec) -> int:
    return (3 if spec.gated_mlp else 2) * spec.hidden_size  # gate, up, down


def _blocks(spec: ModelSpec) -> int:
    return -(-spec.intermediate_size // MLP_BLOCK)  # the last may be short

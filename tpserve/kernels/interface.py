"""What a decoder is made of: one interface, whatever carries it out.

A decoder's forward pass is written once, over these operations. Eager kernels compute as they are called. Native ones
record what is called, once, and replay it at every step (`capture`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from tpserve.model.spec import Rotary

Activation = Literal["silu", "gelu", "gelu_tanh"]
Lines = Any  # (tokens, columns) of a step, as a backend holds them
Matrix = Any  # a weight as a backend's `pack` leaves it
Tokens = Any  # a step's tokens, as a backend's forward pass takes them


@dataclass(frozen=True)
class Norm:
    """Float32, the same on all ranks."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Heads:
    """A rank's attention heads in one layer; query head h reads KV head h // (heads // kv_heads)."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a plan, flat in row order, on the host. All int64.

    `positions`, `kv_slots` (flat place in the pool: page * page_size + offset): (tokens,). `starts`, `counts`, `slots`:
    (rows,). `last` is each row's last token's place. `fed` are the tokens whose ids the slots `fed_slots` hold; the
    others' are in `ids`. `tables` has every slot's pages (slots, pages). `tails` are places of the rows' last pages
    that hold what was there before.
    """

    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    last: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    ids: np.ndarray
    fed: np.ndarray
    fed_slots: np.ndarray
    tables: np.ndarray
    tails: np.ndarray


Forward = Callable[[StepTokens, Tensor], Tensor]  # of the step's tokens and the last ids of slots: final hidden states


# Of kernels. `wait` is for other threads and ranks, `transfer` the rest of collectives.
KINDS = ("linear", "attention", "rows", "wait", "transfer")


class Kernels(ABC):
    """The operations of a decoder on one rank's shard.

    The residual stream is float32 and the same on all ranks; products take the compute dtype and are summed over the
    ranks in float32.
    """

    @property
    def seconds(self) -> Sequence[float]:
        """What this rank spent in each of KINDS since the start, as far as it is measured."""
        return [0.0] * len(KINDS)

    @abstractmethod
    def pack(self, *parts: Tensor, gated: bool = False) -> Matrix:
        """Weights (out, in) one above the other, as `linear` takes them; the originals are then not needed.

        `gated`: of two parts of one shape, the first is the gate of the second.
        """

    @abstractmethod
    def embed(self, tokens: Tokens, table: Tensor, scale: float) -> Lines:
        """The residual stream: the ids' lines of the table (vocabulary, hidden), scaled."""

    @abstractmethod
    def norm(self, x: Lines, norm: Norm) -> Lines:
        """x normed, in the compute dtype."""

    @abstractmethod
    def linear(self, hidden: Lines, weight: Matrix, bias: Tensor | None, activation: Activation | None = None) -> Lines:
        """hidden times weight, plus bias; with an activation if one is named, of the gate if the weight has one."""

    @abstractmethod
    def attention(
        self, tokens: Tokens, qkv: Lines, qk_norm: Tensor | None, keys: Tensor, values: Tensor,
        heads: Heads, rotary: Rotary, window: int | None,
    ) -> Lines:  # fmt: skip
        """Attention of a step's tokens: queries and keys are normed (if so) and rotated, keys and values stored.

        `qkv` has query heads, key heads, value heads. `keys` and `values` are the layer's pools (pages, kv_heads,
        page_size, head_dim). Returns (tokens, heads * head_dim).
        """

    @abstractmethod
    def reduce_add_(
        self, x: Lines, products: Sequence[tuple[Lines, Matrix]], biases: Sequence[Tensor], norm: Norm | None
    ) -> None:
        """The end of row-parallel layers: the products' sum over the ranks, plus biases, normed if so, is added to x.

        A rank that holds nothing of the layers gives no products.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, head: Matrix, scale: float) -> Tensor:
        """hidden (rows, hidden) times head, scaled, float32. Valid until the next call."""

    @abstractmethod
    def capture(self, forward: Callable[[Tokens, Tensor], Lines], pools: Tensor) -> Forward:
        """A forward pass made of these operations, ready to be run on `pools` with any step's tokens."""

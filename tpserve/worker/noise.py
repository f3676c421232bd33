"""The randomness of a sampled id: a pure function of (seed, choice, position, id), on any device.

Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with
key = seed xor splitmix64(choice), or the seed itself for choice 0, and counter = (id div 4, position, 0, 0);
id mod 4 selects the word. A rank draws it for its own ids, and nothing is communicated.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import torch
from torch import Tensor

LANES = 4  # ids of a block: those that share a counter
HIGHEST = 16.64  # no noise is above this: -log(-log(1 - 2**-24)) is 16.6355

_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class RowNoise:
    """The noise of some rows, for ids from `first_id` (a multiple of LANES) on.

    `seeds` are uint64, `choices` and `positions` of any integer type, each (rows,).
    """

    def __init__(self, seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, first_id: int):
        self.keys = philox_keys(seeds, choices)
        self.positions = positions.astype(np.int64)
        self.first_block = first_id // LANES

    def of(self, rows: Tensor, blocks: Tensor) -> Tensor:
        """The noise of `blocks`, float32 (n, LANES); rows and blocks are int64 (n,), blocks counted from first_id."""
        keys, positions = (torch.from_numpy(x).to(rows.device).index_select(0, rows) for x in (self.keys, self.positions))
        return gumbel(philox_words(blocks + self.first_block, positions, keys))

    def take(self, index: np.ndarray) -> RowNoise:
        """That of the rows at `index`."""
        taken = copy(self)
        taken.keys, taken.positions = self.keys[index], self.positions[index]
        return taken


def philox_keys(seeds: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """The keys' 64 bits as int64, low word first in use."""
    salt = np.where(choices == 0, np.uint64(0), _splitmix64(choices.astype(np.uint64)))
    keys: np.ndarray = (seeds ^ salt).view(np.int64)
    return keys


def philox_words(blocks: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    """The 32-bit words of each block's ids, as int64 (n, LANES). All arguments are int64 (n,)."""
    c0, c1, c2, c3 = blocks.clone(), positions, torch.zeros_like(blocks), torch.zeros_like(blocks)
    k0, k1 = keys.clone(), keys >> 32
    for _ in range(_ROUNDS):
        # A factor must be 32 bits wide; what is only xored may carry more above them until it becomes one.
        # The products' 64 bits are right although int64 takes the highest for a sign.
        product0, product1 = c0.mul_(_MULTIPLIERS[0]), c2.mul_(_MULTIPLIERS[1])
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW)
        c1, c3 = product1, product0
        k0.add_(_WEYL[0])
        k1.add_(_WEYL[1])
    return torch.stack((c0, c1.bitwise_and_(_LOW), c2, c3.bitwise_and_(_LOW)), dim=1)


def gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of 32-bit words x: -log(-log(u)) with u = (x + 1/2) / 2**32.

    In float64 u is exact and neither logarithm loses anything, near 0 or near 1. u is at most 1 - 2**-24.
    """
    u = words.double().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return u.log_().neg_().log_().neg_().float()


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """One output of the generator whose state is x (Steele, Lea and Flood, OOPSLA 2014), for uint64 arrays."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))

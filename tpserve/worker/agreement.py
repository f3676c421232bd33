"""The ranks' proof that they did the same: a running digest of the plans executed and the ids sampled."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

DIGEST_BYTES = 8


class Disagreement(RuntimeError):
    """The ranks' digests differ after `step`; `ranks` are those that differ from the majority, or all if none is."""

    def __init__(self, ranks: Sequence[int], size: int, step: int):
        self.ranks = tuple(ranks)
        self.step = step
        names = " and ".join(map(str, self.ranks))
        if len(self.ranks) == size:
            text = f"ranks {names} disagree on the ids of step {step}"
        elif len(self.ranks) == 1:
            text = f"rank {names} disagrees with the others on the ids of step {step}"
        else:
            text = f"ranks {names} disagree with the others on the ids of step {step}"
        super().__init__(text)


class Agreement:
    """One rank's digest, through the last step that it was told of."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._step = 0

    @property
    def digest(self) -> bytes:
        """DIGEST_BYTES bytes."""
        return self._hash.digest()

    def update(self, step: int, plan: bytes, ids: np.ndarray) -> None:
        """Take in the wire form of a step's plan and the ids that this rank sampled in it."""
        self._hash.update(plan)
        self._hash.update(ids.astype("<i8").tobytes())
        self._step = step

    def check(self, digests: Sequence[bytes]) -> None:
        """Compare the digests of all ranks, in rank order, each as of the same step. Raises Disagreement."""
        if len(set(digests)) == 1:
            return
        digest, count = Counter(digests).most_common(1)[0]
        majority = digest if 2 * count > len(digests) else None
        odd = [rank for rank, digest in enumerate(digests) if digest != majority]
        raise Disagreement(odd, len(digests), self._step)

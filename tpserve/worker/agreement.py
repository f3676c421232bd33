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
        subject = f"rank {names} disagrees" if len(self.ranks) == 1 else f"ranks {names} disagree"
        others = " with the others" if len(self.ranks) < size else ""
        super().__init__(f"{subject}{others} on the ids of step {step}")


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

"""The progress bar of weight loading, on a terminal only."""

from __future__ import annotations

import sys

from tqdm import tqdm


class LoadProgress:
    """Bytes read by all ranks together."""

    def __init__(self, ranks: int):
        self._done, self._total = [0] * ranks, [0] * ranks
        self._bar: tqdm[None] | None = None

    def update(self, rank: int, done_bytes: int, total_bytes: int) -> None:
        """A rank has read this much."""
        if not sys.stderr.isatty():
            return
        self._done[rank], self._total[rank] = done_bytes, total_bytes
        if self._bar is None:
            self._bar = tqdm(desc="weights", total=1, unit="B", unit_scale=True, leave=False, file=sys.stderr)
        self._bar.total = sum(self._total)
        self._bar.update(sum(self._done) - self._bar.n)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

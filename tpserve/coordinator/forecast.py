"""How many tokens those that run will hold at once, by how long the answers before were. Pure."""

from __future__ import annotations

from collections import deque

import numpy as np

_REMEMBERED = 128  # answers
_EASE = 0.98  # of caution, with each answer that ends


class Forecast:
    """Learns the lengths of answers. Until some have ended, and after pages did not last, answers are taken to become
    as long as they may; with each that ends less so.
    """

    def __init__(self) -> None:
        self._answers: deque[int] = deque(maxlen=_REMEMBERED)
        self._caution = 1.0  # 0: as long as others on the average, 1: as long as they may

    def ended(self, answer: int) -> None:
        """An answer ended with so many tokens."""
        self._answers.append(answer)
        self._caution *= _EASE

    def preempted(self) -> None:
        """The pages did not last."""
        self._caution = 1.0

    def lengths(self, answers: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """How long these answers will be, of which there are so many tokens: as the mean of those that were longer."""
        past = np.sort(np.array(self._answers, np.int64))
        first_longer = np.searchsorted(past, answers, side="right")
        num_longer = len(past) - first_longer
        sums = np.append(np.cumsum(past[::-1])[::-1], 0)  # of each answer and those longer
        means = np.where(num_longer > 0, sums[first_longer] / np.maximum(num_longer, 1), allowed)
        likely = np.minimum(means, allowed)
        found: np.ndarray = likely + self._caution * (allowed - likely)
        return found

    def most_held(self, prompts: np.ndarray, answers: np.ndarray, allowed: np.ndarray) -> int:
        """Most tokens that sequences with such prompts and answers hold at once, each of which grows by one a step until
        its end and then gives up all.
        """
        held, left = prompts + answers, self.lengths(answers, allowed) - answers
        last_first = np.argsort(-left)
        # When the k-th to last ends, those that end later have grown as much as it.
        at_ends = np.cumsum(held[last_first]) + np.arange(1, len(held) + 1) * left[last_first]
        return int(np.ceil(at_ends.max()))

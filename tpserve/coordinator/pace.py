"""How much prompt work a step may hold, and how many sequences may run, so that the gaps between tokens keep to a target.

A step's time is a line in its decode rows and its prompt tokens; how steep is learnt from the steps that were done, so the
share of prompt tokens is what the target leaves, rather than found by overstepping it. Pure: the time is told.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

_LEAST_SHARE = 32  # a step may hold at least one in so many of its budget's tokens: prompts are never starved
_QUANTILE = 0.96  # of the paced steps, so many are to hold the target
_QUANTILE_STEP = 0.02
_MOST_MARGIN = 3.0


class StepTimes:
    """Seconds of a step as base + rows * per_row + tokens * per_token, learnt by a Kalman filter whose coefficients drift.

    What a step does not tell (of prompt tokens, while all rows decode) stays as it was and becomes uncertain, so that the
    next step that tells it counts for more. Steps that took far longer than is likely count as if they were just unlikely.
    """

    _GUESS_S = np.array([0.02, 0.001, 0.001])  # how large the coefficients might be; also the most uncertain they get
    _DRIFT = 0.02  # of a coefficient, per step
    _NOISE = 0.1  # of a step's time
    _LEAST_S = 1e-7
    _CLIP = 3  # standard deviations

    def __init__(self) -> None:
        self.coefficients = np.zeros(3)  # seconds
        self._covariance = np.diag(self._GUESS_S**2)

    def predict(self, rows: int, tokens: int) -> float:
        """Seconds that such a step takes."""
        return float(self.coefficients @ (1, rows, tokens))

    def learn(self, rows: int, tokens: int, seconds: float) -> None:
        """Such a step took so long."""
        x = np.array([1.0, rows, tokens])
        drift = np.diag((self._DRIFT * self.coefficients) ** 2)
        covariance = self._covariance + drift
        gain = covariance @ x
        variance = x @ gain + (self._NOISE * seconds) ** 2 + self._LEAST_S**2
        limit = self._CLIP * math.sqrt(variance)
        error = min(max(seconds - self.predict(rows, tokens), -limit), limit)
        self.coefficients = np.maximum(self.coefficients + gain * (error / variance), 0.0)
        covariance -= np.outer(gain, gain) / variance
        scale = np.minimum(1.0, self._GUESS_S / np.sqrt(np.maximum(covariance.diagonal(), self._LEAST_S**2)))
        self._covariance = covariance * np.outer(scale, scale)


class _Planned(NamedTuple):
    rows: int
    tokens: int
    at_s: float


class Pace:
    """Keeps the time of steps with decode rows to `target_s`, within a budget of `most_tokens` a step."""

    def __init__(self, target_s: float, most_tokens: int):
        self._target_s = target_s
        self._most_tokens = most_tokens
        self._least_tokens = max(1, most_tokens // _LEAST_SHARE)
        self._times = StepTimes()
        self._margin = 1.2  # by which paced steps take longer than predicted, but for a few of them
        self._planned: deque[_Planned] = deque()
        self._done_s = -math.inf

    def share(self, rows: int) -> int:
        """Most prompt tokens beside so many decode rows. Without any nobody waits for the step to end."""
        if not rows:
            return self._most_tokens
        per_token = float(self._times.coefficients[2])
        left_s = self._target_s / self._margin - self._times.predict(rows, 0)
        fitting = left_s / per_token if per_token > 0 else math.copysign(math.inf, left_s)
        return int(min(max(fitting, self._least_tokens), self._most_tokens))

    @property
    def most_running(self) -> int:
        """As many sequences can run, at least one, that the target leaves time for the least share of prompt tokens."""
        per_row = float(self._times.coefficients[1])
        left_s = self._target_s / self._margin - self._times.predict(0, self._least_tokens)
        return max(1, int(min(left_s / per_row, 2**31))) if per_row > 0 else 2**31

    def planned(self, rows: int, tokens: int, now_s: float) -> None:
        """A step with so many decode rows and prompt tokens goes to the workers."""
        self._planned.append(_Planned(rows, tokens, now_s))

    def done(self, now_s: float) -> None:
        """The oldest planned step's result is in."""
        rows, tokens, planned_s = self._planned.popleft()
        seconds = now_s - max(planned_s, self._done_s)
        self._done_s = now_s
        if rows and tokens:
            over = seconds > self._margin * self._times.predict(rows, tokens)
            self._margin += _QUANTILE_STEP * (_QUANTILE - 1 + over)
            self._margin = min(max(self._margin, 1.0), _MOST_MARGIN)
        self._times.learn(rows, tokens, seconds)

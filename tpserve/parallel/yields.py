"""What giving way costs a waiting process."""

from __future__ import annotations

_SHORT_S = 0.001  # our own processes seldom need a core for longer, unless ranks share it
_WINDOW_S = 0.05
_MOST_LOST_S = 0.015  # within a window
_DEAR_S = 0.2


class Yields:
    """Tells whether to sleep at a wait instead of yielding.

    A yield hands the core to who else wants it. If that is a process that computes without end, it is for a whole time
    slice, at every wait anew (and from 6.18 on, Linux takes the rest of one's own for it); a sleeper gets the core back when
    it wakes. So who loses much time by yields sleeps for a while. The native kernels' waits keep the same rule.
    """

    def __init__(self) -> None:
        self._began_s = self._lost_s = self._dear_until_s = 0.0

    def are_dear(self, now_s: float) -> bool:
        """Whether they have cost much lately."""
        return now_s < self._dear_until_s

    def took(self, from_s: float, to_s: float) -> None:
        """A yield lasted from then to then."""
        if to_s - from_s < _SHORT_S:
            return
        if from_s - self._began_s > _WINDOW_S:
            self._began_s, self._lost_s = from_s, 0.0
        self._lost_s += to_s - from_s
        if self._lost_s > _MOST_LOST_S:
            self._dear_until_s = to_s + _DEAR_S

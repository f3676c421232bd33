"""Finding stop strings in text that arrives in pieces.

Characters go one by one through a Knuth-Morris-Pratt automaton per stop string, so the outcome does not
depend on how the text was cut into pieces. The state of an automaton is the length of the longest suffix of
the text that its stop string begins with: that much, and no more, must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopPattern:
    """A stop string with its failure table: `fallback[n]` is the next shorter prefix that ends its first n characters."""

    __slots__ = ("fallback", "text")

    def __init__(self, text: str):
        self.text = text
        self.fallback = [0, 0]
        for char in text[1:]:
            self.fallback.append(self.advance(self.fallback[-1], char))

    def advance(self, matched: int, char: str) -> int:
        """The state after `char`, from a state short of a whole match."""
        while matched and self.text[matched] != char:
            matched = self.fallback[matched]
        return matched + (self.text[matched] == char)


class StopFinder:
    """The text of one choice on its way to the client, up to the first stop string, or with it (`include`).

    The first is the one that is complete first; of several complete at the same character, the longest.
    Hidden pieces are searched like others but never come out: a stop string may be the text of a special
    token that the client does not see.
    """

    def __init__(self, patterns: Sequence[StopPattern], include: bool):
        self._patterns = patterns
        self._include = include
        self._matched = [0] * len(patterns)
        self._held = ""
        self._hidden: list[range] = []  # of `_held`
        self.found: str | None = None  # the stop string that ended the text

    def feed(self, piece: str, shown: bool = True, may_stop: bool = True) -> str:
        """The text that may be shown now. Nothing comes out after a stop string was found.

        One that is complete within a piece that may not stop does not count.
        """
        if not self._patterns:
            return piece if shown else ""
        if self.found is not None:
            return ""
        start = len(self._held)
        self._held += piece
        if not shown:
            self._hidden.append(range(start, len(self._held)))
        for end, char in enumerate(piece, start + 1):
            whole = self._advance(char)
            if whole is not None and may_stop:
                self.found = whole.text
                return self._release(end if self._include else end - len(whole.text))
        return self._release(len(self._held) - max(self._matched))

    def end(self) -> str:
        """What was held back, when no more text comes. Empty after a stop string was found."""
        return "" if self.found is not None else self._release(len(self._held))

    def _advance(self, char: str) -> StopPattern | None:
        """Move every automaton on; the longest stop string that is complete now, if any."""
        whole: StopPattern | None = None
        for index, pattern in enumerate(self._patterns):
            state = pattern.advance(self._matched[index], char)
            if state == len(pattern.text):
                state = pattern.fallback[state]  # from where it goes on, if this one does not count
                whole = pattern if whole is None or len(pattern.text) > len(whole.text) else whole
            self._matched[index] = state
        return whole

    def _release(self, count: int) -> str:
        """Take the first `count` characters out of those held, less the hidden ones."""
        out, self._held = self._held[:count], self._held[count:]
        for hidden in reversed(self._hidden):
            out = out[: hidden.start] + out[hidden.stop :]
        self._hidden = [
            range(max(0, hidden.start - count), hidden.stop - count) for hidden in self._hidden if hidden.stop > count
        ]
        return out

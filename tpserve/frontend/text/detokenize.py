"""From ids, as they come, to the text that a client sees.

Ids become text through their bytes and one incremental UTF-8 decoder per choice, so that each id costs the same
wherever it stands. The tokenizers library's `DecodeStream` would not do: after bytes that are not UTF-8 it shows
nothing until valid text follows, it holds back a real U+FFFD, and it drops an unfinished character at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tpserve.frontend.text.stops import StopFinder, StopPattern
from tpserve.messages import Finish
from tpserve.tokenizer import Tokenizer


class Detokenizer:
    """The text of a sequence, id by id. Joined, it is the text of the ids' bytes joined.

    Bytes that are not UTF-8 give U+FFFD as `bytes.decode(errors="replace")` has it. A space that an id begins
    with is kept, also at the very beginning: an answer goes on from its prompt.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._piece = tokenizer.piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, id_: int) -> str:
        """The characters that this id completes."""
        return self._decoder.decode(self._piece(id_))

    def end(self) -> str:
        """U+FFFD when the text ends within a character, else nothing."""
        return self._decoder.decode(b"", True)


class AnswerText:
    """The text of one choice up to its end or a stop string, kept until the client takes it.

    `hidden_ids` are not shown (special tokens), but the search for stop strings sees them. A stop string counts when
    more than `min_tokens` ids have come; what ends the text is shown only if `include_stop`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        patterns: Sequence[StopPattern],
        hidden_ids: frozenset[int],
        min_tokens: int,
        include_stop: bool,
    ):
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._ids_before_stop = min_tokens
        self._include_stop = include_stop
        self._detokenizer = Detokenizer(tokenizer)
        self._finder = StopFinder(patterns, include_stop)
        self._untaken: list[str] = []
        self.released = 0  # characters that have come out, taken or not

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._finder.found

    def add(self, id_: int, finish: Finish) -> tuple[str, bytes]:
        """Take the next id, with the engine's reason to end after it.

        Returns what it adds to the text that is shown, should no stop string cut it: characters, and its bytes.
        """
        may_stop = self._ids_before_stop <= 0
        self._ids_before_stop -= 1
        hidden = id_ in self._hidden_ids or (finish is Finish.STOP and not self._include_stop)
        text = "" if hidden else self._detokenizer.add(id_)
        if finish:
            text += self._detokenizer.end()
        self._put(self._finder.feed(text, may_stop=may_stop))
        if hidden:
            self._put(self._finder.feed(self._tokenizer.text_of(id_), shown=False, may_stop=may_stop))
        if finish:
            self._put(self._finder.end())
        return text, b"" if hidden else self._tokenizer.piece(id_)

    def take(self) -> str:
        """The text that came since the last call."""
        text = "".join(self._untaken)
        self._untaken.clear()
        return text

    def _put(self, text: str) -> None:
        self._untaken.append(text)
        self.released += len(text)

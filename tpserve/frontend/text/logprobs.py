"""Logprobs as they come from the engine, and in the shapes of OpenAI's and vLLM's answers.

They are of the raw logits. Each position has its own id's and those of the likeliest ids. Joined, the tokens' texts are
the answer's text, but for the last one before a stop string, which is shown whole even if the stop string cuts it.
What an answer has of each position is made while the answer is written, by iterators: there may be millions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpserve.messages import Scores
from tpserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """One position: the id that stands there, then the likeliest ids, best first; int32 and float32, as in `Scores`."""

    ids: np.ndarray
    logprobs: np.ndarray

    @property
    def id(self) -> int:
        """The id that stands there."""
        return int(self.ids[0])

    @property
    def logprob(self) -> float:
        """Its logprob."""
        return float(self.logprobs[0])

    def likeliest(self, count: int) -> Iterator[tuple[int, float]]:
        """So many likeliest ids with their logprobs, best first."""
        return zip(self.ids[1 : count + 1].tolist(), self.logprobs[1 : count + 1].tolist())

    def ranked(self, count: int) -> dict[int, tuple[float, int | None]]:
        """The own id, then so many likeliest ones: logprob, and rank from 1, which is known of the likeliest alone."""
        ranked: dict[int, tuple[float, int | None]] = {}
        for rank, (id_, logprob) in enumerate(self.likeliest(len(self.ids)), 1):
            ranked[id_] = logprob, rank
        own = {self.id: ranked.get(self.id, (self.logprob, None))}
        return own | dict(itertools.islice(ranked.items(), count))


def split(scores: Scores) -> Iterator[Score | None]:
    """Position by position; None where no logprobs are wanted. Copies: one that is kept must not keep all of a step."""
    ends = np.cumsum(scores.counts, dtype=np.int64).tolist()
    for start, end in zip([0, *ends], ends):
        yield Score(scores.ids[start:end].copy(), scores.logprobs[start:end].copy()) if end > start else None


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """An id where it stands in a text. `score` is None for the first of a prompt, which nothing precedes."""

    offset: int  # of its text, in characters
    text: str  # what it adds: the characters that it completes; nothing if it is not shown
    data: bytes  # the bytes that it adds
    score: Score | None


def completion_logprobs(tokens: Sequence[Token], count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The schema of /v1/completions, with `count` likeliest ids."""
    return {
        "text_offset": (token.offset for token in tokens),
        "token_logprobs": (None if token.score is None else token.score.logprob for token in tokens),
        "tokens": (token.text for token in tokens),
        "top_logprobs": (None if token.score is None else _top(token.score, count, tokenizer) for token in tokens),
    }


def _top(score: Score, count: int, tokenizer: Tokenizer) -> dict[str, float]:
    """Best first. Of ids that are spelled alike the likeliest counts."""
    top: dict[str, float] = {}
    for id_, logprob in (*score.likeliest(count), (score.id, score.logprob)):
        top.setdefault(_key(id_, tokenizer.piece(id_)), logprob)
    return top


def _key(id_: int, piece: bytes) -> str:
    """An id's text, with a name in its place, as OpenAI's, if it has none: keys must not be alike."""
    try:
        return piece.decode() or f"token_id:{id_}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(tokens: Iterable[Token], count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The schema of /v1/chat/completions, with `count` likeliest ids."""
    return {"content": (_entry(token, count, tokenizer) for token in tokens), "refusal": None}


def _entry(token: Token, count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    assert token.score is not None  # only a prompt's first id has none
    top = [
        {"token": tokenizer.text_of(id_), "logprob": logprob, "bytes": list(tokenizer.piece(id_))}
        for id_, logprob in token.score.likeliest(count)
    ]
    return {"token": token.text, "logprob": token.score.logprob, "bytes": list(token.data), "top_logprobs": top}


def prompt_logprobs(scores: Iterable[Score | None], count: int, tokenizer: Tokenizer) -> Iterator[dict[str, Any] | None]:
    """As vLLM has them: for each id of the prompt a map of ids, for the first null."""
    return (None if score is None else _by_id(score, count, tokenizer) for score in scores)


def _by_id(score: Score, count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    shown = {}
    for id_, (logprob, rank) in score.ranked(count).items():
        known = {} if rank is None else {"rank": rank}
        shown[str(id_)] = {"logprob": logprob, **known, "decoded_token": tokenizer.text_of(id_)}
    return shown

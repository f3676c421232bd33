"""Answers under a grammar, by a model that likes every id alike, or some more than others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLTokenizer

from tpserve import grammar
from tpserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """What was sampled; `is_complete` if the grammar ended it and not the limit."""

    data: bytes
    ids: list[int]
    is_complete: bool

    @property
    def text(self) -> str:
        return self.data.decode()


def allowed(mask: bytes) -> list[int]:
    """The ids of a mask."""
    ids: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, "u1"), bitorder="little")).tolist()
    return ids


def sample(
    tokens: LLTokenizer,
    tokenizer: Tokenizer,
    text: str,
    seed: int = 0,
    limit: int = 3000,
    likes: Callable[[bytes], bool] = lambda piece: False,
) -> Answer:
    """Sample until the grammar `text` is complete. Three times in four, if there is one, it is an id whose piece it likes."""
    matcher, draw, ids = grammar.compile(tokens, text), random.Random(seed), list[int]()
    while not matcher.is_stopped() and len(ids) < limit:
        choice = allowed(matcher.compute_bitmask())
        assert not matcher.is_error(), matcher.get_error()
        liked = [id_ for id_ in choice if likes(tokenizer.piece(id_))]
        id_ = draw.choice(liked if liked and draw.random() < 0.75 else choice)
        assert matcher.consume_token(id_)
        ids += [] if id_ in tokens.eos_tokens else [id_]
    return Answer(b"".join(map(tokenizer.piece, ids)), ids, matcher.is_stopped())

"""A sequence: one choice of a request, from its arrival until it ends. And what it shares with others."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tpserve.messages import Finish, Submit


class Matcher(Protocol):
    """Where a choice stands in its grammar."""

    def accept(self, token: int) -> Finish:
        """Take its next id: why the choice ends with it, or NONE."""

    def fill(self, words: np.ndarray) -> None:
        """Write which ids may follow, as in a row of `SampleMasks`: uint32, bit i of word w is id 32 w + i."""


@dataclass(slots=True, eq=False)
class Group:
    """The requests for all the prompts of one request of a client's. *Queued* until a choice of theirs is admitted."""

    number: int
    arrived_s: float
    rank: float  # its place in the queue; the lower comes first
    max_wait_s: float
    requests: dict[int, Request] = field(default_factory=dict)  # the open ones
    is_queued: bool = True


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and its choices, while one of them is open."""

    submit: Submit
    group: Group
    root: bytes  # what its chains of digests begin with
    choices: dict[int, Sequence] = field(default_factory=dict)  # the open ones
    num_targets: int = field(init=False)  # of the prompt's ids, from the second on, those whose logprobs are wanted
    num_scored: int = 0  # so many of them are found, or planned to be; whichever choice comes by finds the next

    def __post_init__(self) -> None:
        self.num_targets = len(self.submit.prompt) - 1 if self.submit.prompt_logprobs >= 0 else 0


@dataclass(slots=True, eq=False)
class Sequence:
    """What the coordinator knows of a choice. Counts are tokens. What changes with each id that it decodes is in `Batch`."""

    request: Request
    choice: int
    order: tuple[float, int]  # among all sequences: the group's rank, then the order of arrival
    ids: array[int]  # of type 'i': prompt and generated; while it has a slot, the last few may be missing (`Batch`)
    max_len: int  # most ids it may come to have
    stop_ids: frozenset[int]
    leader: Sequence | None  # another choice of the same prompt, which is prefilled first
    matcher: Matcher | None  # which has taken the generated ids
    speculates: bool = False  # whether its rows may have drafts

    cached: int | None = None  # prompt tokens that the first admission found computed
    digests: list[bytes] = field(default_factory=list)  # of the pages' contents, as far as they were needed
    ended: bool = False

    # Of one stay in a slot; `start` sets them.
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_prefill: int = 0  # tokens known when it was admitted; what comes after is decoded one by one
    num_prefilled: int = 0  # of these, how many are computed, or planned to be
    num_published: int = 0  # of its pages, how many were offered to the prefix index
    prefilled_at: int | None = None  # the step that computes the last of them

    @property
    def num_prompt(self) -> int:
        """Of its tokens, those of the prompt."""
        return len(self.request.submit.prompt)

    @property
    def looks_back(self) -> bool:
        """Whether the workers are to know all its ids."""
        return self.speculates or self.request.submit.sampling.looks_back

    @property
    def is_running(self) -> bool:
        """Whether it advances, or could."""
        return bool(self.pages)

    @property
    def most_cached(self) -> int:
        """How many of its tokens need not be computed: logits are needed of the last, and where scores are wanted."""
        request = self.request
        return request.num_scored if request.num_scored < request.num_targets else len(self.ids) - 1

    def start(self, slot: int, pages: list[int], num_computed: int, page_size: int) -> None:
        """Begin a stay in a slot. The first `num_computed` tokens are in the pages already."""
        self.slot = slot
        self.pages = pages
        self.num_prefill = len(self.ids)
        self.num_prefilled = num_computed
        self.num_published = num_computed // page_size
        self.prefilled_at = None
        if self.cached is None:
            self.cached = min(num_computed, self.num_prompt)

    def stop(self) -> None:
        """End the stay: its pages have other owners now, and so has the slot when no id is outstanding."""
        self.pages = []
        self.num_prefill = self.num_prefilled = self.num_published = 0
        self.prefilled_at = None

    def is_prefilling(self) -> bool:
        """Whether a chunk is what the next plan may bring."""
        return self.num_prefilled < self.num_prefill

    def can_share(self, step: int) -> bool:
        """Whether its prompt is computed before this step, in pages that it still holds."""
        return self.prefilled_at is not None and self.prefilled_at < step

    def finish(self) -> Finish:
        """Why it ends with the last of its ids, or NONE. The matcher takes that id."""
        token = self.ids[-1]
        if token < 0:
            return Finish.ERROR
        if token in self.stop_ids:
            return Finish.STOP
        by_grammar = Finish.NONE if self.matcher is None else self.matcher.accept(token)
        if by_grammar is not Finish.NONE:
            return by_grammar
        return Finish.LENGTH if len(self.ids) == self.max_len else Finish.NONE

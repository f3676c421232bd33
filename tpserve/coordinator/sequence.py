"""A sequence: one choice of a request, from its arrival until it ends."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from tpserve.messages import Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """What the coordinator knows of a choice. Counts are tokens.

    Because plans are made ahead of their results, a sequence has ids that are *known* (`ids`), tokens whose
    keys and values are *computed* or planned to be, and samples that are *outstanding*: planned, id not known yet.
    """

    request: int
    choice: int
    arrival: int  # order of arrival among all sequences
    arrived_s: float  # when
    ids: array[int]  # of type 'i': prompt and generated
    num_prompt: int
    max_len: int  # most ids it may come to have
    stop_ids: frozenset[int]
    sampling: Sampling
    leader: Sequence | None  # another choice of the same prompt, which is prefilled first

    samples_left: int = field(init=False)  # samples not planned yet
    cached: int | None = None  # prompt tokens that the first admission found computed
    digests: list[bytes] = field(default_factory=list)  # of the pages' contents, as far as they were needed
    ended: bool = False

    # Of one stay in a slot; `start` sets them.
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_prefill: int = 0  # tokens known when it was admitted; what comes after is decoded one by one
    num_published: int = 0  # of its pages, how many were offered to the prefix index
    prefilled_at: int | None = None  # the step that computes the last of them

    def __post_init__(self) -> None:
        self.samples_left = self.max_len - len(self.ids)

    @property
    def num_outstanding(self) -> int:
        """Samples that are planned and not known."""
        return self.max_len - len(self.ids) - self.samples_left

    def start(self, slot: int, pages: list[int], num_computed: int, page_size: int) -> None:
        """Begin a stay in a slot. The first `num_computed` tokens are in the pages already."""
        self.slot = slot
        self.pages = pages
        self.num_computed = num_computed
        self.num_prefill = len(self.ids)
        self.num_published = num_computed // page_size
        self.prefilled_at = None
        if self.cached is None:
            self.cached = min(num_computed, self.num_prompt)

    def stop(self) -> None:
        """End the stay: slot and pages have other owners now. Outstanding samples stay so."""
        self.slot = None
        self.pages = []
        self.num_computed = self.num_prefill = self.num_published = 0
        self.prefilled_at = None

    def is_prefilling(self) -> bool:
        """Whether a prompt's chunk is what the next plan brings."""
        return self.num_computed < self.num_prefill

    def can_share(self, step: int) -> bool:
        """Whether its prompt is computed before this step, in pages that it still holds."""
        return self.prefilled_at is not None and self.prefilled_at < step

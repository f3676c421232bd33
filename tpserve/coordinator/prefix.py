"""What of a sequence is computed already, by itself or by others; and the offer of what it computes."""

from __future__ import annotations

from typing import NamedTuple

from tpserve.coordinator.pages import PagePool
from tpserve.coordinator.sequence import Sequence


class Prefix(NamedTuple):
    """What is computed already of a sequence that is to be admitted."""

    pages: list[int]  # to be shared, all of them full
    tokens: int
    partial: int | None  # the page with the tokens beyond `pages`, to be copied


class Prefixes:
    """Finds prefixes in the pool's index and in the pages of leaders. With `is_on` False the index stays empty."""

    def __init__(self, pool: PagePool, page_size: int, is_on: bool):
        self._pool = pool
        self._page_size = page_size
        self._is_on = is_on

    def find(self, sequence: Sequence, step: int) -> Prefix:
        """What this step need not compute of a sequence without slot."""
        most = sequence.most_cached
        pages = self._hit(sequence, most // self._page_size)
        tokens = len(pages) * self._page_size
        leader, shared = sequence.leader, min(sequence.num_prompt, most)
        if leader is None or not leader.can_share(step) or tokens >= shared:
            return Prefix(pages, tokens, None)
        full, rest = divmod(shared, self._page_size)
        return Prefix(leader.pages[:full], shared, leader.pages[full] if rest else None)

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Offer its full pages to the index; so many of its ids are its own and computed, in steps already planned."""
        if not self._is_on:
            return
        full = num_computed // self._page_size
        self._pool.extend_digests(sequence.digests, sequence.request.root, sequence.ids, full)
        for index in range(sequence.num_published, full):
            self._pool.publish(sequence.pages[index], sequence.digests[index])
        sequence.num_published = full

    def _hit(self, sequence: Sequence, most: int) -> list[int]:
        """Indexed pages with the content of the sequence's first ones, `most` at most."""
        if not self._is_on:
            return []
        self._pool.extend_digests(sequence.digests, sequence.request.root, sequence.ids, most)
        return self._pool.find(sequence.digests[:most])

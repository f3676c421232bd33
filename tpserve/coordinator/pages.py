"""The pool of KV pages as numbers: who refers to which, and which hold a prefix that can be used again.

A page is *used* while sequences refer to it, *cached* while nobody does but its content is in the prefix
index, else *free*. Page p means page p of every rank's pool. Pure: no clock, no randomness.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable

_DIGEST_BYTES = 16
_PAGE, _SALT = b"page", b"salt"  # what is digested: one kind's digests are no other's, whatever a client calls its salt


class PagePool:
    """Pages 0 to total - 1, their reference counts, and the prefix index.

    The index finds a page by the digest of all ids from the sequence's start to the page's end, and of the salt:
    sequences share prefixes if theirs are equal. The digest is keyed with `secret` (at most 64 bytes): who doesn't
    know it cannot make two prefixes collide.
    """

    def __init__(self, total: int, page_size: int, secret: bytes):
        self.total = total
        self._page_size = page_size
        self._hashes = {kind: hashlib.blake2b(digest_size=_DIGEST_BYTES, key=secret, person=kind) for kind in (_PAGE, _SALT)}
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._num_references = 0
        self._digests: list[bytes | None] = [None] * total
        self._index: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}  # the page unused for longest comes first

    @property
    def free(self) -> int:
        """Pages without content that matters."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody refers to, kept for their content until they are needed."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """How many pages `take` can give."""
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        """Pages that sequences refer to."""
        return self.total - self.available

    @property
    def num_shared(self) -> int:
        """References beyond each used page's first."""
        return self._num_references - self.used

    def take(self, count: int) -> list[int]:
        """`count` pages for one sequence, cached ones last. Raises ValueError when fewer are available."""
        if count > self.available:
            raise ValueError(f"{count} pages are wanted, {self.available} are available")
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        self._num_references += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Let one more sequence refer to these used or cached pages."""
        for page in pages:
            if not self._references[page]:
                del self._cached[page]
            self._references[page] += 1
            self._num_references += 1

    def release(self, pages: list[int]) -> None:
        """Take back one sequence's reference to each of its pages."""
        for page in reversed(pages):  # a prefix is of no use without its beginning, so its end is evicted first
            self._references[page] -= 1
            self._num_references -= 1
            if self._references[page]:
                continue
            if self._digests[page] is None:
                self._free.append(page)
            else:
                self._cached[page] = None

    def num_unreferenced(self, pages: Iterable[int]) -> int:
        """How many of these pages are cached, so that sharing them makes fewer available."""
        return sum(not self._references[page] for page in pages)

    def root(self, salt: str) -> bytes:
        """What the digests of a sequence with that salt begin with."""
        if not salt:
            return b""
        hash_ = self._hashes[_SALT].copy()
        hash_.update(salt.encode())
        return hash_.digest()

    def extend_digests(self, digests: list[bytes], root: bytes, ids: array[int], count: int) -> None:
        """Append to a sequence's page digests until there are `count`, which its ids must fill."""
        size, page_hash = self._page_size, self._hashes[_PAGE]
        for i in range(len(digests), count):
            hash_ = page_hash.copy()
            hash_.update(digests[i - 1] if i else root)
            hash_.update(ids[i * size : (i + 1) * size])
            digests.append(hash_.digest())

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The indexed pages of the longest beginning of this chain of digests."""
        pages = []
        for digest in digests:
            page = self._index.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Put a used page into the index, unless another page with this content is there."""
        if digest not in self._index:
            self._index[digest] = page
            self._digests[page] = digest

    def forget(self, digests: Iterable[bytes]) -> None:
        """Take the pages with this content out of the index."""
        for digest in digests:
            page = self._index.pop(digest, None)
            if page is None:
                continue
            self._digests[page] = None
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def is_shared(self, pages: Iterable[int]) -> bool:
        """Whether more than one sequence refers to any of these."""
        return any(self._references[page] > 1 for page in pages)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless free + used + cached = total, used being what these sequences' page tables hold."""
        references = Counter(page for table in tables for page in table)
        assert [references[page] for page in range(self.total)] == self._references, "pages were lost or taken twice"
        assert sum(self._references) == self._num_references, "references were miscounted"
        pages = sorted([*self._free, *references, *self._cached])
        assert pages == list(range(self.total)), "free + used + cached is not the total"
        indexed = {digest: page for page, digest in enumerate(self._digests) if digest is not None}
        assert indexed == self._index, "index and pages disagree"
        assert all(self._digests[page] is not None for page in self._cached), "a cached page is not in the index"

    def _evict(self) -> None:
        digest = self._digests[next(iter(self._cached))]
        assert digest is not None, "a cached page is not indexed"
        self.forget([digest])

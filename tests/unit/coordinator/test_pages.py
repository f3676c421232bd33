from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpserve.coordinator.pages import PagePool

OPERATIONS = ("take", "publish", "hit", "release")


def digests_of(pool: PagePool, ids: list[int], count: int) -> list[bytes]:
    digests: list[bytes] = []
    pool.extend_digests(digests, b"", array("i", ids), count)
    return digests


def cached_chain(pool: PagePool, ids: list[int], count: int) -> list[int]:
    """The pages of a sequence that has been computed, published and released."""
    pages = pool.take(count)
    for page, digest in zip(pages, digests_of(pool, ids, count), strict=True):
        pool.publish(page, digest)
    pool.release(pages)
    return pages


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.free, pool.used, pool.cached


def test_pages_taken_and_released_without_publication_are_free_again() -> None:
    pool = PagePool(4, 2, b"k")
    pages = pool.take(3)
    assert len(set(pages)) == 3
    assert counts(pool) == (1, 3, 0)
    pool.release(pages)
    assert counts(pool) == (4, 0, 0)


def test_take_more_than_available_raises_and_takes_nothing() -> None:
    pool = PagePool(4, 2, b"k")
    pool.take(3)
    with pytest.raises(ValueError, match="2 pages are wanted, 1 are available"):
        pool.take(2)
    assert counts(pool) == (1, 3, 0)


def test_shared_page_is_used_until_its_last_reference_is_released() -> None:
    pool = PagePool(2, 2, b"k")
    pages = pool.take(1)
    pool.share(pages)
    assert pool.is_shared(pages)
    pool.release(pages)
    assert counts(pool) == (1, 1, 0)
    pool.release(pages)
    assert counts(pool) == (2, 0, 0)


def test_released_published_pages_are_found_by_content_and_shared_again() -> None:
    pool = PagePool(4, 2, b"k")
    pages = cached_chain(pool, [1, 2, 3, 4], 2)
    assert counts(pool) == (2, 0, 2)
    found = pool.find(digests_of(pool, [1, 2, 3, 4, 9, 9], 3))
    assert found == pages
    assert pool.num_unreferenced(found) == 2
    pool.share(found)
    assert pool.num_unreferenced(found) == 0
    assert counts(pool) == (2, 2, 0)


def test_pages_with_equal_ids_after_different_beginnings_have_different_digests() -> None:
    pool = PagePool(4, 2, b"k")
    assert digests_of(pool, [1, 2, 5, 5], 2)[1] != digests_of(pool, [2, 1, 5, 5], 2)[1]


def test_digests_depend_on_the_secret() -> None:
    assert digests_of(PagePool(1, 2, b"a"), [1, 2], 1) != digests_of(PagePool(1, 2, b"b"), [1, 2], 1)
    assert len(digests_of(PagePool(1, 2, b"a"), [1, 2], 1)[0]) == 16


def test_extending_digests_step_by_step_gives_those_of_one_go() -> None:
    pool, ids = PagePool(4, 2, b"k"), array("i", [1, 2, 3, 4, 5, 6])
    digests: list[bytes] = []
    for count in (1, 1, 3):
        pool.extend_digests(digests, b"", ids, count)
    assert digests == digests_of(pool, ids.tolist(), 3)


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = PagePool(4, 2, b"k")
    cached = cached_chain(pool, [1, 2, 3, 4], 2)
    assert set(pool.take(2)).isdisjoint(cached)
    assert counts(pool) == (0, 2, 2)


def test_eviction_takes_the_chain_unused_for_longest_from_its_end() -> None:
    pool = PagePool(4, 2, b"k")
    old, new = cached_chain(pool, [1, 2, 3, 4], 2), cached_chain(pool, [5, 6, 7, 8], 2)
    pool.share(old)
    pool.release(old)  # now `new` is the older one
    assert pool.take(1) == new[1:]
    assert pool.find(digests_of(pool, [5, 6, 7, 8], 2)) == new[:1]
    assert pool.find(digests_of(pool, [1, 2, 3, 4], 2)) == old


def test_second_page_with_the_same_content_is_not_indexed() -> None:
    pool = PagePool(4, 2, b"k")
    first, second = cached_chain(pool, [1, 2], 1), pool.take(1)
    pool.publish(second[0], digests_of(pool, [1, 2], 1)[0])
    assert pool.find(digests_of(pool, [1, 2], 1)) == first
    pool.release(second)
    assert counts(pool) == (3, 0, 1)


def test_forgotten_content_is_not_found_and_its_unused_pages_are_free() -> None:
    pool = PagePool(4, 2, b"k")
    cached_chain(pool, [1, 2, 3, 4], 2)
    held = pool.find(digests_of(pool, [1, 2], 1))
    pool.share(held)
    pool.forget(digests_of(pool, [1, 2, 3, 4], 2))
    assert pool.find(digests_of(pool, [1, 2], 1)) == []
    assert counts(pool) == (3, 1, 0)
    pool.release(held)
    assert counts(pool) == (4, 0, 0)


def test_check_notices_a_page_that_no_page_table_holds() -> None:
    pool = PagePool(2, 2, b"k")
    pages = pool.take(1)
    pool.check([pages])
    with pytest.raises(AssertionError, match="lost or taken twice"):
        pool.check([])


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 8),
    st.lists(
        st.tuples(st.sampled_from(["take", "publish", "hit", "release"]), st.integers(0, 5), st.integers(0, 2)), max_size=40
    ),
)
def test_any_use_keeps_free_used_and_cached_the_total(total: int, operations: list[tuple[str, int, int]]) -> None:
    pool = PagePool(total, 1, b"k")
    held: list[list[int]] = []
    for operation, amount, token in operations:
        digests = digests_of(pool, [token] * amount, amount)
        if operation in ("take", "publish") and amount <= pool.available:
            held.append(pool.take(amount))
            for page, digest in zip(held[-1], digests, strict=True):
                if operation == "publish":
                    pool.publish(page, digest)
        elif operation == "hit":
            held.append(pool.find(digests))
            pool.share(held[-1])
        elif operation == "release" and held:
            pool.release(held.pop(amount % len(held)))
        pool.check(held)
    for pages in held:
        pool.release(pages)
    pool.check([])
    assert pool.used == 0

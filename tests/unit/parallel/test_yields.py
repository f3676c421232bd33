from __future__ import annotations

import pytest

from tpserve.parallel.yields import Yields


def after(yields: Yields, begin_s: float, count: int, each_s: float, apart_s: float) -> float:
    """Lets yields of one length follow one another; returns when the last one is over."""
    now_s = begin_s
    for _ in range(count):
        yields.took(now_s, now_s + each_s)
        now_s += each_s + apart_s
    return now_s


@pytest.mark.parametrize(
    ("count", "each_s", "apart_s", "dear"),
    [
        (10_000, 0.000001, 0.0, False),  # nobody wanted the core
        (100, 0.0008, 0.0, False),  # a process of ours did, for a little while
        (100, 0.005, 0.03, False),  # now and then one that takes longer
        (4, 0.004, 0.0001, True),  # one that computes without end
    ],
)
def test_yields_are_dear_once_much_of_the_time_goes_to_long_ones(count: int, each_s: float, apart_s: float, dear: bool) -> None:
    yields = Yields()
    now_s = after(yields, 100.0, count, each_s, apart_s)
    assert yields.are_dear(now_s) == dear


def test_yields_are_tried_again_after_a_while() -> None:
    yields = Yields()
    now_s = after(yields, 100.0, 4, 0.004, 0.0001)
    assert yields.are_dear(now_s + 0.15)
    assert not yields.are_dear(now_s + 0.25)
    yields.took(now_s + 0.25, now_s + 0.254)
    assert not yields.are_dear(now_s + 0.26), "what was lost in another window counts"

"""Top-k, top-p and min-p against their definitions in float64, and the same at every split of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.passes import BEST, FORMS, passes
from tests.ranks import Ranks
from tests.unit.worker.test_sampler import make_logits, sample, sample_on
from tpserve.parallel.collectives import Alone
from tpserve.worker.filters import Filtered
from tpserve.worker.noise import RowNoise
from tpserve.worker.sampling_rows import SamplingRows

FLOATS = st.floats(-60, 60, width=32) | st.sampled_from([0.0, -0.0, 1.0, 1.5, float("-inf"), 1e-40, -1e30, 3e38])
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=FLOATS).filter(
    lambda x: bool((x.max(axis=1) > -np.inf).all())
)
TEMPERATURES = st.sampled_from([1e-5, 0.1, 0.7, 1.0, 3.0, 1e30])


def make_rows(count: int, temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingRows:
    whole = dict(choices=np.zeros(count, np.int64), positions=np.arange(count), logprobs=np.full(count, -1))
    return SamplingRows(
        temperatures=np.full(count, temperature, np.float32),
        top_ks=np.full(count, top_k),
        top_ps=np.full(count, top_p, np.float32),
        min_ps=np.full(count, min_p, np.float32),
        seeds=np.zeros(count, np.uint64),
        **whole,
    )


def filtered_by(logits: np.ndarray, rows: SamplingRows, form: str) -> Filtered:
    greatest, noise = (logits.max(axis=1), logits.argmax(axis=1)), RowNoise(rows.seeds, rows.choices, rows.positions, 0)
    index = np.arange(len(logits))
    return Filtered(passes(form), Alone(), torch.from_numpy(logits), index, greatest, greatest[0], rows, noise)


def kept(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    form: str = BEST,
) -> np.ndarray:
    """Which logits the filters leave: bool, as `logits`, whose rows are all filtered alike."""
    return kept_by(logits, make_rows(len(logits), temperature, top_k, top_p, min_p), form)


def kept_by(logits: np.ndarray, rows: SamplingRows, form: str = BEST) -> np.ndarray:
    """The same, for rows that are filtered in their own ways."""
    filtered, everything = filtered_by(logits, rows, form), np.arange(len(logits))
    counted = filtered.top_k()
    inside = [~filtered.outside(everything, np.ascontiguousarray(column), counted) for column in logits.T]
    return (np.stack(inside, axis=1) | (rows.top_ps == 1)[:, None]) & (logits >= np.maximum(counted, filtered.min_p())[:, None])


def weights(row: np.ndarray, temperature: float) -> np.ndarray:
    """Unnormalized probabilities in float64."""
    scaled = (row.astype(np.float64) - row.max()) / np.float32(temperature)
    return np.exp(scaled)


@pytest.mark.parametrize("form", ["torch", BEST])
@given(logits=ROWS, top_k=st.integers(1, 50))
def test_top_k_keeps_the_kth_greatest_and_its_ties(logits: np.ndarray, top_k: int, form: str) -> None:
    for row, left in zip(logits, kept(logits, top_k=top_k, form=form)):
        kth = np.sort(row)[::-1][min(top_k, len(row)) - 1] if top_k <= len(row) else -np.inf
        np.testing.assert_array_equal(left, row >= kth)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top_k", [1024, 1025, 2999, 3000, 3001])
def test_large_k_keeps_the_kth_greatest_and_its_ties(top_k: int, form: str) -> None:
    logits = (3 * np.random.default_rng(1).standard_normal((4, 3000))).astype(np.float32)
    logits[1] = logits[1].round(1)
    logits[2] = 1.0
    logits[3, 1500:] = -np.inf
    rows = make_rows(4, 1.0, top_k, 1.0, 0.0)
    least = filtered_by(logits, rows, form).top_k()
    for row, lowest in zip(logits, least):
        kth = np.sort(row)[::-1][top_k - 1] if top_k <= len(row) else -np.inf
        np.testing.assert_array_equal(row >= lowest, row >= kth)


@pytest.mark.parametrize("form", ["torch", BEST])
@given(logits=ROWS, temperature=TEMPERATURES, top_p=st.floats(0.0, 1.0, exclude_max=True, width=32))
def test_top_p_keeps_the_fewest_that_reach_p(logits: np.ndarray, temperature: float, top_p: float, form: str) -> None:
    for row, left in zip(logits, kept(logits, temperature, top_p=top_p, form=form)):
        weight, least = weights(row, temperature), row[left].min()
        wanted = top_p * weight.sum()
        slack = 3e-7 * weight.sum()  # of masses that are rounded to 2**-29 each, of exponentials in float32
        np.testing.assert_array_equal(left, row >= least)
        assert weight[row >= least].sum() >= wanted - slack
        assert weight[row > least].sum() <= wanted + slack


@pytest.mark.parametrize("form", ["torch", BEST])
@given(logits=ROWS, temperature=TEMPERATURES, min_p=st.floats(2.0**-20, 1.0, width=32))
def test_min_p_keeps_what_is_likely_enough(logits: np.ndarray, temperature: float, min_p: float, form: str) -> None:
    for row, left in zip(logits, kept(logits, temperature, min_p=min_p, form=form)):
        ratio = weights(row, temperature)
        clear = np.abs(ratio - min_p) > 1e-9
        np.testing.assert_array_equal(left[clear], (ratio >= min_p)[clear])
        assert left[row.argmax()]


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    assert kept(logits, top_p=0.69).sum() == 2
    assert kept(logits, top_p=0.71).sum() == 3
    assert kept(logits, top_k=2, top_p=0.71).sum() == 2  # of 0.7
    assert kept(logits, top_k=2, top_p=0.55).sum() == 1


def test_min_p_is_relative_to_the_likeliest_and_after_temperature() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    assert kept(logits, min_p=0.45).sum() == 3
    assert kept(logits, min_p=0.45, temperature=0.5).sum() == 2
    assert kept(logits, min_p=0.45, top_k=1).sum() == 1


def test_filters_ties_are_kept_together() -> None:
    logits = np.array([[1.0, 2.0, 0.0, 1.0, -0.0, 1.0]], np.float32)
    assert kept(logits, top_k=2).sum() == 4
    assert kept(logits, top_p=0.5).sum() == 4
    assert kept(logits, top_k=5).sum() == 6


@pytest.mark.parametrize("form", FORMS)
def test_draws_lie_in_what_the_filters_leave_and_are_those_of_torch(form: str) -> None:
    logits, rows = make_logits(24, 3000), all_kinds(24)
    left = kept_by(logits, rows, form)
    assert not left.all(axis=1).any()
    ids = sample(logits, rows, form)
    assert left[np.arange(24), ids].all()
    np.testing.assert_array_equal(ids, sample(logits, rows))


@pytest.mark.parametrize("form", ["torch", BEST])
@pytest.mark.parametrize(
    ("columns", "starts"),
    [(3000, (0, 1504)), (3000, (0, 32, 1504)), (150, (0, 64, 96, 128)), (96, (0, 32, 64, 96)), (2700, (0, 0, 2688))],
    ids=str,
)
def test_filters_at_any_split_are_those_of_one_rank(ranks: Ranks, columns: int, starts: tuple[int, ...], form: str) -> None:
    logits = make_logits(24, columns, seed=columns, scale=3.0)
    logits[::3] = logits[::3].round(1)  # with many ties
    rows = all_kinds(24)
    np.testing.assert_array_equal(sample_on(ranks, starts, logits, rows, form), sample(logits, rows))


def all_kinds(count: int) -> SamplingRows:
    """top_ks (small and large), top_ps (narrow ones too) and min_ps in all combinations of on and off, but none unfiltered."""
    i = np.arange(count)
    top_ks = np.select([i % 4 == 1, i % 4 == 2], [7 + i, 1100 + i], 0)
    top_ps = np.where(i % 3 == 0, 1.0, np.where(i % 2, 0.1, 0.6) + 0.39 * i / count)
    return SamplingRows(
        temperatures=(0.5 + i / count).astype(np.float32),
        top_ks=top_ks,
        top_ps=top_ps.astype(np.float32),
        min_ps=np.where((i % 5 == 0) | ((i % 3 == 0) & (top_ks == 0)), 0.002 * (1 + i), 0.0).astype(np.float32),
        seeds=(i * 2**59).astype(np.uint64),
        choices=i % 4,
        positions=1000 - i,
        logprobs=np.full(count, -1),
    )

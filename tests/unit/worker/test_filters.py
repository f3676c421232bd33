"""Top-k, top-p and min-p against their definitions in float64, and the same at every split of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import ranks as jobs
from tests.ranks import Ranks
from tpserve.parallel.collectives import Alone
from tpserve.worker.filters import least_logits

FLOATS = st.floats(-60, 60, width=32) | st.sampled_from([0.0, -0.0, 1.0, 1.5, float("-inf"), 1e-40, -1e30, 3e38])
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 40)), elements=FLOATS).filter(
    lambda x: bool((x.max(axis=1) > -np.inf).all())
)
TEMPERATURES = st.sampled_from([1e-5, 0.1, 0.7, 1.0, 3.0, 1e30])


def leasts(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """least_logits of one rank, all rows alike."""
    count = len(logits)
    limits = (np.full(count, temperature, np.float32), np.full(count, top_k), np.full(count, top_p, np.float32))
    tensors = map(torch.from_numpy, (logits.max(axis=1), *limits, np.full(count, min_p, np.float32)))
    return least_logits(torch.from_numpy(logits), *tensors, Alone()).numpy()


def weights(row: np.ndarray, temperature: float) -> np.ndarray:
    """Unnormalized probabilities in float64."""
    scaled = (row.astype(np.float64) - row.max()) / np.float32(temperature)
    return np.exp(scaled)


@given(ROWS, st.integers(1, 50))
def test_top_k_keeps_the_kth_greatest_and_its_ties(logits: np.ndarray, top_k: int) -> None:
    for row, least in zip(logits, leasts(logits, top_k=top_k)):
        kth = np.sort(row)[::-1][min(top_k, len(row)) - 1] if top_k <= len(row) else -np.inf
        np.testing.assert_array_equal(row >= least, row >= kth)


@given(ROWS, TEMPERATURES, st.floats(0.0, 1.0, exclude_max=True, width=32))
def test_top_p_keeps_the_fewest_that_reach_p(logits: np.ndarray, temperature: float, top_p: float) -> None:
    for row, least in zip(logits, leasts(logits, temperature, top_p=top_p)):
        weight = weights(row, temperature)
        wanted = top_p * weight.sum()
        slack = 1e-7 * weight.sum()  # of masses that are rounded to 2**-30 each
        assert weight[row >= least].sum() >= wanted - slack
        assert weight[row > least].sum() <= wanted + slack
        assert least in row


@given(ROWS, TEMPERATURES, st.floats(2.0**-20, 1.0, width=32))
def test_min_p_keeps_what_is_likely_enough(logits: np.ndarray, temperature: float, min_p: float) -> None:
    for row, least in zip(logits, leasts(logits, temperature, min_p=min_p)):
        ratio = weights(row, temperature)
        clear = np.abs(ratio - min_p) > 1e-9
        np.testing.assert_array_equal((row >= least)[clear], (ratio >= min_p)[clear])
        assert row.max() >= least


def test_top_p_counts_only_what_top_k_left() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    np.testing.assert_array_equal(leasts(logits, top_p=0.69), logits[:, 1])
    np.testing.assert_array_equal(leasts(logits, top_p=0.71), logits[:, 2])
    np.testing.assert_array_equal(leasts(logits, top_k=2, top_p=0.71), logits[:, 1])  # of 0.7
    np.testing.assert_array_equal(leasts(logits, top_k=2, top_p=0.55), logits[:, 0])


def test_min_p_is_relative_to_the_likeliest_and_after_temperature() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    assert (logits >= leasts(logits, min_p=0.45)).sum() == 3
    assert (logits >= leasts(logits, min_p=0.45, temperature=0.5)).sum() == 2
    assert (logits >= leasts(logits, min_p=0.45, top_k=1)).sum() == 1


def test_filters_ties_are_kept_together() -> None:
    logits = np.array([[1.0, 2.0, 0.0, 1.0, -0.0, 1.0]], np.float32)
    assert (logits >= leasts(logits, top_k=2)).sum() == 4
    assert (logits >= leasts(logits, top_p=0.5)).sum() == 4
    assert (logits >= leasts(logits, top_k=5)).sum() == 6


def test_filters_of_each_row_are_its_own() -> None:
    logits = np.random.default_rng(2).standard_normal((40, 200)).astype(np.float32)
    limits = all_kinds(len(logits))
    together = least_logits(torch.from_numpy(logits), *map(torch.from_numpy, (logits.max(axis=1), *limits)), Alone())
    for i, row in enumerate(logits):
        temperature, top_k, top_p, min_p = (limit[i].item() for limit in limits)
        assert leasts(row[None], temperature, top_k, top_p, min_p)[0] == together[i]


@pytest.mark.parametrize(
    ("columns", "starts"),
    [(3000, (0, 1504)), (3000, (0, 32, 1504)), (150, (0, 64, 96, 128)), (96, (0, 32, 64, 96)), (2700, (0, 0, 2688))],
    ids=str,
)
def test_filters_at_any_split_are_those_of_one_rank(ranks: Ranks, columns: int, starts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(columns)
    logits = (3 * rng.standard_normal((24, columns))).astype(np.float32)
    logits[::3] = logits[::3].round(1)  # with many ties
    limits = all_kinds(len(logits))
    expected = least_logits(torch.from_numpy(logits), *map(torch.from_numpy, (logits.max(axis=1), *limits)), Alone())
    assert len(set(expected.tolist())) > len(logits) // 2
    ranks.open(len(starts))
    for result in ranks.run(jobs.least, logits, starts, limits):
        np.testing.assert_array_equal(result, expected.numpy())


def all_kinds(count: int) -> tuple[np.ndarray, ...]:
    """temperatures, top_ks (small and large), top_ps and min_ps in all combinations of on and off."""
    rows = np.arange(count)
    top_ks = np.select([rows % 4 == 1, rows % 4 == 2], [7 + rows, 1100 + rows], 0)
    top_ps = np.where(rows % 3 == 0, 1.0, 0.6 + 0.39 * rows / count).astype(np.float32)
    min_ps = np.where(rows % 5 == 0, 0.002 * rows, 0.0).astype(np.float32)
    return (0.5 + rows / count).astype(np.float32), top_ks, top_ps, min_ps

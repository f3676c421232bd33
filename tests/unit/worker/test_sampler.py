"""Ids from logits: the definition, any split of the vocabulary, closed-form frequencies, bad rows, disagreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests import ranks as jobs
from tests.passes import BEST, FORMS, passes
from tests.ranks import Ranks
from tpserve.parallel.collectives import Alone
from tpserve.parallel.partition import VOCAB_UNIT
from tpserve.worker.noise import LANES, RowNoise
from tpserve.worker.sampler import NOT_FINITE, Sampler, SamplingRows


def make_rows(
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 7,
    choice: int = 0,
) -> SamplingRows:
    """Rows of one request at positions 1, 2, 3, ..."""
    return SamplingRows(
        temperatures=np.full(count, temperature, np.float32),
        top_ks=np.full(count, top_k),
        top_ps=np.full(count, top_p, np.float32),
        min_ps=np.full(count, min_p, np.float32),
        seeds=np.full(count, seed, np.uint64),
        choices=np.full(count, choice),
        positions=np.arange(1, count + 1),
        logprobs=np.full(count, -1),
    )


def mixed_rows(count: int) -> SamplingRows:
    """Greedy, unfiltered and filtered rows in turn, each with its own parameters."""
    i = np.arange(count)
    return SamplingRows(
        temperatures=np.where(i % 3 == 0, 0.0, 0.4 + i / count).astype(np.float32),
        top_ks=np.where(i % 6 == 2, 3 + i, 0),
        top_ps=np.where(i % 12 >= 5, 0.9, 1.0).astype(np.float32),
        min_ps=np.where(i % 9 == 8, 0.05, 0.0).astype(np.float32),
        seeds=(i * 2**59).astype(np.uint64),
        choices=i % 4,
        positions=1000 - i,
        logprobs=np.full(count, -1),
    )


def make_logits(count: int, columns: int, seed: int = 0, scale: float = 4.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((count, columns))).astype(np.float32)


def sample(logits: np.ndarray, rows: SamplingRows, form: str = "torch") -> np.ndarray:
    """The ids that a single rank samples."""
    whole = torch.from_numpy(logits)
    ids, _ = Sampler(Alone(), 0, passes=passes(form)).sample(whole, rows, 1, b"", whole[:0])
    return ids.numpy()


def sample_on(ranks: Ranks, starts: Sequence[int], logits: np.ndarray, rows: SamplingRows, form: str = BEST) -> np.ndarray:
    """The ids that ranks with these first ids sample; they must agree."""
    ranks.open(len(starts))
    results = [ids for (ids,) in ranks.run(jobs.sample, [(logits, rows)], starts, None, form)]
    for ids in results:
        np.testing.assert_array_equal(ids, results[0])
    return np.asarray(results[0])


def noise_of(rows: SamplingRows, columns: int) -> np.ndarray:
    """The noise of every id in every row."""
    source = RowNoise(rows.seeds, rows.choices, rows.positions, 0)
    blocks = -(-columns // LANES)
    row = torch.arange(len(rows.positions)).repeat_interleave(blocks)
    block = torch.arange(blocks).repeat(len(rows.positions))
    return source.of(row, block).view(len(rows.positions), -1).numpy()[:, :columns]


def even_starts(size: int, columns: int) -> tuple[int, ...]:
    units = -(-columns // VOCAB_UNIT)
    return tuple(VOCAB_UNIT * (units // size * rank + min(rank, units % size)) for rank in range(size))


@pytest.mark.parametrize("form", FORMS)
def test_greedy_rows_take_the_greatest_and_the_lowest_of_equals(form: str) -> None:
    logits = make_logits(50, 200)
    logits[:, 77] = logits[:, 150] = 100.0
    logits[0, 20] = 100.0
    assert sample(logits, make_rows(50, temperature=0.0), form).tolist() == [20] + [77] * 49
    assert sample(logits, make_rows(50, temperature=9e-6), form).tolist() == [20] + [77] * 49


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [1, 5, 64, 203])
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 5.0, 1e30])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 3e4])
def test_unfiltered_rows_take_the_greatest_logit_over_temperature_plus_noise(
    form: str, columns: int, temperature: float, scale: float
) -> None:
    rows, logits = make_rows(40, temperature), make_logits(40, columns, scale=scale)
    sums = logits / np.float32(temperature) + noise_of(rows, columns)
    np.testing.assert_array_equal(sample(logits, rows, form), sums.argmax(axis=1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0, 1e30])
def test_filtered_rows_take_the_greatest_sum_that_is_left(form: str, temperature: float) -> None:
    rows, logits = make_rows(60, temperature, top_k=20), make_logits(60, 203)
    least = np.sort(logits, axis=1)[:, -20, None]
    sums = (logits - logits.max(axis=1, keepdims=True)) / np.float32(temperature) + noise_of(rows, 203)
    ids = sample(logits, rows, form)
    np.testing.assert_array_equal(ids, np.where(logits >= least, sums, -np.inf).argmax(axis=1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_filters_at_their_narrowest_are_greedy(form: str, limits: dict[str, Any]) -> None:
    logits = make_logits(40, 100)
    ids = sample(logits, make_rows(40, 2.0, **limits), form)
    np.testing.assert_array_equal(ids, logits.argmax(axis=1))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_all_kinds_together_are_sampled_as_each_alone(form: str) -> None:
    rows, logits = mixed_rows(72), make_logits(72, 300)
    unfiltered, filtered = rows.kinds()
    assert min(len(unfiltered), len(filtered)) > 10
    ids = sample(logits, rows, form)
    for i in range(72):
        assert sample(logits[i : i + 1], rows.take(np.array([i])), form) == ids[i]


@pytest.mark.parametrize("form", ["torch", BEST])
@pytest.mark.parametrize(("size", "columns"), [(2, 300), (3, 300), (4, 150), (4, 96), (3, 33), (4, 5000)])
def test_ids_at_any_size_are_those_of_one_rank(ranks: Ranks, size: int, columns: int, form: str) -> None:
    starts = even_starts(size, columns)
    rows, logits = mixed_rows(100), make_logits(100, columns, seed=size)
    logits[::5] = logits[::5].round()  # with ties, across ranks too
    np.testing.assert_array_equal(sample_on(ranks, starts, logits, rows, form), sample(logits, rows))


def test_ids_change_with_seed_choice_and_position() -> None:
    logits = np.zeros((1, 4096), np.float32)
    variants = [
        make_rows(1),
        make_rows(1, seed=8),
        make_rows(1, choice=1),
        make_rows(1, choice=2),
        make_rows(2).take(np.array([1])),
    ]
    assert len({sample(logits, rows).item() for rows in variants}) == len(variants)


def closed_form(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities by the definition of the filters, in float64; the row has no ties."""
    order = np.argsort(-row)
    p = np.exp((row[order].astype(np.float64) - row.max()) / temperature)
    kept = np.arange(len(row)) < (top_k or len(row))
    p_k = p * kept / (p * kept).sum()
    kept &= np.cumsum(p_k) - p_k < top_p
    kept &= p >= min_p
    out = np.zeros(len(row))
    out[order] = p * kept / (p * kept).sum()
    return out


@pytest.mark.parametrize("starts", [(0,), (0, 32, 64)], ids=["tp 1", "tp 3"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0), (2.0, 12, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (1.5, 30, 0.9, 0.02)],
)
def test_sampled_frequencies_match_the_closed_form(
    ranks: Ranks, starts: tuple[int, ...], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row, count = make_logits(1, 96, seed=3, scale=1.5)[0], 2000
    rows = make_rows(count, temperature, top_k, top_p, min_p, seed=11)
    counts = np.bincount(sample_on(ranks, starts, np.tile(row, (count, 1)), rows), minlength=96)
    expected = count * closed_form(row, temperature, top_k, top_p, min_p)
    assert not counts[expected == 0].any()
    common = expected >= 5
    observed, wanted = counts[common], expected[common]
    if not common[expected > 0].all():  # the chi-square test wants no rare classes: they are one
        observed, wanted = np.append(observed, count - observed.sum()), np.append(wanted, count - wanted.sum())
    assert stats.chisquare(observed, wanted).pvalue > 0.001


@pytest.mark.parametrize("form", ["torch", BEST])
@pytest.mark.parametrize("starts", [(0,), (0, 32, 64)], ids=["tp 1", "tp 3"])
def test_rows_that_are_not_finite_end_alone_on_all_ranks(ranks: Ranks, starts: tuple[int, ...], form: str) -> None:
    rows, logits = mixed_rows(72), make_logits(72, 96)
    good = sample(logits, rows)
    logits[10:13, 50] = np.nan
    logits[20:23, 5] = np.inf
    logits[30:33] = -np.inf
    logits[40:43, :60] = -np.inf  # may be: there are others
    ids = sample_on(ranks, starts, logits, rows, form)
    bad = np.isin(np.arange(72), [*range(10, 13), *range(20, 23), *range(30, 33)])
    assert (ids[bad] == NOT_FINITE).all()
    assert (ids[40:43] >= 60).all()
    bad[40:43] = True
    np.testing.assert_array_equal(ids[~bad], good[~bad])


@pytest.mark.parametrize(
    ("rows", "gathers"), [(make_rows(5, 0.0), 1), (make_rows(0), 1), (make_rows(5), 1), (make_rows(5, min_p=0.1), 2)]
)
def test_sample_gathers_once_if_nothing_is_filtered(ranks: Ranks, rows: SamplingRows, gathers: int) -> None:
    ranks.open(2)
    ranks.run(jobs.sample, [(make_logits(len(rows.positions), 64), rows)], (0, 32))
    assert ranks.run(jobs.counts) == [(0, gathers)] * 2


@pytest.mark.parametrize(
    ("size", "rank", "text"),
    [
        (2, 1, "Disagreement: ranks 0 and 1 disagree on the ids of step 2"),
        (3, 0, "Disagreement: rank 0 disagrees with the others on the ids of step 2"),
        (4, 2, "Disagreement: rank 2 disagrees with the others on the ids of step 2"),
    ],
)
def test_sample_after_a_wrong_id_names_rank_and_step_on_all_ranks(ranks: Ranks, size: int, rank: int, text: str) -> None:
    logits, rows = make_logits(6, 128), mixed_rows(6)
    none = (logits[:0], rows.take(np.arange(0)))
    ranks.open(size)
    results = ranks.run(jobs.sample, [(logits, rows), (logits, rows), none, (logits, rows)], even_starts(size, 128), (rank, 2))
    right = sample(logits, rows)
    for this, (first, second, *later) in enumerate(results):
        np.testing.assert_array_equal(first, right)
        assert np.array_equal(second, right) is (this != rank)
        assert later == [text]

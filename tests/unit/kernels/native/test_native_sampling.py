"""Each pass over logits at each native level against torch's form, over random shapes, and nothing outside the rows touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.passes import FORMS, passes
from tpserve.worker.native_passes import NativePasses
from tpserve.worker.noise import RowNoise
from tpserve.worker.passes import MASS_UNIT, MOST_TOP, TORCH

LEVELS = [form for form in FORMS if form != "torch"]
COLUMNS = [0, 1, 3, 31, 32, 63, 64, 65, 200, 1027, 5000]
ROWS = 9
GUARD = 1e9  # stands on both sides of each row; would win everything

pytestmark = pytest.mark.skipif(not LEVELS, reason="the native kernels are not built")


@pytest.fixture(params=LEVELS)
def native(request: pytest.FixtureRequest) -> NativePasses:
    """The passes of one level."""
    made = passes(request.param)
    assert isinstance(made, NativePasses)
    return made


def guarded(columns: int, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    """Random logits, some of them equal or minus infinity, between guards."""
    logits = scale * np.random.default_rng(seed).standard_normal((ROWS, columns)).astype(np.float32)
    logits[1::3] = logits[1::3].round()
    logits[2, : columns // 2] = -np.inf
    whole = torch.full((ROWS, columns + 64), GUARD)
    whole[:, 32 : 32 + columns] = torch.from_numpy(logits)
    return whole[:, 32 : 32 + columns]


def index() -> np.ndarray:
    return np.array([7, 2, 0, 4, 5, 1])


@pytest.mark.parametrize("columns", COLUMNS)
def test_greatest_is_the_first_of_the_greatest(native: NativePasses, columns: int) -> None:
    logits = guarded(columns)
    for found, expected in zip(native.greatest(logits), TORCH.greatest(logits)):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("place", [0, 17, 64, 1500, 2999])
def test_greatest_of_a_row_with_nan_is_nan(native: NativePasses, place: int) -> None:
    logits = guarded(3000)
    logits[3, place], logits[4, place], logits[5] = torch.nan, torch.inf, -torch.inf
    values, columns = native.greatest(logits)
    assert np.isnan(values[3])
    assert (values[4], columns[4]) == (np.inf, place)
    assert (values[5], columns[5]) == (-np.inf, 0)
    assert np.isfinite(values[[0, 1, 2, 6, 7, 8]]).all()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 3.0, 1e30])
@pytest.mark.parametrize("first_id", [0, 24576])
def test_draws_are_those_of_torch(native: NativePasses, columns: int, temperature: float, first_id: int) -> None:
    logits, rows, count = guarded(columns, seed=columns), index(), len(index())
    greatest = tuple(x[rows] for x in TORCH.greatest(logits))
    noise = RowNoise(np.arange(count).astype(np.uint64) << np.uint64(60), np.arange(count), np.arange(count), first_id)
    tops = np.where(np.arange(count) % 2, greatest[0] + 1, 0).astype(np.float32)
    least = np.where(np.arange(count) % 3, -np.inf, 1.0).astype(np.float32)
    args = logits, rows, greatest, tops, np.full(count, temperature, np.float32), least, noise
    (values, drawn), (expected, places) = native.draw(*args), TORCH.draw(*args)
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(np.where(np.isinf(expected), -1, drawn), np.where(np.isinf(expected), -1, places))


def test_draws_of_equal_logits_are_those_of_torch_at_many_positions(native: NativePasses) -> None:
    logits, count = torch.zeros(64, 4096), 64
    noise = RowNoise(np.full(count, 2**63 - 1, np.uint64), np.full(count, 2), np.arange(count), 4096)
    zeros, ones, nothing = np.zeros(count, np.float32), np.ones(count, np.float32), np.full(count, -np.inf, np.float32)
    args = logits, np.arange(count), TORCH.greatest(logits), zeros, ones, nothing, noise
    (values, drawn), (expected, places) = native.draw(*args), TORCH.draw(*args)
    np.testing.assert_array_equal(drawn, places)
    np.testing.assert_allclose(values, expected, rtol=4e-7)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("temperature", [1e-5, 0.7, 3.0, 1e30])
def test_masses_are_those_of_torch_but_for_the_precision_of_float32(
    native: NativePasses, columns: int, temperature: float
) -> None:
    logits, rows = guarded(columns, scale=2.0), index()
    tops = TORCH.greatest(logits)[0][rows].clip(-1e30)
    temperatures, least = np.full(len(rows), temperature, np.float32), np.linspace(-4, 4, len(rows), dtype=np.float32)
    above = least + np.float32(0.5)
    masses = native.mass(logits, rows, tops, temperatures, least, above)
    expected = TORCH.mass(logits, rows, tops, temperatures, least, above)
    np.testing.assert_allclose(masses, expected, rtol=1e-6, atol=columns)
    assert masses.dtype == np.int64
    assert (masses <= columns * MASS_UNIT).all()


@pytest.mark.parametrize("columns", COLUMNS)
def test_counts_are_those_of_torch(native: NativePasses, columns: int) -> None:
    logits = guarded(columns)
    least = np.array([-np.inf, 0.0, 3.5, -1.0, np.inf, -0.0], np.float32)
    np.testing.assert_array_equal(native.count(logits, index(), least), TORCH.count(logits, index(), least))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("width", [0, 1, 5, 64, MOST_TOP])
def test_top_is_descending_and_the_first_of_equals_come_first(native: NativePasses, columns: int, width: int) -> None:
    logits = guarded(columns)
    values, places = native.top(logits, index(), width)
    assert values.shape == places.shape == (len(index()), width)
    held = min(width, columns)
    for row, found, place in zip(logits.numpy()[index()], values, places):
        order = np.lexsort((np.arange(columns), -row))[:held]
        np.testing.assert_array_equal(place[:held], order)
        np.testing.assert_array_equal(found[:held], row[order])
        assert (found[held:] == -np.inf).all()


@pytest.mark.parametrize("columns", COLUMNS)
def test_log_sum_exp_is_that_of_float64(native: NativePasses, columns: int) -> None:
    logits = guarded(columns)
    expected = logits[torch.from_numpy(index())].double().logsumexp(1).numpy()
    np.testing.assert_allclose(native.log_sum_exp(logits, index()), expected, atol=3e-6)


@pytest.mark.parametrize("columns", COLUMNS)
def test_masks_and_penalties_are_those_of_torch_and_change_nothing_else(native: NativePasses, columns: int) -> None:
    rng, rows = np.random.default_rng(columns), index()
    words = rng.integers(0, 2**32, (len(rows), -(-columns // 32)), np.uint32)
    sizes = np.minimum(np.arange(len(rows)) * 7, columns)
    ids = np.concatenate([rng.permutation(columns)[:size] for size in sizes]).astype(np.int32)
    counts, penalties = (ids % 3).astype(np.int32), rng.uniform(0.5, 2.0, (3, len(rows))).astype(np.float32)
    wholes = []
    for form in (native, TORCH):
        logits = guarded(columns)
        form.penalize_(logits, rows, ids, counts, sizes, penalties)
        form.mask_(logits, rows, words)
        wholes.append(logits._base)
    torch.testing.assert_close(*wholes, rtol=2e-6, atol=2e-6)
    assert (wholes[0][:, :32] == GUARD).all()
    assert (wholes[0][:, -32:] == GUARD).all()

"""The noise: golden vectors, an independent Philox in plain integers, and both ends of the logarithms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpserve.worker.noise import HIGHEST, LANES, RowNoise, gumbel, philox_keys, philox_words

U64 = st.integers(0, 2**64 - 1)
GOLDEN = [
    (7, 0, 5, "08457763 70432487 8367145e 37911677", (-1.233254, 0.193173, 0.405098, -0.423693)),
    (2**63 - 1, 2, 1000, "e619b92a 2f22fd4c 06777ff0 6ac30e4f", (2.238096, -0.525986, -1.302504, 0.134016)),
]
IDS = (12, 13, 14, 15)


def key(seed: int, choice: int) -> int:
    return int(philox_keys(np.array([seed], np.uint64), np.array([choice]))[0]) % 2**64


def words(block: int, position: int, seed: int, choice: int = 0) -> list[int]:
    keys = torch.from_numpy(philox_keys(np.array([seed], np.uint64), np.array([choice])))
    return philox_words(torch.tensor([block]), torch.tensor([position]), keys)[0].tolist()


def plain_philox(block: int, position: int, key: int) -> list[int]:
    """Philox-4x32-10 as its authors describe it."""
    x, k = [block, position, 0, 0], [key % 2**32, key >> 32]
    for _ in range(10):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * x[0], 2**32), divmod(0xCD9E8D57 * x[2], 2**32)
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


@pytest.mark.parametrize(("seed", "choice", "position", "expected", "noise"), GOLDEN)
def test_noise_golden_vectors_match(seed: int, choice: int, position: int, expected: str, noise: tuple[float, ...]) -> None:
    assert [f"{word:08x}" for word in words(IDS[0] // LANES, position, seed, choice)] == expected.split()
    source = RowNoise(np.array([seed], np.uint64), np.array([choice]), np.array([position]), first_id=0)
    drawn = source.of(torch.tensor([0]), torch.tensor([IDS[0] // LANES]))
    assert drawn.dtype == torch.float32
    np.testing.assert_allclose(drawn[0].numpy(), noise, rtol=0, atol=6e-7)  # they are given to six places


def test_philox_zero_counter_and_key_gives_the_published_vector() -> None:
    assert [f"{word:08x}" for word in words(0, 0, 0)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_philox_keys_choice_zero_is_the_seed_and_others_are_salted() -> None:
    assert key(2**64 - 1, 0) == 2**64 - 1
    assert key(0, 1) == 0x910A2DEC89025CC1
    assert key(5, 1) == 5 ^ 0x910A2DEC89025CC1


@given(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 2**31), U64), min_size=1, max_size=20))
def test_philox_words_any_counter_match_plain_integers(counters: list[tuple[int, int, int]]) -> None:
    blocks, positions, keys = zip(*counters)
    drawn = philox_words(
        torch.tensor(blocks), torch.tensor(positions), torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
    )
    assert drawn.tolist() == [plain_philox(*counter) for counter in counters]


def test_row_noise_first_id_only_shifts_the_blocks() -> None:
    seeds, choices, positions = np.array([3, 4], np.uint64), np.array([0, 1]), np.array([9, 2])
    whole = RowNoise(seeds, choices, positions, 0)
    part = RowNoise(seeds, choices, positions, 32)
    rows, blocks = torch.tensor([0, 1, 1]), torch.tensor([0, 5, 2])
    assert torch.equal(part.of(rows, blocks), whole.of(rows, blocks + 8))


@pytest.mark.parametrize("word", [0, 1, 2, 1000, 2**31 - 1, 2**31, 2**32 - 2**20, 2**32 - 10_000, 2**32 - 257])
def test_gumbel_at_both_ends_loses_nothing(word: int) -> None:
    complement = (2**32 - word - 0.5) / 2**32  # 1 - u, exactly
    log_u = math.log((word + 0.5) / 2**32) if word < 2**31 else math.log1p(-complement)
    expected = np.float32(-math.log(-log_u))
    assert abs(gumbel(torch.tensor([word])).item() - expected) <= 2 * np.spacing(abs(expected))


def test_gumbel_greatest_words_are_capped_below_the_bound() -> None:
    drawn = gumbel(torch.tensor([2**32 - 256, 2**32 - 1]))
    assert drawn[0] == drawn[1] == pytest.approx(24 * math.log(2), abs=1e-5)
    assert drawn[1] < HIGHEST < drawn[1] + 0.01

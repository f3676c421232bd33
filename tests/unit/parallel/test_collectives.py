"""Sums and gathers by real processes, over shared memory and over gloo."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from tests import ranks as jobs
from tests.ranks import Failed, Ranks
from tpserve.parallel.backends import Kind, open_collectives
from tpserve.parallel.collectives import Alone, RankMissing

CAPACITY = 4096  # bytes
ORDERED: list[Kind] = ["native", "shared_memory"]
GROUPS: list[tuple[Kind, int]] = [*((kind, size) for kind in ORDERED for size in (2, 3, 4)), ("gloo", 2)]


@pytest.fixture(params=GROUPS, ids=[f"{kind}-{size}" for kind, size in GROUPS])
def group(request: pytest.FixtureRequest, ranks: Ranks) -> Ranks:
    kind, size = request.param
    ranks.open(size, kind, capacity_bytes=CAPACITY)
    return ranks


def parts(size: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of very different size, so that the order of a sum shows in its last bits."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((size, *shape)) * 10.0 ** rng.integers(-4, 5, (size, *shape))).astype(np.float32)


def in_rank_order(x: np.ndarray) -> np.ndarray:
    total = x[0].copy()
    for part in x[1:]:
        total += part
    return total


@pytest.mark.parametrize("shape", [(1,), (5, 16), (CAPACITY // 4,), (CAPACITY // 4 + 1,), (7, 600), (0,)], ids=str)
def test_all_reduce_any_shape_sums_over_the_ranks(group: Ranks, shape: tuple[int, ...]) -> None:
    x = parts(group.size, *shape)
    results = group.run(jobs.reduce, x)
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_allclose(results[0], x.astype(np.float64).sum(0), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 1500)], ids=str)
def test_all_gather_any_type_stacks_in_rank_order(group: Ranks, dtype: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).integers(0, 200, (group.size, *shape)).astype(dtype)
    for result in group.run(jobs.gather, x):
        np.testing.assert_array_equal(result, x, strict=True)


def test_all_gather_later_calls_leave_earlier_results_alone(group: Ranks) -> None:
    first = parts(group.size, 8)
    results = [group.run(jobs.gather, parts(group.size, 8, seed=seed)) for seed in range(4)]
    np.testing.assert_array_equal(results[0][0], first)


def test_counters_each_call_counts_once_however_large(group: Ranks) -> None:
    before = group.run(jobs.counts)[0]
    group.run(jobs.reduce, parts(group.size, 10 * CAPACITY))
    group.run(jobs.gather, parts(group.size, 3))
    group.run(jobs.gather, parts(group.size, 3))
    assert group.run(jobs.counts)[0] == (before[0] + 1, before[1] + 2)


@pytest.mark.parametrize("kind", ORDERED)
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("columns", [3, 2000])
def test_all_reduce_in_shared_memory_adds_in_rank_order(ranks: Ranks, kind: Kind, size: int, columns: int) -> None:
    ranks.open(size, kind, capacity_bytes=CAPACITY)
    x = parts(size, columns)
    assert not np.array_equal(in_rank_order(x), in_rank_order(x[::-1])), "the order must show"
    for result in ranks.run(jobs.reduce, x):
        np.testing.assert_array_equal(result, in_rank_order(x))


@pytest.mark.parametrize("kind", ORDERED)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_many_in_a_row_never_mixes_calls(ranks: Ranks, kind: Kind, size: int) -> None:
    ranks.open(size, kind, capacity_bytes=CAPACITY)
    count = 200
    rng = np.random.default_rng(9)
    expected = []
    for turn in range(count):
        x = rng.standard_normal((size, 3 + 500 * (turn % 2))).astype(np.float32)
        expected.append(float(in_rank_order(x)[-1]))
    assert ranks.run(jobs.reduce_many, count, 9) == [expected] * size


@pytest.mark.parametrize("kind", ORDERED)
def test_all_reduce_loses_no_time_slice_at_each_wait_to_who_computes_beside_it(ranks: Ranks, kind: Kind) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("two cores are wanted")
    ranks.open(2, kind, capacity_bytes=CAPACITY)
    ranks.run(jobs.pinned_reduce_many, 100, 9, cores)
    spin = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", spin, str(core)], stdout=subprocess.PIPE) for core in cores]
    try:
        for hog in hogs:
            assert hog.stdout is not None
            hog.stdout.readline()
        began = time.monotonic()
        ranks.run(jobs.pinned_reduce_many, 4000, 9, cores)
        assert time.monotonic() - began < 8  # a slice of 4 ms each would be 16 s
    finally:
        for hog in hogs:
            hog.kill()
            hog.communicate()


@pytest.mark.parametrize(
    ("kind", "size", "absent"), [*((kind, *case) for kind in ORDERED for case in ((2, [1]), (4, [0, 2]))), ("gloo", 2, [0])]
)
def test_collective_some_ranks_absent_names_them_and_the_call(ranks: Ranks, kind: Kind, size: int, absent: list[int]) -> None:
    ranks.open(size, kind, limit_s=0.3)
    x = parts(size, 4)
    ranks.run(jobs.reduce, x)
    present = [rank for rank in range(size) if rank not in absent]
    for outcome in ranks.outcomes(jobs.reduce, x, ranks=present):
        assert isinstance(outcome, Failed)
        assert outcome.kind == RankMissing.__name__
        assert outcome.details["ranks"] == tuple(absent)
        assert outcome.details["sequence"] == 2


@pytest.mark.parametrize(("absent", "start"), [((2,), "rank 2 did"), ((0, 3), "ranks 0 and 3 did")])
def test_rank_missing_text_names_ranks_call_and_limit(absent: tuple[int, ...], start: str) -> None:
    assert str(RankMissing(absent, 17, 30.0)) == f"{start} not arrive at collective 17 within 30 s"


def test_alone_nothing_is_communicated_or_counted() -> None:
    alone = open_collectives("shared_memory", 0, 1, limit_s=1.0, store_path="")
    assert isinstance(alone, Alone)
    x = torch.tensor([1.0, 2.0])
    alone.all_reduce_(x)
    assert x.tolist() == [1.0, 2.0]
    assert alone.all_gather(x).tolist() == [[1.0, 2.0]]
    assert (alone.all_reduces, alone.all_gathers, alone.seconds) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("machine", "memory_fd", "why"),
    [
        ("aarch64", 5, "on aarch64 other ranks may see a rank's stores out of order"),
        ("x86_64", None, "no memory was made for it"),
    ],
)
def test_open_where_shared_memory_is_impossible_takes_gloo_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, machine: str, memory_fd: int | None, why: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("tpserve.parallel.distributed.TorchDistributed", lambda *args: args)
    monkeypatch.setattr(logging.getLogger("tpserve"), "propagate", True)
    opened = open_collectives("shared_memory", 1, 2, limit_s=3.0, store_path="store", memory_fd=memory_fd)
    assert opened == ("gloo", 1, 2, "store", 3.0)
    assert set(caplog.messages) == {f"collectives go through gloo, not shared memory: {why}"}

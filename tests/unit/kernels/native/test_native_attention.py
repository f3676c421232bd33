from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.guard import guarded
from tpserve.kernels.interface import KINDS
from tpserve.kernels.native.abi import AttentionArgs, Dtype, Op, Step
from tpserve.kernels.native.library import Library, Program, Team

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
F32 = (torch.float32, torch.float32)  # of queries, of the pools
BF16 = (torch.bfloat16, torch.bfloat16)
# Against attention in float64 of the same rounded inputs, with values around 1. Float32 sums of up to some hundred products,
# and a softcap's error of some 1e-7 * softcap. In bfloat16 the weights are rounded to 8 bits, and the result once more.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
CANARY = 7.0
ROOM = 5  # columns beside the result, which must stay as they are


@dataclass(frozen=True)
class Case:
    """`rows` are pairs of the first token's position and the number of tokens."""

    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    dtypes: tuple[torch.dtype, torch.dtype] = BF16
    spread: float = 1.0  # of queries: large ones make one weight of nearly 1


@dataclass(frozen=True)
class Inputs:
    queries: Tensor
    keys: Tensor
    values: Tensor
    counts: np.ndarray
    starts: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    expected: Tensor  # float64


def exact(query: Tensor, keys: Tensor, values: Tensor, case: Case) -> Tensor:
    """Attention of the last len(query) tokens of a context, in float64."""
    k, v = (x.double().repeat_interleave(case.group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), k) * case.head_dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    length = len(keys)
    behind = torch.arange(length - len(query), length)[:, None] - torch.arange(length)
    seen = (behind >= 0) & (behind < (case.window or length))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def inputs(case: Case) -> Inputs:
    """Pages are scattered, and hold NaN wherever no token of the step may look."""
    starts, counts = np.array(case.rows, np.int64).T.copy()
    most = int((-(-(starts + counts) // case.page_size)).max())
    slots = np.random.default_rng(0).permutation(len(starts) + 1)[: len(starts)].astype(np.int64)
    tables = torch.randperm((len(starts) + 1) * most).view(-1, most).numpy()
    shape = (tables.size * case.page_size, case.kv_heads, case.head_dim)
    queries = torch.randn(int(counts.sum()), case.kv_heads * case.group, case.head_dim).mul(case.spread).to(case.dtypes[0])
    keys, values = torch.full((2, *shape), torch.nan, dtype=case.dtypes[1])
    expected = []
    for slot, start, query in zip(slots, starts, queries.split(counts.tolist())):
        length = int(start) + len(query)
        positions = np.arange(length)
        places = torch.from_numpy(tables[slot][positions // case.page_size] * case.page_size + positions % case.page_size)
        k, v = torch.randn(2, length, *shape[1:]).to(case.dtypes[1])
        seen = slice(max(0, int(start) + 1 - case.window) if case.window else 0, length)
        keys[places[seen]], values[places[seen]] = k[seen], v[seen]
        expected.append(exact(query, k, v, case))
    # A page has the keys of one head after those of the other.
    keys, values = (pool.unflatten(0, (-1, case.page_size)).transpose(1, 2).contiguous() for pool in (keys, values))
    return Inputs(queries, keys, values, counts, starts, slots, tables, torch.cat(expected))


def attend(lib: Library, case: Case, given: Inputs, threads: int = 1) -> Tensor:
    tokens, heads, head_dim = given.queries.shape
    out = torch.full((tokens, heads * head_dim + ROOM), CANARY, dtype=case.dtypes[0])
    args = AttentionArgs(
        given.queries.data_ptr(), given.keys.data_ptr(), given.values.data_ptr(), out.data_ptr(), head_dim**-0.5,
        case.softcap, case.window, heads, case.kv_heads, head_dim, case.page_size, out.stride(0),
        *(DTYPES[dtype] for dtype in case.dtypes),
    )  # fmt: skip
    first = np.cumsum(given.counts) - given.counts
    arrays = (first, given.starts, given.counts, given.slots, given.tables)
    step = Step(None, None, None, *(array.ctypes.data for array in arrays), given.tables.shape[1], tokens, len(first))
    program = Program(lib, Team(lib, [0] * threads), None)
    program.add(Op.ATTENTION, args)
    assert program.run(step, (ctypes.c_double * len(KINDS))())
    assert (out[:, heads * head_dim :] == CANARY).all()
    return out[:, : heads * head_dim].view(tokens, heads, head_dim)


def check(lib: Library, case: Case) -> None:
    given = inputs(case)
    tolerance = TOLERANCES[case.dtypes[0]]
    torch.testing.assert_close(attend(lib, case, given).double(), given.expected, rtol=tolerance, atol=tolerance)


MIXED = ((0, 1), (150, 1), (0, 130), (63, 1), (7, 40), (60, 9), (64, 2))


@pytest.mark.parametrize("dtypes", [F32, BF16, (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)], ids=str)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128, 256, 352, 512])
def test_attention_of_decoding_and_prefilling_rows_equals_attention_over_each_row(
    lib: Library, head_dim: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    torch.manual_seed(head_dim)
    check(lib, Case(MIXED, head_dim=head_dim, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 4), (1, 9), (1, 71)])
def test_attention_with_groups_of_any_size_equals_attention_with_repeated_keys(
    lib: Library, kv_heads: int, group: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    torch.manual_seed(group)
    check(lib, Case(((33, 1), (5, 70), (0, 3)), kv_heads=kv_heads, group=group, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 64, 65])
def test_attention_through_a_window_never_reads_what_lies_before_it(
    lib: Library, window: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    torch.manual_seed(window)
    check(lib, Case((*MIXED, (15, 1), (16, 1), (31, 34), (127, 130)), window=window, dtypes=dtypes))


@pytest.mark.parametrize("page_size", [1, 5, 16, 48])
def test_attention_over_pages_of_any_size_equals_attention_over_each_row(lib: Library, page_size: int) -> None:
    torch.manual_seed(page_size)
    check(lib, Case(MIXED, page_size=page_size))


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_attention_with_a_softcap_bounds_the_scores(
    lib: Library, spread: float, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    torch.manual_seed(1)
    check(lib, Case(MIXED, softcap=5.0, spread=spread, dtypes=dtypes))


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
def test_attention_with_scores_in_the_hundreds_stays_finite(lib: Library, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(2)
    case = Case(MIXED, spread=100.0, dtypes=dtypes)
    given = inputs(case)
    got = attend(lib, case, given).double()
    # The error of a score, some 1e-6 of hundreds, is the relative error of a weight.
    tolerance = 10 * TOLERANCES[dtypes[0]]
    torch.testing.assert_close(got, given.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
def test_attention_by_several_threads_gives_the_same_bits(lib: Library, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    torch.manual_seed(3)
    case = Case((*MIXED, (300, 200)), window=90, dtypes=dtypes)
    given = inputs(case)
    alone = attend(lib, case, given)
    assert all(torch.equal(attend(lib, case, given, threads), alone) for threads in (2, 3, 7))


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [1, 20])
def test_attention_over_a_long_context_weighs_old_keys_like_new_ones(
    lib: Library, tokens: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    length = 16384
    case = Case(((length - tokens, tokens),), kv_heads=1, group=2, head_dim=32, dtypes=dtypes)
    given = inputs(case)
    given.queries.zero_()  # all keys alike
    places = torch.from_numpy(given.tables[given.slots[0]]).repeat_interleave(16) * 16 + torch.arange(length) % 16
    halves = torch.where(torch.arange(length) < length // 2, 1.0, -1.0)[:, None].to(case.dtypes[1])
    given.values.view(-1, case.head_dim)[places] = halves.expand(-1, case.head_dim)
    # The last token sees as many of one as of the other; the sum of so many weights has some rounding.
    torch.testing.assert_close(attend(lib, case, given)[-1].double(), torch.zeros(2, 32).double(), rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
def test_attention_of_a_token_is_the_same_whatever_tokens_of_its_row_are_with_it(
    lib: Library, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    torch.manual_seed(5)
    case = Case(((199, 2),), kv_heads=1, group=2, window=70, dtypes=dtypes)
    given = inputs(case)
    both = attend(lib, case, given)
    for token in range(2):
        alone = replace(given, queries=given.queries[token : token + 1], counts=np.array([1]), starts=given.starts + token)
        assert torch.equal(attend(lib, case, alone)[0], both[token])


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_attention_of_a_query_that_is_nan_is_nan_there_alone(
    lib: Library, softcap: float, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    torch.manual_seed(4)
    case = Case(((20, 1), (0, 30)), softcap=softcap, dtypes=dtypes)
    given = inputs(case)
    given.queries[10, 2] = torch.nan
    got = attend(lib, case, given)
    assert got[10, 2].isnan().all()
    got[10, 2] = 0
    assert got.isfinite().all()


@pytest.mark.parametrize("dtypes", [F32, BF16], ids=str)
@pytest.mark.parametrize("tokens", [1, 20])
def test_attention_reads_nothing_behind_its_buffers(lib: Library, tokens: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    case = Case(((100, tokens),), group=2, dtypes=dtypes)
    for seed in range(200):
        torch.manual_seed(seed)
        given = inputs(case)
        if given.tables[given.slots[0], (99 + tokens) // case.page_size] == given.tables.size - 1:
            break  # the row's last page, which is not full, is the last one of the pools
    else:
        pytest.fail("no seed gives the row the last page")
    bounded = replace(given, queries=guarded(given.queries), keys=guarded(given.keys), values=guarded(given.values))
    assert torch.equal(attend(lib, case, bounded), attend(lib, case, given))


cases = st.builds(
    Case,
    rows=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 70)), min_size=1, max_size=4).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.integers(1, 70),
    page_size=st.integers(1, 33),
    window=st.just(0) | st.integers(1, 90),
    softcap=st.sampled_from([0.0, 20.0]),
    dtypes=st.sampled_from([F32, BF16, (torch.float32, torch.float16), (torch.bfloat16, torch.float32)]),
)


@settings(max_examples=40, deadline=None)
@given(case=cases, seed=st.integers(0, 9))
@example(case=Case(((0, 65),), group=1, head_dim=1, window=1), seed=0)  # a scale of 1, and lines that see nothing of a tile
def test_attention_of_random_shapes_equals_attention_over_each_row(lib: Library, case: Case, seed: int) -> None:
    torch.manual_seed(seed)
    check(lib, case)

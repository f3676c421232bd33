from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpserve.kernels.interface import KINDS
from tpserve.kernels.native import abi
from tpserve.kernels.native.abi import Dtype, NormKind, Op
from tpserve.kernels.native.library import Library, Program, Team
from tpserve.parallel import segment
from tpserve.parallel.shared_memory_native import NativeSharedMemory

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
# One rounding of the result; sums of squares in another order change the last bits of float32.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=[1, 3])
def team(request: pytest.FixtureRequest, lib: Library) -> Team:
    return Team(lib, [0] * request.param)


def run(team: Team, ops: Sequence[tuple[Op, ctypes.Structure]], step: abi.Step) -> None:
    program = Program(team.lib, team, None)
    for op, args in ops:
        program.add(op, args)
    assert program.run(step, (ctypes.c_double * len(KINDS))())


def norm_args(x: Tensor, out: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind, size: int) -> abi.NormArgs:
    place = None if bias is None else bias.data_ptr()
    strides = x.stride(0), out.stride(0)
    return abi.NormArgs(x.data_ptr(), out.data_ptr(), weight.data_ptr(), place, 1e-5, kind, size, *strides, DTYPES[out.dtype])


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind) -> Tensor:
    x = x.double()
    if kind == NormKind.LAYER:
        return F.layer_norm(x, x.shape[-1:], weight.double(), None if bias is None else bias.double(), 1e-5)
    y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size", "with_bias"), [(1, 576, False), (5, 77, True), (4, 8, True), (7, 3, False)])
def test_norm_of_any_size_equals_the_formula(
    team: Team, kind: NormKind, dtype: torch.dtype, rows: int, size: int, with_bias: bool
) -> None:
    x, weight = torch.randn(rows, size + 5) * 3 + 1, torch.randn(size)
    bias = torch.randn(size) if with_bias else None
    out = torch.full((rows, size + 3), 7.0, dtype=dtype)
    run(team, [(Op.NORM, norm_args(x, out, weight, bias, kind, size))], abi.Step(tokens=rows))
    expected = normed(x[:, :size], weight, bias, kind)
    torch.testing.assert_close(out[:, :size].double(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    assert (out[:, size:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed_of_any_table_gives_scaled_lines(team: Team, dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 45).to(dtype), torch.tensor([3, 49, 0, 3])
    x = torch.full((4, 48), 7.0)
    args = abi.EmbedArgs(table.data_ptr(), x.data_ptr(), 2.5, 45, x.stride(0), DTYPES[dtype])
    run(team, [(Op.EMBED, args)], abi.Step(ids=ids.data_ptr(), tokens=4))
    torch.testing.assert_close(x[:, :45], table[ids].float() * 2.5)
    assert (x[:, 45:] == 7).all()


@pytest.mark.parametrize("lines", [2, 64])
@pytest.mark.parametrize("with_norm", [False, True])
def test_reduce_of_one_rank_adds_products_bias_and_norms(team: Team, lines: int, with_norm: bool) -> None:
    tokens, hidden = 9, 40
    x, activations = torch.randn(tokens, hidden), [torch.zeros(tokens, 64), torch.zeros(tokens, 32)]
    weights = [torch.randn(hidden, 50), torch.randn(hidden, 20)]
    products = []
    for number, (line, weight) in enumerate(zip(activations, weights)):
        line[:, : weight.shape[1]] = torch.randn(tokens, weight.shape[1])
        packed = torch.zeros(48 * line.shape[1])
        team.lib.call.tps_pack(team.lib.level, weight.data_ptr(), packed.data_ptr(), *weight.shape, Dtype.F32, 1)
        args = abi.LinearArgs(
            line.data_ptr(), 0, packed.data_ptr(), None, 1.0, *weight.shape, line.stride(0), hidden,
            Dtype.F32, Dtype.F32, abi.Activation.NONE, 0, number,
        )  # fmt: skip
        products.append((args, packed))
    bias, weight, partial = torch.randn(hidden), torch.randn(hidden), torch.zeros(lines, hidden)
    total = sum(line[:, : w.shape[1]].double() @ w.double().T for line, w in zip(activations, weights)) + bias
    expected = x + (normed(total, weight, None, NormKind.RMS) if with_norm else total)
    after = torch.zeros(tokens, hidden)
    out_norm = norm_args(x, x, weight, None, NormKind.RMS, hidden)
    next_norm = norm_args(x, after, weight, None, NormKind.LAYER, hidden)
    args = abi.ReduceArgs(
        ctypes.pointer(products[0][0]), ctypes.pointer(products[1][0]), bias.data_ptr(),
        ctypes.pointer(out_norm) if with_norm else None, ctypes.pointer(next_norm), x.data_ptr(), partial.data_ptr(),
        hidden, x.stride(0), lines,
    )  # fmt: skip
    run(team, [(Op.REDUCE, args)], abi.Step(tokens=tokens))
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.double(), normed(x, weight, None, NormKind.LAYER), rtol=1e-5, atol=1e-5)


def test_team_of_many_threads_runs_many_programs(lib: Library) -> None:
    team, x, weight = Team(lib, [0, 0, 0, 0]), torch.randn(3, 32), torch.ones(32)
    program = Program(lib, team, None)
    outs = [torch.zeros(3, 32) for _ in range(20)]
    for out in outs:
        program.add(Op.NORM, norm_args(x, out, weight, None, NormKind.RMS, 32))
    for _ in range(50):
        x.copy_(torch.randn(3, 32))
        assert program.run(abi.Step(tokens=3), (ctypes.c_double * len(KINDS))())
        assert all(torch.equal(out, outs[0]) for out in outs)
        torch.testing.assert_close(outs[0].double(), normed(x, weight, None, NormKind.RMS), rtol=1e-5, atol=1e-5)


def test_program_ends_in_all_threads_when_another_rank_does_not_arrive(lib: Library) -> None:
    hidden, tokens = 32, 5
    fd = segment.create(2, 1 << 12)
    ranks = NativeSharedMemory(0, 2, fd, limit_s=0.05)  # keeps the memory
    os.close(fd)
    x, partial = torch.randn(tokens, hidden), torch.zeros(2, hidden)
    args = abi.ReduceArgs(None, None, None, None, None, x.data_ptr(), partial.data_ptr(), hidden, x.stride(0), 2)
    program = Program(lib, Team(lib, [0] * 3), ranks.group)
    for _ in range(3):
        program.add(Op.REDUCE, args)
    before = x.clone()
    for run_number in (1, 2, 3):
        assert not program.run(abi.Step(tokens=tokens), (ctypes.c_double * len(KINDS))())
        assert ranks.group.sequence == run_number, "the program ends at the first meeting"
    assert torch.equal(x, before)


def test_waiting_for_threads_is_counted_as_waiting(lib: Library) -> None:
    x, weight, out = torch.randn(64, 512), torch.ones(512), torch.zeros(64, 512)
    program = Program(lib, Team(lib, [0] * 2), None)  # which have one core to share
    for _ in range(100):
        program.add(Op.NORM, norm_args(x, out, weight, None, NormKind.RMS, 512))
    seconds = (ctypes.c_double * len(KINDS))()
    began = time.perf_counter()
    for _ in range(50):  # so that what others take of the core at a run's end is little beside the rest
        assert program.run(abi.Step(tokens=64), seconds)
    took_s, spent = time.perf_counter() - began, dict(zip(KINDS, seconds))
    assert spent["wait"] > 0
    assert 0.5 * took_s < spent["rows"] + spent["wait"] <= took_s

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpserve.kernels import reference
from tpserve.kernels.interface import KINDS
from tpserve.kernels.native.abi import Dtype, NormKind, Op, RotaryArgs, Step, TurnsArgs
from tpserve.kernels.native.library import Library, Program, Team

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
# A few roundings of float32, or one to the dtype in which the result is kept (half a unit in the last place, and a float32
# that lies on the border of two may fall to either).
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1.01 * 2**-10, torch.bfloat16: 1.01 * 2**-7}
EPS = 1e-5
CANARY = 7.0


def run(lib: Library, op: Op, args: ctypes.Structure, step: Step, threads: int) -> None:
    program = Program(lib, Team(lib, [0] * threads), None)
    program.add(op, args)
    assert program.run(step, (ctypes.c_double * len(KINDS))())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("half", [1, 10, 32, 128])
def test_turns_at_any_position_equal_cosines_and_sines_of_torchs_angles(lib: Library, half: int, threads: int) -> None:
    torch.manual_seed(half)
    positions = torch.cat([torch.arange(5), torch.randint(1 << 20, (30,))])
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    cos, sin = torch.full((2, len(positions) + 1, half), CANARY)
    args = TurnsArgs(frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), 1.25, half)
    run(lib, Op.TURNS, args, Step(None, positions.data_ptr(), tokens=len(positions)), threads)
    # The angle is rounded to float32 first: at position 2**20 any other one is off by up to 0.06.
    angles = (positions.float()[:, None] * frequencies).double()
    torch.testing.assert_close(cos[:-1].double(), angles.cos() * 1.25, rtol=0, atol=3e-7)
    torch.testing.assert_close(sin[:-1].double(), angles.sin() * 1.25, rtol=0, atol=3e-7)
    assert (cos[-1] == CANARY).all()
    assert (sin[-1] == CANARY).all()


def normed(x: Tensor, weight: Tensor | None, kind: NormKind) -> Tensor:
    if weight is None:
        return x
    if kind is NormKind.RMS:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    return F.layer_norm(x, x.shape[-1:], eps=EPS) * weight


@pytest.mark.parametrize("norm", [None, NormKind.RMS, NormKind.LAYER])
@pytest.mark.parametrize(("head_dim", "half"), [(8, 4), (20, 10), (20, 3), (64, 32), (80, 16), (96, 40), (256, 128), (64, 0)])
@pytest.mark.parametrize(
    ("query_dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float16)],
)
def test_rotary_norms_and_turns_queries_and_keys_and_writes_keys_and_values(
    lib: Library, query_dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, half: int, norm: NormKind | None
) -> None:
    torch.manual_seed(head_dim)
    tokens, heads, kv_heads, page_size, places = 7, 6, 2, 4, 40
    columns = (heads + 2 * kv_heads) * head_dim
    padded = torch.full((tokens, columns + 3), torch.nan)
    qkv = padded[:, :columns].copy_(torch.randn(tokens, columns)).unflatten(1, (-1, head_dim))
    cos, sin = torch.rand(2, tokens, half)
    weight = None if norm is None else torch.randn(heads + kv_heads, head_dim)
    place = np.random.default_rng(0).permutation(places)[:tokens].astype(np.int64)
    rotated = normed(qkv[:, : heads + kv_heads].double(), None if weight is None else weight.double(), norm or NormKind.RMS)
    low, high, rest = rotated.split([half, half, head_dim - 2 * half], dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    expected = torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1)

    for threads in (1, 3):
        queries = torch.full((tokens + 1, heads, head_dim), CANARY, dtype=query_dtype)
        pools = torch.full((2, places // page_size, kv_heads, page_size, head_dim), CANARY, dtype=kv_dtype)
        args = RotaryArgs(
            padded.data_ptr(), cos.data_ptr(), sin.data_ptr(), None if weight is None else weight.data_ptr(),
            queries.data_ptr(), pools[0].data_ptr(), pools[1].data_ptr(), EPS, norm or NormKind.RMS, heads, kv_heads,
            head_dim, half, page_size, padded.stride(0), DTYPES[query_dtype], DTYPES[kv_dtype],
        )  # fmt: skip
        run(lib, Op.ROTARY, args, Step(places=place.ctypes.data, tokens=tokens), threads)
        keys, values = pools.transpose(2, 3).flatten(1, 2)  # (places, kv_heads, head_dim)
        for got, want in ((queries[:-1], expected[:, :heads]), (keys[place], expected[:, heads:])):
            tolerance = TOLERANCES[got.dtype]
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=2e-6)
        assert torch.equal(values[place], qkv[:, heads + kv_heads :].to(kv_dtype))
        assert (queries[-1] == CANARY).all()
        untouched = np.setdiff1d(np.arange(places), place)
        assert (keys[untouched] == CANARY).all()
        assert (values[untouched] == CANARY).all()


def test_rotary_agrees_with_the_torch_form(lib: Library) -> None:
    torch.manual_seed(0)
    qkv, cos, sin = torch.randn(5, 4, 64), torch.rand(5, 32), torch.rand(5, 32)
    queries, pools, places = torch.zeros(5, 2, 64), torch.zeros(2, 5, 1, 64), torch.arange(5)
    args = RotaryArgs(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), None, queries.data_ptr(), pools[0].data_ptr(), pools[1].data_ptr(),
        EPS, NormKind.RMS, 2, 1, 64, 32, 1, 256, Dtype.F32, Dtype.F32,
    )  # fmt: skip
    run(lib, Op.ROTARY, args, Step(places=places.data_ptr(), tokens=5), 1)
    expected = reference.rotary(qkv[:, :3], cos[:, None], sin[:, None], torch.float32)
    torch.testing.assert_close(torch.cat([queries, pools[0]], dim=1), expected, rtol=0, atol=1e-6)

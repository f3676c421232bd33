from __future__ import annotations

from ctypes import c_double
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.guard import guarded
from tpserve.kernels.interface import KINDS
from tpserve.kernels.native.abi import Activation, Dtype, LinearArgs, Op, Step
from tpserve.kernels.native.library import Library, Program, Team

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}
ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
}
CANARY = -777.0
ROOM = 3  # columns beside the result, which must stay as they are


def padded(k: int) -> int:
    return -(-k // 32) * 32


def packed(lib: Library, *parts: Tensor) -> Tensor:
    """One weight, or gate and other."""
    n, k = parts[0].shape
    block = 16 * padded(k)
    data = guarded(torch.full((len(parts) * -(-n // 16) * block,), CANARY).to(parts[0].dtype))
    for number, part in enumerate(parts):
        place, part = data.data_ptr() + number * block * data.itemsize, guarded(part)
        lib.call.tps_pack(lib.level, part.data_ptr(), place, n, k, DTYPES[part.dtype], len(parts))
    return data


@dataclass(frozen=True)
class Case:
    rows: int
    n: int  # columns of the result
    k: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.float32
    activation: Activation = Activation.NONE
    gated: bool = False
    bias: bool = False
    accumulate: bool = False
    scale: float = 1.0
    threads: int = 1


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # (rows, k), in the compute dtype
    parts: tuple[Tensor, ...]  # (n, k) each
    bias: Tensor | None  # (n), or (2 n) if gated
    before: Tensor  # (rows, n), float32


def inputs(case: Case, seed: int) -> Inputs:
    torch.manual_seed(seed)
    parts = tuple((torch.randn(case.n, case.k) / case.k**0.5).to(case.dtype) for _ in range(1 + case.gated))
    x = torch.randn(case.rows, case.k).to(torch.bfloat16 if case.dtype == torch.bfloat16 else torch.float32)
    bias = torch.randn(len(parts) * case.n) if case.bias else None
    before = torch.randn(case.rows, case.n) if case.accumulate else torch.full((case.rows, case.n), CANARY)
    return Inputs(x, parts, bias, before)


def native(lib: Library, case: Case, given: Inputs) -> Tensor:
    """The product, from buffers which hold NaN beside what may be read; what lies beside the result is checked."""
    x = torch.full((case.rows, padded(case.k) + 32), torch.nan, dtype=given.x.dtype)
    x[:, case.k : padded(case.k)] = 0
    x[:, : case.k] = given.x
    x = guarded(x)
    out = torch.full((case.rows, case.n + ROOM), CANARY).to(case.out_dtype)
    out[:, : case.n] = given.before
    out = guarded(out)
    weight, bias = packed(lib, *given.parts), None if given.bias is None else guarded(given.bias)
    args = LinearArgs(
        x.data_ptr(), out.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), case.scale,
        len(given.parts) * case.n, case.k, x.stride(0), out.stride(0), DTYPES[case.dtype], DTYPES[case.out_dtype],
        case.activation, case.gated, case.accumulate,
    )  # fmt: skip
    program = Program(lib, Team(lib, [0] * case.threads), None)
    program.add(Op.LINEAR, args)
    assert program.run(Step(tokens=case.rows), (c_double * len(KINDS))())
    assert (out[:, case.n :] == torch.tensor(CANARY).to(case.out_dtype)).all()
    return out[:, : case.n].clone()


def exact(case: Case, given: Inputs) -> Tensor:
    products = torch.cat([given.x.double() @ part.double().T for part in given.parts], dim=1)
    if given.bias is not None:
        products += given.bias.double()
    result = ACTIVATIONS[case.activation](products[:, : case.n])
    if case.gated:
        result = result * products[:, case.n :]
    result = result * case.scale
    return result + given.before.double() if case.accumulate else result


@st.composite
def cases(draw: st.DrawFn) -> Case:
    accumulate = draw(st.booleans())
    return Case(
        rows=draw(st.integers(1, 70)),
        n=draw(st.integers(1, 100)),
        k=draw(st.integers(1, 200)),
        dtype=draw(st.sampled_from(list(DTYPES))),
        out_dtype=torch.float32 if accumulate else draw(st.sampled_from([torch.float32, torch.bfloat16])),
        activation=draw(st.sampled_from(list(Activation))),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
        accumulate=accumulate,
        scale=draw(st.sampled_from([1.0, 0.125])),
    )


@given(case=cases(), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_product_of_any_shape_equals_the_exact_one(lib: Library, case: Case, seed: int) -> None:
    values = inputs(case, seed)
    # Sums of about 1 in float32; then one rounding to the result's dtype.
    rtol = 2**-8 if case.out_dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(native(lib, case, values).double(), exact(case, values), rtol=rtol, atol=2e-5)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("rows", [2, 17, 70])
def test_row_alone_has_the_same_bits_as_among_others(lib: Library, dtype: torch.dtype, rows: int) -> None:
    case = Case(rows, 50, 150, dtype)
    values = inputs(case, rows)
    together = native(lib, case, values)
    for row in range(0, rows, 7):
        alone = Inputs(values.x[row : row + 1], values.parts, None, values.before[row : row + 1])
        assert torch.equal(native(lib, Case(1, 50, 150, dtype), alone), together[row : row + 1])


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("gated", [False, True])
def test_slices_of_the_outputs_have_the_same_bits_as_the_whole(lib: Library, dtype: torch.dtype, gated: bool) -> None:
    case = Case(5, 90, 70, dtype, activation=Activation.SILU, gated=gated, threads=2)
    values = inputs(case, 0)
    whole = native(lib, case, values)
    for begin, end in ((0, 33), (33, 90)):
        part = Inputs(values.x, tuple(each[begin:end] for each in values.parts), None, values.before[:, begin:end])
        sliced = native(lib, Case(5, end - begin, 70, dtype, activation=Activation.SILU, gated=gated), part)
        assert torch.equal(sliced, whole[:, begin:end])


def test_rows_beyond_what_the_cache_holds_are_all_computed(lib: Library) -> None:
    case = Case(300, 40, 4000)  # 2.4 MB of x
    values = inputs(case, 0)
    torch.testing.assert_close(native(lib, case, values).double(), exact(case, values), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("parts", [1, 2])
def test_packed_weight_lies_as_documented(lib: Library, dtype: torch.dtype, parts: int) -> None:
    weights = [torch.randn(37, 45).to(dtype) for _ in range(parts)]
    neighbours = 2 if dtype == torch.bfloat16 else 1
    blocks = packed(lib, *weights).view(3, parts, padded(45) // neighbours, 16, neighbours)
    for number, weight in enumerate(weights):
        unpacked = blocks[:, number].permute(0, 2, 1, 3).reshape(48, 64)
        assert torch.equal(unpacked, F.pad(weight, (0, 64 - 45, 0, 48 - 37)))


def test_no_rows_write_nothing(lib: Library) -> None:
    case = Case(0, 20, 40)
    assert native(lib, case, inputs(case, 0)).shape == (0, 20)

from __future__ import annotations

import pytest
import torch

from tpserve.kernels.linear import linear, pack

SIZES = [(640, 576), (576, 672), (33, 7), (1, 64), (0, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("out", "width"), SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_product_with_a_packed_weight_equals_the_plain_one(dtype: torch.dtype, out: int, width: int, rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, width).to(dtype), torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    for b in (None, bias):
        product = linear(x, pack(weight), b)
        exact = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert product.dtype == dtype
        assert product.shape == (rows, out)
        # One rounding of the result; float32 also rounds as it adds up.
        torch.testing.assert_close(
            product.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4 * width**0.5
        )


def test_float16_weight_is_converted_for_a_float32_product() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8).half()
    assert torch.equal(linear(x, pack(weight)), x @ weight.float().T)

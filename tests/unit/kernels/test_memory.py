from __future__ import annotations

import pytest
import torch

from tpserve.kernels.memory import Arena, zeros


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (3, 5), (1 << 20, 3)], ids=str)
def test_zeros_of_any_shape_are_zero_and_may_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = zeros(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert not tensor.any()
    assert (tensor.fill_(1) == 1).all()


def test_arena_tensors_lie_apart_on_cache_lines_and_outlive_it() -> None:
    arena = Arena()
    tensors = [arena.zeros((size,), torch.float32) for size in (1, 7, 1000, 40 << 20, 3)]
    del arena
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)

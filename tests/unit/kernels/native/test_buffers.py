"""The buffers that a recorded decoder uses are those that the arithmetic of memory adds up."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tpserve.checkpoint.weights import Dummy, load
from tpserve.kernels.native.buffers import buffers
from tpserve.kernels.native.kernels import NativeKernels
from tpserve.kernels.native.library import NotBuilt, Team, library
from tpserve.model import families
from tpserve.model.decoder import Decoder
from tpserve.model.spec import ModelSpec
from tpserve.parallel import segment
from tpserve.parallel.collectives import Alone
from tpserve.parallel.partition import Shard, partition
from tpserve.parallel.shared_memory_native import NativeSharedMemory

CONFIG: dict[str, Any] = dict(
    vocab_size=211, hidden_size=48, intermediate_size=103, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
    head_dim=16,
)  # fmt: skip
TOKENS, ROWS, PAGE = 24, 5, 16


class Recorder(NativeKernels):
    """Remembers which buffers are asked for."""

    used: set[str]

    def _lines(self, name: str, columns: int) -> torch.Tensor:
        self.used = {*getattr(self, "used", ()), f"{name}.{columns}"}
        return super()._lines(name, columns)


@pytest.fixture(scope="module")
def team() -> Team:
    try:
        return Team(library(), [min(os.sched_getaffinity(0))])
    except NotBuilt as error:
        pytest.skip(str(error))


def record(spec: ModelSpec, shard: Shard, ranks: int, compute: torch.dtype, team: Team) -> Recorder:
    """A decoder's kernels after everything was recorded; the other ranks are not there."""
    fd = segment.create(ranks)
    collectives = Alone() if ranks == 1 else NativeSharedMemory(shard.rank, ranks, fd, 1.0)
    os.close(fd)
    kernels = Recorder(spec, shard, collectives, compute, PAGE, team, TOKENS, ROWS)
    weights = load(spec, shard, Dummy(spec), torch.device("cpu"), compute, kernels, lambda _: None)
    decoder = Decoder(spec, shard, weights, kernels, compute)
    decoder.capture(torch.zeros(spec.num_layers, 2, 2, PAGE, len(shard.layers[0].kv_heads), spec.head_dim, dtype=compute))
    decoder.logits(torch.zeros(0, spec.hidden_size, dtype=compute))
    return kernels


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma3", "cohere", "gpt_neox"])
@pytest.mark.parametrize("ranks", [1, 3, 7])  # of seven, some hold nothing of attention
def test_buffers_that_are_reckoned_are_made_and_used_and_no_others(
    family: str, ranks: int, compute: torch.dtype, team: Team
) -> None:
    spec = families.family(family).spec(CONFIG)
    for shard in partition(spec, ranks):
        reckoned = buffers(spec, shard, compute.itemsize, TOKENS, ROWS, ranks == 1)
        kernels = record(spec, shard, ranks, compute, team)
        assert kernels.used == reckoned.keys()
        made = {name: buffer.nbytes for name, buffer in kernels._buffers.items()}
        assert made == {name: size.size_bytes for name, size in reckoned.items()}

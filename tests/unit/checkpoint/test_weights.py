from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.specs import llama_spec, split_params
from tpserve import memory
from tpserve.checkpoint.demo import demo_path
from tpserve.checkpoint.weights import Dummy, Safetensors, load
from tpserve.kernels.torch_kernels import TorchKernels
from tpserve.model.decoder import Weights
from tpserve.model.families import llama
from tpserve.model.spec import ModelSpec
from tpserve.parallel.collectives import Alone
from tpserve.parallel.partition import MLP_BLOCK, partition

CPU = torch.device("cpu")


def kernels(spec: ModelSpec) -> TorchKernels:
    return TorchKernels(spec, Alone(), torch.float32, CPU, page_size=16)


@pytest.fixture(scope="module")
def demo() -> tuple[Path, ModelSpec]:
    folder = demo_path()
    return folder, llama.spec(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_requests_its_slices_and_little_more(demo: tuple[Path, ModelSpec], ranks: int) -> None:
    folder, spec = demo
    for shard in partition(spec, ranks):
        source = Safetensors(folder)
        seen: list[int] = []
        load(spec, shard, source, CPU, torch.bfloat16, kernels(spec), seen.append)
        assert source.requested_bytes <= 1.05 * memory.weight_bytes(spec, shard, "bfloat16")
        assert seen == sorted(seen)


@pytest.mark.parametrize("ranks", [2, 3])
def test_weight_bytes_per_rank_are_within_one_block_of_even(demo: tuple[Path, ModelSpec], ranks: int) -> None:
    _, spec = demo
    held = [split_params(spec, shard) for shard in partition(spec, ranks)]
    block = MLP_BLOCK * 3 * spec.hidden_size
    assert max(abs(params - sum(held) / ranks) for params in held) <= block


def test_shards_of_dummy_weights_are_slices_of_one_model() -> None:
    spec = llama_spec(vocab=100, hidden=32, layers=2, heads=6, kv_heads=3, head_dim=8, intermediate=72, bias=True, tie=False)

    def weights(ranks: int) -> list[Weights]:
        shards = partition(spec, ranks)
        return [load(spec, s, Dummy(spec), CPU, torch.float32, kernels(spec), lambda _: None) for s in shards]

    (whole,), parts = weights(1), weights(3)
    assert torch.equal(torch.cat([part.head.weight for part in parts]), whole.head.weight)
    assert all(torch.equal(part.embed, whole.embed) for part in parts)
    for layer, expected in enumerate(whole.layers):
        held = [part.layers[layer] for part in parts]
        wo, w_down = [w.wo.weight for w in held if w.wo], [w.w_down.weight for w in held if w.w_down]
        assert expected.wo is not None
        assert expected.w_down is not None
        assert torch.equal(torch.cat(wo, 1), expected.wo.weight)
        assert torch.equal(torch.cat(w_down, 1), expected.w_down.weight)
        assert expected.wqkv is not None
        assert abs(float(expected.wqkv.weight.std()) * spec.hidden_size**0.5 - 1) < 0.1

"""Loading one rank's shard: each tensor's slice is read by itself, so a rank reads little more than it keeps."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from tpserve.checkpoint.headers import scan
from tpserve.kernels.interface import Kernels, Matrix, Norm
from tpserve.model.decoder import LayerWeights, Weights
from tpserve.model.families import Layout, Param, family, held
from tpserve.model.spec import ModelSpec
from tpserve.parallel.partition import Shard, Span

Progress = Callable[[int], None]


class Source(Protocol):
    """Where tensors come from. `read` gives the part of a parameter's tensor that `spans` cut out, one span per axis.

    `whole` gives the tensor of a parameter outside the layers, to be kept on a CPU.
    """

    def read(self, param: Param, layer: int | None, spans: tuple[Span, ...]) -> Tensor: ...

    def whole(self, param: Param, storage: torch.dtype) -> Tensor: ...


class Safetensors:
    """Slices of a folder's safetensors files. `requested_bytes` counts what was asked for."""

    def __init__(self, folder: Path):
        self.requested_bytes = 0
        self._stored = scan(folder)
        self._files = {file: safe_open(file, framework="pt") for file in {stored.file for stored in self._stored.values()}}

    def read(self, param: Param, layer: int | None, spans: tuple[Span, ...]) -> Tensor:
        """The slice, of the file's dtype; whole tensors are mapped, not copied."""
        tensor = param.tensor.format(layer=layer)
        stored = self._stored[tensor]
        opened = self._files[stored.file]
        whole = tuple(map(len, spans)) == stored.shape
        cut = tuple(slice(span.start, span.stop) for span in spans)
        part: Tensor = opened.get_tensor(tensor) if whole else opened.get_slice(tensor)[cut]
        self.requested_bytes += part.numel() * part.element_size()
        return part

    def whole(self, param: Param, storage: torch.dtype) -> Tensor:
        """Mapped from the file, in its dtype, so that all ranks share the pages.

        By a mapping of its own, as what was read of another one stays in it; and all of it, so that no step waits for the disk.
        """
        with safe_open(self._stored[param.tensor].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(param.tensor)
        tensor.flatten()[:: mmap.PAGESIZE // tensor.itemsize].sum()
        self.requested_bytes += tensor.nbytes
        return tensor


class Dummy:
    """Random weights, the same for a tensor's element whatever the slice: a hash of its name and place."""

    def __init__(self, spec: ModelSpec):
        self._bound = (3 / spec.hidden_size) ** 0.5

    def read(self, param: Param, layer: int | None, spans: tuple[Span, ...]) -> Tensor:
        """float32: evenly spread, of unit gain for a product (variance 1 / hidden); norms are near 1, biases near 0."""
        place = torch.zeros((), dtype=torch.int64)
        for span in spans:
            place = place.unsqueeze(-1) * 1_000_003 + torch.arange(span.start, span.stop)
        name = param.tensor.format(layer=layer).encode()
        mixed = (place + zlib.crc32(name)) * -7046029254386353131  # the 64-bit golden ratio
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        unit = ((mixed >> 40) & 0xFFFFFF).float() / 2**23 - 1
        if param.name.endswith("norm"):
            return 1 - param.offset + unit / 8
        return unit / 8 if len(spans) == 1 else unit * self._bound

    def whole(self, param: Param, storage: torch.dtype) -> Tensor:
        """As `read`, in the storage dtype."""
        return self.read(param, None, tuple(Span(0, size) for size in param.shape)).to(storage)


def load(
    spec: ModelSpec,
    shard: Shard,
    source: Source,
    device: torch.device,
    storage: torch.dtype,
    kernels: Kernels,
    progress: Progress,
) -> Weights:
    """The rank's parameters on `device`: products in `storage`, packed for `kernels`; norms and biases in float32.

    `progress` is called with the bytes kept so far.
    """
    return _Loader(spec, shard, source, device, storage, kernels, progress).weights()


class _Loader:
    def __init__(
        self, spec: ModelSpec, shard: Shard, source: Source, device: torch.device,
        storage: torch.dtype, kernels: Kernels, progress: Progress,
    ):  # fmt: skip
        self.spec, self.shard, self.source, self.device = spec, shard, source, device
        self.storage, self.kernels, self.progress = storage, kernels, progress
        self.done_bytes = 0

    def weights(self) -> Weights:
        top = {param.name: param for param in family(self.spec.family).params(self.spec)}
        layer = {param.name: param for param in family(self.spec.family).layer_params(self.spec)}
        norm, head = _Parts(self, top, None).norm("norm"), self.part(top["head"], None, self.storage)
        assert norm is not None, f"the family {self.spec.family} declares no norm"
        assert head is not None
        return Weights(
            embed=self._whole(top["embed"]),
            layers=tuple(self._layer(_Parts(self, layer, number)) for number in range(self.spec.num_layers)),
            norm=norm,
            head=self.kernels.pack(head),
        )

    def _layer(self, parts: _Parts) -> LayerWeights:
        attn_norm = parts.norm("attn_norm")
        assert attn_norm is not None, f"the family {self.spec.family} declares no attn_norm"
        return LayerWeights(
            attn_norm=attn_norm,
            wqkv=parts.product("wqkv", "wq", "wk", "wv"),
            bqkv=parts.fused(torch.float32, "bqkv", "bq", "bk", "bv"),
            qk_norm=parts.qk_norm(),
            wo=parts.product("wo"),
            bo=parts.fused(torch.float32, "bo"),
            attn_out_norm=parts.norm("attn_out_norm"),
            mlp_norm=parts.norm("mlp_norm"),
            w_up=parts.product("w_gate", "w_up", gated=self.spec.gated_mlp),
            b_up=parts.fused(torch.float32, "b_gate", "b_up"),
            w_down=parts.product("w_down"),
            b_down=parts.fused(torch.float32, "b_down"),
            mlp_out_norm=parts.norm("mlp_out_norm"),
        )

    def _whole(self, param: Param) -> Tensor:
        tensor = self.source.whole(param, self.storage)
        self._count(tensor.numel() * self.storage.itemsize)
        return tensor if self.device.type == "cpu" else tensor.to(self.device, self.storage)

    def part(self, param: Param, layer: int | None, dtype: torch.dtype) -> Tensor | None:
        """The rank's slice, or None if it holds nothing of a layer's part (an empty head stays a tensor)."""
        spans = [Span(0, size) for size in param.shape]
        if param.split is not None:
            spans[param.dim] = held(self.spec, self.shard, param, layer)
            if not spans[param.dim] and layer is not None:
                return None
        part = _arranged(self.source.read(param, layer, tuple(spans)), param.layout, self.spec.head_dim)
        if param.offset:
            part = part.float() + param.offset
        kept = torch.empty(part.shape, dtype=dtype, device=self.device).copy_(part)
        self._count(kept.nbytes)
        return kept

    def _count(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes
        self.progress(self.done_bytes)


@dataclass(frozen=True)
class _Parts:
    """This rank's parts of one layer by the names of their parameters; what the model does not have is None."""

    loader: _Loader
    params: Mapping[str, Param]
    layer: int | None

    def fused(self, dtype: torch.dtype, *names: str) -> Tensor | None:
        kept = self._held(dtype, *names)
        return torch.cat(kept) if len(kept) > 1 else next(iter(kept), None)

    def product(self, *names: str, gated: bool = False) -> Matrix | None:
        kept = self._held(self.loader.storage, *names)
        return self.loader.kernels.pack(*kept, gated=gated) if kept else None

    def _held(self, dtype: torch.dtype, *names: str) -> list[Tensor]:
        parts = [self.loader.part(self.params[name], self.layer, dtype) for name in names if name in self.params]
        return [part for part in parts if part is not None]

    def norm(self, name: str) -> Norm | None:
        weight = self.fused(torch.float32, name)
        return None if weight is None else Norm(weight, self.fused(torch.float32, f"{name}_bias"))

    def qk_norm(self) -> Tensor | None:
        """One row for each query and KV head, also where the checkpoint has one for all of them."""
        if self.layer is None or not self.loader.spec.qk_norm:
            return None
        held, head_dim = self.loader.shard.layers[self.layer], self.loader.spec.head_dim
        rows = []
        for name, heads in (("q_norm", held.q_heads), ("k_norm", held.kv_heads)):
            weight = self.fused(torch.float32, name)
            rows += [] if weight is None else [weight.expand(len(heads), head_dim)]
        return torch.cat(rows) if rows else None


def _arranged(part: Tensor, layout: Layout, head_dim: int) -> Tensor:
    """Whole heads of a checkpoint's tensor in the decoder's order."""
    match layout:
        case "plain":
            return part
        case "pairs":
            return _halves(part, 0, head_dim)
        case "norm_pairs":
            return _halves(part, 1, head_dim)
        case "qkv_by_head":
            by_kind: Tensor = part.unflatten(0, (-1, 3, head_dim)).transpose(0, 1).flatten(0, 2)
            return by_kind


def _halves(part: Tensor, axis: int, head_dim: int) -> Tensor:
    """Neighbours that rotate together move into the two halves of their head."""
    halves: Tensor = part.unflatten(axis, (-1, head_dim // 2, 2)).transpose(axis + 1, axis + 2).flatten(axis, axis + 2)
    return halves

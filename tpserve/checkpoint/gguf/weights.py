"""Writing a GGUF file's tensors as safetensors, a few at a time: never the whole model in memory."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from tpserve.checkpoint.gguf.family import Config, Family
from tpserve.checkpoint.gguf.reader import Tensor
from tpserve.settings import UserError

_SHARD_BYTES = 2 * 2**30  # at most in one file, but for a tensor that is larger by itself
_CHUNK = 2**22  # elements that are expanded to float32 at once
_KEPT = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}


@dataclass(frozen=True)
class Plan:
    """What is to be written. Keys are GGUF's names."""

    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]  # Hugging Face's
    family: Family
    config: Config
    dtype: torch.dtype

    def size_bytes(self, name: str) -> int:
        """Of a tensor as it will be written."""
        return self.tensors[name].elements * self.dtype.itemsize


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """What to write: float32 or float16 where most weights of matrices are such, else bfloat16."""
    counts: Counter[GGMLQuantizationType] = Counter()
    for tensor in tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.kind] += tensor.elements
    return _KEPT.get(counts.most_common(1)[0][0], torch.bfloat16)


def check_kinds(tensors: Mapping[str, Tensor], file: str) -> None:
    """Raise UserError for a block type that cannot be expanded."""
    for kind, tensor in {tensor.kind: tensor for tensor in tensors.values()}.items():
        try:
            tensor.rows(0, 1)
        except NotImplementedError:
            raise UserError(f"{file}: block type {kind.name} is not supported; give another file, such as Q4_K_M") from None


def check_room(plan: Plan, file: str, folder: Path) -> None:
    """Raise UserError when the folder's disk has no room."""
    needed, free = sum(map(plan.size_bytes, plan.names)), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{file}: its weights take {needed:,} bytes once converted, {folder.parent} has {free:,} free;"
            " make room or set TPSERVE_CACHE to a folder on another disk"
        )


def write(plan: Plan, folder: Path) -> None:
    """Write the tensors into `folder`: as one file, or as several and their index."""
    shards = list(_shards(plan))
    where: dict[str, str] = {}
    total_bytes = sum(tensor.data.nbytes for tensor in plan.tensors.values())
    with tqdm(total=total_bytes, desc="converting", unit="B", unit_scale=True, disable=None) as bar:  # on a terminal
        for number, shard in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            written = {}
            for name in shard:
                written[plan.names[name]] = _converted(plan, name)
                bar.update(plan.tensors[name].data.nbytes)
            _save(written, folder / file)
            where |= dict.fromkeys(written, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(plan.size_bytes, plan.names))}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from None
    path.chmod(0o644)


def _shards(plan: Plan) -> Iterator[list[str]]:
    """The names in order, in groups of at most _SHARD_BYTES."""
    shard: list[str] = []
    total = 0
    for name in plan.names:
        size = plan.size_bytes(name)
        if shard and total + size > _SHARD_BYTES:
            yield shard
            shard, total = [], 0
        shard.append(name)
        total += size
    yield shard


def _converted(plan: Plan, name: str) -> torch.Tensor:
    """The tensor in the shape and order of Hugging Face, expanded in float32 and rounded once."""
    module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    offset = plan.family.norm_offset if module.endswith("norm") else 0.0
    weight = _expanded(plan.tensors[name], offset, plan.dtype)
    if module not in plan.family.rows:
        return weight
    try:
        return plan.family.rows[module](weight, plan.config).contiguous()
    except RuntimeError:
        raise UserError(f"tensor {name} has shape {list(weight.shape)}, which does not fit the number of heads") from None


def _expanded(tensor: Tensor, offset: float, dtype: torch.dtype) -> torch.Tensor:
    """All of a tensor, a few rows at a time."""
    rows, columns = len(tensor.data), tensor.shape[-1]
    out = torch.empty(rows, columns, dtype=dtype)
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        chunk = tensor.rows(start, start + step)
        if offset:
            chunk += np.float32(offset)
        out[start : start + step] = torch.from_numpy(chunk)
    return out.reshape(tensor.shape)

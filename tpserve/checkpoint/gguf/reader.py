"""The GGUF format, versions 2 and 3: one file's keys and values, and its tensors, mapped into memory.

By the format's specification (ggml's docs/gguf.md). The `gguf` package's own reader takes a quarter of a minute for a
vocabulary of 262,144 tokens, and follows a damaged count for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT
from gguf.quants import dequantize

_Kind = GGUFValueType
_NUMBERS = {
    _Kind.UINT8: "<u1", _Kind.INT8: "<i1", _Kind.UINT16: "<u2", _Kind.INT16: "<i2", _Kind.UINT32: "<u4", _Kind.INT32: "<i4",
    _Kind.UINT64: "<u8", _Kind.INT64: "<i8", _Kind.FLOAT32: "<f4", _Kind.FLOAT64: "<f8", _Kind.BOOL: "?",
}  # fmt: skip
_MOST = 2**24  # entries of a list, far more than any vocabulary or model has
_MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Tensor:
    """A tensor as the file has it. Its data are read when they are used."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # the last dimension is the one whose elements are neighbours
    data: np.ndarray  # (rows, bytes of a row) uint8

    @property
    def elements(self) -> int:
        """How many numbers it is made of."""
        return prod(self.shape)

    def rows(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Some rows as float32: (rows, elements of a row), a copy. Raises NotImplementedError for some block types."""
        return np.array(dequantize(self.data[start:stop], self.kind), np.float32)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(Values by key, tensors by name) of a file of these versions. Raises ValueError for one that is damaged."""
    content = np.memmap(path, np.uint8, "r")
    cursor = _Cursor(content, 8)  # after magic and version
    tensor_count, key_count = cursor.number("<u8"), cursor.number("<u8")
    values: dict[str, Any] = {}
    for _ in range(key_count):
        _add(values, cursor.text(), cursor.value(cursor.number("<u4")))
    infos: dict[str, _Info] = {}
    for _ in range(tensor_count):
        _add(infos, cursor.text(), cursor.info())
    alignment = values.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    return values, {name: info.tensor(name, content, start) for name, info in infos.items()}


@dataclass(frozen=True)
class _Info:
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # from where the data of all tensors begin

    def tensor(self, name: str, content: np.ndarray, start: int) -> Tensor:
        """The tensor in the file's `content`, where tensor data begin at `start`."""
        elements, size = GGML_QUANT_SIZES[self.kind]
        if not all(self.shape) or self.shape[-1] % elements:
            raise ValueError(f"tensor {name} has shape {list(self.shape)} in blocks of {elements}")
        row_bytes = self.shape[-1] // elements * size
        begin, size_bytes = start + self.offset, prod(self.shape[:-1]) * row_bytes
        if begin + size_bytes > len(content):
            raise ValueError(f"tensor {name} would end at byte {begin + size_bytes} of {len(content)}")
        return Tensor(self.kind, self.shape, content[begin : begin + size_bytes].reshape(-1, row_bytes))


class _Cursor:
    """Reads one thing after the other, from byte `offset` on. Raises ValueError for what cannot be."""

    def __init__(self, content: np.ndarray, offset: int):
        self._content = content.data
        self.offset = offset

    def take(self, size_bytes: int) -> memoryview:
        end = self.offset + size_bytes
        if end > len(self._content):
            raise ValueError(f"it has {len(self._content)} bytes, and says that there are at least {end}")
        taken = self._content[self.offset : end]
        self.offset = end
        return taken

    def numbers(self, dtype: str, count: int) -> list[Any]:
        found: list[Any] = np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype).tolist()
        return found

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0]

    def text(self) -> str:
        return str(self.take(self.number("<u8")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _Kind.STRING:
            return self.text()
        if kind == _Kind.ARRAY:
            return self._list(self.number("<u4"), self.number("<u8"))
        number = self.number(_NUMBERS[_Kind(kind)])
        # 1e-05 rather than 9.9999997e-06: what was meant is the shortest of its kind.
        return float(str(np.float32(number))) if kind == _Kind.FLOAT32 else number

    def _list(self, kind: int, count: int) -> list[Any]:
        if kind == _Kind.ARRAY or count > _MOST:
            raise ValueError(f"it has a list of {count} {_Kind(kind).name}")
        if kind == _Kind.STRING:
            return [self.text() for _ in range(count)]
        return self.numbers(_NUMBERS[_Kind(kind)], count)

    def info(self) -> _Info:
        dimensions = self.number("<u4")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"it has a tensor of {dimensions} dimensions")
        shape = tuple(reversed(self.numbers("<u8", dimensions)))
        return _Info(GGMLQuantizationType(self.number("<u4")), shape, self.number("<u8"))


def _add(entries: dict[str, Any], name: str, entry: Any) -> None:
    if name in entries:
        raise ValueError(f"it has {name} twice")
    entries[name] = entry

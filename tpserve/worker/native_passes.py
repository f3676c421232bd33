"""The passes over logits by the native kernels (`kernels/native/sampling.cpp`), for logits in this machine's memory."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from torch import Tensor

from tpserve.kernels.native.library import Library
from tpserve.worker.noise import RowNoise
from tpserve.worker.passes import MOST_TOP


class _Rows(ctypes.Structure):
    """LogitRows of `sampling.h`."""

    _fields_ = [
        ("logits", c_void_p), ("index", c_void_p), ("stride", c_int64), ("columns", c_int32), ("count", c_int32),
    ]  # fmt: skip


class _Draw(ctypes.Structure):
    """DrawArgs of `sampling.h`."""

    _fields_ = [
        *((name, c_void_p) for name in ("tops", "temperatures", "least", "keys", "positions")), ("first_block", c_int64),
    ]  # fmt: skip


class _Mass(ctypes.Structure):
    """MassArgs of `sampling.h`."""

    _fields_ = [(name, c_void_p) for name in ("tops", "temperatures", "least", "above")]


class _Past(ctypes.Structure):
    """PastArgs of `sampling.h`."""

    _fields_ = [(name, c_void_p) for name in ("columns", "counts", "sizes", "repetition", "presence", "frequency")]


_ARGUMENTS: dict[str, list[Any]] = {
    "greatest": [c_void_p, c_void_p],
    "draw": [c_void_p, c_void_p, c_void_p],
    "mass": [c_void_p, c_void_p, c_void_p],
    "count": [c_void_p, c_void_p],
    "top": [c_int, c_void_p, c_void_p],
    "log_sum_exp": [c_void_p],
    "mask": [c_void_p, c_int64],
    "penalize": [c_void_p],
}


class NativePasses:
    """See Passes."""

    def __init__(self, library: Library):
        self._level = library.level
        self._call = {name: getattr(library.call, f"tps_sampling_{name}") for name in _ARGUMENTS}
        for name, function in self._call.items():
            function.restype, function.argtypes = None, [c_void_p, c_void_p, *_ARGUMENTS[name]]

    def greatest(self, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """See Passes."""
        values, columns = np.empty(len(logits), np.float32), np.empty(len(logits), np.int64)
        self._run("greatest", logits, np.arange(len(logits)), _at(values), _at(columns))
        return values, columns

    def draw(
        self, logits: Tensor, index: np.ndarray, greatest: tuple[np.ndarray, np.ndarray], tops: np.ndarray,
        temperatures: np.ndarray, least: np.ndarray, noise: RowNoise,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """See Passes."""
        values, columns = (x.copy() for x in greatest)
        args = _Draw(*map(_at, (tops, temperatures, least, noise.keys, noise.positions)), noise.first_block)
        self._run("draw", logits, index, byref(args), _at(values), _at(columns))
        return values, columns

    def mass(
        self,
        logits: Tensor,
        index: np.ndarray,
        tops: np.ndarray,
        temperatures: np.ndarray,
        least: np.ndarray,
        above: np.ndarray,
    ) -> np.ndarray:
        """See Passes."""
        masses = np.empty((2, len(index)), np.int64)
        self._run("mass", logits, index, byref(_Mass(*map(_at, (tops, temperatures, least, above)))), *map(_at, masses))
        return masses

    def count(self, logits: Tensor, index: np.ndarray, least: np.ndarray) -> np.ndarray:
        """See Passes."""
        counts = np.empty(len(index), np.int64)
        self._run("count", logits, index, _at(least), _at(counts))
        return counts

    def top(self, logits: Tensor, index: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """See Passes."""
        assert width <= MOST_TOP
        values, columns = np.empty((len(index), width), np.float32), np.empty((len(index), width), np.int32)
        self._run("top", logits, index, width, _at(values), _at(columns))
        return values, columns

    def log_sum_exp(self, logits: Tensor, index: np.ndarray) -> np.ndarray:
        """See Passes."""
        sums = np.empty(len(index), np.float32)
        self._run("log_sum_exp", logits, index, _at(sums))
        return sums

    def mask_(self, logits: Tensor, index: np.ndarray, words: np.ndarray) -> None:
        """See Passes."""
        self._run("mask", logits, index, _at(words), words.shape[1])

    def penalize_(
        self, logits: Tensor, index: np.ndarray, columns: np.ndarray, counts: np.ndarray, sizes: np.ndarray,
        penalties: np.ndarray,
    ) -> None:  # fmt: skip
        """See Passes."""
        self._run("penalize", logits, index, byref(_Past(*map(_at, (columns, counts, sizes, *penalties)))))

    def _run(self, name: str, logits: Tensor, index: np.ndarray, *args: object) -> None:
        assert logits.stride(1) == 1 or not logits.numel()
        rows = _Rows(logits.data_ptr(), _at(index), logits.stride(0), logits.shape[1], len(index))
        self._call[name](self._level, byref(rows), *args)


def _at(array: np.ndarray) -> int:
    """The address of an array, which must be contiguous."""
    assert array.flags.c_contiguous
    return array.ctypes.data

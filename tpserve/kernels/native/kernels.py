"""The operations of a decoder by the native kernels: recorded once as a program, which one call runs at every step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpserve.kernels.interface import KINDS, Activation, Forward, Heads, Kernels, Norm, StepTokens
from tpserve.kernels.memory import Arena
from tpserve.kernels.native import abi
from tpserve.kernels.native.abi import Dtype, NormKind, Op
from tpserve.kernels.native.buffers import BLOCK, PAD, Buffer, buffers, padded, sum_lines
from tpserve.kernels.native.library import Program, Team
from tpserve.model.rotary import RotaryTable
from tpserve.model.spec import ModelSpec, Rotary
from tpserve.parallel.collectives import Alone
from tpserve.parallel.partition import Shard
from tpserve.parallel.shared_memory_native import NativeSharedMemory

_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


@dataclass(frozen=True)
class Matrix:
    """A packed weight of n columns (gate and other together) by k; `data` is as `linear.cpp` says."""

    data: Tensor
    n: int
    k: int
    gated: bool


class NativeKernels(Kernels):
    """Recording. Buffers are made once, for steps of up to `most_tokens` and logits of up to `most_rows` at once."""

    def __init__(
        self, spec: ModelSpec, shard: Shard, collectives: Alone | NativeSharedMemory, compute: torch.dtype, page_size: int,
        team: Team, most_tokens: int, most_rows: int,
    ):  # fmt: skip
        self.spec = spec
        self.collectives = collectives
        self.compute = compute
        self.page_size = page_size
        self.team = team
        self.lib = team.lib
        self.most_tokens = most_tokens
        self.most_rows = most_rows
        self._rotaries = {layer.rotary: RotaryTable(layer.rotary, torch.device("cpu")) for layer in spec.layers}
        self._turned: dict[Rotary, tuple[Tensor, Tensor]] = {}
        self._arena = Arena()
        sizes = buffers(spec, shard, compute.itemsize, most_tokens, most_rows, isinstance(collectives, Alone))
        self._buffers = {name: self._made(size) for name, size in sizes.items()}
        self._seconds = (ctypes.c_double * len(KINDS))()  # where the time of all steps went
        self._program = self._new_program()
        self._reduces = 0  # a step
        self._reduced: tuple[Tensor, abi.ReduceArgs] | None = None  # the last kernel, if it was a REDUCE, and its x
        self._head: tuple[Program, Tensor, Tensor] | None = None

    @property
    def seconds(self) -> Sequence[float]:
        """See Kernels."""
        return list(self._seconds)

    def pack(self, *parts: Tensor, gated: bool = False) -> Matrix:
        """See Kernels."""
        if not gated and len(parts) > 1:
            parts = (torch.cat(parts),)
        columns, k = parts[0].shape
        padded_k = padded(k, PAD)
        data = self._arena.zeros((len(parts) * padded(columns, BLOCK) * padded_k,), parts[0].dtype)
        block_bytes = BLOCK * padded_k * data.itemsize
        for number, part in enumerate(parts):
            part, place = part.contiguous(), data.data_ptr() + number * block_bytes
            self.lib.call.tps_pack(self.lib.level, part.data_ptr(), place, columns, k, _DTYPES[part.dtype], len(parts))
        return Matrix(data, len(parts) * columns, k, gated)

    def embed(self, tokens: None, table: Tensor, scale: float) -> Tensor:
        """See Kernels."""
        x = self._lines("x", self.spec.hidden_size)
        args = abi.EmbedArgs(table.data_ptr(), x.data_ptr(), scale, table.shape[1], x.stride(0), _DTYPES[table.dtype])
        self._add(Op.EMBED, args, table)
        return x

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Kernels."""
        hidden = self._lines("hidden", x.shape[1])
        args = self._norm_args(x, norm, hidden)
        if self._reduced is not None and self._reduced[0] is x:  # its lines are at hand there
            self._reduced[1].next_norm = ctypes.pointer(args)
            self._program.keep(norm)
            self._reduced = None
        else:
            self._add(Op.NORM, args, norm)
        return hidden

    def linear(self, hidden: Tensor, weight: Matrix, bias: Tensor | None, activation: Activation | None = None) -> Tensor:
        """See Kernels."""
        columns = weight.n // 2 if weight.gated else weight.n
        # What attention reads is normed and rotated in float32 first; what a product reads is in its dtype.
        out = self._lines("qkv" if activation is None else "up", columns)
        args = self._linear_args(
            hidden, weight, out.data_ptr(), out.stride(0), _DTYPES[out.dtype], bias=bias, activation=activation
        )
        self._add(Op.LINEAR, args, weight, bias)
        return out

    def attention(
        self, tokens: None, qkv: Tensor, qk_norm: Tensor | None, keys: Tensor, values: Tensor,
        heads: Heads, rotary: Rotary, window: int | None,
    ) -> Tensor:  # fmt: skip
        """See Kernels."""
        cos, sin = self._turns(rotary)
        width = heads.heads * heads.head_dim
        queries, mixed = self._lines("queries", width), self._lines("mixed", width)
        kind = _DTYPES[self.compute], _DTYPES[keys.dtype]
        rotate = abi.RotaryArgs(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), _pointer(qk_norm), queries.data_ptr(), keys.data_ptr(),
            values.data_ptr(), self.spec.norm_eps, self._norm_kind, heads.heads, heads.kv_heads, heads.head_dim,
            cos.shape[1], self.page_size, qkv.stride(0), *kind,
        )  # fmt: skip
        self._add(Op.ROTARY, rotate, qk_norm)
        attend = abi.AttentionArgs(
            queries.data_ptr(), keys.data_ptr(), values.data_ptr(), mixed.data_ptr(), self.spec.attention_scale, 0.0,
            window or 0, heads.heads, heads.kv_heads, heads.head_dim, self.page_size, mixed.stride(0), *kind,
        )  # fmt: skip
        self._add(Op.ATTENTION, attend)
        return mixed

    def reduce_add_(
        self, x: Tensor, products: Sequence[tuple[Tensor, Matrix]], biases: Sequence[Tensor], norm: Norm | None
    ) -> None:
        """See Kernels."""
        hidden, group = x.shape[1], self._program.group
        if group is None:
            partial = self._lines("partial", hidden)
            lines = len(partial)
        else:
            partial, lines = None, sum_lines(self.spec, group.capacity, self.most_tokens)
        if not lines:
            raise ValueError(f"the memory in which partial sums are added up is too small for {hidden} values")
        linears = [
            # Where the sum goes is known only when the step runs.
            self._linear_args(lines_in, matrix, 0, hidden, Dtype.F32, accumulate=number > 0)
            for number, (lines_in, matrix) in enumerate(products)
        ]
        first, second = [ctypes.pointer(args) for args in linears] + [None] * (2 - len(linears))
        bias = sum(biases[1:], biases[0]) if biases else None
        out_norm = None if norm is None else ctypes.pointer(self._norm_args(x, norm, x))
        args = abi.ReduceArgs(
            first, second, _pointer(bias), out_norm, None, x.data_ptr(), _pointer(partial), hidden, x.stride(0), lines
        )  # fmt: skip
        self._add(Op.REDUCE, args, products, bias, norm)
        self._reduces += group is not None
        self._reduced = x, args

    def logits(self, hidden: Tensor, head: Matrix, scale: float) -> Tensor:
        """See Kernels."""
        if self._head is None:
            self._head = self._head_program(head, scale)
        if len(hidden) > self.most_rows:
            return torch.cat([self.logits(some, head, scale).clone() for some in hidden.split(self.most_rows)])
        program, into, out = self._head
        into[: len(hidden), : hidden.shape[1]].copy_(hidden)
        self._run(program, abi.Step(tokens=len(hidden)))
        return out[: len(hidden)]

    def capture(self, forward: Callable[[None, Tensor], Tensor], pools: Tensor) -> Forward:
        """See Kernels."""
        hidden = forward(None, pools)
        program, reduces = self._program, self._reduces

        def run(tokens: StepTokens, last_ids: Tensor) -> Tensor:
            if len(tokens.ids) > self.most_tokens:
                raise ValueError(f"a step of {len(tokens.ids)} tokens; there is room for {self.most_tokens}")
            if len(tokens.fed):
                tokens.ids[tokens.fed] = last_ids.numpy()[tokens.fed_slots]
            self._run(program, _step(tokens))
            self.collectives.all_reduces += reduces
            return hidden[: len(tokens.ids)]

        return run

    @property
    def _norm_kind(self) -> NormKind:
        return NormKind.RMS if self.spec.norm == "rms" else NormKind.LAYER

    def _new_program(self) -> Program:
        return Program(self.lib, self.team, None if isinstance(self.collectives, Alone) else self.collectives.group)

    def _add(self, op: Op, args: ctypes.Structure, *kept: Any) -> None:
        self._program.add(op, args, *kept)
        self._reduced = None

    def _run(self, program: Program, step: abi.Step) -> None:
        if not program.run(step, self._seconds):
            assert not isinstance(self.collectives, Alone)
            raise self.collectives.missing()

    def _made(self, size: Buffer) -> Tensor:
        """Zeros, all of them touched: what does not fit fails now, not in mid-stream."""
        dtype = self.compute if size.item_bytes == self.compute.itemsize else torch.float32
        return self._arena.zeros((size.lines, size.columns), dtype).zero_()

    def _lines(self, name: str, columns: int) -> Tensor:
        """A buffer of the step's lines (lines, columns); where products read them each is padded with zeros."""
        return self._buffers[f"{name}.{columns}"][:, :columns]

    def _turns(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        if rotary not in self._turned:
            table = self._rotaries[rotary]
            half = len(table.frequencies)
            number = len(self._turned)
            cos, sin = (self._lines(f"{part}{number}", half) for part in ("cos", "sin"))
            args = abi.TurnsArgs(table.frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), table.scale, half)
            self._add(Op.TURNS, args, table)
            self._turned[rotary] = cos, sin
        return self._turned[rotary]

    def _norm_args(self, x: Tensor, norm: Norm, out: Tensor) -> abi.NormArgs:
        return abi.NormArgs(
            x.data_ptr(), out.data_ptr(), norm.weight.data_ptr(), _pointer(norm.bias), self.spec.norm_eps,
            self._norm_kind, x.shape[1], x.stride(0), out.stride(0), _DTYPES[out.dtype],
        )  # fmt: skip

    def _linear_args(
        self, x: Tensor, weight: Matrix, out: int, out_stride: int, out_dtype: Dtype, *,
        bias: Tensor | None = None, activation: Activation | None = None, scale: float = 1.0, accumulate: bool = False,
    ) -> abi.LinearArgs:  # fmt: skip
        kind = abi.Activation.NONE if activation is None else abi.Activation[activation.upper()]
        return abi.LinearArgs(
            x.data_ptr(), out, weight.data.data_ptr(), _pointer(bias), scale, weight.n, weight.k, x.stride(0), out_stride,
            _DTYPES[weight.data.dtype], out_dtype, kind, weight.gated, accumulate,
        )  # fmt: skip

    def _head_program(self, head: Matrix, scale: float) -> tuple[Program, Tensor, Tensor]:
        into, out = self._lines("last", head.k), self._lines("logits", head.n)
        program = self._new_program()
        args = self._linear_args(into, head, out.data_ptr(), head.n, Dtype.F32, scale=scale)
        program.add(Op.LINEAR, args, head, into, out)
        return program, into, out


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _step(tokens: StepTokens) -> abi.Step:
    """The arrays stay the caller's, and must outlive the step."""
    first = tokens.last + 1 - tokens.counts
    arrays = (
        tokens.ids, tokens.positions, tokens.kv_slots, first, tokens.starts, tokens.counts, tokens.slots, tokens.tables,
    )  # fmt: skip
    step = abi.Step(*(array.ctypes.data for array in arrays), tokens.tables.shape[1], len(tokens.ids), len(tokens.slots))
    step.kept = arrays
    return step

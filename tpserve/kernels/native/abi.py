"""The C structs of the native kernels (`native.h`, `program.h`, `collective.h`), field by field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum


class Dtype(IntEnum):
    """Of a buffer."""

    F32 = 0
    BF16 = 1
    F16 = 2


class Activation(IntEnum):
    """Of a product's columns."""

    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3


class NormKind(IntEnum):
    """Of lines."""

    RMS = 0
    LAYER = 1


class Op(IntEnum):
    """What a program does; each has a struct of arguments."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    TURNS = 3
    ROTARY = 4
    ATTENTION = 5
    REDUCE = 6


class Step(Structure):
    """The tokens of one step."""

    _fields_ = [
        *((name, c_void_p) for name in ("ids", "positions", "places", "first", "starts", "counts", "slots", "tables")),
        ("table_stride", c_int64),
        ("tokens", c_int32),
        ("rows", c_int32),
    ]


class EmbedArgs(Structure):
    """Op.EMBED."""

    _fields_ = [
        ("table", c_void_p),
        ("x", c_void_p),
        ("scale", c_float),
        *((name, c_int32) for name in ("hidden", "x_stride", "table_dtype")),
    ]


class NormArgs(Structure):
    """Op.NORM."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "out", "weight", "bias")),
        ("eps", c_float),
        *((name, c_int32) for name in ("kind", "size", "x_stride", "out_stride", "out_dtype")),
    ]


class LinearArgs(Structure):
    """Op.LINEAR."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "out", "weight", "bias")),
        ("scale", c_float),
        *((name, c_int32) for name in ("n", "k", "x_stride", "out_stride", "weight_dtype", "out_dtype")),
        *((name, c_int32) for name in ("activation", "gated", "accumulate")),
    ]


class TurnsArgs(Structure):
    """Op.TURNS."""

    _fields_ = [*((name, c_void_p) for name in ("frequencies", "cos", "sin")), ("scale", c_float), ("half", c_int32)]


class RotaryArgs(Structure):
    """Op.ROTARY."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "cos", "sin", "norm_weight", "queries", "keys", "values")),
        ("eps", c_float),
        *((name, c_int32) for name in ("norm_kind", "heads", "kv_heads", "head_dim", "half", "page_size")),
        *((name, c_int32) for name in ("qkv_stride", "query_dtype", "kv_dtype")),
    ]


class AttentionArgs(Structure):
    """Op.ATTENTION."""

    _fields_ = [
        *((name, c_void_p) for name in ("queries", "keys", "values", "out")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("window", "heads", "kv_heads", "head_dim", "page_size", "out_stride")),
        *((name, c_int32) for name in ("query_dtype", "kv_dtype")),
    ]


class ReduceArgs(Structure):
    """Op.REDUCE."""

    _fields_ = [
        ("first", POINTER(LinearArgs)),
        ("second", POINTER(LinearArgs)),
        ("bias", c_void_p),
        ("out_norm", POINTER(NormArgs)),
        ("next_norm", POINTER(NormArgs)),
        ("x", c_void_p),
        ("partial", c_void_p),
        *((name, c_int32) for name in ("hidden", "x_stride", "lines")),
    ]


class Group(Structure):
    """Ranks that meet in shared memory."""

    _fields_ = [
        ("flags", c_void_p),
        ("slots", c_void_p),
        *((name, c_int64) for name in ("flag_stride", "capacity", "limit_ns")),
        ("sequence", c_uint64),
        *((name, c_int32) for name in ("rank", "size")),
    ]


STRUCTS = (Step, EmbedArgs, NormArgs, LinearArgs, TurnsArgs, RotaryArgs, AttentionArgs, ReduceArgs, Group)

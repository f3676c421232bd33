"""The wire form of messages: MessagePack arrays ``[tag, epoch, field, ...]``.

A message is a dataclass, its tag its place among the kinds that a codec is made for. Fields are packed by
their annotations, and anything else is refused: wrong tag, arity, type, range or length. Arrays are
little-endian ``bin`` fields and come back as read-only numpy arrays, so that a message about many rows
costs the same as one about few. Nothing is pickled.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import numpy as np


class MessageError(ValueError):
    """The bytes are not a valid message; the text says what is wrong."""


@dataclass(frozen=True)
class Range:
    """Inclusive bounds of an integer field."""

    low: int
    high: int


U16 = Annotated[int, Range(0, 2**16 - 1)]
U32 = Annotated[int, Range(0, 2**32 - 1)]
U64 = Annotated[int, Range(0, 2**64 - 1)]
I32 = Annotated[int, Range(-(2**31), 2**31 - 1)]
U8s = Annotated[np.ndarray, "<u1"]
U16s = Annotated[np.ndarray, "<u2"]
I32s = Annotated[np.ndarray, "<i4"]
U32s = Annotated[np.ndarray, "<u4"]
U64s = Annotated[np.ndarray, "<u8"]
F32s = Annotated[np.ndarray, "<f4"]

_Convert = Callable[[Any], Any]
_Field = tuple[str, _Convert, _Convert]  # name, to the wire, from the wire


class Codec:
    """Encodes and decodes messages of these kinds."""

    def __init__(self, kinds: Sequence[type]):
        self._kinds = tuple(kinds)
        self._tags = {kind: tag for tag, kind in enumerate(kinds)}

    def encode(self, message: Any, epoch: int) -> bytes:
        """The wire form. Raises MessageError when a field does not fit its annotation."""
        kind = type(message)
        if kind not in self._tags:
            raise MessageError(f"{kind.__name__} is not a message")
        packed: bytes = msgpack.packb([self._tags[kind], epoch, *_pack(kind, message)])
        return packed

    def decode(self, data: bytes | memoryview) -> tuple[int, Any]:
        """(epoch, message). Raises MessageError for anything that `encode` cannot have made."""
        try:
            parts = msgpack.unpackb(data, use_list=True, strict_map_key=True)
        except Exception as error:  # msgpack raises many unrelated kinds for bad bytes
            raise MessageError(f"not MessagePack: {error}") from None
        if not (isinstance(parts, list) and len(parts) >= 2 and type(parts[0]) is type(parts[1]) is int):
            raise MessageError("not an array that begins with tag and epoch")
        tag, epoch, *values = parts
        if not 0 <= tag < len(self._kinds) or epoch < 0:
            raise MessageError(f"unknown tag {tag} or epoch {epoch}")
        return epoch, _unpack(self._kinds[tag], values)


def _pack(kind: type, message: object) -> list[Any]:
    out = []
    for name, put, _ in _fields(kind):
        try:
            out.append(put(getattr(message, name)))
        except MessageError as error:
            raise MessageError(f"{kind.__name__}.{name}: {error}") from None
    return out


def _unpack(kind: type, values: list[Any]) -> Any:
    codecs = _fields(kind)
    if len(values) != len(codecs):
        raise MessageError(f"{kind.__name__} has {len(codecs)} fields, got {len(values)}")
    out = []
    for (name, _, get), value in zip(codecs, values):
        try:
            out.append(get(value))
        except MessageError as error:
            raise MessageError(f"{kind.__name__}.{name}: {error}") from None
    return kind(*out)


def _codec(annotation: Any) -> tuple[_Convert, _Convert]:
    """(to the wire, from the wire) of one annotation."""
    if get_origin(annotation) is Annotated:
        base, detail = get_args(annotation)
        return _array(np.dtype(detail)) if base is np.ndarray else _integer(detail)
    if get_origin(annotation) is list:
        put, get = _codec(get_args(annotation)[0])
        return (lambda xs: [put(x) for x in xs]), (lambda xs: [get(x) for x in _exactly(list, xs)])
    if annotation in (str, bool):
        return (lambda x: _exactly(annotation, x),) * 2
    if annotation is float:
        return (lambda x: float(x)), (lambda x: _exactly(float, x))
    return _nested(annotation)


def _nested(kind: type) -> tuple[_Convert, _Convert]:
    """A message within another. That of nothing but empty arrays, which most are, takes a byte and little time."""
    if any(get_args(hint)[:1] != (np.ndarray,) for hint in _hints(kind).values()):
        return (lambda x: _pack(kind, x)), (lambda x: _unpack(kind, _exactly(list, x)))
    nothing = empty(kind)

    def put(message: Any) -> list[Any]:
        return [] if message is nothing else _pack(kind, message)

    def get(value: Any) -> Any:
        return nothing if value == [] else _unpack(kind, _exactly(list, value))

    return put, get


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise MessageError(f"wants {kind.__name__}, got {type(value).__name__}")
    return value


def _integer(bounds: Range) -> tuple[_Convert, _Convert]:
    def check(value: Any) -> int:
        if type(value) is not int or not bounds.low <= value <= bounds.high:
            raise MessageError(f"wants an integer from {bounds.low} to {bounds.high}, got {value!r}")
        return value

    def put(value: Any) -> int:
        if isinstance(value, bool | float):
            raise MessageError(f"wants an integer, got {value!r}")
        return check(operator.index(value))

    return put, check


def _array(dtype: np.dtype[Any]) -> tuple[_Convert, _Convert]:
    nothing = np.frombuffer(b"", dtype)  # read-only, so one for all: most arrays of most messages are

    def put(value: Any) -> bytes:
        if type(value) is np.ndarray and value.shape == (0,):
            return b""
        array = np.asarray(value)
        if array.ndim != 1 or not (array.dtype == dtype or array.size == 0):
            raise MessageError(f"wants a 1-d array of {dtype.name}, got {array.dtype.name} {array.shape}")
        return array.astype(dtype, copy=False).tobytes()

    def get(value: Any) -> np.ndarray:
        data: bytes = _exactly(bytes, value)
        if not data:
            return nothing
        if len(data) % dtype.itemsize:
            raise MessageError(f"{len(data)} bytes are no array of {dtype.name}")
        return np.frombuffer(data, dtype)

    return put, get


@functools.cache
def _fields(kind: type) -> list[_Field]:
    return [(name, *_codec(hint)) for name, hint in _hints(kind).items()]


def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


@functools.cache
def empty(kind: type) -> Any:
    """The message of this kind whose arrays are all empty; it has nothing else."""
    return kind(*(get(b"") for _, _, get in _fields(kind)))


def same_length(message: object, *names: str) -> None:
    """Raise MessageError unless these fields are of one length."""
    lengths = [*map(len, _getter(names)(message))]
    if len(set(lengths)) > 1:
        raise MessageError(f"{type(message).__name__}: lengths differ: {dict(zip(names, lengths))}")


@functools.cache
def _getter(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    return operator.attrgetter(*names)


def adds_up(message: object, **flat: str) -> None:
    """Raise MessageError unless each of these fields is as long as the numbers in the field named before it make."""
    for counts, ids in flat.items():
        each, there = getattr(message, counts), len(getattr(message, ids))
        said = int(each.sum()) if len(each) else 0  # mostly there are none, and a sum takes its time
        if said != there:
            raise MessageError(f"{type(message).__name__}: {counts} make {said}, {ids} has {there}")

"""What passes between the frontend and the child that compiles: texts, each after its length in bytes."""

from __future__ import annotations

import os
import struct

LENGTH = struct.Struct(">I")


def frame(text: str) -> bytes:
    """The text as it is sent."""
    data = text.encode()
    return LENGTH.pack(len(data)) + data


def write(descriptor: int, text: str) -> None:
    """Send a text; blocks."""
    with open(descriptor, "wb", closefd=False) as file:
        file.write(frame(text))


def read(descriptor: int) -> str | None:
    """The next text; None at the end. Blocks."""
    length = _exactly(descriptor, LENGTH.size)
    return _exactly(descriptor, *LENGTH.unpack(length)).decode() if length else None


def _exactly(descriptor: int, size: int) -> bytes:
    """That many bytes, or fewer at the end."""
    data = b""
    while len(data) < size and (part := os.read(descriptor, size - len(data))):
        data += part
    return data

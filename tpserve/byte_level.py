"""How byte-level BPE spells bytes: as characters that can be seen."""

from __future__ import annotations


def _spelling() -> str:
    """Printable Latin-1 as itself, the rest in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return "".join(chr(byte) if byte in printable else chr(0x100 + rest.index(byte)) for byte in range(256))


CHARACTERS = _spelling()  # by byte
BYTES = {char: byte for byte, char in enumerate(CHARACTERS)}

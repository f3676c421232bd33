"""How byte-level BPE spells bytes: as characters that can be seen."""

from __future__ import annotations


def _spelling() -> str:
    """Printable Latin-1 as itself, the rest in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return "".join(chr(byte) if byte in printable else chr(0x100 + rest.index(byte)) for byte in range(256))


CHARACTERS = _spelling()  # by byte
BYTES = {char: byte for byte, char in enumerate(CHARACTERS)}
# By code point, the Latin-1 character of the byte that it spells; for those of Latin-1 that spell none, one beyond it.
_LATIN_1 = dict.fromkeys(range(256), "\uffff") | {ord(char): chr(byte) for char, byte in BYTES.items()}


def spelled(token: str) -> bytes | None:
    """The bytes that a token spells; None if one of its characters spells none."""
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return None

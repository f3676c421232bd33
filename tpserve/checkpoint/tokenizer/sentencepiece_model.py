"""A SentencePiece model (tokenizer.model) as a tokenizer of the tokenizers library.

The file is a protocol buffer, defined by sentencepiece_model.proto of SentencePiece. It is read here rather than by
generated code, which works with some versions of protobuf only and so would bind whoever installs tpserve to these.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, normalizers

from tpserve.checkpoint.tokenizer import build
from tpserve.checkpoint.tokenizer.build import MARK, Kind
from tpserve.settings import UserError

_UNIGRAM, _BPE = 1, 2
_OTHERS: dict[int | None, str] = {3: "word", 4: "char"}
Value = int | bytes


@dataclass
class Model:
    """What a file holds, as far as it decides about ids."""

    texts: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    type: int | None = None  # None: not read yet
    special: dict[str, int] = field(default_factory=dict)  # name, such as bos_token -> id; -1: it has none
    suffixes: bool = False  # a space belongs to the word before it
    charsmap: bytes | None = None  # how characters are normalized; empty: not at all, None: not read yet
    prefix: bool = True  # a space is put before the text
    strip: bool = True  # runs of spaces become one, those at the ends none
    escape: bool = True  # spaces are spelled as U+2581
    once: bool = False  # no space is put after added tokens; not in the file, but in tokenizer_config.json

    def put(self, id_: int, text: str, kind: int, score: float = 0.0) -> None:
        """Have a piece at an id: in place of another, or the next one."""
        place = slice(id_, id_ + 1)
        self.texts[place], self.kinds[place], self.scores[place] = [text], [kind], [score]

    def names(self) -> dict[str, str]:
        """The texts of the tokens that have a name, by that."""
        return {name: self.texts[id_] for name, id_ in self.special.items() if 0 <= id_ < len(self.texts)}


def read(path: Path) -> Model:
    """The model in a file. Raises UserError if it is none."""
    model = Model(special={"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1})
    try:
        for number, value in _fields(path.read_bytes()):
            _take(model, number, value)
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise UserError(f"{path}: is no SentencePiece model, or a damaged one ({error}); download it again") from None
    if not model.texts or model.type is None or model.charsmap is None:  # they come in this order
        raise UserError(f"{path}: is no SentencePiece model, or is cut short; download it again")
    return model


def tokenizer(model: Model, path: Path) -> Tokenizer:
    """The tokenizer, yet without its added tokens. Raises UserError for a kind of model that is not supported."""
    if model.type in _OTHERS or model.suffixes or not model.escape:
        kind = _OTHERS.get(model.type, "one with another place or spelling of spaces")
        raise UserError(
            f"{path}: a SentencePiece model of type {kind} is not supported, only bpe and unigram are; give tokenizer.json"
        )
    try:
        return _tokenizer(model)
    except Exception as error:  # the library raises nothing more precise
        raise UserError(f"{path}: no tokenizer can be made of it ({error}); download it again") from None


def _tokenizer(model: Model) -> Tokenizer:
    first: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.strip:
        first += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    unknown = model.special["unk_token"]
    if model.type == _BPE:
        bpe = build.sentencepiece_bpe(model.texts, model.kinds, model.scores, unknown)
        return build.sentencepiece(bpe, model.prefix, first, model.once)
    unigram = models.Unigram(list(zip(model.texts, model.scores)), unknown, Kind.BYTE in model.kinds)
    return build.sentencepiece(unigram, model.prefix, first, model.once)


def _take(model: Model, number: int, value: Value) -> None:
    """Put one field of the file into the model."""
    match number, value:
        case 1, bytes(piece):
            fields = dict(_fields(piece))
            kind = int(fields.get(3, Kind.NORMAL))
            text = bytes(fields.get(1, b"")).decode()
            # A user's own piece is found in the text before spaces are marked.
            text = text.replace(MARK, " ") if kind == Kind.USER_DEFINED else text
            model.put(len(model.texts), text, kind, struct.unpack("<f", bytes(fields.get(2, b"\0\0\0\0")))[0])
        case 2, bytes(trainer):
            fields = dict(_fields(trainer))
            model.type = int(fields.get(3, _UNIGRAM))
            model.suffixes = bool(fields.get(24, False))
            for name, place in {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}.items():
                model.special[name] = _signed(int(fields.get(place, model.special[name])))
        case 3, bytes(normalizer):
            fields = dict(_fields(normalizer))
            model.charsmap = bytes(fields.get(2, b""))
            model.prefix, model.strip, model.escape = (bool(fields.get(place, True)) for place in (3, 4, 5))


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """The number and value of each field of a message in protobuf's wire format; of a number, its bytes if it is a float."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        if key & 7 == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        sizes = {1: 8, 5: 4}
        size, place = (sizes[key & 7], place) if key & 7 in sizes else _varint(data, place)
        if key & 7 not in (1, 2, 5) or place + size > len(data):
            raise ValueError(f"byte {place} is in no field")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of 7 bits a byte, lowest first, and the place after it."""
    value = shift = 0
    while data[place] & 0x80:
        value |= (data[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
    return value | data[place] << shift, place + 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value

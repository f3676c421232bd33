"""The model's tokenizer: text to ids, and the bytes that each id stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from tpserve.byte_level import spelled
from tpserve.settings import UserError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WRITE = "write it with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
_MOST_SHRINK = 4  # Unicode normal forms make no more than four bytes one (a mathematical iota with two accents: 8 to 2)


class Tokenizer:
    """A tokenizer.json, without the truncation and padding it may ask for.

    Raises UserError when there is none, or one that decodes in a way that is not built.
    """

    def __init__(self, folder: Path):
        self._file = folder / "tokenizer.json"
        if not self._file.exists():
            raise UserError(f"no tokenizer.json in {folder}; {_WRITE}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{self._file} is no readable tokenizer ({error}); download it again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        steps = _steps(self._tokenizer.decoder, "decoders")
        _check_decoder(steps)
        ids = set(self._tokenizer.get_vocab().values())  # not all up to the largest: there may be gaps
        self._pieces = {id_: _piece(self._tokenizer.id_to_token(id_) or "", id_ in added, steps) for id_ in ids}
        self._reach = self._reach_bytes(added.values())

    def beyond(self, vocab_size: int) -> list[str]:
        """The added tokens that a model with that many ids does not have, as some models' makers and users leave it.

        Raises UserError if there are others than added ones: the tokenizer is another model's.
        """
        beyond = sorted(id_ for id_ in self._pieces if id_ >= vocab_size)
        if not self._added_ids.issuperset(beyond):
            found = f"ids up to {beyond[-1]}, but the embedding has {vocab_size} rows"
            raise UserError(f"{self._file} has {found}; they are of different models")
        return [self.text_of(id_) for id_ in beyond]

    def id_of(self, token: str) -> int | None:
        """The id of the token that is spelled so, if there is one."""
        id_: int | None = self._tokenizer.token_to_id(token)
        return id_

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The text's ids. Releases the GIL (the library's `encode` does not), so it may run beside an event loop."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int]]:
        """Where the text of each of `encode`'s ids begins and ends, in characters; (0, 0) for ids that are added to it."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.offsets

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included. Releases the GIL, as `encode` does."""
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        return text

    def token(self, id_: int) -> str:
        """How the vocabulary spells the id; empty for an id that the tokenizer does not have."""
        return self._tokenizer.id_to_token(id_) or ""

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of ids, without tokenizing; 0 where the tokenizer may swallow any amount of text."""
        return -(-len(text.encode()) // self._reach) if self._reach else 0

    def text_of(self, id_: int) -> str:
        """The id's own text; empty for an id that the tokenizer does not have."""
        return self.piece(id_).decode("utf-8", "replace")

    def piece(self, id_: int) -> bytes:
        """What the id adds to a text; nothing for an id that the tokenizer does not have."""
        return self._pieces.get(id_, b"")

    def _reach_bytes(self, added: Iterable[tokenizers.AddedToken]) -> int | None:
        """The most bytes of text that one id can stand for, or None when that has no bound or is not known."""
        pieces = self._pieces.values()
        has_every_byte = len({piece for piece in pieces if len(piece) == 1}) == 256  # no text is unknown to it
        keeps = all(map(_keeps_text, _steps(self._tokenizer.pre_tokenizer, "pretokenizers")))
        shrinks = [_shrink(step) for step in _steps(self._tokenizer.normalizer, "normalizers")]
        if not has_every_byte or not keeps or None in shrinks or any(token.lstrip or token.rstrip for token in added):
            return None
        return max(map(len, pieces)) * max([1, *filter(None, shrinks)])


def _steps(component: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a part of the tokenizer, nested sequences unfolded; none where there is no such part."""
    return [] if component is None else _unfold(json.loads(component.__getstate__()), inner)


def _unfold(step: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    return [part for nested in step[inner] for part in _unfold(nested, inner)] if step["type"] == "Sequence" else [step]


# Decoding


def _check_decoder(steps: list[dict[str, Any]]) -> None:
    for step in steps or [{"type": "null"}]:
        kind = step["type"]
        known = kind in ("ByteLevel", "ByteFallback", "Metaspace", "Fuse")
        known |= kind == "Replace" and "String" in step["pattern"]
        known |= kind == "Strip" and step["stop"] == 0  # of the text's beginning, which no answer holds
        if not known:
            raise UserError(f"tokenizer.json: the decoder {kind} is not supported yet")


def _piece(token: str, added: bool, steps: list[dict[str, Any]]) -> bytes:
    """The bytes that a token stands for within a text."""
    for step in steps:
        match step["type"]:
            case "ByteLevel" if not added and (found := spelled(token)) is not None:  # added tokens are spelled as text
                return found
            case "ByteFallback" if byte := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(byte[1], 16)])
            case "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            case "Metaspace":
                token = token.replace(step["replacement"], " ")
    return token.encode()


# How much text an id can stand for


def _keeps_text(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer only cuts, and drops nothing."""
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength")


def _shrink(step: dict[str, Any]) -> int | None:
    """How many bytes of text a normalizer makes one at most; None when that has no bound or is not known."""
    match step["type"]:
        case "NFC" | "NFD" | "NFKC" | "NFKD":
            return _MOST_SHRINK
        case "Prepend":
            return 1
        case "Replace" if "String" in step["pattern"] and step["content"]:
            return max(1, -(-len(step["pattern"]["String"].encode()) // len(step["content"].encode())))
    return None

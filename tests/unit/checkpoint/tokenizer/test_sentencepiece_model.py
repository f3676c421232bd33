"""tokenizer.model files converted, against the ids of the library sentencepiece."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from tests.fixtures.mixed_text import mixed_text
from tests.unit.checkpoint.tokenizer.models import AS_IT_IS, SENTENCES, sentencepiece, write
from tpserve.checkpoint.tokenizer import sentencepiece_model
from tpserve.checkpoint.tokenizer.build import Kind
from tpserve.checkpoint.tokenizer.convert import convert
from tpserve.settings import UserError
from tpserve.tokenizer import Tokenizer

GEMMA = AS_IT_IS | dict(add_dummy_prefix=False, user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁", "<td>", "|"])


class Pair:
    """A model read by the library that defines the format, and by us."""

    def __init__(self, folder: Path, **options: Any):
        self.model = sentencepiece(**options)
        self.reference = SentencePieceProcessor(model_proto=self.model)
        made = write(folder / "made")
        convert(write(folder / "model", self.model), made)
        self.tokenizer = Tokenizer(made)

    def check(self, text: str) -> None:
        assert self.tokenizer.encode(text, False) == self.reference.encode(text), text


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("llama"), model_type="bpe", **AS_IT_IS)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("gemma"), model_type="bpe", **GEMMA)


def test_bpe_model_with_bytes_gives_the_ids_of_the_library(llama: Pair) -> None:
    llama.check(mixed_text(400))
    for text in SENTENCES:
        llama.check(text)


def test_bpe_model_with_a_users_own_pieces_gives_the_ids_of_the_library(gemma: Pair) -> None:
    gemma.check(mixed_text(400).replace("▁", "_"))  # to the library a space and its mark are the same
    for text in SENTENCES:
        gemma.check(text)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\0"), max_size=80))
def test_any_text_gives_the_ids_of_the_library_and_its_own_bytes(llama: Pair, gemma: Pair, text: str) -> None:
    llama.check(text)
    gemma.check(text)
    assert b"".join(map(gemma.tokenizer.piece, gemma.tokenizer.encode(text, False))) == text.encode()


@pytest.mark.parametrize(
    "options",
    [
        dict(model_type="unigram", **AS_IT_IS),
        dict(model_type="unigram", **GEMMA | dict(user_defined_symbols=["<td>", "|"])),
        dict(model_type="unigram"),  # the trainer's own settings: NFKC, spaces made one, no bytes
        dict(model_type="bpe", vocab_size=2500),
        dict(model_type="bpe", **AS_IT_IS | dict(normalization_rule_name="nmt_nfkc_cf")),
        dict(model_type="bpe", unk_id=3, bos_id=2, eos_id=1, pad_id=0, **AS_IT_IS),
    ],
)
def test_other_models_give_the_ids_of_the_library(tmp_path: Path, options: dict[str, Any]) -> None:
    pair = Pair(tmp_path, **options)
    for text in SENTENCES:
        pair.check(text)


def test_model_holds_what_the_library_says_of_its_pieces(tmp_path: Path, gemma: Pair) -> None:
    model = sentencepiece_model.read(write(tmp_path, gemma.model) / "tokenizer.model")
    reference = gemma.reference
    ids = range(reference.vocab_size())
    tests = {
        Kind.UNKNOWN: reference.is_unknown,
        Kind.CONTROL: reference.is_control,
        Kind.BYTE: reference.is_byte,
        Kind.UNUSED: reference.is_unused,
    }
    assert model.scores == [reference.get_score(id_) for id_ in ids]
    assert [text.replace(" ", "▁") for text in model.texts] == [reference.id_to_piece(id_) for id_ in ids]
    for kind, test in tests.items():
        assert [id_ for id_ in ids if model.kinds[id_] == kind] == [id_ for id_ in ids if test(id_)]
    assert model.special == {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(model_type="char"), "of type char is not supported, only bpe and unigram are; give tokenizer.json"),
        (dict(model_type="word", vocab_size=300), "of type word is not supported"),
        (dict(model_type="bpe", treat_whitespace_as_suffix=True), "with another place or spelling of spaces is not supported"),
    ],
)
def test_model_of_another_kind_is_refused_by_name(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Pair(tmp_path, **options)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 499723\n",
        b"\x0a\x05\x0a\x03abc\x0b",
        b"\x0a\x05\x0a\x03\xff\xfe\xfd",
        b"\x0a\xff",
        b"\x0a\x04\x0a\x01a\x10",
        b"\x12\x02\x18\x02",
    ],
)
def test_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.model: is no SentencePiece model, or .*; download it again"):
        sentencepiece_model.read(write(tmp_path, content) / "tokenizer.model")


@given(place=st.integers(0, 10**9))
def test_file_cut_short_is_refused(gemma: Pair, tmp_path_factory: pytest.TempPathFactory, place: int) -> None:
    settings = len(gemma.model) - 40  # what comes last says how text is normalized
    path = tmp_path_factory.getbasetemp() / "cut.model"
    path.write_bytes(gemma.model[: place % settings])
    with pytest.raises(UserError, match=r"cut\.model: is no SentencePiece model, or"):
        sentencepiece_model.read(path)


@pytest.mark.parametrize(
    "change", [dict(charsmap=b"?"), dict(special={"unk_token": 10**6}), dict(type=1, special={"unk_token": -2})]
)
def test_model_with_settings_that_do_not_fit_is_refused(gemma: Pair, tmp_path: Path, change: dict[str, Any]) -> None:
    path = write(tmp_path, gemma.model) / "tokenizer.model"
    model = dataclasses.replace(sentencepiece_model.read(path), **change)
    with pytest.raises(UserError, match=r"tokenizer\.model: no tokenizer can be made of it .*; download it again"):
        sentencepiece_model.tokenizer(model, path)

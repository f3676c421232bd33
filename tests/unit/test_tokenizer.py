from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from tests.unit.frontend.small import END, SPECIAL
from tpserve.settings import UserError
from tpserve.tokenizer import Tokenizer

SHRINKING = ["the " * 30, "\u212a" * 50, "\u1fbe\u0308\u0301" * 20, "\u1100\u1161\u11a8" * 9, "u\u0308\u0304" * 20]


def changed(reference: HfTokenizer, folder: Path, **parts: object) -> Tokenizer:
    """The reference with some of its parts replaced."""
    copy = HfTokenizer.from_str(reference.to_str())
    for name, part in parts.items():
        setattr(copy, name, part)
    copy.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def sentencepiece(folder: Path, **parts: object) -> Tokenizer:
    """Like the tokenizers of SentencePiece models: a marked space, and byte tokens for what has no piece."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁the": 257, "▁sea": 258, "▁": 259}
    copy = HfTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    copy.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    copy.decoder = decoders.Sequence(strip)
    return changed(copy, folder, **parts)


@given(st.text(max_size=60))
def test_pieces_of_a_text_are_its_bytes(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text, False))) == text.encode()


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_ids == {0, 1, 2}
    assert [tokenizer.text_of(id_) for id_ in range(3)] == SPECIAL


def test_special_tokens_are_added_when_asked(reference: HfTokenizer, tmp_path: Path) -> None:
    begin = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", END)])
    tokenizer = changed(reference, tmp_path, post_processor=begin)
    assert tokenizer.encode("a", True) == [END, *tokenizer.encode("a", False)]


def test_truncation_and_padding_of_the_file_are_not_applied(reference: HfTokenizer, tmp_path: Path) -> None:
    copy = HfTokenizer.from_str(reference.to_str())
    copy.enable_truncation(3)
    copy.enable_padding(length=50)
    tokenizer = changed(copy, tmp_path)
    assert tokenizer.encode("the quick brown fox", False) == reference.encode("the quick brown fox").ids


def test_an_added_token_stands_for_its_own_text(reference: HfTokenizer, tmp_path: Path) -> None:
    copy = HfTokenizer.from_str(reference.to_str())
    copy.add_tokens([AddedToken("été\n", special=False)])
    tokenizer = changed(copy, tmp_path)
    (id_,) = tokenizer.encode("été\n", False)
    assert tokenizer.text_of(id_) == "été\n"


def test_byte_fallback_and_marked_spaces_become_bytes(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert [tokenizer.piece(id_) for id_ in (257, 259, 0xF0 + 1)] == [b" the", b" ", b"\xf0"]


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_file_that_is_missing_or_no_tokenizer_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    text = (
        f"^no tokenizer.json in {tmp_path}; write it with" if content is None else f"^{tmp_path}/tokenizer.json is no readable"
    )
    with pytest.raises(UserError, match=text):
        Tokenizer(tmp_path)


def test_tokenizer_may_have_added_tokens_that_the_model_has_not_but_no_others(reference: HfTokenizer, tmp_path: Path) -> None:
    copy = HfTokenizer.from_str(reference.to_str())
    copy.add_tokens(["<image>"])
    copy.add_special_tokens(["<pad>"])
    tokenizer = changed(copy, tmp_path)
    assert [tokenizer.beyond(size) for size in (302, 301, 300)] == [[], ["<pad>"], ["<image>", "<pad>"]]
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer\.json has ids up to 301, but the embedding has 299 rows"):
        tokenizer.beyond(299)


def test_id_of_a_token_is_found_by_its_spelling(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_of(token) for token in (*SPECIAL, "<|no such token|>")] == [0, 1, 2, None]


def test_vocabulary_may_have_gaps(tmp_path: Path) -> None:
    changed(HfTokenizer(models.BPE({"a": 0, "b": 1}, [])), tmp_path, decoder=decoders.Fuse())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["b"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.piece(id_) for id_ in (-1, 0, 1, 4_000_000_000, 10**30)] == [b"", b"a", b"", b"b", b""]


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), None, decoders.Strip(" ", 0, 1)])
def test_a_decoder_that_is_not_built_is_refused_by_name(reference: HfTokenizer, tmp_path: Path, decoder: object) -> None:
    name = "null" if decoder is None else type(decoder).__name__
    with pytest.raises(UserError, match=f"decoder {name} is not supported yet"):
        changed(reference, tmp_path, decoder=decoder)


@given(st.text(max_size=200) | st.sampled_from(SHRINKING))
def test_no_text_has_fewer_ids_than_the_bound(bounded: list[Tokenizer], text: str) -> None:
    for tokenizer in bounded:
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, False))


@pytest.fixture(scope="module")
def bounded(reference: HfTokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Tokenizers that shrink text in the ways that have a bound."""
    forms = [None, normalizers.NFC(), normalizers.NFKC(), normalizers.NFD(), normalizers.Replace("the", "t")]
    made = [changed(reference, tmp_path_factory.mktemp("model"), normalizer=form) for form in forms]
    return [*made, sentencepiece(tmp_path_factory.mktemp("model"))]


def test_the_bound_grows_with_the_text(tokenizer: Tokenizer, bounded: list[Tokenizer]) -> None:
    longest = max(len(tokenizer.piece(id_)) for id_ in range(300))
    assert tokenizer.least_tokens("x" * 10 * longest + "y") == 11
    assert all(one.least_tokens("x" * 100_000) > 0 for one in bounded)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace(Regex(" +"), " ")},
        {"normalizer": normalizers.Replace(" ", "")},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])},
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(reference: HfTokenizer, tmp_path: Path, parts: dict[str, object]) -> None:
    assert changed(reference, tmp_path, **parts).least_tokens(" " * 10_000) == 0


def test_an_added_token_that_swallows_spaces_has_no_bound(reference: HfTokenizer, tmp_path: Path) -> None:
    copy = HfTokenizer.from_str(reference.to_str())
    copy.add_tokens([AddedToken("<x>", rstrip=True, special=True)])
    tokenizer = changed(copy, tmp_path)
    assert len(tokenizer.encode("<x>" + " " * 1000, False)) == 1
    assert tokenizer.least_tokens("<x>" + " " * 1000) == 0


def test_a_tokenizer_to_which_text_may_be_unknown_has_no_bound(tmp_path: Path) -> None:
    copy = HfTokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    copy.decoder = decoders.Fuse()
    tokenizer = changed(copy, tmp_path)
    assert tokenizer.least_tokens("x" * 1000) == 0


def test_ids_of_a_text_decode_to_it_special_tokens_included(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for text in ("", "the fox 😀 é", f"a{SPECIAL[1]}b"):
        assert tokenizer.decode(tokenizer.encode(text, False)) == text
    pieces = sentencepiece(tmp_path)
    assert pieces.decode(pieces.encode("the sea é", False)) == "the sea é"


def test_token_is_spelled_as_in_the_vocabulary(tokenizer: Tokenizer, reference: HfTokenizer) -> None:
    assert [tokenizer.token(id_) for id_ in (END, 260, 305)] == [SPECIAL[0], reference.id_to_token(260), ""]

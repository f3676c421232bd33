"""Tokenizers of GGUF files: two real ones against llama.cpp, small ones against what can be told by hand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HfTokenizer

from tests import gemma
from tests.fixtures import make_llama_cpp_ids as llama_cpp
from tests.fixtures.mixed_text import mixed_text
from tpserve.byte_level import CHARACTERS
from tpserve.checkpoint import gguf
from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.checkpoint.gguf.tokenizer import write_tokenizer
from tpserve.checkpoint.tokenizer.build import SPLITS, Kind
from tpserve.settings import UserError
from tpserve.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(**changes: Any) -> dict[str, Any]:
    """Keys of a byte-level tokenizer: a special token, a user's own, all bytes, then some merged ones."""
    merged = ["ĠĠ", "Ġ1", "ll", "hello", "é"]
    texts = ["<end>", "<own  token>", "[PAD2]", *CHARACTERS, *merged[:-1], CHARACTERS[0xC3] + CHARACTERS[0xA9]]
    kinds = [Kind.CONTROL, Kind.USER_DEFINED, Kind.UNUSED] + [Kind.NORMAL] * (len(texts) - 3)
    keys: dict[str, Any] = {"model": "gpt2", "pre": "smollm", "tokens": texts, "token_type": kinds}
    keys |= {"merges": ["Ġ Ġ", "Ġ 1", "l l", "Ã ©"], "bos_token_id": 0, "eos_token_id": 0}
    return keys | changes


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """Keys of SentencePiece's tokenizer: special tokens, bytes, a user's own, letters, and merged pieces with scores."""
    pieces = {"▁": -90.0, "a": -91.0, "b": -92.0, "c": -93.0, "ab": -2.0, "bc": -1.0, "▁a": -3.0, "▁▁": -4.0}
    texts = ["<unk>", "<s>", "</s>", *BYTES, "    ", *pieces]
    kinds = [Kind.UNKNOWN, *[Kind.CONTROL] * 2, *[Kind.BYTE] * 256, Kind.USER_DEFINED, *[Kind.NORMAL] * len(pieces)]
    scores = [*[0.0] * (len(texts) - len(pieces)), *pieces.values()]
    return {"model": "llama", "tokens": texts, "token_type": kinds, "scores": scores} | changes


def metadata(keys: dict[str, Any], **others: Any) -> Metadata:
    values = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    return Metadata("x.gguf", {"general.architecture": "llama", "llama.context_length": 64} | values | others)


def written(folder: Path, keys: dict[str, Any]) -> Tokenizer:
    write_tokenizer(metadata(keys), folder)
    return Tokenizer(folder)


def texts_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.text_of(id_) for id_ in tokenizer.encode(text, False)]


def check_against_llama_cpp(folder: Path, name: str) -> None:
    """The ids of the mixed text are those that llama.cpp makes of it with the file that the folder was made of."""
    expected = json.loads(llama_cpp.FILE.read_text())
    text = mixed_text()
    assert hashlib.sha256(text.encode()).hexdigest() == expected["text"]["sha256"], "it is not the text that llama.cpp had"
    ids = Tokenizer(folder).encode(text, True)
    assert len(ids) > 100_000
    assert llama_cpp.facts(ids) == expected[name]


def test_demo_tokenizer_gives_the_ids_of_llama_cpp(demo_model: Path) -> None:
    check_against_llama_cpp(demo_model, "smollm2")


@pytest.mark.slow
def test_gemma_tokenizer_gives_the_ids_of_llama_cpp() -> None:
    check_against_llama_cpp(gguf.describe(gemma.gguf_path())[0], "gemma3")


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "don't 1234  x", ["don", "'t", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "don't 1234  x", ["don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("command-r", "a 12", ["a", "Ġ", "1", "2"]),
        ("llama-bpe", "DON'T 12345!\n\nx", ["DON", "'T", "Ġ", "123", "45", "!ĊĊ", "x"]),
        ("qwen2", "DON'T 123!\n\nx", ["DON", "'T", "Ġ", "1", "2", "3", "!ĊĊ", "x"]),
        ("tekken", "someHTTPServer's 12", ["some", "HTTPServer", "'s", "Ġ", "1", "2"]),
    ],
)
def test_words_are_split_as_the_file_says(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    written(tmp_path, byte_level(pre=pre))
    rule = HfTokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    assert [word for word, _ in rule.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_tokenizer_gives_any_text_back(tmp_path: Path, pre: str) -> None:
    tokenizer = written(tmp_path, byte_level(pre=pre))
    text = "naïve  日本 👩‍💻 ½\r\n\t'LL  <own  token> end   "
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text, False))) == text.encode()
    assert tokenizer.least_tokens(text) > 0


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("gpt-2", False)])
def test_word_that_is_a_token_stays_whole_with_those_that_ignore_merges(tmp_path: Path, pre: str, whole: bool) -> None:
    words = texts_of(written(tmp_path, byte_level(pre=pre)), "hello")
    assert words == (["hello"] if whole else ["h", "e", "ll", "o"])


@pytest.mark.parametrize(("pre", "composed"), [("qwen2", True), ("olmo", True), ("llama-bpe", False)])
def test_text_is_composed_where_the_models_do_so(tmp_path: Path, pre: str, composed: bool) -> None:
    assert (texts_of(written(tmp_path, byte_level(pre=pre)), "e\u0301") == ["é"]) is composed


def test_control_tokens_are_special_and_a_users_own_are_not(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, byte_level())
    assert texts_of(tokenizer, "a<own  token><end>") == ["a", "<own  token>", "<end>"]
    assert tokenizer.special_ids == {0}
    assert tokenizer.text_of(2) == "", "padding of the vocabulary is no text"


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        (byte_level(), None),
        (byte_level(add_bos_token=True), 0),
        (byte_level(pre="llama-bpe"), 0),
        (byte_level(pre="llama-bpe", add_bos_token=False), None),
        (sentencepiece(), 1),
        (sentencepiece(bos_token_id=2), 2),
        (sentencepiece(add_bos_token=False), None),
    ],
)
def test_begin_token_is_added_where_the_file_or_its_kind_says(tmp_path: Path, keys: dict[str, Any], first: int | None) -> None:
    tokenizer = written(tmp_path, keys)
    plain = tokenizer.encode("a", False)
    assert tokenizer.encode("a", True) == (plain if first is None else [first, *plain])


def test_end_token_is_added_where_the_file_says(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, sentencepiece(add_eos_token=True))
    assert tokenizer.encode("a", True) == [1, *tokenizer.encode("a", False), 2]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", [" a", "bc"]),  # bc has the highest score, then ab, which has no b left, then the space with a
        ("babc", [" ", "b", "a", "bc"]),
        ("cab", [" ", "c", "ab"]),
        (" a", [" ", " a"]),
        ("  ", ["  ", " "]),
        ("c    c", [" ", "c", "    ", " ", "c"]),  # four are the user's own token, after which text begins anew
        ("é", [" ", "\ufffd", "\ufffd"]),
    ],
)
def test_pieces_are_merged_by_their_scores(tmp_path: Path, text: str, tokens: list[str]) -> None:
    assert texts_of(written(tmp_path, sentencepiece()), text) == tokens


def test_pieces_of_equal_score_are_merged_in_the_order_of_their_ids(tmp_path: Path) -> None:
    keys = sentencepiece()
    equal = keys | {"scores": [-1000.0] * len(keys["tokens"])}
    assert texts_of(written(tmp_path, equal), "cabc") == [" ", "c", "ab", "c"]


def test_space_before_the_text_can_be_left_out(tmp_path: Path) -> None:
    tokenizer = written(tmp_path, sentencepiece(add_space_prefix=False))
    assert texts_of(tokenizer, "c a</s>c") == ["c", " a", "</s>", "c"]
    assert tokenizer.encode("", True) == [1]


def test_config_names_special_tokens_and_the_template(tmp_path: Path) -> None:
    template = {"tokenizer.chat_template": "{{ messages }}"}
    write_tokenizer(metadata(sentencepiece(padding_token_id=0), **template), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<unk>",
        "unk_token": "<unk>",
        "chat_template": "{{ messages }}",
    }


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (byte_level(model="rwkv"), r"x\.gguf: tokenizer\.ggml\.model is 'rwkv'; supported: gpt2, llama"),
        (byte_level(model=None), "has no tokenizer.ggml.model"),
        (byte_level(pre="deepseek-coder"), r"tokenizer\.ggml\.pre is 'deepseek-coder', .*supported: gpt-2, .*qwen2"),
        (byte_level(pre=None), r"tokenizer\.ggml\.pre is missing"),
        (byte_level(merges=None), r"has no tokenizer\.ggml\.merges"),
        (byte_level(merges=["x yz"]), "merges .*do not fit together .*convert the model again"),
        (byte_level(merges=["xyz"]), "merges has a line that is no pair"),
        (byte_level(token_type=[1]), "token_type has 1 entries for 264 tokens"),
        (byte_level(token_type=1), "token_type is no list of int"),
        (byte_level(tokens=[1, 2]), "tokens is no list of str"),
        (byte_level(merges=[1]), "merges is no list of str"),
        (byte_level(bos_token_id="0"), "bos_token_id is '0', which is no int"),
        (byte_level(eos_token_id=264), "eos_token has id 264, but there are 264 tokens"),
        (byte_level(tokens=["a", "a"], token_type=None), "names a token twice"),
        (sentencepiece(scores=[0.0]), "scores has 1 entries for 268 tokens"),
        (sentencepiece(scores=None), r"has no tokenizer\.ggml\.scores"),
    ],
)
def test_tokenizer_that_is_not_supported_or_broken_is_refused(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        write_tokenizer(metadata(keys), tmp_path)
    assert not list(tmp_path.iterdir())

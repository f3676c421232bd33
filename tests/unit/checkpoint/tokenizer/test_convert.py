"""Model folders without tokenizer.json: what is written for them, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from tests.unit.checkpoint.tokenizer.models import AS_IT_IS, SENTENCES, byte_level, entry, sentencepiece, write
from tpserve.byte_level import BYTES
from tpserve.checkpoint.folder import special_tokens
from tpserve.checkpoint.tokenizer.build import SPLITS
from tpserve.checkpoint.tokenizer.convert import convert
from tpserve.frontend.chat import template
from tpserve.settings import UserError
from tpserve.tokenizer import Tokenizer


class Pair(NamedTuple):
    """One tokenizer, as we and as transformers have it."""

    ours: Tokenizer
    theirs: Any


SPECIAL = {"600": entry("<|begin|>"), "601": entry("<|end|>"), "605": entry("<think>", special=False)}


@pytest.fixture(scope="module")
def model() -> bytes:
    return sentencepiece(model_type="bpe", **AS_IT_IS)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """An empty folder to convert into."""
    return write(tmp_path / "made")


def split(name: str) -> pre_tokenizers.PreTokenizer:
    """A way to split text, as its own tokenizer.json files state it."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "mpt":
        return plain
    if name == "command-r":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    split = pre_tokenizers.Split(Regex(str(SPLITS[name].pattern)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def write_vocab(folder: Path, trained: HfTokenizer, **settings: Any) -> Path:
    write(folder, **settings)
    trained.model.save(str(folder))  # vocab.json and merges.txt
    return folder


def write_tiktoken(folder: Path, trained: HfTokenizer, **settings: Any) -> Path:
    lines = []
    for token, rank in sorted(trained.get_vocab().items(), key=lambda item: item[1]):
        lines.append(base64.b64encode(bytes(BYTES[char] for char in token)) + b" %d\n" % rank)
    return write(folder, b"".join(lines), **settings)


# tokenizer.model of SentencePiece


@pytest.mark.parametrize(
    ("config", "first", "last"),
    [
        ({}, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"bos_token": None}, [], []),
        ({"bos_token": entry("</s>")}, [2], []),
    ],
)
def test_ids_are_those_of_the_model_between_the_tokens_that_the_config_adds(
    tmp_path: Path, made: Path, model: bytes, config: dict[str, Any], first: list[int], last: list[int]
) -> None:
    convert(write(tmp_path / "model", model, tokenizer_config=config), made)
    ids = SentencePieceProcessor(model_proto=model).encode("A text.")
    assert Tokenizer(made).encode("A text.", True) == [*first, *ids, *last]
    assert Tokenizer(made).encode("A text.", False) == ids


@pytest.fixture(scope="module", params=[None, True, False])
def without_legacy(request: pytest.FixtureRequest, model: bytes, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tokenizer converted without legacy and with each `add_prefix_space`, and the same of transformers."""
    from transformers import AddedToken, LlamaTokenizer

    folder, made = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("made")
    size = SentencePieceProcessor(model_proto=model).vocab_size()
    settings = {"legacy": False, "add_prefix_space": request.param}
    convert(write(folder, model, tokenizer_config=settings | {"added_tokens_decoder": {str(size): entry("<x>")}}), made)
    content = json.loads((made / "tokenizer.json").read_text())["model"]
    vocab = {token: id_ for token, id_ in content["vocab"].items() if id_ < size}
    added = [AddedToken("<x>", normalized=False, special=True)]
    theirs = LlamaTokenizer(vocab, [tuple(merge) for merge in content["merges"]], extra_special_tokens=added, **settings)
    return Pair(Tokenizer(made), theirs)


@given(text=st.lists(st.sampled_from(["A text.", " ", "  ", "</s>", "<x>", "un", "\n", "1"]), max_size=6).map("".join))
def test_ids_without_legacy_are_those_of_transformers(without_legacy: Pair, text: str) -> None:
    assert without_legacy.ours.encode(text, False) == without_legacy.theirs.encode(text, add_special_tokens=False)


def test_prefix_is_none_where_the_config_says_so(tmp_path: Path, made: Path, model: bytes) -> None:
    convert(write(tmp_path / "model", model, tokenizer_config={"add_prefix_space": False}), made)
    reference = SentencePieceProcessor(model_proto=model + b"\x1a\x02\x18\x00")  # normalizer_spec.add_dummy_prefix: false
    for text in SENTENCES:
        assert Tokenizer(made).encode(text, False) == reference.encode(text)


@pytest.mark.parametrize("name", ["legacy", "add_prefix_space", "add_bos_token", "add_eos_token"])
def test_switch_that_is_none_is_refused_by_name(tmp_path: Path, made: Path, model: bytes, name: str) -> None:
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: {name} is 'no'; it must be true or false"):
        convert(write(tmp_path / "model", model, tokenizer_config={name: "no"}), made)


def test_special_tokens_of_an_older_export_are_found(tmp_path: Path, made: Path, model: bytes) -> None:
    size = SentencePieceProcessor(model_proto=model).vocab_size()
    folder = write(
        tmp_path / "model", model, added_tokens={"<|im_end|>": size, "<|im_start|>": size + 1, "<x>": size + 2},
        special_tokens_map={"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["<|im_start|>"]},
    )  # fmt: skip
    convert(folder, made)
    assert special_tokens(made) == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert Tokenizer(made).special_ids == {0, 1, 2, size, size + 1}


@pytest.mark.parametrize("config", [{"eos_token": {}}, {"additional_special_tokens": 5}, {"extra_special_tokens": {"x": []}}])
def test_special_token_without_its_text_is_refused(tmp_path: Path, made: Path, model: bytes, config: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="it must be a string or an object with its content"):
        convert(write(tmp_path / "model", model, tokenizer_config=config), made)


def test_tokens_are_named_by_the_config_and_else_by_the_model(tmp_path: Path, made: Path, model: bytes) -> None:
    convert(write(tmp_path / "model", model, tokenizer_config={"eos_token": "<s>", "legacy": False}), made)
    config = json.loads((made / "tokenizer_config.json").read_text())
    assert config == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<s>", "legacy": False}


def test_added_tokens_come_after_the_model_or_in_place_of_its_pieces(tmp_path: Path, made: Path, model: bytes) -> None:
    size = SentencePieceProcessor(model_proto=model).vocab_size()
    decoder = {
        "2": entry("<|turn|>"),
        str(size): entry("<pad>"),
        str(size + 1): entry("▁▁", special=False),
        str(size + 3): entry("<x>", special=False, rstrip=True),
    }
    folder = write(
        tmp_path / "model", model, added_tokens={"<|im_end|>": size + 2, "<pad>": size},
        tokenizer_config={"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"},
    )  # fmt: skip
    convert(folder, made)
    tokenizer = Tokenizer(made)
    assert tokenizer.encode("<|turn|><pad>  <|im_end|><x> \n", False) == [2, size, size + 1, size + 2, size + 3]
    assert tokenizer.special_ids == {0, 1, 2, size, size + 2}
    assert tokenizer.text_of(size + 1) == "  "


def test_chat_template_of_the_folder_is_kept(tmp_path: Path, made: Path, model: bytes) -> None:
    folder = write(tmp_path / "model", model, tokenizer_config={"chat_template": "old"})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}new")
    convert(folder, made)
    loaded = template.load(made)
    assert loaded is not None
    assert loaded.render([]) == "<s>new"


# tokenizer.model of tiktoken, and vocab.json with merges.txt


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("Qwen2ForCausalLM", "qwen2"),
        ("Qwen3ForCausalLM", "qwen2"),
        ("CohereForCausalLM", "command-r"),
        ("GPTNeoXForCausalLM", "mpt"),
    ],
)
def test_vocabulary_and_merges_give_the_ids_that_they_were_trained_with(
    tmp_path: Path, made: Path, architecture: str, name: str
) -> None:
    trained = byte_level(split(name))
    settings = {"config": {"architectures": [architecture]}, "tokenizer_config": {"added_tokens_decoder": SPECIAL}}
    convert(write_vocab(tmp_path / "model", trained, **settings), made)
    trained.normalizer = normalizers.NFC()
    for text in SENTENCES:
        assert Tokenizer(made).encode(text, True) == trained.encode(text).ids
    assert Tokenizer(made).encode("<|end|><think>", False) == [601, 605]
    assert Tokenizer(made).special_ids == {600, 601}


def test_byte_level_tokenizer_puts_a_space_in_front_where_the_config_says_so(tmp_path: Path, made: Path) -> None:
    trained = byte_level(split("mpt"))
    settings = {"config": {"architectures": ["GPTNeoXForCausalLM"]}, "tokenizer_config": {"add_prefix_space": True}}
    convert(write_vocab(tmp_path / "model", trained, **settings), made)
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for text in ("the dog", " the dog", "\n"):
        assert Tokenizer(made).encode(text, False) == trained.encode(text).ids


def test_token_of_the_vocabulary_that_the_config_names_is_special(tmp_path: Path, made: Path) -> None:
    settings = {
        "config": {"architectures": ["GPTNeoXForCausalLM"]},
        "tokenizer_config": {"eos_token": "the", "bos_token": None},
    }
    convert(write_vocab(tmp_path / "model", byte_level(split("mpt")), **settings), made)
    assert Tokenizer(made).special_ids == {Tokenizer(made).encode("the", False)[0]}


def test_tokens_with_ranks_give_the_ids_that_they_were_trained_with(tmp_path: Path, made: Path) -> None:
    trained = byte_level(split("llama-bpe"))
    settings = {"config": {"architectures": ["LlamaForCausalLM"]}}
    config = {"added_tokens_decoder": SPECIAL, "bos_token": "<|begin|>"}
    convert(write_tiktoken(tmp_path / "model", trained, **settings, tokenizer_config=config), made)
    for text in SENTENCES:
        assert Tokenizer(made).encode(text, True) == [600, *trained.encode(text).ids]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (dict(config={"architectures": ["LlamaForCausalLM"]}), "known only for Qwen2ForCausalLM, .* not for LlamaForCausalLM"),
        (dict(), r"no config\.json"),
        (dict(config={"architectures": ["Qwen2ForCausalLM"]}, vocab={"a": 0}), r"merges\.txt: does not fit the vocabulary"),
        (dict(config={"architectures": ["Qwen2ForCausalLM"]}, vocab={"a": "x"}), r"merges\.txt: does not fit the vocabulary"),
        (
            dict(config={"architectures": ["Qwen2ForCausalLM"]}, tokenizer_config={"add_bos_token": True, "bos_token": "<s>"}),
            r"tokenizer_config\.json: the tokenizer has no token '<s>'; give the model's tokenizer\.json",
        ),
    ],
)
def test_vocabulary_that_cannot_be_read_is_refused(tmp_path: Path, made: Path, files: dict[str, Any], text: str) -> None:
    folder = write_vocab(tmp_path / "model", byte_level(split("qwen2")))
    with pytest.raises(UserError, match=text):
        convert(write(folder, **files), made)


def test_merges_that_are_no_text_are_refused(tmp_path: Path, made: Path) -> None:
    folder = write_vocab(tmp_path / "model", byte_level(split("qwen2")), config={"architectures": ["Qwen2ForCausalLM"]})
    (folder / "merges.txt").write_bytes(b"a \xff\n")
    with pytest.raises(UserError, match=r"merges\.txt: is not UTF-8"):
        convert(folder, made)


@pytest.mark.parametrize(
    ("content", "architecture", "config", "text"),
    [
        (b"YQ== 0\n", "LlamaForCausalLM", {}, "its special tokens are in tokenizer_config.json"),
        (b"YQ== 0\n", "Qwen2ForCausalLM", {"added_tokens_decoder": SPECIAL}, "known only for LlamaForCausalLM"),
        (b"YQ== 0\n?? 1\n", "LlamaForCausalLM", {"added_tokens_decoder": SPECIAL}, "line 2 is no token and rank"),
        (b"YQ== 0\nYg==\n", "LlamaForCausalLM", {"added_tokens_decoder": SPECIAL}, "line 2 is no token and rank"),
        (b"YQ== 0\n", "LlamaForCausalLM", {"added_tokens_decoder": {"x": entry("a")}}, "added tokens cannot be read"),
        (b"YQ== 0\n", "LlamaForCausalLM", {"added_tokens_decoder": {"1": "a"}}, "added tokens cannot be read"),
    ],
)
def test_tokens_with_ranks_that_cannot_be_read_are_refused(
    tmp_path: Path, made: Path, content: bytes, architecture: str, config: dict[str, Any], text: str
) -> None:
    folder = write(tmp_path / "model", content, config={"architectures": [architecture]}, tokenizer_config=config)
    with pytest.raises(UserError, match=text):
        convert(folder, made)


def test_added_token_far_beyond_the_model_is_refused(tmp_path: Path, made: Path, model: bytes) -> None:
    with pytest.raises(UserError, match=r"an added token '<x>' cannot have id 99999"):
        convert(write(tmp_path / "model", model, added_tokens={"<x>": 99999}), made)

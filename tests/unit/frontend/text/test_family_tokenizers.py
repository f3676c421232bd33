"""The tokenizers of the families, as transformers' own classes write them: text and ids both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers, trainers

from tests.fixtures.mixed_text import CODE, EMOJI, ENGLISH, LANGUAGES, mixed_text
from tpserve.frontend.text.detokenize import Detokenizer
from tpserve.tokenizer import Tokenizer

BYTE_LEVEL = ["GPT2Tokenizer", "Qwen2Tokenizer", "CohereTokenizer", "GPTNeoXTokenizer"]
SENTENCEPIECE = ["LlamaTokenizer", "GemmaTokenizer"]
TEXTS = [*ENGLISH, *LANGUAGES, *CODE, *EMOJI, " a  b   c\n\n\t ", "", "1234 ½ Ⅳ"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(byte_level: bool) -> dict[str, Any]:
    """Vocabulary and merges for one of transformers' classes."""
    tokenizer = HfTokenizer(models.BPE())
    alphabet: list[str] = []
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>", "<pad>", "<eos>", "<bos>", *([] if byte_level else BYTES)]
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*ENGLISH, *LANGUAGES[:9]], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


@pytest.fixture(scope="module", params=[*BYTE_LEVEL, *SENTENCEPIECE])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one of the classes writes."""
    made = tmp_path_factory.mktemp(request.param)
    getattr(transformers, request.param)(**trained(request.param in BYTE_LEVEL)).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> HfTokenizer:
    return HfTokenizer.from_file(str(folder / "tokenizer.json"))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(map(detokenizer.add, ids)) + detokenizer.end()


def check(tokenizer: Tokenizer, reference: HfTokenizer, text: str) -> None:
    """The answer's text, id by id, is what the library adds to the prompt's text for the ids of both."""
    ids = tokenizer.encode(text, False)
    prompt = tokenizer.encode("x", False)
    assert ids == reference.encode(text, add_special_tokens=False).ids
    assert reference.decode(prompt) + streamed(tokenizer, ids) == reference.decode(prompt + ids, skip_special_tokens=False)
    assert tokenizer.least_tokens(text) <= len(ids)


def test_streamed_text_is_that_of_the_whole(tokenizer: Tokenizer, reference: HfTokenizer) -> None:
    for text in [*TEXTS, *mixed_text(150).split("\n")]:
        check(tokenizer, reference, text)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_streamed_text_of_any_characters_is_that_of_the_whole(tokenizer: Tokenizer, reference: HfTokenizer, text: str) -> None:
    check(tokenizer, reference, text)


def test_long_text_is_known_to_be_long_before_it_is_tokenized(tokenizer: Tokenizer) -> None:
    assert tokenizer.least_tokens("word " * 20_000) > 100

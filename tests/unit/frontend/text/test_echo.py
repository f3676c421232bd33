from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HfTokenizer

from tests.unit.frontend.small import WORDS
from tpserve.frontend.schema import completion_request
from tpserve.frontend.text.echo import Echo, echoes
from tpserve.tokenizer import Tokenizer

TEXTS = ["the fox", "a 😀 🎉 end", "你好世界。", "  leading", "two  spaces ", "<|user|>a<|end|>", "\n", "e\u0301"]


def echo(tokenizer: Tokenizer, prompt: str | list[int]) -> Echo:
    request = completion_request({"prompt": prompt, "echo": True, "logprobs": 0}, None, 10_000)
    ids = tokenizer.encode(prompt, True) if isinstance(prompt, str) else prompt
    (made,) = echoes(request, [np.array(ids, "<i4")], tokenizer)
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_parts_of_a_text_are_what_its_ids_add(tokenizer: Tokenizer, text: str) -> None:
    made = echo(tokenizer, text)
    assert made.text == text
    assert made == echo(tokenizer, tokenizer.encode(text, True))


def test_ids_within_a_character_are_shown_with_a_replacement(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode("😀", False)[:2]
    assert echo(tokenizer, lead) == Echo("\ufffd", ["", "\ufffd"])


def test_parts_are_made_only_for_logprobs(tokenizer: Tokenizer) -> None:
    request = completion_request({"prompt": "a", "echo": True}, None, 310)
    assert echoes(request, [np.array([5], "<i4")], tokenizer) == [Echo("a", [])]


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One that writes spaces as SentencePiece does, composes characters, drops spaces at the end, and adds BOS and EOS."""
    library = HfTokenizer(models.BPE(byte_fallback=True, unk_token=None))
    library.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip(left=False, right=True)])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>", *bytes_], show_progress=False)
    library.train_from_iterator([WORDS, "é"], trainer)
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    library.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    folder: Path = tmp_path_factory.mktemp("framed")
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("the fox", ["", "the", " fox", ""]),
        ("the 😀", ["", "the", " ", "", "", "", "😀", ""]),
        ("e\u0301", ["", "e\u0301", ""]),  # one character, which the normalizer has made of two
        ("fox  ", ["", "fox  ", ""]),  # it has dropped the spaces
    ],
)
def test_parts_joined_are_the_text_whatever_a_tokenizer_makes_of_it(framed: Tokenizer, text: str, parts: list[str]) -> None:
    assert echo(framed, text) == Echo(text, parts)

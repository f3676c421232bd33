"""Small tokenizers trained by the libraries that define their formats."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.fixtures.mixed_text import CODE, ENGLISH, LANGUAGES, WORDS, mixed_text

SENTENCES = [*ENGLISH, *LANGUAGES, *CODE, "", " two  spaces ", "tab\tand\nnewline", "un" * 40, "ab 12 ½ 👩‍💻", "<0x0A"]
# As Llama 2, Mistral and Gemma have it: nothing is normalized, and bytes stand for what has no piece.
AS_IT_IS: dict[str, Any] = dict(
    normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True,
    byte_fallback=True, character_coverage=0.98,
)  # fmt: skip


def sentencepiece(**options: Any) -> bytes:
    """A tokenizer.model of some 1,500 pieces."""
    file = io.BytesIO()
    lines = iter([line for line in mixed_text(800).split("\n") if line])
    options = dict(vocab_size=1500, hard_vocab_limit=False) | options
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, minloglevel=2, **options)
    return file.getvalue()


def byte_level(split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level BPE tokenizer of 600 tokens, trained on words as `split` makes them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*SENTENCES, *WORDS], trainer)
    return tokenizer


def write(folder: Path, model: bytes | None = None, **settings: Any) -> Path:
    """Write tokenizer.model and JSON files: config={...} is config.json. Returns the folder, which is made."""
    folder.mkdir(exist_ok=True)
    if model is not None:
        (folder / "tokenizer.model").write_bytes(model)
    for name, value in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def entry(content: str, special: bool = True, **options: bool) -> dict[str, Any]:
    """A token as `added_tokens_decoder` has it."""
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "special": special} | options

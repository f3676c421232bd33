"""The tokenizer of a GGUF file, written as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from tpserve.checkpoint.gguf.metadata import Metadata
from tpserve.checkpoint.tokenizer import build
from tpserve.checkpoint.tokenizer.build import SPLITS, Kind
from tpserve.settings import UserError

_T = TypeVar("_T")

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not say
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # byte-level tokenizers that add bos where a file does not say


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Write the tokenizer into the folder, which exists. Raises UserError for one that is not supported or broken."""
    texts, kinds = _tokens(metadata)
    special = _special(metadata, len(texts))
    try:
        tokenizer = _put_together(metadata, texts, kinds, special)
    except UserError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise UserError(
            f"{metadata.file}: tokens, merges and scores do not fit together as a tokenizer ({error}); convert the model again"
        ) from None
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The class by which transformers takes tokenizer.json as it is; a model's own may rebuild it otherwise.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.size("context_length"),
        **{name: texts[id_] for name, id_ in special.items()},
        "chat_template": metadata.get("tokenizer.chat_template", str, None),
    }
    text = json.dumps({key: value for key, value in config.items() if value is not None}, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _put_together(metadata: Metadata, texts: list[str], kinds: list[int], special: dict[str, int]) -> Tokenizer:
    match metadata.require("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer, begins = _byte_level(metadata, texts, kinds)
        case "llama":
            tokenizer, begins = _sentencepiece(metadata, texts, kinds, special.get("unk_token")), True
        case other:
            raise UserError(f"{metadata.file}: tokenizer.ggml.model is {other!r:.60}; supported: gpt2, llama")
    tokenizer.add_tokens(build.added(texts, kinds))
    named = {name: texts[id_] for name, id_ in special.items()}
    begin = named.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", bool, begins) else None
    end = named.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", bool, False) else None
    build.surround(tokenizer, begin, end)
    return tokenizer


def _tokens(metadata: Metadata) -> tuple[list[str], list[int]]:
    """Each token's text and kind."""
    texts = metadata.list_of("tokenizer.ggml.tokens", str)
    kinds = [int(Kind.NORMAL)] * len(texts)
    if "tokenizer.ggml.token_type" in metadata.values:
        kinds = _for_each(metadata, "token_type", texts, int)
    if len(set(texts)) < len(texts):
        raise UserError(f"{metadata.file}: tokenizer.ggml.tokens names a token twice; convert the model again")
    return texts, kinds


def _special(metadata: Metadata, size: int) -> dict[str, int]:
    """The ids of the tokens that have a name."""
    defaults = _SENTENCEPIECE_IDS if metadata.get("tokenizer.ggml.model", str, None) == "llama" else {}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id", int, defaults.get(key)) for name, key in _SPECIAL.items()}
    for name, id_ in ids.items():
        if id_ is not None and not 0 <= id_ < size:
            raise UserError(f"{metadata.file}: the {name} has id {id_!r}, but there are {size} tokens; convert the model again")
    return {name: id_ for name, id_ in ids.items() if id_ is not None}


def _byte_level(metadata: Metadata, texts: list[str], kinds: list[int]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether it begins texts with bos by itself."""
    name = metadata.get("tokenizer.ggml.pre", str, None)
    if name is None or name not in SPLITS:
        found = "is missing" if name is None else f"is {name!r}"
        raise UserError(
            f"{metadata.file}: tokenizer.ggml.pre {found}, so how to split text is not known; supported: {', '.join(SPLITS)}"
        )
    # Unused tokens only fill the vocabulary up to the rows of the embedding.
    vocab = {text: id_ for id_, (text, kind) in enumerate(zip(texts, kinds)) if kind != Kind.UNUSED}
    lines = metadata.list_of("tokenizer.ggml.merges", str)
    merges: Any = [tuple(line.split(" ")) for line in lines]
    if not all(len(merge) == 2 for merge in merges):
        raise UserError(f"{metadata.file}: tokenizer.ggml.merges has a line that is no pair; convert the model again")
    return build.byte_level(vocab, merges, SPLITS[name]), name in _BEGINS


def _sentencepiece(metadata: Metadata, texts: list[str], kinds: list[int], unknown: int | None) -> Tokenizer:
    scores = _for_each(metadata, "scores", texts, float)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    return build.sentencepiece(build.sentencepiece_bpe(texts, kinds, scores, unknown), prefix)


def _for_each(metadata: Metadata, key: str, texts: list[str], kind: type[_T]) -> list[_T]:
    values = metadata.list_of(f"tokenizer.ggml.{key}", kind)
    if len(values) != len(texts):
        raise UserError(
            f"{metadata.file}: tokenizer.ggml.{key} has {len(values)} entries for {len(texts)} tokens; convert the model again"
        )
    return values

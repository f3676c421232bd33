"""Tokenizers in other files than tokenizer.json: that is made of them once, in the user's cache."""

from __future__ import annotations

from pathlib import Path

from tpserve.checkpoint.cache import cache_dir, key, make_once
from tpserve.checkpoint.converter import run_converter

_VERSION = 2  # of what is written: raise it when the same files would now give another tokenizer.json
_FORMS = (("tokenizer.model",), ("vocab.json", "merges.txt"))  # the files of each other form
_BESIDE = (  # what they are read with
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def folder_of(model: Path) -> Path:
    """The folder of the tokenizer.json of a model folder: itself, or one in the cache, made first if it is not there.

    A folder with no known form of tokenizer is returned as it is. Raises UserError for a form that cannot be converted.
    """
    forms = [form for form in _FORMS if all((model / name).exists() for name in form)]
    if (model / "tokenizer.json").exists() or not forms:
        return model
    files = [model / name for name in (*forms[0], *_BESIDE) if (model / name).exists()]
    folder = cache_dir() / "tokenizers" / f"{model.name}-{key(_VERSION, files)}"
    return make_once(
        folder, lambda partial: run_converter("tpserve.checkpoint.tokenizer", model, partial), f"tokenizer of {model.name}"
    )

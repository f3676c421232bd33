"""Tokenizers in other files than tokenizer.json: that is made of them once, in the user's cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tpserve.checkpoint.cache import cache_dir, make_once, run_module

_VERSION = 1  # of what is written: raise it when the same files would now give another tokenizer.json
_FORMS = (("tokenizer.model",), ("vocab.json", "merges.txt"))  # the files of each other form
_BESIDE = ("config.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja")  # what they are read with


def folder_of(model: Path) -> Path:
    """The folder of the tokenizer.json of a model folder: itself, or one in the cache, made first if it is not there.

    A folder with no known form of tokenizer is returned as it is. Raises UserError for a form that cannot be converted.
    """
    forms = [form for form in _FORMS if all((model / name).exists() for name in form)]
    if (model / "tokenizer.json").exists() or not forms:
        return model
    files = [model / name for name in (*forms[0], *_BESIDE) if (model / name).exists()]
    folder = cache_dir() / "tokenizers" / f"{model.name}-{_key(files)}"
    return make_once(folder, lambda partial: _convert(model, partial), f"tokenizer of {model.name}")


def _convert(model: Path, folder: Path) -> None:
    run_module("tpserve.checkpoint.tokenizer", str(model), str(folder), str(os.getpid()))


def _key(files: list[Path]) -> str:
    """Differs when the files do, going by where they really are, their sizes and the times of their last change."""
    seen = [(file.name, os.path.realpath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((_VERSION, seen)).encode()).hexdigest()[:12]

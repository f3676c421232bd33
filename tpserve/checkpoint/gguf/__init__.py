"""GGUF files: written once as a Hugging Face folder in the user's cache, from where they are served like any other model."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path

from tpserve.checkpoint.cache import cache_dir, make_once, run_module
from tpserve.settings import UserError

_VERSION = 1  # of what is written: raise it when the same file would now give another folder


def converted(path: Path) -> Path:
    """The folder of the model in a GGUF file, made first if it is not there; a file that has changed gets a new folder.

    Raises UserError for a file that is not there, is incomplete, or holds what is not supported.
    """
    parts = _parts(path)
    folder = cache_dir() / "gguf" / f"{model_name(path)}-{_key(parts)}"

    def make(partial: Path) -> None:
        print(f"converting {path} into {folder}", file=sys.stderr)
        run_module("tpserve.checkpoint.gguf", *map(str, parts), str(partial), str(os.getpid()))

    return make_once(folder, make, path.name)


def model_name(path: Path) -> str:
    """The file's name without its ending and without the number of its part."""
    return _split(path)[0]


def _split(path: Path) -> tuple[str, int]:
    """The name of the whole, and of how many files it is: llama-00001-of-00003.gguf -> llama, 3."""
    found = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})", path.stem)
    return (found[1], int(found[2])) if found else (path.stem, 1)


def _parts(path: Path) -> list[Path]:
    """All files of the model: itself, or its parts in order where the name says that it is one of several."""
    name, count = _split(path)
    parts = [path] if count == 1 else [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise UserError(f"--model {path}: there is no file {part}")
    return [Path(os.path.abspath(part)) for part in parts]


def _key(parts: list[Path]) -> str:
    """Differs when the files do, going by where they really are, their sizes and the times of their last change."""
    seen = [(os.path.realpath(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts]
    return hashlib.sha256(repr((_VERSION, seen)).encode()).hexdigest()[:12]

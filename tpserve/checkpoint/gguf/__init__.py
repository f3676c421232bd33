"""GGUF files: written once as a Hugging Face folder in the user's cache, its weights apart from the rest and later."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tpserve.checkpoint.cache import cache_dir, key, make_once, superseded
from tpserve.checkpoint.converter import run_converter
from tpserve.settings import UserError

_LONGEST_NAME = 128  # bytes, of the 255 that a file system may take
_VERSION = 2  # of what is written: raise it when the same file would now give another folder


def describe(path: Path) -> tuple[Path, Callable[[], Path]]:
    """The folder of the model's files but for its weights, and what makes these, and returns the folder that they are in.

    Both are made once; a file that has changed gets new ones. Raises UserError, as does the second, for a file that is
    not there, is incomplete, or holds what is not supported.
    """
    parts = _parts(path)
    name = model_name(path).encode()[:_LONGEST_NAME].decode(errors="ignore")
    folder = cache_dir() / "gguf" / f"{name}-{key(_VERSION, parts)}"

    def make(stage: str, partial: Path) -> None:
        run_converter("tpserve.checkpoint.gguf", stage, *parts, partial)

    def make_weights(partial: Path) -> None:
        for other in superseded(folder):
            print(f"{other} is of an earlier {path}; remove it if no server needs it any more", file=sys.stderr)
        make("weights", partial)

    make_once(folder, lambda partial: make("description", partial), path.name)
    return folder, lambda: make_once(folder / "weights", make_weights, path.name)


def model_name(path: Path) -> str:
    """The file's name without its ending and without the number of its part."""
    return _split(path)[0]


def _split(path: Path) -> tuple[str, int]:
    """The name of the whole, and of how many files it is: llama-00001-of-00003.gguf -> llama, 3."""
    found = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})", path.stem)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        return path.stem, 1
    return found[1], int(found[3])


def _parts(path: Path) -> list[Path]:
    """All files of the model: itself, or its parts in order where the name says that it is one of several."""
    name, count = _split(path)
    parts = [path] if count == 1 else [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise UserError(f"--model {path}: there is no file {part}")
    return [Path(os.path.abspath(part)) for part in parts]

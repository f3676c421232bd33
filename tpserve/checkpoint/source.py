"""What `--model` means: the demo, a folder, a GGUF file or a Hub id, each brought to a folder that can be read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tpserve.checkpoint import gguf, tokenizer
from tpserve.checkpoint.demo import demo_path
from tpserve.checkpoint.headers import CONVERT
from tpserve.settings import DEMO, Settings, UserError


@dataclass(frozen=True)
class Source:
    """Where a model's files are. `fetch_weights` brings what its description can do without; returns their folder."""

    path: Path  # config.json, generation_config.json
    tokenizer: Path  # tokenizer.json, tokenizer_config.json, chat template
    name: str  # what clients call the model: never a path
    fetch_weights: Callable[[], Path]


def describe(settings: Settings) -> Source:
    """The model's files but for its weights, so that what cannot be served is refused before these are fetched.

    Raises UserError if there is no such model.
    """
    model = settings.model
    path = Path(os.path.expanduser(model))
    if settings.revision and (model == DEMO or path.exists()):
        raise UserError(f"--revision {settings.revision}: only a Hub id has revisions, not --model {model}; leave it out")
    if model == DEMO:
        return _demo()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _gguf(path)
    if path.is_file():
        raise UserError(
            f"--model {model}: is a file, but not FILE.gguf; give that or a folder with config.json; of weights {CONVERT}"
        )
    if not path.is_dir():
        return _hub(settings)
    path = Path(os.path.abspath(path))  # a link keeps its name, which clients know the model by
    return Source(path, _tokenizer(path), path.name, lambda: path)


def _demo() -> Source:
    path = demo_path()
    if not path.is_dir():
        raise UserError(f"--model demo: the demo model is not in {path}; run scripts/setup, which makes it")
    return Source(path, path, DEMO, lambda: path)


def _gguf(path: Path) -> Source:
    folder, fetch_weights = gguf.describe(path)
    return Source(folder, folder, gguf.model_name(path), fetch_weights)


def _hub(settings: Settings) -> Source:
    from tpserve.checkpoint import hub  # here, as the library takes a while and few need it

    path, fetch_weights = hub.describe(settings)
    return Source(path, _tokenizer(path), settings.model, fetch_weights)


def _tokenizer(path: Path) -> Path:
    """The folder of the tokenizer: the model's own, or one in the cache where that has another form than tokenizer.json."""
    return tokenizer.folder_of(path)

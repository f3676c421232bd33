"""What all tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import gguf_models, hf_to_gguf
from tests.hf_to_gguf import Job
from tests.tiny import Tiny
from tpserve.checkpoint import demo


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model; made first where scripts/setup has not made it yet."""
    return demo.prepare()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tiny], Path]:
    """Writes a tiny model the first time it is asked for; the folders are shared, so leave them as they are."""
    return functools.cache(lambda tiny: tiny.write(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[Tiny], Path]) -> Path:
    """The folder of the default tiny model."""
    return tiny_folder(Tiny())


@pytest.fixture(scope="session")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every GGUF model's folder and, beside it, its file in float32; one in other types, one in parts."""
    root = tmp_path_factory.mktemp("gguf")
    folders = [gguf_models.write_folder(name, root / name) for name in gguf_models.MODELS]
    hf_to_gguf.write(
        *(Job(folder, root / f"{folder.name}.gguf") for folder in folders),
        *(Job(root / "gemma3", root / f"gemma3-{kind}.gguf", kind) for kind in ("f16", "bf16")),
        Job(root / "llama", root / "split.gguf", options=("--split-max-tensors", "8")),
    )
    return root

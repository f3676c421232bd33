"""Models and servers that the end-to-end tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server
from tests.tiny import Tiny

LAYERS = 2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that every TP size up to 4 splits unevenly."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return Tiny(layers=LAYERS).write(folder)


@pytest.fixture(scope="session")
def tiny_layers() -> int:
    return LAYERS


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    """The tiny model at TP 2 in float32; tests leave it idle."""
    with Server("--model", tiny_model, "--tp", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB") as server:
        yield server

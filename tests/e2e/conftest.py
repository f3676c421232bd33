"""A server that the end-to-end tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import Server
from tests.tiny import Tiny


@pytest.fixture(scope="session")
def tiny_layers() -> int:
    return Tiny().layers


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    """The tiny model at TP 2 in float32; tests leave it idle."""
    with Server("--model", tiny_model, "--tp", "2", "--dtype", "float32", "--kv-cache-memory", "64MiB") as server:
        yield server

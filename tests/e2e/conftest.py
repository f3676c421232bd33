"""A server that the end-to-end tests share: starting one takes seconds."""

from __future__ import annotations

import shutil
import tempfile
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


@pytest.fixture(scope="session")
def demo_server() -> Iterator[Server]:
    """The demo model at TP 2 in float32; tests leave it idle."""
    with Server("--model", "demo", "--tp", "2", "--dtype", "float32", "--kv-cache-memory", "512MiB") as server:
        yield server


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of this test's own for run directories and temporary files; nothing may be left in it."""
    place = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: it holds unix sockets
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(place))
    yield place
    left = list(place.iterdir())
    shutil.rmtree(place)
    assert not left

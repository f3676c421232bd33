"""What all tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

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

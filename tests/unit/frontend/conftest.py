"""What the frontend's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer

from tests.unit.frontend import small
from tpserve.deployment import Deployment
from tpserve.frontend.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's folder."""
    return small.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """Its tokenizer, as the frontend has it."""
    return Tokenizer(model_folder)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> HfTokenizer:
    """The library's own view of the same file."""
    return HfTokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def deployment(model_folder: Path) -> Deployment:
    """A server of it."""
    return small.deployment(model_folder)

"""What the unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HfTokenizer

from tests.ranks import Ranks
from tests.unit.frontend import small
from tpserve.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes; a test opens the group it wants."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model's folder."""
    return small.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """Its tokenizer, as the server has it."""
    return Tokenizer(model_folder)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> HfTokenizer:
    """The library's own view of the same file."""
    return HfTokenizer.from_file(str(model_folder / "tokenizer.json"))

"""The files in configs/ work as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpserve import config_file, sources

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_there_are_examples() -> None:
    assert len(FILES) >= 3


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_is_read_and_its_values_are_good(file: Path) -> None:
    given, _ = config_file.read(str(file))
    assert len(given) >= 5
    sources.check(given)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_says_how_it_is_used(file: Path) -> None:
    assert f"--config configs/{file.name}\n" in file.read_text()

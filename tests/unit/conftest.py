"""What the unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes; a test opens the group it wants."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()

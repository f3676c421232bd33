"""What the tests of the terminal client share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.chat.stub import Stub, serve


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A scripted server."""
    with serve() as server:
        yield server

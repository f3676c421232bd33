"""What the frontend's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.frontend import small
from tpserve.deployment import Deployment


@pytest.fixture(scope="session")
def deployment(model_folder: Path) -> Deployment:
    """A server of the small model."""
    return small.deployment(model_folder)

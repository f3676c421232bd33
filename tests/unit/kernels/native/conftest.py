from __future__ import annotations

import pytest

from tpserve.kernels.native.library import Library, NotBuilt, library


@pytest.fixture(scope="module", params=["plain", "avx2", "avx512", "amx"])
def lib(request: pytest.FixtureRequest) -> Library:
    """The kernels of each level that this machine has."""
    try:
        return library(request.param)
    except NotBuilt as error:
        pytest.skip(str(error))

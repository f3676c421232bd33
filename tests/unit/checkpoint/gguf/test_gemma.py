"""A real file with several block types, against what other readers of it give."""

from __future__ import annotations

import pytest

from tests import gemma, packages
from tpserve.checkpoint import gguf


@pytest.mark.slow
def test_converted_gemma_has_the_known_weights() -> None:
    packages.check(gguf.describe(gemma.gguf_path())[1]() / "model.safetensors", gemma.WEIGHTS_SHA256)

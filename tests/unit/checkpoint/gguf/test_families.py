"""A tiny model of every family, written as GGUF by another program and converted back, against the folder it came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import gguf_models
from tpserve.checkpoint.gguf.convert import convert

pytestmark = pytest.mark.slow


def logits(folder: Path) -> torch.Tensor:
    """Of 40 tokens: beyond the windows, and beyond the context before rotary scaling."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model(ids).logits[0]


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_converted_model_gives_the_logits_of_the_original(gguf_files: Path, tmp_path: Path, name: str) -> None:
    convert([gguf_files / f"{name}.gguf"], tmp_path)
    torch.testing.assert_close(logits(tmp_path), logits(gguf_files / name), rtol=0, atol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_converted_half_precision_keeps_its_dtype_and_values(
    gguf_files: Path, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    convert([gguf_files / f"gemma3-{kind}.gguf"], tmp_path)
    original, found = (load_file(folder / "model.safetensors") for folder in (gguf_files / "gemma3", tmp_path))
    assert found.keys() == original.keys()
    for name, weight in original.items():  # norms are there in float32, with 1 added
        torch.testing.assert_close(found[name], weight.to(dtype), rtol=0, atol=0 if weight.ndim > 1 else 4e-3)


def test_converted_parts_are_one_model(gguf_files: Path, tmp_path: Path) -> None:
    parts = sorted(gguf_files.glob("split-*.gguf"))
    assert len(parts) > 1
    convert(parts, tmp_path)
    torch.testing.assert_close(logits(tmp_path), logits(gguf_files / "llama"), rtol=0, atol=1e-4)

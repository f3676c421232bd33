"""Angles against those of transformers, within and beyond the length before scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import ORIGINAL, ROTARIES, write_rotary
from tpserve.checkpoint import folder
from tpserve.model import families
from tpserve.model.rotary import RotaryTable

POSITIONS = torch.tensor([0, 1, 7, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])


def angles_of(module: Any, layer_type: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of transformers, (positions, pairs): it has each pair's twice."""
    arguments = (torch.zeros(1), POSITIONS[None]) + ((layer_type,) if layer_type else ())
    cos, sin = module(*arguments)
    is_interleaved = type(module).__name__.startswith("Cohere")
    return tuple(x[0, :, ::2] if is_interleaved else x[0, :, : x.shape[-1] // 2] for x in (cos, sin))  # type: ignore[return-value]


@pytest.mark.parametrize("name", ROTARIES)
def test_angles_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = write_rotary(name, tmp_path)
    config = folder.read_json(path / "config.json")
    spec = families.for_architecture(folder.architecture(config), config).spec(config)
    module = AutoModelForCausalLM.from_pretrained(path).base_model.rotary_emb
    types = config.get("layer_types") if spec.family == "gemma3" else None
    for number, layer in enumerate(spec.layers):
        expected = angles_of(module, types[number] if types else None)
        for mine, theirs in zip(RotaryTable(layer.rotary, torch.device("cpu")).at(POSITIONS), expected, strict=True):
            torch.testing.assert_close(mine[:, 0], theirs, atol=1e-5, rtol=1e-5)

"""Rotary position embedding: the angles by which each position turns each pair of dimensions (Su et al. 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpserve.model.spec import Linear, Llama3, Rotary, Yarn


class RotaryTable:
    """Cosines and sines of one kind of rotary embedding, for any position."""

    def __init__(self, rotary: Rotary, device: torch.device):
        self.frequencies = frequencies(rotary).to(device)  # (dims / 2,) float32
        self.scale = rotary.scaling.attention_factor if isinstance(rotary.scaling, Yarn) else 1.0

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each (tokens, 1, dims / 2) float32, for positions (tokens,)."""
        angles = (positions.float()[:, None] * self.frequencies)[:, None]
        return angles.cos() * self.scale, angles.sin() * self.scale


def frequencies(rotary: Rotary) -> Tensor:
    """Radians per position of each pair, (dims / 2,) float32: theta ** (-2i / dims), scaled as the model says."""
    plain = 1.0 / rotary.theta ** (torch.arange(0, rotary.dims, 2, dtype=torch.float32) / rotary.dims)
    match rotary.scaling:
        case Linear(factor):
            return plain / factor
        case Llama3():
            return _llama3(plain, rotary.scaling)
        case Yarn():
            return _yarn(plain, rotary, rotary.scaling)
    return plain


def _llama3(plain: Tensor, scaling: Llama3) -> Tensor:
    """Wavelengths are measured by how many fit into the original length: few are stretched, many are kept."""
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain / scaling.factor, plain, kept.clamp(0, 1))


def _yarn(plain: Tensor, rotary: Rotary, scaling: Yarn) -> Tensor:
    """Pairs that turn `beta_fast` times within the original length are kept, those with `beta_slow` turns are stretched."""

    def pair_with(turns: float) -> float:
        length_per_turn = scaling.original_length / (turns * 2 * math.pi)
        return rotary.dims * math.log(length_per_turn) / (2 * math.log(rotary.theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dims - 1)
    width = last - first or 0.001  # the reference's own way out of a ramp of no width
    stretched = ((torch.arange(rotary.dims // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return torch.lerp(plain, plain / scaling.factor, stretched)

"""Rotary position embedding: frequency tables for the four supported kinds, and the rotation."""

import math

import torch
from torch import Tensor

from models.config import DecoderConfig, RopeConfig


def rope_table(decoder: DecoderConfig, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[num_positions, head_dim]` float32, scaled by yarn's attention factor."""
    inverse, scale = _inverse_frequencies(decoder)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [..., heads, head_dim]` by `cos`, `sin` `[..., head_dim]`, in x's dtype."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def _inverse_frequencies(decoder: DecoderConfig) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` float32 and the factor on cos and sin."""
    rope, dim = decoder.rope, decoder.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inverse = 1.0 / rope.theta**exponents
    match rope.kind:
        case "linear":
            return inverse / float(rope.parameters["factor"]), 1.0
        case "llama3":
            return _llama3(inverse, rope), 1.0
        case "yarn":
            return _yarn(inverse, decoder)
        case _:
            return inverse, 1.0


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, a band in between is interpolated."""
    p = rope.parameters
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inverse
    share = (original / wavelengths - low) / (high - low)
    smooth = (1 - share) * inverse / factor + share * inverse
    scaled = torch.where(wavelengths > original / low, inverse / factor, inverse)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, smooth, scaled)


def _yarn(inverse: Tensor, decoder: DecoderConfig) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp in between."""
    p, dim = decoder.rope.parameters, decoder.head_dim
    factor = float(p["factor"])
    original = float(p.get("original_max_position_embeddings", decoder.max_position_embeddings))
    scale = p.get("attention_factor")
    if scale is None:
        mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
        if mscale and mscale_all:
            scale = _mscale(factor, float(mscale)) / _mscale(factor, float(mscale_all))
        else:
            scale = _mscale(factor, 1.0)

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times within the original context."""
        ratio = original / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(decoder.rope.theta))

    low = dimension(float(p.get("beta_fast") or 32))
    high = dimension(float(p.get("beta_slow") or 1))
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), float(scale)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

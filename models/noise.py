"""Gumbel noise as a pure function of a request's seed, a position and a token id.

Integer arithmetic alone decides its bits, so that they are the same for every row count,
sharding, schedule and device. `backends/native/sampling.cpp` computes the same.
"""

import torch
from torch import Tensor

# Arbitrary, and different: two chains from them make the 64-bit key of a row.
_FIRST, _SECOND = 0x3C6EF372, 0x1F83D9AB


def uniform(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Of each row and token id a number in the open interval (0, 1): `[rows, n] float32`.

    `seeds [rows, 2] int32` are the halves of a 64-bit seed, `positions [rows] int32` those of the
    token being chosen, `ids [n] int32`. A number has 32 bits: the small ones are as exact as the
    others, down to 2**-33.
    """
    low, high = seeds.unbind(1)
    first = _chain(torch.full_like(low, _FIRST), low, high, positions)
    second = _chain(torch.full_like(low, _SECOND), low, high, positions)
    bits = _chain(ids, first.unsqueeze(1), second.unsqueeze(1))
    upper = ((bits >> 8) & 0xFFFFFF).float() * 2**-24
    lower = ((bits & 0xFF).float() + 0.5) * 2**-32
    return (upper + lower).clamp(max=1 - 2**-24)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise `[rows, n] float32`; arguments as in `uniform`.

    A large value comes from a uniform number near 0, where the exact ones are, and not from one
    near 1: the tail is true up to 22.9, where it ends.
    """
    return -torch.log(-torch.log1p(-uniform(seeds, positions, ids)))


def _chain(state: Tensor, *words: Tensor) -> Tensor:
    """A hash of `state` and `words`, all int32."""
    for word in words:
        state = _mix(state + word)
    return state


def _mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which every bit of the result depends evenly on every bit of `x`.

    The multipliers are those of C. Wellons' lowbias32, as found by T. Ettinger.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0xD35A2D97 - 2**32)
    return x ^ ((x >> 15) & 0x1FFFF)

"""Which tokens min-p, top-k and top-p leave, decided alike by ranks that hold parts of a row.

Everything is said in distances: how far a token's scaled logit lies below the row's largest.
A cut is the largest distance that stays, so tokens at equal distance share their fate, and every
decision rests on sums of integers, which are the same in any order and over any number of ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from models.parallel import TensorParallel

_LIMB = 2**13


def limbs(weights: Tensor, count: int) -> Tensor:
    """`weights [rows, n] float32` in [0, 1] as digits of base 2**13: `[count, rows, n] int32`.

    Digit i counts units of 2**-(12 + 13 * i); what is left of the last one is dropped. The first
    is at most 2**12, so that sums of every digit stay below 2**31 over 2**18 tokens.
    """
    digits = []
    rest = weights * (_LIMB // 2)
    for _ in range(count):
        digit = rest.floor()
        digits.append(digit.to(torch.int32))
        # Exact, as both steps only drop leading bits or move the exponent.
        rest = (rest - digit) * _LIMB
    return torch.stack(digits)


def kept(
    distances: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, tp: TensorParallel
) -> Tensor:
    """Which tokens stay, `[rows, local vocabulary] bool`; those at distance 0 always do.

    `distances [rows, local vocabulary] float32` are not negative, and inf for tokens that can't be
    chosen; `top_k [rows] int32`, 0 for all; `top_p`, `min_p [rows] float32`. First the tokens go
    that are less probable than `min_p` of the most probable one, then those that `top_k` others
    precede, then those whose predecessors hold `top_p` of the mass that is left. Predecessors are
    strictly more probable.

    Masses are in units of 2**-25 of the most probable token, fractions dropped. Cut off so, 50 000
    tokens lose less than 0.15% of the mass, and only where they hold next to nothing each.
    """
    order = distances.view(torch.int32)
    top_k, top_p, min_p = (t.unsqueeze(1) for t in (top_k, top_p, min_p))

    def few_before(bound: Tensor) -> Tensor:
        counts = tp.all_reduce((order < bound).int().sum(1, keepdim=True, dtype=torch.int32))
        return (counts < top_k) | (top_k <= 0)

    left = (order <= _last(few_before, bound_like=order)) & (distances <= -min_p.log())
    weights = limbs(torch.where(left, (-distances).exp(), 0), 2)

    def mass_before(bound: Tensor) -> tuple[Tensor, Tensor]:
        sums = (weights * (order < bound).int()).sum(2, dtype=torch.int32)
        high, low = tp.all_reduce(sums).unsqueeze(2)
        return high + low // _LIMB, low % _LIMB

    high, low = mass_before(torch.full_like(order[:, :1], torch.iinfo(torch.int32).max))
    share = (top_p * (high.float() * _LIMB + low.float())).ceil()
    # A float's 24 bits in two digits. Integers from here on: sums have more bits than that.
    upper = (share / _LIMB).floor()
    share_high, share_low = upper.int(), (share - upper * _LIMB).int()

    def light_before(bound: Tensor) -> Tensor:
        high, low = mass_before(bound)
        light = (high < share_high) | ((high == share_high) & (low < share_low))
        return light | (top_p >= 1)

    return left & (order <= _last(light_before, bound_like=order))


def _last(holds: Callable[[Tensor], Tensor], bound_like: Tensor) -> Tensor:
    """The largest bound `[rows, 1] int32` that `holds`, given that 0 does and that none does above
    one that doesn't.

    Bounds are distances: the bits of floats that are not negative, read as int32, are in the
    floats' order. They are found bit by bit, so that ranks agree by sums of `[rows]`.
    """
    bound = torch.zeros_like(bound_like[:, :1])
    for bit in reversed(range(31)):
        larger = bound | (1 << bit)
        bound = torch.where(holds(larger), larger, bound)
    return bound

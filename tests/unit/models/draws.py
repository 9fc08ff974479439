"""Draws to test: slow oracles of noise, of cuts and of distributions, and a chi-square test."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from models.scores import SamplingRows

MASK = 2**32 - 1


def sampling_rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    position: int = 0,
) -> SamplingRows:
    """Rows that are all sampled alike."""
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        top_k=torch.full((count,), top_k, dtype=torch.int32),
        seeds=torch.tensor([[seed, 0]], dtype=torch.int32).expand(count, 2).contiguous(),
        positions=torch.full((count,), position, dtype=torch.int32),
    )


def random_seeds(count: int, seed: int = 0) -> Tensor:
    """`[count, 2] int32` of all 64 bits."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.iinfo(torch.int32)
    return torch.randint(bounds.min, bounds.max, (count, 2), generator=generator, dtype=torch.int32)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x21F0AAAD & MASK
    x ^= x >> 15
    x = x * 0xD35A2D97 & MASK
    return x ^ x >> 15


def noise_bits(low: int, high: int, position: int, token: int) -> int:
    """The 32 bits that `models.noise` makes of one seed, position and token id."""
    first, second = 0x3C6EF372, 0x1F83D9AB
    for word in (low, high, position):
        first, second = mix(first + word & MASK), mix(second + word & MASK)
    return mix(mix(token + first & MASK) + second & MASK)


def noise(seed: Sequence[int], position: int, token: int) -> float:
    """Gumbel noise, in float64 but for the rounding of the uniform number."""
    exact = (noise_bits(seed[0], seed[1], position, token) + 0.5) / 2**32
    uniform = min(float(torch.tensor(exact, dtype=torch.float32)), 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


def kept_tokens(distances: Sequence[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """Which tokens min-p, then top-k, then top-p leave."""
    left = [d <= (-math.log(min_p) if min_p else math.inf) for d in distances]
    if top_k:
        left = [
            keep and sum(other < d for other in distances) < top_k
            for keep, d in zip(left, distances, strict=True)
        ]
    if top_p >= 1:
        return left
    weights = [
        int(torch.tensor(-d).exp() * 2**25) if keep else 0
        for keep, d in zip(left, distances, strict=True)
    ]
    share = top_p * sum(weights)
    pairs = list(zip(weights, distances, strict=True))
    before = [sum(weight for weight, other in pairs if other < d) for d in distances]
    return [
        keep and (d == 0 or mass < share)
        for keep, d, mass in zip(left, distances, before, strict=True)
    ]


def distribution(logits: Tensor, how: SamplingRows) -> Tensor:
    """What rows with these `logits [vocabulary]` are drawn from, by the first row of `how`."""
    distances = (logits.float().max() - logits.float()) / how.temperature[0]
    keep = kept_tokens(
        distances.tolist(), int(how.top_k[0]), float(how.top_p[0]), float(how.min_p[0])
    )
    weights = torch.exp(-distances.double()) * torch.tensor(keep)
    return weights / weights.sum()


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """How probable it is that draws from `probabilities` fit no better than `counts` do, of several
    rows `[rows, cells]` all of them together."""
    if (counts[probabilities == 0] > 0).any():
        return 0.0
    rows = zip(*map(torch.atleast_2d, (counts, probabilities.double())), strict=True)
    statistics, freedoms = zip(*(_misfit(*row) for row in rows), strict=True)
    freedom = torch.tensor(sum(freedoms) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.stack(statistics).sum() / 2))


def _misfit(counts: Tensor, probabilities: Tensor) -> tuple[Tensor, int]:
    """The statistic of one distribution and its degrees of freedom."""
    expected = probabilities * counts.sum()
    # Cells in which little is expected count as one.
    small = expected < 10
    groups = [(counts[~small].double(), expected[~small])]
    if expected[small].sum() >= 10:
        groups.append((counts[small].sum()[None].double(), expected[small].sum()[None]))
    observed, wanted = (torch.cat(parts) for parts in zip(*groups, strict=True))
    return ((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1

"""How many drafts serving would accept on held-out greedy responses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from training.blocks import Anchored, make_batch
from training.pair import Pair

_BLOCKS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`length`, tokens per verify step of the walk that serving takes through the responses, bonus
    included; `at[j]`, the share of its steps that accept draft j (0 is the first)."""

    length: float
    at: tuple[float, ...]


def walk(num_right: Sequence[int], first: int, num_tokens: int) -> Iterator[int]:
    """The drafts that each verify step accepts, cut at the end of the sequence.

    `num_right[i]` says how many drafts of the block at `first + i` are right, one after the other;
    the response begins at `first` and ends before `num_tokens`.
    """
    anchor = first
    # A step behind the last token's predecessor would emit nothing.
    while anchor < num_tokens - 1:
        accepted = min(num_right[anchor - first], num_tokens - 2 - anchor)
        yield accepted
        anchor += accepted + 1


@torch.no_grad()
def right_drafts(pair: Pair, sequence: Anchored) -> list[int]:
    """How many drafts of the block at each of the sequence's anchors are right, one after the
    other, over the whole vocabulary."""
    drafter, config = pair.drafter, pair.config
    counts: list[int] = []
    for first in range(0, len(sequence.anchors), _BLOCKS_AT_ONCE):
        part = sequence._replace(anchors=sequence.anchors[first : first + _BLOCKS_AT_ONCE])
        device = pair.target.embed.weight.device
        batch = make_batch([part], config.block_size, config.mask_token_id, device)
        hidden = pair.block_states(batch)
        for rows, labels in zip(hidden.split(64), batch.labels.split(64), strict=True):
            drafts = drafter.draft_tokens(drafter.draft_logits(rows, config.num_drafts))
            wrong = (drafts != labels).cumsum(1)
            counts += wrong.eq(0).sum(1).tolist()
    return counts


def measure(pair: Pair, sequences: Sequence[tuple[int, Anchored]]) -> Acceptance:
    """The acceptance over responses; each comes with the length of its prompt.

    The sequences' own anchors are not used.
    """
    steps: list[int] = []
    for num_prompt, sequence in sequences:
        num_tokens = len(sequence.token_ids)
        every = range(num_prompt, num_tokens - 1)
        right = right_drafts(pair, sequence._replace(anchors=every))
        steps += walk(right, num_prompt, num_tokens)
    num_drafts = pair.config.num_drafts
    at = tuple(sum(a > j for a in steps) / max(1, len(steps)) for j in range(num_drafts))
    return Acceptance(1 + sum(steps) / max(1, len(steps)), at)

"""The blocks that a pass trains on: anchors, labels, weights, and sequences side by side."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from training.attention import BlockContext, Piece, make_context

NO_LABEL = -1


class Anchored(NamedTuple):
    """A sequence and where its blocks begin, ascending.

    `aux [tokens, features]` are the target's captured states of at least the tokens before the
    last anchor.
    """

    token_ids: Sequence[int]
    anchors: Sequence[int]
    aux: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences one after the other, and all their blocks.

    Context: `aux [tokens, features]`, `positions [tokens] int32`. Blocks: `blocks [rows, block]
    int32`, at `anchors [rows] int32`. `labels [rows, K] int64`, NO_LABEL behind the end.
    """

    aux: Tensor
    positions: Tensor
    blocks: Tensor
    anchors: Tensor
    labels: Tensor
    context: BlockContext

    @property
    def num_positions(self) -> int:
        """Block positions, the anchors included."""
        return self.blocks.numel()


def choose_anchors(num_prompt: int, num_tokens: int, most: int, choose: random.Random) -> list[int]:
    """Distinct anchors where a served block may begin and has a label, ascending.

    A bonus token is always a token of the response, which begins at `num_prompt`.
    """
    places = range(num_prompt, num_tokens - 1)
    return sorted(choose.sample(places, min(most, len(places))))


def draft_weights(num_drafts: int, gamma: float) -> Tensor:
    """exp(-(j - 1) / gamma) of drafts j = 1..num_drafts: a draft counts only where all before
    it were right. `[num_drafts] float32`."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


def labels_of(token_ids: Sequence[int], anchors: Sequence[int], num_drafts: int) -> Tensor:
    """The tokens behind each anchor `[anchors, num_drafts] int64`, NO_LABEL past the end."""
    padded = torch.tensor([*token_ids, *[NO_LABEL] * num_drafts])
    first = torch.tensor(anchors, dtype=torch.int64) + 1
    return padded[first.unsqueeze(1) + torch.arange(num_drafts)]


def make_batch(
    sequences: Sequence[Anchored],
    block_size: int,
    mask_token_id: int,
    device: torch.device | None = None,
) -> Batch:
    """The context before each sequence's last anchor, and `[anchor, mask, ...]` at each anchor."""
    aux, positions, blocks, anchors, labels, pieces = [], [], [], [], [], []
    first_token = 0
    for sequence in sequences:
        length = max(sequence.anchors)
        aux.append(sequence.aux[:length])
        positions.append(torch.arange(length, dtype=torch.int32))
        block = torch.full((len(sequence.anchors), block_size), mask_token_id, dtype=torch.int32)
        block[:, 0] = torch.tensor([sequence.token_ids[a] for a in sequence.anchors])
        blocks.append(block)
        anchors.append(torch.tensor(sequence.anchors, dtype=torch.int32))
        labels.append(labels_of(sequence.token_ids, sequence.anchors, block_size - 1))
        pieces.append(Piece(first_token, length, len(sequence.anchors)))
        first_token += length
    all_anchors = torch.cat(anchors).to(device)
    return Batch(
        aux=torch.cat(aux).to(device),
        positions=torch.cat(positions).to(device),
        blocks=torch.cat(blocks).to(device),
        anchors=all_anchors,
        labels=torch.cat(labels).to(device),
        context=make_context(pieces, all_anchors),
    )

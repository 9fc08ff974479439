"""Training's block attention against single queries over the keys they may see."""

import math

import pytest
import torch
from torch import Tensor

from models.kv_cache import LayerKV
from training import attention
from training.attention import Piece, TrainingOps, make_context

BLOCK, KV_HEADS, GROUP, DIM = 3, 2, 2, 4
# Of two sequences with 7 and 5 tokens of context.
PIECES = [Piece(0, 7, 3), Piece(7, 5, 2)]
ANCHORS = [0, 4, 7, 1, 5]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, tokens = len(ANCHORS), 12
    shapes = [
        (rows, BLOCK, KV_HEADS, GROUP, DIM),
        (rows, BLOCK, KV_HEADS, DIM),
        (rows, BLOCK, KV_HEADS, DIM),
        (1, tokens, KV_HEADS, DIM),
        (1, tokens, KV_HEADS, DIM),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def slow(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    first_tokens = [piece.first_token for piece in PIECES for _ in range(piece.num_blocks)]
    out = []
    for row, (first, anchor) in enumerate(zip(first_tokens, ANCHORS, strict=True)):
        for place in range(BLOCK):
            for head in range(KV_HEADS):
                seen = torch.cat([keys[0, first : first + anchor, head], k[row, :, head]])
                mixed = torch.cat([values[0, first : first + anchor, head], v[row, :, head]])
                for member in range(GROUP):
                    scores = seen @ q[row, place, head, member] / math.sqrt(DIM)
                    out.append(scores.softmax(0) @ mixed)
    return torch.stack(out).view(len(ANCHORS), BLOCK, KV_HEADS * GROUP * DIM)


@pytest.mark.parametrize("blocks_at_once", [1, 2, 32])
def test_values_and_gradients(blocks_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_BLOCKS_AT_ONCE", blocks_at_once)
    q, k, v, keys, values = tensors = inputs()
    context = make_context(PIECES, torch.tensor(ANCHORS, dtype=torch.int32))
    found = TrainingOps().block_attention(q, k, v, LayerKV(keys, values), context)
    expected = slow(*tensors)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    ours = torch.autograd.grad((found * weights).sum(), tensors)
    theirs = torch.autograd.grad((expected * weights).sum(), tensors)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_a_block_does_not_see_its_anchor_token_or_another_sequence() -> None:
    q, k, v, keys, values = inputs()
    context = make_context(PIECES, torch.tensor(ANCHORS, dtype=torch.int32))
    out = TrainingOps().block_attention(q, k, v, LayerKV(keys, values), context)
    row = 1  # of the first sequence, at anchor 4
    (gradient,) = torch.autograd.grad(out[row].sum(), [values])
    touched = gradient[0].abs().sum((1, 2)) > 0
    assert touched.nonzero().flatten().tolist() == [0, 1, 2, 3]

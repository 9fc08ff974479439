"""The loss over candidates against torch's over the whole vocabulary."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from training import objective
from training.objective import Candidates, Soft, choose_candidates, score

ROWS, HIDDEN, VOCAB = 7, 8, 50


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def everything() -> Candidates:
    return Candidates(torch.arange(VOCAB), torch.zeros(VOCAB))


HEAD, WEIGHTS = random(VOCAB, HIDDEN, seed=1), random(ROWS, seed=2).abs()
LABELS = torch.tensor([3, 49, 0, 7, 7, 12, 30])
SOFT_IDS = torch.tensor([[3, 4], [49, 1], [5, 0], [7, 8], [9, 7], [12, 2], [31, 30]])
SOFT = Soft(SOFT_IDS, torch.tensor([[0.75, 0.25]] * ROWS))


@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("rows_at_once", [3, 512])
def test_with_all_candidates_it_is_cross_entropy(
    distill: float, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "_ROWS_AT_ONCE", rows_at_once)
    hidden = random(ROWS, HIDDEN, seed=0).requires_grad_()
    found = score(hidden, LABELS, WEIGHTS, HEAD, everything(), SOFT, distill)
    logits = hidden @ HEAD.t()
    wanted = (1 - distill) * F.one_hot(LABELS, VOCAB).float()
    wanted.scatter_add_(1, SOFT.ids, distill * SOFT.probs)
    expected = (WEIGHTS * F.cross_entropy(logits, wanted, reduction="none")).sum()
    torch.testing.assert_close(found.loss, expected)
    assert found.best.tolist() == logits.argmax(1).tolist()
    ours, theirs = (torch.autograd.grad(2 * x, [hidden])[0] for x in (found.loss, expected))
    torch.testing.assert_close(ours, theirs)


def test_random_candidates_stand_for_all_others() -> None:
    hidden = random(ROWS, HIDDEN, seed=0)
    expected = (hidden @ HEAD.t()).exp().sum(1)
    certain, sums = torch.cat([LABELS, torch.tensor([1, 2])]), torch.zeros(ROWS)
    for seed in range(2000):
        generator = torch.Generator().manual_seed(seed)
        candidates = choose_candidates(certain, VOCAB, 10, generator)
        assert len(candidates.ids) == len(set(certain.tolist())) + 10
        logits = hidden @ HEAD[candidates.ids].t() + candidates.log_counts
        sums += logits.exp().sum(1)
    torch.testing.assert_close(sums / 2000, expected, rtol=0.05, atol=0)


def test_few_others_are_all_candidates() -> None:
    candidates = choose_candidates(LABELS, VOCAB, VOCAB, torch.Generator())
    assert candidates.ids.tolist() == list(range(VOCAB))
    assert not candidates.log_counts.any()


def test_without_random_candidates_the_others_do_not_count() -> None:
    candidates = choose_candidates(LABELS, VOCAB, 0, torch.Generator())
    assert candidates.ids.tolist() == sorted(set(LABELS.tolist()))
    assert not candidates.log_counts.any()

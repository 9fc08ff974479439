"""Muon and AdamW against torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.optimizer import Masters, Trained, orthogonalised
from training.recipe import Optimizer

RATES: dict[str, Any] = {"learning_rate": 0.05, "norm_rate": 0.01, "weight_decay": 0.1}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, Trained]:
    generator = torch.Generator().manual_seed(0)

    def one(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    return {
        "wide": Trained(one(4, 9), (4,)),
        "stacked": Trained(one(12, 5), (6, 2, 4)),
        "norm": Trained(one(7), (7,)),
    }


def gradient(parameter: Tensor, step: int) -> Tensor:
    seed = 100 * step + parameter.numel()
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


def ours(optimizer: Optimizer, num_steps: int) -> dict[str, Tensor]:
    trained = parameters()
    masters = Masters(trained, optimizer=optimizer, **RATES)
    for step in range(num_steps):
        for each in trained.values():
            each.parameter.grad = gradient(each.parameter, step)
        masters.collect()
        masters.update(0.5)
    return {name: each.parameter.detach() for name, each in trained.items()}


def test_adamw_is_torchs() -> None:
    found, reference = ours("adamw", 4), parameters()
    # Norms are not decayed.
    torch_optimizer = torch.optim.AdamW(
        [
            {"params": [reference[n].parameter for n in ("wide", "stacked")], "lr": 0.025},
            {"params": [reference["norm"].parameter], "lr": 0.005, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for step in range(4):
        for each in reference.values():
            each.parameter.grad = gradient(each.parameter, step)
        torch_optimizer.step()
    for name, each in reference.items():
        torch.testing.assert_close(found[name], each.parameter.detach(), msg=name)


def test_muon_is_torchs_on_each_matrix_of_a_stack() -> None:
    found, reference = ours("muon", 4), parameters()
    pieces: dict[str, list[nn.Parameter]] = {}
    for name in ("wide", "stacked"):
        split = reference[name].parameter.detach().split(reference[name].rows)
        pieces[name] = [nn.Parameter(piece.clone()) for piece in split]
    torch_optimizer = torch.optim.Muon(
        [piece for each in pieces.values() for piece in each], lr=0.025, weight_decay=0.1
    )
    for step in range(4):
        for name, each in pieces.items():
            whole = gradient(reference[name].parameter, step)
            for piece, part in zip(each, whole.split(reference[name].rows), strict=True):
                piece.grad = part.clone()
        torch_optimizer.step()
    for name, each in pieces.items():
        expected = torch.cat([piece.detach() for piece in each])
        # Both iterate in bfloat16.
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("shape", [(5, 20), (20, 5), (8, 8)])
def test_orthogonalised_has_the_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.t() @ orthogonalised(matrix) @ right.t()
    values = found.diagonal()
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (found - values.diag()).abs().max() < 0.1


def test_gradients_add_up_in_float32() -> None:
    trained = parameters(torch.bfloat16)
    masters = Masters(trained, optimizer="adamw", **RATES)
    norm = trained["norm"].parameter
    for value in (256.0, 1.0):
        norm.grad = torch.full_like(norm, value)
        masters.collect()
    assert masters.gradients["norm"].tolist() == [257.0] * 7, "bfloat16 would say 256"
    assert norm.grad is None


def test_small_updates_reach_bfloat16_parameters_in_the_end() -> None:
    trained = parameters(torch.bfloat16)
    masters = Masters(
        trained, optimizer="adamw", learning_rate=1e-4, norm_rate=1e-4, weight_decay=0
    )
    norm = trained["norm"].parameter
    before = norm.detach().clone()
    for _ in range(100):
        norm.grad = torch.ones_like(norm)
        masters.collect()
        masters.update(1.0)
    torch.testing.assert_close(norm.detach().float(), before.float() - 0.01, rtol=0.01, atol=0.002)

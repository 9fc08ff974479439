"""The floor reads each weight of the target once."""

from pathlib import Path

import pytest
import torch

from benchmarks.floor import Floor, _pack, weight_shapes
from models.config import load_target_config
from tests.tiny import load_target, make_target


def test_shapes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Against transformers' modules: as many values, and fused sizes that add up."""
    directory = make_target(
        tmp_path, "qwen3", num_heads=4, num_kv_heads=2, head_dim=16, num_layers=2
    )
    model = load_target(directory)
    shapes = weight_shapes(load_target_config(directory))
    assert shapes[:4] == [(128, 32), (32, 64), (128, 32), (32, 64)]
    assert shapes[-1] == (300, 32)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(shapes) == 2 * 4 + 1
    assert sum(rows * columns for rows, columns in shapes) == sum(m.weight.numel() for m in linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_matmul_takes_its_row_to_its_outputs(tmp_path: Path, dtype: torch.dtype) -> None:
    if not Floor.available(dtype):
        pytest.skip(f"torch can't pack {dtype} here")
    target = load_target_config(make_target(tmp_path, "llama", num_layers=2))
    matmuls = _pack(target, dtype)
    assert [tuple(packed.shape) for _, packed in matmuls] == weight_shapes(target)
    for row, packed in matmuls:
        out = torch.ops.mkldnn._linear_pointwise(row, packed, None, "none", [], "")
        torch.testing.assert_close(out, row @ packed.to_dense().T)


def test_measurements_add_up(tmp_path: Path) -> None:
    if not Floor.available(torch.float32):
        pytest.skip("torch can't pack float32 here")
    floor = Floor(load_target_config(make_target(tmp_path, "llama", num_layers=2)), torch.float32)
    floor.measure(2)
    floor.measure(3)
    assert len(floor._times_s) == 5
    floor._times_s = [0.004, 0.001, 0.009]
    assert floor.ms == 4.0
    floor.close()
    assert floor._process.exitcode == 0

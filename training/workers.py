"""Data-parallel training: workers of Ray Train that sum their gradients after every step."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.recipe import TrainingRefused
from training.run import Run, train


def train_with_ray(run: Run, num_workers: int) -> None:
    """`training.run.train` in `num_workers` processes, on a Ray of their own.

    Each has an equal share of this machine's cores, or a GPU where there are any. Raises
    `TrainingRefused` where Ray Train is not installed, or there are fewer cores or GPUs.
    """
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer
    except ImportError:
        raise TrainingRefused(
            "several workers need Ray Train, which is in the extra 'train'"
        ) from None
    use_gpu = torch.cuda.is_available()
    places = torch.cuda.device_count() if use_gpu else len(os.sched_getaffinity(0))
    if num_workers > places:
        what = "GPUs" if use_gpu else "cores"
        raise TrainingRefused(f"--workers is {num_workers}, there are {places} {what}")
    if not use_gpu and run.num_threads is None:
        run = replace(run, num_threads=places // num_workers)
    root = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="dflash-train-") as directory:
        # A Ray of its own: a cluster that may be serving is left alone.
        ray.init(
            address="local",
            _temp_dir=directory,
            include_dashboard=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )
        try:
            TorchTrainer(
                _work,
                train_loop_config={"run": run},
                scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
                run_config=RunConfig(storage_path=str(Path(directory) / "results")),
            ).fit()
        finally:
            ray.shutdown()


def _work(config: dict[str, Any]) -> None:
    """What each worker runs; Ray Train has made the process group."""
    import ray.train
    from ray.train.torch import get_device

    run: Run = config["run"]
    context = ray.train.get_context()
    rank, num_workers = context.get_world_rank(), context.get_world_size()
    device = get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    run = replace(run, device=str(device))

    def any_of(value: bool) -> bool:
        flag = torch.tensor([float(value)], device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    train(run, rank=rank, num_workers=num_workers, reduce=_sum, any_of=any_of)


def _sum(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)

"""`python -m deploy.precompile serve_config.yaml`: compile ahead of a deployment.

Fills the compile cache (`DFLASH_CACHE_DIR`) of this machine by starting each application's engine
once, as `serve run` would, on a Ray of its own. A later start then only reads the cache.
"""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import ray
import typer
from ray.util.placement_group import placement_group
from rich.console import Console
from rich.progress import Progress

from actors.bundles import bundles
from actors.cluster import refuse_impossible
from actors.config import EngineConfig
from actors.engine import Engine
from actors.errors import ConfigError
from actors.placement import RayShardGroup
from deploy.check import check


def precompile(config: EngineConfig) -> float:
    """Load and warm up one engine on the running Ray, and end it; the seconds it took.

    Raises `ConfigError` where its nodes can't hold the engine, and what a rank raised.
    """
    started = time.monotonic()
    refuse_impossible(config)
    group = placement_group(bundles(config), strategy=config.placement_strategy)
    shards = None
    try:
        shards = RayShardGroup(config, group)
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(config.served_model_name, total=None)
            Engine(config, shards, lambda chunks: None).warm_up(
                lambda done, total: bar.update(task, completed=done, total=total)
            )
    finally:
        if shards is not None:
            shards.close()
        ray.util.remove_placement_group(group)
    return time.monotonic() - started


def main(path: Annotated[Path, typer.Argument(help="A Serve config file.")]) -> None:
    """Compile for every application, one line each; exit 1 where one can't be."""
    try:
        configs = check(path)
        with tempfile.TemporaryDirectory(prefix="dflash-precompile-") as directory:
            # A Ray of its own: a cluster that may be serving is left alone.
            ray.init(address="local", _temp_dir=directory, include_dashboard=False)
            try:
                for config in configs:
                    seconds = precompile(config)
                    typer.echo(f"{config.served_model_name}: compiled in {seconds:.0f} s")
            finally:
                ray.shutdown()
    except ConfigError as error:
        typer.echo(f"bad configuration: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)

"""`python -m deploy.check serve_config.yaml`: judge a configuration before anything is started."""

from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from actors.config import EngineConfig, resolve_served
from actors.errors import ConfigError


def check(path: Path) -> list[EngineConfig]:
    """The engine configuration of each of our applications in a Serve config file.

    Raises `ConfigError`, one line, for the first thing that can't be served.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        schema = ServeDeploySchema.model_validate(raw)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {field}: {first['msg']} (got {first['input']!r})") from None
    configs = []
    for application in schema.applications:
        if application.import_path != "app.main:build":
            continue
        try:
            configs.append(resolve_served(application.args)[0])
        except ConfigError as error:
            raise ConfigError(f"{path}: application {application.name!r}: {error}") from None
    if not configs:
        raise ConfigError(f"{path}: no application has import_path app.main:build")
    return configs


def main(path: Annotated[Path, typer.Argument(help="A Serve config file.")]) -> None:
    """Print one line per application, or what is wrong, and exit 1."""
    try:
        configs = check(path)
    except ConfigError as error:
        typer.echo(f"bad configuration: {error}", err=True)
        raise typer.Exit(1) from None
    for config in configs:
        drafter = config.drafter_path.name if config.drafter_path else "no drafter"
        typer.echo(
            f"{config.served_model_name}: {drafter}, {config.dtype}, "
            f"TP {config.tensor_parallel_size}, {config.max_num_seqs} requests of up to "
            f"{config.max_model_len} tokens, {config.num_kv_pages} KV pages"
        )


if __name__ == "__main__":
    typer.run(main)

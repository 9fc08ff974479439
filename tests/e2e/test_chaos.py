"""Clients notice no more than a pause when any part of what serves them is killed."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from benchmarks.server import ROOT


def test_streams_outlive_every_kind_of_death(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, drafter = tiny_pair
    args = {
        "model": str(target),
        "served_model_name": "tiny",
        "speculative_config": {"method": "dflash", "model": str(drafter)},
        "backend": "eager",
        "max_model_len": 1024,
    }
    config, prompts = tmp_path / "config.yaml", tmp_path / "prompts.jsonl"
    config.write_text(yaml.safe_dump({"applications": [{"args": args}]}))
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("abc", "Hello")))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.chaos",
            "--streams",
            "4",
            "--kills",
            "5",
            "--max-tokens",
            "300",
            "--config",
            str(config),
            "--file",
            str(prompts),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["failed"], result["wrong_tokens"]) == (0, 0)
    assert result["kills"] == {"shard": 1, "drafter": 1, "router": 1, "server": 1, "node": 1}
    # Only the server has its clients' connections.
    assert result["broken"] <= 4
    assert result["answers"] > 4

"""`deploy.precompile` as an operator runs it: the cache is filled."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_the_cache_is_filled_ahead(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    args = {
        "model": str(tiny_pair[0]),
        "served_model_name": "tiny",
        "speculative_config": {"method": "dflash", "model": str(tiny_pair[1])},
        "max_model_len": 64,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
        "buckets": {"prefill_widths": [16]},
    }
    config = tmp_path / "serve.yaml"
    application = {"name": "tiny", "import_path": "app.main:build", "args": args}
    config.write_text(yaml.safe_dump({"applications": [application]}))
    cache = tmp_path / "cache"
    # Engines of other tests in this process have set inductor's.
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.precompile", str(config)],
        cwd=ROOT,
        env=environment | {"DFLASH_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("tiny: compiled in ")
    assert list(cache.glob("native-*/*.so"))
    assert list((cache / "inductor").rglob("*.so"))


def test_a_bad_configuration_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("applications: [{name: a, import_path: 'app.main:build', args: {}}]")
    done = subprocess.run(
        [sys.executable, "-m", "deploy.precompile", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "model: required" in done.stderr
    assert "Traceback" not in done.stderr

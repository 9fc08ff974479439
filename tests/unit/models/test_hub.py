import fnmatch
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from models import hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checkpoint(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "model.safetensors").touch()
    (directory / "config.json").write_text("{}")
    return directory


def complete_target(cache: Path) -> Path:
    directory = checkpoint(cache / hub.DEMO_TARGET)
    files = {"config.json": {"size": 2, "sha256": "unused"}}
    marker = {"format": hub.MARKER_FORMAT, "files": files}
    (directory / hub.MARKER).write_text(json.dumps(marker))
    return directory


def error_of(model: str) -> str:
    with pytest.raises(hub.CheckpointNotFound) as caught:
        hub.resolve(model)
    message = str(caught.value)
    assert "\n" not in message
    assert repr(model) in message
    return message


def test_cache_dir_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("DFLASH_CACHE_DIR", "")
    assert hub.cache_dir() == tmp_path / ".cache" / "dflash-serve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert hub.cache_dir() == tmp_path / "xdg" / "dflash-serve"
    monkeypatch.setenv("DFLASH_CACHE_DIR", "~/mine")
    assert hub.cache_dir() == tmp_path / "mine"
    assert hub.demo_target_dir() == tmp_path / "mine" / hub.DEMO_TARGET
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DFLASH_CACHE_DIR", "relative")
    assert hub.cache_dir() == tmp_path / "relative"


def test_demo_target_needs_the_marker(cache: Path) -> None:
    message = error_of(hub.DEMO_TARGET)
    assert f"is missing in {cache}: run `python -m deploy.demo`" in message
    directory = complete_target(cache)
    assert hub.resolve(hub.DEMO_TARGET) == directory
    (directory / hub.MARKER).unlink()
    assert "incomplete" in error_of(hub.DEMO_TARGET)


def test_is_complete_rechecks_sizes(cache: Path) -> None:
    directory = complete_target(cache)
    assert hub.is_complete(directory)
    (directory / "config.json").write_text("{")
    assert not hub.is_complete(directory)
    (directory / "config.json").unlink()
    assert not hub.is_complete(directory)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"format": 0, "files": {"config.json": {"size": 2}}}']
    + [
        f'{{"format": {hub.MARKER_FORMAT}, "files": {files}}}' for files in ("{}", "[1]", '{"a":1}')
    ],
)
def test_a_broken_or_older_marker_is_not_complete(cache: Path, text: str) -> None:
    directory = complete_target(cache)
    (directory / hub.MARKER).write_text(text)
    assert not hub.is_complete(directory)


def test_demo_drafter_is_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(hub.__file__).parent / "checkpoints" == hub._SHIPPED
    monkeypatch.setattr(hub, "_SHIPPED", tmp_path)
    assert "holds no config.json" in error_of(hub.DEMO_DRAFTER)
    shipped = checkpoint(tmp_path / hub.DEMO_DRAFTER)
    assert hub.resolve(hub.DEMO_DRAFTER) == shipped


def test_local_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path / "org" / "name")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for model in (str(directory), "org/name", "./org/name", "~/org/name"):
        assert hub.resolve(model) == directory
    assert str(tmp_path / "org") in error_of("org")


def test_demo_names_win_over_directories(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / hub.DEMO_TARGET)
    directory = complete_target(cache)
    assert hub.resolve(hub.DEMO_TARGET) == directory


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("gpt2", "is unknown"),
        ("org/name with blanks", "no such directory"),
        ("/nowhere/at/all", "no such directory"),
        ("./nowhere", "no such directory"),
        (".", "holds no config.json"),
        ("~no-such-user-here/x", "can't be read"),
        ("x" * 5000, "can't be read"),
        ("a\0b", "is unknown"),
    ],
)
def test_everything_else_is_one_clear_line(
    model: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reason in error_of(model)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    assert "is a file" in error_of(str(path))


@pytest.fixture
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, in offline mode."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path / "hf"


def cached_snapshot(hf_cache: Path, *files: str) -> Path:
    repo = hf_cache / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for name in files:
        (snapshot / name).touch()
    return snapshot


def test_offline_without_a_cached_snapshot(hf_cache: Path) -> None:
    message = error_of("org/name")
    assert "no local directory" in message
    assert "HF_HUB_OFFLINE is set" in message


def test_offline_with_a_cached_snapshot(hf_cache: Path) -> None:
    snapshot = cached_snapshot(hf_cache, "config.json", "model.safetensors")
    assert hub.resolve("org/name") == snapshot


@pytest.mark.parametrize(
    ("file", "missing"), [("config.json", "*.safetensors"), ("model.safetensors", "config.json")]
)
def test_a_snapshot_without_weights_or_config(hf_cache: Path, file: str, missing: str) -> None:
    cached_snapshot(hf_cache, file)
    assert f"holds no {missing}" in error_of("org/name")


def test_offline_mode_as_set_in_the_environment(tmp_path: Path) -> None:
    code = "from models.hub import resolve; resolve('org/name')"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = Path(hub.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )
    assert "HF_HUB_OFFLINE is set" in done.stderr.splitlines()[-1]


def http_error(kind: Callable[..., Exception], status: int) -> Exception:
    response = SimpleNamespace(headers={}, request=None)
    return kind(f"{status} from the hub\nwith details", response=response)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (http_error(errors.GatedRepoError, 403), "is gated"),
        (http_error(errors.RepositoryNotFoundError, 404), "doesn't exist, or is private"),
        (http_error(errors.HfHubHTTPError, 500), "can't be downloaded: 500 from the hub"),
        (errors.LocalEntryNotFoundError("no connection"), "can't be reached"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (errors.HFValidationError("bad id\nreally"), "can't be downloaded: bad id"),
        (RuntimeError(""), "can't be downloaded: RuntimeError"),
    ],
)
def test_a_failed_download_is_one_line_with_the_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert reason in error_of("org/name")


def test_pickles_are_never_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    snapshot = checkpoint(tmp_path / "snapshot")
    (snapshot / "model.safetensors").touch()

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("org/name-1.5_b") == snapshot
    assert asked["repo_id"] == "org/name-1.5_b"

    def wanted(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in asked["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(name, p) for p in asked["ignore_patterns"])

    for name in (
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "chat_template.jinja",
        "mask_embedding.pt",
    ):
        assert wanted(name), name
    for name in (
        "pytorch_model.bin",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "training_args.pt",
        "onnx/config.json",
        "README.md",
    ):
        assert not wanted(name), name


def test_import_is_torch_free() -> None:
    code = (
        "import sys, models.hub; sys.exit(bool({'torch', 'huggingface_hub'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(hub.__file__).parents[1], check=True)

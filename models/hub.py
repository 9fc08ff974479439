"""Where checkpoints come from: the demo pair by name, a local directory, or a Hugging Face id.

Torch-free, so that a configuration can be validated before anything is placed.
"""

import json
import os
import re
from pathlib import Path

DEMO_TARGET = "smollm2-135m-instruct"
DEMO_DRAFTER = "smollm2-135m-instruct-dflash"

MARKER = ".complete.json"
MARKER_FORMAT = 1

_EXPECTED = (
    f"give {DEMO_TARGET}, {DEMO_DRAFTER}, a directory with a config.json, "
    "or a Hugging Face id org/name"
)
_SHIPPED = Path(__file__).resolve().parent / "checkpoints"
_HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_ALLOW = ["*.json", "*.safetensors", "*.model", "*.jinja", "mask_embedding.pt"]
# Subfolders and consolidated files hold the same weights once more, in other layouts.
_IGNORE = ["*/*", "consolidated*"]


class CheckpointNotFound(ValueError):
    """A model name leads to no usable checkpoint; the message is one line and names it."""


def cache_dir() -> Path:
    """The directory under which converted checkpoints are kept, absolute; it may not exist yet.

    `DFLASH_CACHE_DIR`, else `$XDG_CACHE_HOME/dflash-serve`, else `~/.cache/dflash-serve`.
    """
    if chosen := os.environ.get("DFLASH_CACHE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return base.expanduser().absolute() / "dflash-serve"


def demo_target_dir() -> Path:
    """Where the demo target lies, or will lie, in the cache."""
    return cache_dir() / DEMO_TARGET


def is_complete(directory: Path) -> bool:
    """Whether a converted checkpoint was finished and verified, and its files still fit.

    The marker is written last and lists every file; here only sizes are compared, which is cheap.
    """
    try:
        marker = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        if marker["format"] != MARKER_FORMAT or not marker["files"]:
            return False
        return all(
            (directory / name).stat().st_size == entry["size"]
            for name, entry in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def resolve(model: str) -> Path:
    """The absolute directory that holds the checkpoint `model`.

    `model` is the demo target's or drafter's name, a directory with a config.json, or a Hugging
    Face id `org/name`, which is downloaded into the Hugging Face cache. The demo names come first,
    then existing directories.

    Raises:
        CheckpointNotFound: `model` is none of these, or its files are missing, incomplete, or can
            neither be downloaded nor found in the Hugging Face cache.
    """
    if not model.strip():
        raise CheckpointNotFound(f"model {model!r} is empty; {_EXPECTED}")
    if model == DEMO_TARGET:
        return _demo_target()
    if model == DEMO_DRAFTER:
        return _with_config(_SHIPPED / DEMO_DRAFTER, model)
    try:
        path = Path(model).expanduser().absolute()
        if path.is_dir():
            return _with_weights(path, model)
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:
        raise CheckpointNotFound(f"model {model!r} can't be read: {_reason(error)}") from error
    if is_file:
        raise CheckpointNotFound(
            f"model {model!r} is a file; give the directory that holds its config.json"
        )
    if _HF_ID.fullmatch(model):
        return _with_weights(_download(model), model)
    if os.sep in model or model.startswith(("~", ".")):
        raise CheckpointNotFound(f"model {model!r}: no such directory")
    raise CheckpointNotFound(f"model {model!r} is unknown; {_EXPECTED}")


def _demo_target() -> Path:
    directory = demo_target_dir()
    if not is_complete(directory):
        state = "incomplete" if directory.is_dir() else "missing"
        raise CheckpointNotFound(
            f"model {DEMO_TARGET!r} is {state} in {directory.parent}: run `python -m deploy.demo`"
        )
    return directory


def _with_config(directory: Path, model: str) -> Path:
    if not (directory / "config.json").is_file():
        raise CheckpointNotFound(f"model {model!r}: {directory} holds no config.json")
    return directory


def _with_weights(directory: Path, model: str) -> Path:
    _with_config(directory, model)
    if not any(directory.glob("*.safetensors")):
        raise CheckpointNotFound(f"model {model!r}: {directory} holds no *.safetensors weights")
    return directory


def _download(repo_id: str) -> Path:
    """The snapshot of `repo_id`; without a network, the one in the Hugging Face cache.

    Raises:
        CheckpointNotFound: the repository is missing, private or gated, or can't be reached.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_ALLOW, ignore_patterns=_IGNORE))
    except errors.GatedRepoError as error:
        raise _unavailable(repo_id, "is gated: accept its terms there and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise _unavailable(repo_id, "doesn't exist, or is private: set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        offline = isinstance(error.__cause__, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else "Hugging Face can't be reached"
        raise _unavailable(repo_id, f"is not complete in the cache, and {why}") from error
    except Exception as error:
        # HTTP, proxy, disk, a malformed id: whatever it is, there is no checkpoint.
        raise _unavailable(repo_id, f"can't be downloaded: {_reason(error)}") from error


def _unavailable(repo_id: str, reason: str) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"model {repo_id!r} is no local directory, and as a Hugging Face id it {reason}"
    )


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

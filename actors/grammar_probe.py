"""Compiles a guide in a process of its own, to see whether it is safe to compile in the engine.

Some grammars of a few hundred characters compile for hours or overflow the stack, whatever limits
the compiler is given. Here that costs a process: `python -m actors.grammar_probe`, which reads a
`_Job` and writes a verdict: why the guide is refused, or an empty string.
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
# Only for a child that hangs without using its processor time.
_WALL_TIMEOUT_S = 60.0


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    guide: Guide


def probe(compiler: GrammarCompiler, guide: Guide) -> str:
    """Why `guide` is refused, empty where it isn't: it does not compile, or not within half a
    second of processor time, 1 MiB of stack and 4 GiB of memory.

    Raises `RuntimeError` where the process can't run at all, whatever the guide.
    """
    job = _Job(
        directory=str(compiler.directory.absolute()),
        vocab_size=compiler.vocab_size,
        eos_token_ids=compiler.eos_token_ids,
        guide=guide,
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "actors.grammar_probe"],
            input=msgspec.json.encode(job),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=_WALL_TIMEOUT_S,
            check=False,
        )
    except UnicodeEncodeError:
        return refusal(guide, "not valid Unicode").message
    except subprocess.TimeoutExpired:
        return refusal(guide, "takes too long to compile").message
    if done.returncode == -signal.SIGPROF:
        return refusal(guide, "takes too long to compile").message
    if done.returncode > 0:
        raise RuntimeError(f"the probe of a guide failed: {done.stderr.decode(errors='replace')}")
    if done.returncode < 0 or not done.stdout:
        return refusal(guide, "too large or too deep to compile").message
    return msgspec.json.decode(done.stdout, type=str)


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=_compile, args=(job,))
    worker.start()
    worker.join()


def _compile(job: _Job) -> None:
    compiler = GrammarCompiler(
        Path(job.directory), vocab_size=job.vocab_size, eos_token_ids=job.eos_token_ids
    )
    # The tokenizer's time is not the guide's fault; that it can't be read, compiling tells again.
    with contextlib.suppress(ValueError):
        _ = compiler.tokenizer
    signal.setitimer(signal.ITIMER_PROF, _CPU_S)
    verdict = ""
    try:
        compiler.compile(job.guide)
    except RequestRejected as error:
        verdict = error.message
    sys.stdout.buffer.write(msgspec.json.encode(verdict))


if __name__ == "__main__":
    main()

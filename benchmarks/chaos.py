"""What clients notice when parts of a serving application are killed.

`python -m benchmarks.chaos`; the last line is JSON, the exit status 1 where a stream failed or got
a wrong token. Starts and ends a server of its own.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
import yaml
from rich.console import Console
from rich.progress import Progress

from benchmarks import options
from benchmarks.prompts import SAMPLE
from benchmarks.server import ROOT, Server, leftovers, serving

# By what Ray calls their processes.
PARTS = {
    "shard": "_RayShard",
    "drafter": "_RayDrafterShard",
    "router": ":Router",
    "server": ":OpenAIServer",
}
NODE = "node"
_MAX_CHARS = 400
_RETRY_AFTER_S = 0.5
_RECOVERED_WITHIN_S = 300.0
# Streams go on for so long between two kills, at least and at most.
_QUIET_S = (0.5, 3.0)
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)

_console = Console(stderr=True)


class Failed(Exception):
    """The server answered with an error."""


class Broken(Exception):
    """The connection ended without an answer's end."""


@dataclass(frozen=True, slots=True)
class Kill:
    kind: str
    at: float


@dataclass(slots=True)
class Stream:
    """Asks for one answer again and again. `heard_at` is when anything of it came last, which
    `has_begun` says, or when it was asked for."""

    body: dict[str, Any]
    expected: str = ""
    heard_at: float = 0.0
    has_begun: bool = False


@dataclass(slots=True)
class Record:
    """What happened; `worst_pause_s`, by kind, is from a kill to the next sign of a stream."""

    kills: list[Kill] = field(default_factory=list)
    answers: int = 0
    failed: int = 0
    broken: int = 0
    wrong_tokens: int = 0
    worst_pause_s: dict[str, float] = field(default_factory=dict)

    def hear(self, stream: Stream) -> None:
        """A sign of a stream, which ends its pause."""
        now = time.monotonic()
        for kill in self.kills:
            if stream.has_begun and stream.heard_at <= kill.at:
                worst = self.worst_pause_s.get(kill.kind, 0.0)
                self.worst_pause_s[kill.kind] = max(worst, now - kill.at)
        stream.heard_at, stream.has_begun = now, True

    def result(self, streams: int) -> dict[str, Any]:
        return {
            "streams": streams,
            "answers": self.answers,
            "failed": self.failed,
            "broken": self.broken,
            "wrong_tokens": self.wrong_tokens,
            "kills": dict(Counter(kill.kind for kill in self.kills)),
            "worst_pause_s": {kind: round(s, 1) for kind, s in self.worst_pause_s.items()},
        }


async def events_of(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[str, None]:
    """The texts of a streamed answer. Raises `Failed` or `Broken`."""
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                what = f"status {response.status_code}: {text:.300}"
                # What the server says is in OpenAI's shape. The proxy in front of one that dies
                # before an answer has begun knows no other way to break the connection.
                raise Failed(what) if text.startswith("{") else Broken(what)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Failed(str(event["error"]))
                    yield event["choices"][0]["delta"].get("content") or ""
    except httpx.TransportError as error:
        raise Broken(repr(error)) from None
    raise Broken("the stream ended without [DONE]")


async def answer_of(client: httpx.AsyncClient, stream: Stream, record: Record) -> str | None:
    """One answer, asked for again where its connection breaks. None where it failed."""
    stream.has_begun, stream.heard_at = False, time.monotonic()
    try:
        while True:
            text = ""
            try:
                async for piece in events_of(client, stream.body):
                    text += piece
                    record.hear(stream)
            except Broken:
                record.broken += 1
                await asyncio.sleep(_RETRY_AFTER_S)
                continue
            except Failed as error:
                _console.print(f"failed: {error}")
                record.failed += 1
                return None
            record.answers += 1
            return text
    finally:
        stream.has_begun = False


async def keep_streaming(
    client: httpx.AsyncClient, stream: Stream, record: Record, ended: asyncio.Event
) -> None:
    while not ended.is_set():
        text = await answer_of(client, stream, record)
        if text is not None and text != stream.expected:
            record.wrong_tokens += 1
            _console.print(f"wrong: {text!r} instead of {stream.expected!r}")
        if text is None:
            await asyncio.sleep(_RETRY_AFTER_S)


async def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _RECOVERED_WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_RECOVERED_WITHIN_S:.0f} s in vain until {what}")
        await asyncio.sleep(0.1)


async def kill_one(server: Server, kind: str, rng: random.Random) -> None:
    """SIGKILL to a random process of this kind, or to all of the node that runs a router."""
    if kind == NODE:
        assert server.nodes is not None
        await asyncio.to_thread(server.nodes.kill_worker, PARTS["router"])
        return
    found = []
    for process in leftovers(server.temp_dir):
        try:
            if PARTS[kind] in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    rng.choice(sorted(found, key=lambda process: process.pid)).kill()


async def run(
    server: Server,
    streams: Sequence[Stream],
    kinds: Sequence[str],
    rng: random.Random,
    on_kill: Callable[[], None],
) -> Record:
    """Kill one part of each of `kinds` in turn, while all `streams` are asked for."""
    record, ended = Record(), asyncio.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=_TIMEOUT, limits=limits) as client:
        undisturbed = await asyncio.gather(*(answer_of(client, s, record) for s in streams))
        for stream, text in zip(streams, undisturbed, strict=True):
            if text is None:
                raise Failed("an answer failed before anything was killed")
            stream.expected = text
        tasks = [
            asyncio.create_task(keep_streaming(client, stream, record, ended)) for stream in streams
        ]
        try:
            for kind in kinds:
                begun = time.monotonic()
                await wait_until(partial(_any_heard, streams, begun), "a stream is in flight")
                kill = Kill(kind, time.monotonic())
                record.kills.append(kill)
                await kill_one(server, kind, rng)
                on_kill()
                if kind == NODE:
                    assert server.nodes is not None
                    await asyncio.to_thread(server.nodes.add_worker)
                await wait_until(partial(_all_heard, streams, kill.at), "every stream goes on")
                await asyncio.sleep(rng.uniform(*_QUIET_S))
        finally:
            ended.set()
            await asyncio.gather(*tasks)
    return record


def _any_heard(streams: Sequence[Stream], since: float) -> bool:
    return any(stream.has_begun and stream.heard_at > since for stream in streams)


def _all_heard(streams: Sequence[Stream], since: float) -> bool:
    return all(stream.heard_at > since for stream in streams)


def main(
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 32,
    kills: Annotated[int, typer.Option(min=1, help="Processes killed, one after another.")] = 12,
    seed: Annotated[int, typer.Option(help="Of what is killed when.")] = 0,
    file: Annotated[
        Path, typer.Option(help="JSONL with `turns`; the first turn is used.")
    ] = SAMPLE,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens per answer.")] = 64,
    config: Annotated[
        Path, typer.Option(help="A Serve config file, whose `args` are served.")
    ] = ROOT / "serve_config.yaml",
    workers: Annotated[
        int, typer.Option(min=0, help="Worker nodes of the cluster; 0 kills none.")
    ] = 2,
) -> None:
    """Stream answers, half of them sampled, while parts of what serves them are killed: shards,
    dedicated drafters, routers, servers, whole nodes."""
    texts = [text for text in options.read_texts(file, None) if len(text) <= _MAX_CHARS]
    args = yaml.safe_load(config.read_text(encoding="utf-8"))["applications"][0]["args"]
    if speculative := args.get("speculative_config"):
        args["speculative_config"] = {**speculative, "placement": "dedicated"}
    rng = random.Random(seed)
    parts = [part for part in PARTS if speculative or part != "drafter"]
    kinds = [*islice(cycle([*parts, NODE] if workers else parts), kills)]
    rng.shuffle(kinds)
    wanted = [
        Stream(
            {
                "model": args.get("served_model_name", args["model"]),
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "temperature": i % 2,
                "seed": i,
                "stream": True,
            }
        )
        for i, text in enumerate(islice(cycle(texts), streams))
    ]
    with (
        serving(args, workers=workers) as server,
        Progress(console=_console, transient=True, refresh_per_second=1) as bar,
    ):
        task = bar.add_task("kills", total=kills)
        record = asyncio.run(run(server, wanted, kinds, rng, lambda: bar.advance(task)))
    result = record.result(streams)
    print(json.dumps(result))
    raise typer.Exit(1 if record.failed or record.wrong_tokens else 0)


if __name__ == "__main__":
    typer.run(main)

"""Spawned processes that run ranks of one engine, driven over pipes."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from actors.config import EngineConfig
from actors.engine import Engine
from actors.messages import GenerateRequest, TokenChunk
from actors.shard import Shard
from models.parallel import TensorParallel

_TIMEOUT_S = 120


class RankProcesses:
    """`run` calls one function on the first `size` processes at once."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, size: int, work: Callable[..., Any], *args: object) -> list[Any]:
        """What `work(memory, rank, size, *args)` returned on each rank; `memory` is a dict that
        the process keeps. Raises RuntimeError where a rank raised."""
        for rank, pipe in enumerate(self._pipes[:size]):
            pipe.send((work, (rank, size, *args)))
        answers = []
        for pipe in self._pipes[:size]:
            if not pipe.poll(_TIMEOUT_S):
                raise RuntimeError("a rank did not answer")
            answers.append(pipe.recv())
        for failed, answer in answers:
            if failed:
                raise RuntimeError(answer)
        return [answer for _, answer in answers]

    def close(self) -> None:
        """End every process."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


class ProcessShards:
    """An engine's `ShardGroup` whose ranks are `actors.shard.Shard` in processes."""

    def __init__(self, processes: RankProcesses, config: EngineConfig) -> None:
        self._processes, self._size = processes, config.tensor_parallel_size
        self.bytes_read: list[int] = processes.run(self._size, _load, config, free_address())

    def step(self, payload: bytes) -> bytes:
        """The output of the step before, which must be the same on every rank."""
        outputs: list[bytes] = self._processes.run(self._size, _step, payload)
        assert len(set(outputs)) == 1, "ranks disagree"
        return outputs[0]

    def seal(self) -> None:
        self._processes.run(self._size, _seal)

    def close(self) -> None:
        self._processes.run(self._size, _close)


def generate_on(
    processes: RankProcesses, config: EngineConfig, messages: Sequence[GenerateRequest]
) -> list[list[TokenChunk]]:
    """The chunks of each request of an engine whose ranks run there."""
    shards = ProcessShards(processes, config)
    chunks: list[TokenChunk] = []
    try:
        engine = Engine(config, shards, chunks.extend)
        engine.add_all(messages)
        while engine.step():
            pass
    finally:
        shards.close()
    return [
        [chunk for chunk in chunks if chunk.request_id == message.request_id]
        for message in messages
    ]


def free_address() -> str:
    """A `host:port` of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def collectives(_memory: dict[str, Any], rank: int, size: int, address: str) -> dict[str, Any]:
    """What `TensorParallel` makes of small tensors that differ by rank, as lists."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)
    try:
        tp = TensorParallel(rank, size, dist.group.WORLD)
        x = torch.arange(6.0).view(2, 3) + 10 * rank
        strided = x.t()
        return {
            "sum": tp.all_reduce(x).tolist(),
            "strided sum": tp.all_reduce(strided).tolist(),
            "rows": tp.all_gather(x, dim=0).tolist(),
            "columns": tp.all_gather(x, dim=-1).tolist(),
            "strided columns": tp.all_gather(strided, dim=1).tolist(),
            "operand": x.tolist(),
        }
    finally:
        dist.destroy_process_group()


def _load(memory: dict[str, Any], rank: int, _size: int, config: EngineConfig, address: str) -> int:
    memory["shard"] = Shard(config, rank)
    memory["shard"].load(address)
    bytes_read: int = memory["shard"].bytes_read
    return bytes_read


def _step(memory: dict[str, Any], _rank: int, _size: int, payload: bytes) -> bytes:
    output: bytes = memory["shard"].step(payload)
    return output


def _seal(memory: dict[str, Any], _rank: int, _size: int) -> None:
    memory["shard"].seal()


def _close(memory: dict[str, Any], _rank: int, _size: int) -> None:
    memory.pop("shard").close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    memory: dict[str, Any] = {}
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            # Nothing to tidy up, and an interpreter with torch in it takes seconds to end.
            os._exit(0)
        try:
            answer = False, work(memory, *args)
        except Exception:
            answer = True, traceback.format_exc()
        pipe.send(answer)
